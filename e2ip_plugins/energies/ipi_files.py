"""Energies of members as i-PI prints those of a committee, for ``i-pi-committee-reweight``."""

import numpy as np
from ase.units import Hartree


def committee_text(energies: np.ndarray, title: str) -> str:
    """Return a row for every frame and a column for every member, in hartree.

    That is what i-PI 3.3 writes for the trajectory ``extras`` with ``extra_type='committee_pot'``, after a line of
    comment. Its tool takes the mean of a row for the energy that the frame was sampled with.

    Parameters
    ----------
    energies : (F, K)
        In eV, with the mean model as their mean.
    title : str
        Text of the comment.

    Examples
    --------
    >>> print(committee_text(np.array([[-27.2, -27.3]]), "two members"), end="")
    # two members
    -9.995815...e-01 -1.003256...e+00
    """
    rows = [" ".join(f"{energy: .14e}" for energy in row) for row in energies / Hartree]
    return "\n".join([f"# {title}", *rows]) + "\n"
