"""`MACECalculator(…, uncertainties="on request")`: the same results, computed when someone asks for them."""

import functools

import numpy as np
import pytest
from ase import units
from ase.md.verlet import VelocityVerlet
from e3nn.util import jit
from mace.calculators import MACECalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.md import BiasedCalculator

SETTINGS = {"device": "cpu", "default_dtype": "float64"}


@pytest.fixture
def makes(make_model):
    """Function that gives a function of calculators, each with models of its own: of readouts and other settings."""

    def of(models=({},), scripted=False, **options):
        def make(**settings):
            built = [make_model(**model) for model in models]
            built = [jit.compile(model) for model in built] if scripted else built
            return MACECalculator(models=built, **SETTINGS, **{**options, **settings})

        return make

    return of


@pytest.mark.parametrize("readout", ["e2ip", "mve", "shallow"])
def test_results_are_those_of_always_to_the_last_bit(makes, frames, request_checks, readout):
    request_checks.check_same(makes([{"readout": readout}]), frames)


def test_other_units_padding_heads_and_committees(makes, frames, request_checks):
    request_checks.check_same(makes(energy_units_to_eV=27.2, length_units_to_A=0.53), frames[2:])
    request_checks.check_same(makes(pad_num_atoms=16, pad_num_edges=256), frames[:1])
    request_checks.check_same(makes([{"heads": ("one", "two")}], head="two"), frames[:1])
    request_checks.check_same(makes([{"hidden_irreps": "8x0e"}]), frames[:1])
    request_checks.check_same(makes([{}, {"seed": 1, "readout": "mve"}]), frames[1:])


def test_a_fitted_model_with_error_bars_of_energies(fitted_file, frames, request_checks, write_calibration):
    make = functools.partial(MACECalculator, str(fitted_file), **SETTINGS)
    request_checks.check_same(make, frames)
    request_checks.check_same(functools.partial(make, calibration=write_calibration()), frames)


def test_a_scripted_model(makes, frames, request_checks):
    request_checks.check_same(makes(scripted=True), frames[1:2])


def test_what_asks_for_uncertainties(makes, frames, request_checks):
    request_checks.check_mapping(makes(), frames[2])
    request_checks.check_not_stale(makes(), frames[2])
    request_checks.check_not_stale(makes([{"readout": "shallow"}]), frames[2])


def test_a_run_with_a_monitor(makes, frames, request_checks):
    atoms = frames[1].copy()
    atoms.set_momenta(np.random.default_rng(0).normal(size=(3, 3)))
    request_checks.check_monitored(makes(), lambda atoms: VelocityVerlet(atoms, 0.1 * units.fs), atoms, 4, 2)


def test_stock_models_and_biased_runs(makes, frames):
    stock = makes([{"readout": None}])(uncertainties="on request")
    stock.calculate(frames[0])
    assert type(stock.results) is dict
    biased = [BiasedCalculator(makes()(uncertainties=when), 1.0, 0.3) for when in ("always", "on request")]
    forces = [calculator.get_property("forces", frames[0]) for calculator in biased]
    np.testing.assert_array_equal(*forces)


def test_what_cannot_wait(makes, frames, write_calibration):
    with pytest.raises(InputError, match="uncertainties='later': choose 'always' or 'on request'"):
        makes()(uncertainties="later")
    with pytest.raises(InputError, match="with compile_mode the readout is a part of the compiled model"):
        makes()(uncertainties="on request", compile_mode="default")
    # Not when the uncertainties are read: long after.
    narrow = makes(calibration=write_calibration(factors={"H": 1.0}))(uncertainties="on request")
    with pytest.raises(InputError, match=r"calibration\.json"):
        narrow.calculate(frames[0])
