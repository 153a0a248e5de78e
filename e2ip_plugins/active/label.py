"""``e2ip label``: reference energies and forces of frames, from any calculator of ASE."""

import ast
import difflib
import os
import pkgutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, List, Sequence, Set, Tuple

import numpy as np
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.chunks import parsed
from e2ip_plugins.predictions.columns import without_labels
from e2ip_plugins.predictions.fingerprints import fingerprint
from e2ip_plugins.predictions.trajectories import append_frame, check_output, read_trajectory, whole_bytes

#: Names of labels in extxyz files; the ready configs of MACE and NequIP read them.
REF_ENERGY, REF_FORCES, REF_STRESS = "REF_energy", "REF_forces", "REF_stress"

#: Info of every labelled frame: the method, as the user wrote it.
METHOD_KEY = "label_method"


@dataclass(frozen=True)
class LabelOptions:
    """Options of ``e2ip label``: the calculator.

    Attributes
    ----------
    calculator : str
        ``module:Class``, for example ``tblite.ase:TBLite``.
    arguments : sequence of str
        ``name=value``; values are Python literals, and text where they are none.
    """

    calculator: str
    arguments: Sequence[str] = ()

    @property
    def method(self) -> str:
        """Calculator and arguments as one text."""
        return " ".join([self.calculator, *sorted(self.arguments)])

    def maker(self) -> Callable[[], Any]:
        """Return a function that makes a calculator.

        Raises
        ------
        InputError
            Names that cannot be imported, arguments that the calculator refuses, and those that look like a misspelt
            parameter.
        """
        where = f"--calculator {self.calculator}"
        if ":" not in self.calculator:
            raise InputError(f"{where}: a module and a class, for example tblite.ase:TBLite")
        # A console script has its own folder on the path, not the current one. The current folder stays there:
        # calculators import some modules with the first frame.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            kind = pkgutil.resolve_name(self.calculator)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"{where}: cannot be imported ({error})") from error
        arguments = dict(map(_argument, self.arguments))
        try:
            calculator = kind(**arguments)
        # Every calculator refuses arguments in another way.
        except Exception as error:
            raise InputError(f"{where}: {type(error).__name__}: {error}") from error
        name = type(calculator).__name__
        if not callable(getattr(calculator, "get_forces", None)):
            raise InputError(f"{where}: is a {name}, no calculator of ASE")
        # Most calculators take any name and read those that they know: a typing error would label by another method.
        # They may read more names than they list.
        known = [key for key in getattr(calculator, "default_parameters", {}) if isinstance(key, str)]
        for key in arguments:
            similar = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            if similar:
                raise InputError(f"--argument {key}: {name} has no such parameter; did you mean {similar[0]}?")
        return lambda: kind(**arguments)


def _argument(text: str) -> Tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise InputError(f"--argument {text}: a name and a value, for example method=GFN2-xTB")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


@dataclass
class Labels:
    """Result of ``e2ip label``.

    Attributes
    ----------
    labelled, existing : int
        Number of frames labelled by this call, and by an earlier call or as copies of another frame.
    failed : list of str
        Frames without a label, and why.
    note : str
        Which frame an earlier call had left cut off, and was removed from the file; empty if none was.
    """

    labelled: int = 0
    existing: int = 0
    failed: List[str] = field(default_factory=list)
    note: str = ""


def label(
    frames: Sequence[Atoms],
    output: Path,
    options: LabelOptions,
    on_failure: Callable[[str], None] = lambda text: None,
) -> Labels:
    """Write frames with labels, one after the other; frames that the file has already are not computed again.

    A new calculator is made for every frame: its label does not depend on the frames before. Labels and predictions of
    the input are left out. A frame whose calculation fails, or gives numbers that are not finite, is not written.

    Parameters
    ----------
    frames : sequence of ase.Atoms
    output : Path
        extxyz file, with ``REF_energy`` (eV) and ``REF_forces`` (eV/Å) and, for periodic frames if the calculator has
        one, ``REF_stress`` (eV/Å³). Its frames have the method as ``label_method``.
    options : LabelOptions
    on_failure : callable
        Function of a text on a frame that failed.

    Raises
    ------
    InputError
        An output without labels or with those of another method, or which cannot be read.
    """
    make_calculator = options.maker()
    marks = [_mark(atoms) if len(atoms) else "" for atoms in frames]
    done, note = _labelled_frames(output, options.method, set(marks))
    labels = Labels(note=note)
    for number, (atoms, mark) in enumerate(zip(frames, marks, strict=True)):
        if mark in done:
            labels.existing += 1
            continue
        try:
            frame = _labelled(atoms, make_calculator())
        # A calculator that finds no solution may raise anything.
        except Exception as error:
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            labels.failed.append(f"frame {number}: {reason.splitlines()[0][:200]}")
            on_failure(labels.failed[-1])
            continue
        frame.info[METHOD_KEY] = options.method
        append_frame(output, frame)
        done.add(mark)
        labels.labelled += 1
    return labels


