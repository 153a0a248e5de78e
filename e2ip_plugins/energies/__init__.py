"""Consistent errors of several energies: differences, members, and thermal averages reweighted to the members."""

from e2ip_plugins.energies.averages import MemberAverages, Reweighted, reweight
from e2ip_plugins.energies.differences import covariance, difference
from e2ip_plugins.energies.draws import members, random_directions
from e2ip_plugins.energies.member_calculator import MemberCalculator

__all__ = [
    "MemberAverages",
    "MemberCalculator",
    "Reweighted",
    "covariance",
    "difference",
    "members",
    "random_directions",
    "reweight",
]
