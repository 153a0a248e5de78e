"""What a prediction costs: of an ensemble only where every member was timed."""

import json
from types import SimpleNamespace

import ase.io
import pytest
from ase.build import molecule
from ase.calculators.emt import EMT

from e2ip_plugins.bench import cost
from e2ip_plugins.bench.plan import Run


def timed(runs, out):
    cost.measure(runs, out, lambda text: None)
    return json.loads(cost.path("aspirin", "mace", out).read_text())["ms_per_atom"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Makes the models of runs, as a calculator opens them."""
    monkeypatch.setattr(cost, "entry_points", lambda **_: [SimpleNamespace(load=lambda: lambda file: EMT())])
    (tmp_path / "data").mkdir()
    ase.io.write(tmp_path / "data" / "aspirin_test.extxyz", molecule("H2O"), format="extxyz")

    def make(*runs):
        for run in runs:
            (tmp_path / "runs" / run.name).mkdir(parents=True)
            (tmp_path / "runs" / run.name / "model.model").touch()

    return make


@pytest.mark.parametrize("number", [3, 2])
def test_an_ensemble_costs_what_all_its_members_do(tmp_path, trained, number):
    runs = [Run("aspirin", "mace", "stock", seed) for seed in (1, 2, 3)]
    trained(*runs[:number])
    figures = timed(runs, tmp_path)
    assert figures["stock model"] > 0.0
    assert ("DE" in figures) == (number == 3)


def test_a_call_for_other_methods_times_the_earlier_ones_beside_them(tmp_path, trained):
    stock, e2ip = ([Run("aspirin", "mace", method, seed) for seed in (1, 2)] for method in ("stock", "e2ip-fixed"))
    trained(*stock, *e2ip)
    timed(stock, tmp_path)
    figures = timed(e2ip, tmp_path)
    assert {"stock model", "DE"} < set(figures) and len(figures) == 3
