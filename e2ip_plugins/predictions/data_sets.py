"""Checks of the data sets of a training before its first batch, for NequIP and MACE."""

from typing import Any, Mapping, Optional, Sequence

import numpy as np

from e2ip_plugins.predictions.checks import check_apart, check_atoms, check_finite


def check_frame(
    numbers: np.ndarray,
    positions: np.ndarray,
    cell: Optional[np.ndarray],
    periodic: Optional[np.ndarray],
    labels: Mapping[str, Any],
    where: str,
    known: Optional[Sequence[str]] = None,
    apart: bool = True,
) -> None:
    """Raise `InputError` for a frame from which nothing can be learned.

    NequIP and MACE would train on such a frame without a word, or stop without naming it.

    Parameters
    ----------
    numbers : (N,)
        Atomic numbers.
    positions : (N, 3)
        In Å.
    cell : (3, 3) or None
        In Å.
    periodic : (3,) of bool or None
    labels : mapping
        References by name, except the forces, that must be finite.
    where : str
        File and frame, for the message.
    known : sequence of str, optional
        Chemical symbols of the species that the model has.
    apart : bool
        Whether to look for atoms at the same place, too.
    """
    check_atoms(numbers, positions, where, known)
    if apart:
        check_apart(positions, cell, periodic, where)
    for name, values in labels.items():
        check_finite(values, where, name)


def masked_forces(masked: int, total: int, where: str) -> str:
    """Return a warning about reference forces that are not finite, or an empty string where there are none."""
    if not masked:
        return ""
    return (
        f"{masked} of {total} atoms {where} have NaN or infinite reference forces: they are left out of statistics, "
        "loss and metrics"
    )
