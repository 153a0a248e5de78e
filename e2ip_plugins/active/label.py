"""``e2ip label``: reference energies and forces of frames, from any calculator of ASE."""

import ast
import difflib
import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import numpy as np

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.chunks import parsed
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.trajectories import TEXT, append_frame, read_trajectory, whole_bytes

#: Names of labels in extxyz files; the ready configs of both hosts read them.
ENERGY, FORCES, STRESS = "REF_energy", "REF_forces", "REF_stress"

#: What the labels are of, in the info of every frame: the method, as the user wrote it.
METHOD = "label_method"


@dataclass
class Labels:
    """What was done.

    Attributes
    ----------
    labelled, there : int
        Frames now, and by an earlier call or as copies of another frame.
    failed : list of str
        Frames without a label, and why.
    note : str
        What an earlier call had left cut off, and was taken out of the file; empty if nothing was.
    """

    labelled: int = 0
    there: int = 0
    failed: List[str] = field(default_factory=list)
    note: str = ""


def calculator_of(name: str, arguments: Sequence[str] = ()) -> Callable[[], Any]:
    """A function that makes a calculator.

    Parameters
    ----------
    name : str
        ``module:Class``, for example ``tblite.ase:TBLite``.
    arguments : sequence of str
        ``name=value``; values are Python literals, and text where they are none.

    Raises
    ------
    InputError
        Names that cannot be imported, and arguments that it does not take, or that look like one that it does.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise InputError(f"--calculator {name}: a module and a class, for example tblite.ase:TBLite")
    # A console script has the folder of the script on its path, not the one that it is called in. It stays there:
    # calculators import some of what they need with the first frame.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"--calculator {name}: cannot be imported ({error})") from error
    given: Dict[str, Any] = {}
    for text in arguments:
        key, sign, value = text.partition("=")
        if not sign or not key.isidentifier():
            raise InputError(f"--argument {text}: a name and a value, for example method=GFN2-xTB")
        given[key] = _literal(value)

    def make() -> Any:
        return made(**given)

    try:
        found = make()
    # Calculators refuse arguments in ways of their own.
    except Exception as error:
        raise InputError(f"--calculator {name}: {type(error).__name__}: {error}") from error
    if not callable(getattr(found, "get_forces", None)):
        raise InputError(f"--calculator {name}: is a {type(found).__name__}, no calculator of ASE")
    # Most calculators take any name and read those that they know: a typing error would label by another method. What
    # they list is not always all that they read.
    known = [key for key in getattr(found, "default_parameters", {}) if isinstance(key, str)]
    for key in given:
        similar = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if similar:
            kind = type(found).__name__
            raise InputError(f"--argument {key}: {kind} has no such parameter; did you mean {similar[0]}?")
    return make


def label(
    frames: Sequence[Any],
    output: Path,
    make_calculator: Callable[[], Any],
    say: Callable[[str], None] = lambda _: None,
    method: str = "",
) -> Labels:
    """Write frames with labels, one after the other; those that the file has already are not computed again.

    Every frame has a calculator of its own: its label does not depend on the frames before. Labels and predictions that
    frames bring along are left out. A frame whose calculation fails, or gives numbers that are not finite, is not
    written.

    Parameters
    ----------
    frames : sequence of ase.Atoms
    output : Path
        extxyz file, with ``REF_energy`` (eV) and ``REF_forces`` (eV/Å) and, of periodic frames where the calculator has
        one, ``REF_stress`` (eV/Å³).
    make_calculator : callable
        See `calculator_of`.
    say : callable
        Takes a line on every frame that failed.
    method : str
        Written into every frame as ``label_method``, and what frames that are there must have.

    Raises
    ------
    InputError
        An output without labels or with those of another method, or which cannot be read.
    """
    output = Path(output)
    marks = [_mark(atoms) if len(atoms) else "" for atoms in frames]
    done, note = _there(output, method, set(marks))
    result = Labels(note=note)
    for number, (atoms, mark) in enumerate(zip(frames, marks, strict=True)):
        if not len(atoms):
            _fail(result, say, number, "has no atoms")
            continue
        if mark in done:
            result.there += 1
            continue
        try:
            labelled = _labelled(atoms, make_calculator())
        # Whatever a calculator raises where it finds no solution.
        except Exception as error:
            _fail(result, say, number, f"{type(error).__name__}: {error}")
            continue
        if method:
            labelled.info[METHOD] = method
        append_frame(output, labelled)
        done.add(mark)
        result.labelled += 1
    return result


def _mark(atoms: Any) -> str:
    """What tells a frame from others, its electronic state included where a calculator may read one."""
    of_atoms = [atoms.arrays[name] for name in ("initial_charges", "initial_magmoms") if name in atoms.arrays]
    # Atom by atom: the moments of an antiferromagnet add up to 0, too.
    state = [str((np.round(values, 3) + 0.0).tolist()) for values in of_atoms if values.any()]
    return " ".join([fingerprint(atoms), *state])


def _labelled(atoms: Any, calculator: Any) -> Any:
    frame = without_labels(atoms)
    working = frame.copy()
    # A constraint is of the run that the frame comes from; the label is of the frame.
    working.set_constraint()
    frame.set_constraint()
    working.calc = calculator
    energy, forces = float(working.get_potential_energy()), np.asarray(working.get_forces(), dtype=float)
    if not (np.isfinite(energy) and np.isfinite(forces).all()):
        raise ValueError("energy or forces are not finite")
    frame.info[ENERGY], frame.arrays[FORCES] = energy, forces
    if frame.pbc.all() and "stress" in getattr(calculator, "implemented_properties", ()):
        frame.info[STRESS] = np.asarray(working.get_stress(voigt=False), dtype=float)
    return frame


def _there(output: Path, method: str, wanted: Set[str]) -> Tuple[Set[str], str]:
    """Fingerprints of frames that the file has; a last one that was cut off is taken out of the file, which is told."""
    if output.suffix not in TEXT:
        raise InputError(f"{output}: labels go into an extxyz file, {' or '.join(TEXT)}")
    if output.is_dir() or not output.parent.is_dir():
        raise InputError(f"{output}: is a folder, or its folder does not exist")
    if not output.exists():
        return set(), ""
    frames, note = read_trajectory(output, may_be_empty=True)
    unlabelled = [i for i, atoms in enumerate(frames) if ENERGY not in atoms.info or FORCES not in atoms.arrays]
    if unlabelled:
        raise InputError(
            f"{output}: is there already, and its frame {unlabelled[0]} has no {ENERGY} and {FORCES}: it was "
            "not written by e2ip label; choose another name"
        )
    others = {str(atoms.info.get(METHOD, "")) for atoms in frames} - {method}
    if method and others:
        other = sorted(others)[0]
        raise InputError(
            f"{output}: has labels "
            + (f"of '{other}', new ones would be of '{method}'" if other else f"that name no {METHOD}")
            + ": choose another name"
        )
    if note:
        _take_off_last(output, method, wanted)
        note = f"{output}: frame {len(frames)} is cut off and taken out of it"
    return set(map(_mark, frames)), note


def _take_off_last(output: Path, method: str, wanted: Set[str]) -> None:
    """Take a frame that was cut off out of the file; `InputError` where it might be whole, or somebody else's."""
    end = whole_bytes(output)
    with output.open("rb") as file:
        file.seek(end)
        rest = file.read()
    lines = rest.split(b"\n")
    if method and len(lines) > 2 and f"{METHOD}=".encode() not in lines[1]:
        raise InputError(f"{output}: its last frame is cut off, and not of e2ip label; choose another name")
    try:
        mark = _mark(parsed(rest)) if len(lines) == int(lines[0]) + 2 else ""
    # Whatever ASE raises: columns are missing.
    except Exception:
        mark = ""
    # Where it is wanted it is made anew.
    if mark and mark not in wanted:
        raise InputError(
            f"{output}: the last line of its last frame has no end; if the frame is all there, end the line, and if "
            "not, take it out"
        )
    os.truncate(output, end)


def _fail(result: Labels, say: Callable[[str], None], number: int, why: str) -> None:
    text = f"frame {number}: {why.splitlines()[0][:200] if why.strip() else 'failed'}"
    result.failed.append(text)
    say(text)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
