"""Molecular dynamics with ASE that knows its uncertainty."""

from e2ip_plugins.md.frames import with_results
from e2ip_plugins.md.monitor import Monitor, MonitorStop
from e2ip_plugins.md.thresholds import Quantile, UncertaintyWarning

__all__ = ["Monitor", "MonitorStop", "Quantile", "UncertaintyWarning", "with_results"]
