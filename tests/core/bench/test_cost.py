"""What a prediction costs: of an ensemble only where every member was timed."""

import json
from types import SimpleNamespace

import ase.io
import pytest
from ase.build import molecule
from ase.calculators.emt import EMT

from e2ip_plugins.bench import cost
from e2ip_plugins.bench.plan import Run


def open_model(file):
    print("opened", file)
    return EMT()


@pytest.fixture
def timed(tmp_path, monkeypatch, plan_of):
    """Makes so many models of each method, as a calculator opens them; milliseconds of a call for ``named`` ones."""
    monkeypatch.setattr(cost, "entry_points", lambda **_: [SimpleNamespace(load=lambda: open_model)])
    (tmp_path / "data").mkdir()
    ase.io.write(tmp_path / "data" / "aspirin_test.extxyz", molecule("H2O"), format="extxyz")

    def measure(named, **numbers):
        for method, number in numbers.items():
            for seed in range(1, number + 1):
                folder = tmp_path / "runs" / Run("aspirin", "mace", method.replace("_", "-"), seed).name
                folder.mkdir(parents=True)
                (folder / "model.model").touch()
        cost.measure(plan_of(sets="aspirin", methods=named, preset="cpu"), lambda text: None)
        return json.loads(cost.path("aspirin", "mace", tmp_path).read_text())["ms_per_atom"]

    return measure


@pytest.mark.parametrize("number", [5, 4])
def test_an_ensemble_costs_what_all_its_members_do(timed, number):
    figures = timed("stock", stock=number)
    assert figures["stock model"] > 0.0
    assert ("DE" in figures) == (number == 5)


def test_two_models_of_a_method_that_has_more_seeds(timed):
    figures = timed("e2ip", e2ip=3)
    assert figures["e²IP together"] > figures["e²IP"] > 0.0


def test_what_a_framework_prints_goes_to_a_log(timed, tmp_path, capsys):
    timed("stock", stock=2)
    assert not capsys.readouterr().out
    assert cost.path("aspirin", "mace", tmp_path).with_suffix(".log").read_text().count("opened") == 2


def test_a_call_for_other_methods_times_the_earlier_ones_beside_them(timed):
    timed("stock", stock=5)
    assert {"stock model", "DE"} < set(timed("e2ip-fixed", e2ip_fixed=2))
