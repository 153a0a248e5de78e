"""Checks of the data sets of a training before its first batch, for NequIP and MACE."""

from typing import Iterable, Optional, Sequence

from e2ip_plugins.predictions.checks import check_apart, check_atoms, check_finite
from e2ip_plugins.predictions.labelled import Label, LabelledFrame


def check_frame(
    frame: LabelledFrame, finite: Iterable[str] = (), known: Optional[Sequence[str]] = None, apart: bool = True
) -> None:
    """Raise `InputError` for a frame from which nothing can be learned.

    NequIP and MACE would train on such a frame without a word, or stop without naming it.

    Parameters
    ----------
    frame : LabelledFrame
    finite : iterable of str
        Labels that must be finite where the frame has them, whatever their weight: ``energy``, ``stress``. In a loss
        zero times NaN is NaN.
    known : sequence of str, optional
        Chemical symbols of the species that the model has.
    apart : bool
        Whether to look for atoms at the same place, too.
    """
    atoms, where = frame.atoms, frame.where
    check_atoms(atoms.numbers, atoms.positions, where, known)
    if apart:
        check_apart(atoms.positions, atoms.cell.array, atoms.pbc, where)
    for name in finite:
        label: Optional[Label] = getattr(frame, name)
        if label is not None:
            check_finite(label.values, where, name)


def masked_forces(masked: int, total: int, where: str) -> str:
    """Return a warning about reference forces that are not finite, or an empty string where there are none."""
    if not masked:
        return ""
    return (
        f"{masked} of {total} atoms {where} have NaN or infinite reference forces: they are left out of statistics, "
        "loss and metrics"
    )
