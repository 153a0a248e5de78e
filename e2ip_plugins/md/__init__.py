"""Molecular dynamics that knows its uncertainty: watched (`Monitor`), driven by it (`BiasedCalculator`), in LAMMPS."""

from e2ip_plugins.errors import UncertaintyWarning
from e2ip_plugins.md.bias import BiasedCalculator
from e2ip_plugins.md.derived import combined_force, mean_force
from e2ip_plugins.md.frames import with_results
from e2ip_plugins.md.mixtures import results_of
from e2ip_plugins.md.monitor import Monitor, MonitorStop
from e2ip_plugins.md.thresholds import Quantile

__all__ = [
    "BiasedCalculator",
    "Monitor",
    "MonitorStop",
    "Quantile",
    "UncertaintyWarning",
    "combined_force",
    "mean_force",
    "results_of",
    "with_results",
]
