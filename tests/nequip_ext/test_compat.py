"""What releases of NequIP have differently is the same to the rest of this package."""

from types import SimpleNamespace

from nequip_ext import E2IPMetrics
from nequip_ext.compat import metric_entries


def test_metrics_of_every_release_have_weights_and_say_whether_nan_counts():
    """Before 0.19 a manager keeps dictionaries, under another name."""
    manager = E2IPMetrics({"forces_rmse": 1.0, "e2ip_nll": 3.0}, ignore_nan={"total_energy": True})
    found = metric_entries(manager)
    assert (found["forces_rmse"], found["e2ip_nll"][0]) == ((0.25, True), 0.75)
    assert (found["total_energy_mae"], found["e2ip_coverage95"]) == ((None, True), (None, False))
    earlier = {
        name: {"field": None, "coeff": c, "ignore_nan": nan, "per_type": False} for name, (c, nan) in found.items()
    }
    assert metric_entries(SimpleNamespace(metrics=earlier)) == found