def _mark(atoms: Atoms) -> str:
    """Return what tells a frame from others, its electronic state included where a calculator may read one."""
    of_atoms = [atoms.arrays[name] for name in ("initial_charges", "initial_magmoms") if name in atoms.arrays]
    # Atom by atom: the moments of an antiferromagnet add up to 0, too.
    state = [str((np.round(values, 3) + 0.0).tolist()) for values in of_atoms if values.any()]
    return " ".join([fingerprint(atoms), *state])


def _labelled(atoms: Atoms, calculator: Any) -> Atoms:
    if not len(atoms):
        raise InputError("has no atoms")
    frame = without_labels(atoms)
    # A constraint belongs to the run of the frame.
    frame.set_constraint()
    working = frame.copy()
    working.calc = calculator
    energy, forces = float(working.get_potential_energy()), np.asarray(working.get_forces(), dtype=float)
    if not (np.isfinite(energy) and np.isfinite(forces).all()):
        raise ValueError("energy or forces are not finite")
    frame.info[REF_ENERGY], frame.arrays[REF_FORCES] = energy, forces
    if frame.pbc.all() and "stress" in getattr(calculator, "implemented_properties", ()):
        frame.info[REF_STRESS] = np.asarray(working.get_stress(voigt=False), dtype=float)
    return frame


def _labelled_frames(output: Path, method: str, wanted: Set[str]) -> Tuple[Set[str], str]:
    """Return the marks of frames that the file has; remove a last one that is cut off, and return a note of that."""
    check_output(output, frames=True, replace=True)
    if not output.exists():
        return set(), ""
    frames, note = read_trajectory(output, may_be_empty=True)
    for i, atoms in enumerate(frames):
        if REF_ENERGY not in atoms.info or REF_FORCES not in atoms.arrays:
            reason = f"its frame {i} has no {REF_ENERGY} and {REF_FORCES}; choose another name"
            raise InputError(f"{output}: was not written by e2ip label, {reason}")
        other = str(atoms.info.get(METHOD_KEY, ""))
        if other != method:
            methods = f"of '{other}', new ones would be of '{method}'" if other else f"that name no {METHOD_KEY}"
            raise InputError(f"{output}: has labels {methods}: choose another name")
    if note:
        _remove_last(output, wanted)
        note = f"{output}: frame {len(frames)} is cut off and taken out of it"
    return set(map(_mark, frames)), note


def _remove_last(output: Path, wanted: Set[str]) -> None:
    """Remove a last frame that is cut off; `InputError` where it may be complete, or not of ``e2ip label``."""
    end = whole_bytes(output)
    with output.open("rb") as file:
        file.seek(end)
        rest = file.read()
    lines = rest.split(b"\n")
    if len(lines) > 2 and f"{METHOD_KEY}=".encode() not in lines[1]:
        raise InputError(f"{output}: its last frame is cut off, and not of e2ip label; choose another name")
    try:
        mark = _mark(parsed(rest)) if len(lines) == int(lines[0]) + 2 else ""
    # ASE may raise anything where columns are missing.
    except Exception:
        mark = ""
    # A frame of the input is labelled anew.
    if mark and mark not in wanted:
        reason = "the last line of its last frame has no end; if the frame is all there, end the line, or remove it"
        raise InputError(f"{output}: {reason}")
    os.truncate(output, end)
