"""Sums of energies as text: ``slab+CO - slab - CO``, ``2*12 - 7``."""

import re
from typing import Dict, List, Optional, Tuple

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError

#: Key of the info of a frame that has its name, unless another one is chosen.
NAME_KEY = "name"

#: A coefficient, such as ``2*``, ``0.5 *`` or ``1/2*``, and what follows it. Names such as ``Pt*CO`` have none.
_COEFFICIENT = re.compile(r"(\d+\.?\d*|\.\d+)(?:/(\d+))?\s*\*\s*(.+)")

#: The rule of sums, which messages state.
SPACES = "put a space before and after every + and - of the sum; without spaces they belong to the name"

#: Names that a message lists.
_LISTED = 20


def coefficients_of(text: str, frames: List[Atoms], key: Optional[str] = None) -> np.ndarray:
    """Return the coefficient (F,) of every frame in a sum such as ``A - B`` or ``2*A + B - 1/2*C``.

    Terms are separated by ``+`` or ``-`` with whitespace on both sides, so that names may contain these characters.
    Without a key, a term of digits alone is the number of a frame, from 0, and every other term is the value of a
    frame's info ``name``. With a key, every term is the value of that info.

    Parameters
    ----------
    text : str
    frames : list of ase.Atoms
        F frames.
    key : str, optional

    Raises
    ------
    InputError
        A sum that cannot be read; a name that no frame has, or several.

    Examples
    --------
    >>> frames = [Atoms(info={"name": name}) for name in ("slab+CO", "slab", "CO")]
    >>> coefficients_of("slab+CO - slab - CO", frames)
    array([ 1., -1., -1.])
    >>> coefficients_of("1/2*0 - 2", frames)
    array([ 0.5,  0. , -1. ])
    """
    coefficients = np.zeros(len(frames))
    for sign, term in _terms(text):
        factor, name = _factor(text, term)
        coefficients[_frame(text, name, frames, key)] += sign * factor
    return coefficients


def _terms(text: str) -> List[Tuple[float, str]]:
    """Return sign and text of every term."""
    terms: List[Tuple[float, List[str]]] = [(1.0, [])]
    words = text.split()
    for i, word in enumerate(words):
        if word not in ("+", "-"):
            terms[-1][1].append(word)
            continue
        sign = 1.0 if word == "+" else -1.0
        # A sign at the beginning belongs to the first term.
        terms = [(sign, [])] if i == 0 else [*terms, (sign, [])]
    if not all(words for _, words in terms):
        raise _unreadable(text, "a term is missing at its end or between two signs" if words else "it is empty")
    return [(sign, " ".join(words)) for sign, words in terms]


def _factor(text: str, term: str) -> Tuple[float, str]:
    """Return coefficient and name of a term."""
    match = _COEFFICIENT.fullmatch(term)
    if match is None:
        return 1.0, term
    number, divisor, name = match.groups()
    if divisor is not None and not int(divisor):
        raise _unreadable(text, f"'{term}' divides by zero")
    return float(number) / int(divisor or 1), name


def _frame(text: str, name: str, frames: List[Atoms], key: Optional[str]) -> int:
    """Return the number of the frame that a term names."""
    if key is None and name.isdecimal():
        if int(name) >= len(frames):
            existing = "the only frame is 0" if len(frames) == 1 else f"frames are 0 to {len(frames) - 1}"
            raise InputError(f"'{text}': there is no such frame: {existing}, got {name}")
        return int(name)
    spaces = f"; {SPACES}" if re.search("[+-]", name) else ""
    numbers = _numbers_by_name(text, frames, key or NAME_KEY, spaces)
    chosen = numbers.get(name, [])
    if not chosen:
        shown = ", ".join(list(numbers)[:_LISTED]) + ", …" * (len(numbers) > _LISTED)
        raise InputError(f"'{text}': no frame has the {key or NAME_KEY} '{name}'; there are: {shown}{spaces}")
    if len(chosen) > 1:
        listed = ", ".join(map(str, chosen[:_LISTED])) + ", …" * (len(chosen) > _LISTED)
        way = "choose another key (--key), or numbers of frames without one" if key else "choose one by its number"
        raise InputError(f"'{text}': {len(chosen)} frames have the {key or NAME_KEY} '{name}' ({listed}); {way}")
    return chosen[0]


def _numbers_by_name(text: str, frames: List[Atoms], key: str, spaces: str) -> Dict[str, List[int]]:
    """Return the numbers of the frames that have a name, by name; ``spaces`` ends the message if there are none."""
    numbers: Dict[str, List[int]] = {}
    for number, atoms in enumerate(frames):
        if key in atoms.info and np.ndim(atoms.info[key]) == 0:
            numbers.setdefault(_name(atoms.info[key]), []).append(number)
    if not numbers:
        others = {name: None for atoms in frames for name, value in atoms.info.items() if isinstance(value, str)}
        listed = ", ".join(others) or "none"
        raise InputError(
            f"'{text}': no frame has '{key}' in its info; use numbers of frames, from 0, or another key (--key): "
            f"{listed}{spaces}"
        )
    return numbers


def _name(value: object) -> str:
    """Return a value of info as it stands in the file: ASE reads F, fluorine, for False."""
    return "FT"[bool(value)] if isinstance(value, (bool, np.bool_)) else str(value)


def _unreadable(text: str, reason: str) -> InputError:
    return InputError(f"'{text}': {reason}; write sums such as 'A - B' or '2*A + B - C'. {SPACES}")
