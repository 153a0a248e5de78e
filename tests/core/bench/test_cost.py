"""What a prediction costs: of an ensemble only where every member was timed."""

import json
from types import SimpleNamespace

import ase.io
import pytest
from ase.build import molecule
from ase.calculators.emt import EMT

from e2ip_plugins.bench import cost
from e2ip_plugins.bench.plan import Run


@pytest.mark.parametrize("trained", [3, 2])
def test_an_ensemble_costs_what_all_its_members_do(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(cost, "entry_points", lambda **_: [SimpleNamespace(load=lambda: lambda file: EMT())])
    (tmp_path / "data").mkdir()
    ase.io.write(tmp_path / "data" / "aspirin_test.extxyz", molecule("H2O"), format="extxyz")
    runs = [Run("aspirin", "mace", "stock", seed) for seed in (1, 2, 3)]
    for run in runs[:trained]:
        (tmp_path / "runs" / run.name).mkdir(parents=True)
        (tmp_path / "runs" / run.name / "model.model").touch()
    cost.measure(runs, tmp_path, lambda text: None)
    figures = json.loads(cost.path("aspirin", "mace", tmp_path).read_text())["ms_per_atom"]
    assert figures["stock model"] > 0.0
    assert ("DE" in figures) == (trained == 3)
