"""Differences of energies, and any other sums of them, with standard deviations."""

import warnings
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from ase import Atoms
from numpy.typing import ArrayLike

from e2ip_plugins.energies.expressions import coefficients_of
from e2ip_plugins.energies.frames import FrameEnergies, Source, read_energies
from e2ip_plugins.errors import InputError, UncertaintyWarning

#: One sum or several: as text, or as the coefficients (F,) or (D, F) of all frames.
Sums = Union[str, Sequence[str], ArrayLike]

#: Coefficients below this, left over where atoms of a species cancel, are rounding.
_ROUNDING = 1e-9


class Differences(NamedTuple):
    """D sums of energies.

    Attributes
    ----------
    values : (D,)
        In eV.
    std : (D,)
        Standard deviations in eV.
    covariance : (D, D)
        In eV².
    """

    values: np.ndarray
    std: np.ndarray
    covariance: np.ndarray


def difference(frames: Source, of: Sums, key: Optional[str] = None) -> Tuple[np.ndarray, np.ndarray]:
    """Return a sum Σ_k c_k E_k of energies and its standard deviation |Σ_k c_k u_k| (`e2ip_plugins.leverage.energies`).

    Warns where the atoms of a species do not cancel.

    Parameters
    ----------
    frames : path, ase.Atoms, or sequence of them
        F frames with predictions of one model, or files of them.
    of : str, sequence of str, or (F,) or (D, F) array
        ``"A - B"``, as `e2ip_plugins.energies.expressions.coefficients_of` reads it, or the coefficients c of all
        frames; D of them for D sums.
    key : str, optional
        Info of the frames that has the names.

    Returns
    -------
    value, std : floats, or (D,) arrays
        In eV.

    Raises
    ------
    InputError
        As `read_energies` and `coefficients_of` do; another number of coefficients than of frames.

    Examples
    --------
    >>> from ase import Atoms
    >>> def frame(energy, vector):
    ...     return Atoms(info={"energy": energy, "energy_error_vector": np.array(vector), "uq_model": "e2ip-1"})
    >>> difference([frame(-7.0, [0.3, 0.1]), frame(-6.5, [0.3, 0.0])], "0 - 1")
    (-0.5, 0.1)
    """
    read, coefficients = _read(frames, of, key)
    result = differences(read, np.atleast_2d(coefficients))
    if coefficients.ndim == 1:
        return result.values.item(), result.std.item()
    return result.values, result.std


def covariance(frames: Source, of: Sums, key: Optional[str] = None) -> np.ndarray:
    """Return the covariance (D, D) in eV² of D sums of energies, which `difference` describes."""
    read, coefficients = _read(frames, of, key)
    return differences(read, np.atleast_2d(coefficients)).covariance


def differences(read: FrameEnergies, coefficients: np.ndarray) -> Differences:
    """Return the sums with coefficients (D, F)."""
    vectors = coefficients @ read.vectors
    return Differences(coefficients @ read.energies, np.linalg.norm(vectors, axis=1), vectors @ vectors.T)


def uncancelled(atoms: List[Atoms], coefficients: np.ndarray) -> str:
    """Return the species whose atoms do not cancel, with their numbers; empty if all do.

    Parameters
    ----------
    atoms : list of ase.Atoms
        F frames.
    coefficients : (F,)

    Examples
    --------
    >>> uncancelled([Atoms("H2O"), Atoms("H2"), Atoms("O2")], np.array([1.0, -1.0, 0.0]))
    'O +1'
    """
    counts: Dict[str, float] = {}
    for index in np.flatnonzero(coefficients):
        for symbol, number in atoms[index].symbols.formula.count().items():
            counts[symbol] = counts.get(symbol, 0.0) + coefficients[index] * number
    return ", ".join(f"{symbol} {count:+g}" for symbol, count in counts.items() if abs(count) > _ROUNDING)


def warn_uncancelled(atoms: List[Atoms], coefficients: np.ndarray, text: str, level: int = 2) -> None:
    """Warn of a sum, which ``text`` names, if atoms of it do not cancel."""
    if species := uncancelled(atoms, coefficients):
        warnings.warn(
            f"{text}: atoms do not cancel ({species}): the value contains the energies of single atoms, and depends on "
            "the zero of the reference energies",
            UncertaintyWarning,
            stacklevel=level + 1,
        )


def _read(frames: Source, of: Sums, key: Optional[str]) -> Tuple[FrameEnergies, np.ndarray]:
    """Return energies, and coefficients (F,) or (D, F)."""
    read = read_energies(frames)
    texts: List[str] = []
    try:
        rows = np.asarray(of)
        if rows.dtype.kind == "U":
            texts = rows.ravel().tolist()
            rows = np.stack([coefficients_of(text, read.atoms, key) for text in texts])
            rows = rows[0] if isinstance(of, str) else rows
        rows = rows.astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{of!r}: is no sum such as 'A - B', nor a list of coefficients, one for each frame"
        ) from error
    if rows.ndim not in (1, 2) or rows.shape[-1] != len(read.atoms) or not np.isfinite(rows).all():
        raise InputError(
            f"coefficients of shape {rows.shape} for {len(read.atoms)} frames: give a finite number for each"
        )
    for i, row in enumerate(np.atleast_2d(rows)):
        warn_uncancelled(read.atoms, row, texts[i] if texts else f"sum {i}", 3)
    return read, rows
