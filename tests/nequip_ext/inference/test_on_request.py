"""`E2IPCalculator(…, uncertainties="on request")`: the same results, computed when someone asks for them."""

import functools

import numpy as np
import pytest
from ase import units
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.verlet import VelocityVerlet

from e2ip_plugins.errors import InputError
from e2ip_plugins.md import BiasedCalculator
from nequip_ext import E2IPCalculator
from nequip_ext.fitting.passes import fit_frames
from nequip_ext.inference.calculator import open_model


@pytest.fixture
def makes(make_model, gnn_config, as_calculator):
    """Function that gives a function of calculators of one model: of options of `E2IPModel` and of its inner model."""

    def of(inner=None, **options):
        model = make_model({**gnn_config(), **(inner or {})}, **options)[1]
        return functools.partial(as_calculator, model)

    return of


@pytest.mark.parametrize("readout", ["e2ip", "mve", "shallow"])
def test_results_are_those_of_always_to_the_last_bit(makes, frames, request_checks, readout):
    request_checks.check_same(makes(readout=readout), frames)


@pytest.mark.parametrize("inner", [{"l_max": 1}, {"l_max": 0}, {"num_layers": 1}, {"model_dtype": "float32"}])
def test_other_features(makes, frames, request_checks, inner):
    request_checks.check_same(makes(inner), frames[:2])


@pytest.mark.parametrize("backbone", ["PaiNNModel", "AlphaNetModel"])
def test_backbones_of_this_package(make_model, as_calculator, frames, request_checks, backbone):
    config = {"_target_": f"nequip_ext.{backbone}", "seed": 1, "model_dtype": "float64", "type_names": ["H", "C", "O"]}
    config.update(r_max=4.0, num_features=16, num_layers=2, num_radial=4, avg_num_neighbors=8.0)
    if backbone == "AlphaNetModel":
        config.update(num_phase_channels=16, num_states=4)
    config.update(per_type_energy_scales=1.3, per_type_energy_shifts={"H": -1.0, "C": -2.0, "O": -3.0})
    request_checks.check_same(functools.partial(as_calculator, make_model(config)[1]), frames[:2])


def test_units_and_calibrations(makes, frames, request_checks, write_calibration):
    make = functools.partial(makes(), energy_units_to_eV=27.2, length_units_to_A=0.53)
    request_checks.check_same(make, frames[:2])
    request_checks.check_same(functools.partial(make, calibration=write_calibration()), frames[:1])


def test_error_bars_of_energies_and_stresses(makes, energy_checks, request_checks):
    make, crystal = makes(evidence="leverage"), bulk("C", "diamond", cubic=True)
    crystal.rattle(0.03, seed=5)
    sets = [energy_checks.labelled_frames(crystal, n, seed, stress=True, spread=30.0) for n, seed in ((12, 0), (8, 1))]
    fit_frames(make().model, *sets, 3, True, lambda text: None)
    request_checks.check_same(make, [crystal])
    request_checks.check_not_stale(make, crystal, "stress_cov")


def test_what_asks_for_uncertainties(makes, frames, request_checks):
    make = makes()
    request_checks.check_mapping(make, frames[1])
    request_checks.check_not_stale(make, frames[1])
    request_checks.check_not_stale(makes(readout="shallow"), frames[1])
    calculator = make(uncertainties="on request")
    calculator.calculate(frames[0])
    fixed = SinglePointCalculator(frames[0], **calculator.results)
    assert set(fixed.results) == set(calculator.results) and "forces_cov" in fixed.results


def test_a_run_with_a_monitor(makes, frames, request_checks):
    atoms = frames[2].copy()
    atoms.set_momenta(np.random.default_rng(0).normal(size=(3, 3)))
    request_checks.check_monitored(makes(), lambda atoms: VelocityVerlet(atoms, 0.1 * units.fs), atoms)


def test_a_biased_run(makes, frames):
    biased = [BiasedCalculator(makes()(uncertainties=when), 1.0, 0.3) for when in ("always", "on request")]
    forces = [calculator.get_property("forces", frames[0]) for calculator in biased]
    np.testing.assert_array_equal(*forces)


def test_checkpoints_and_packages(leverage_run, leverage_package, frames, request_checks):
    request_checks.check_same(functools.partial(E2IPCalculator.from_saved_model, str(leverage_package)), frames[:1])
    request_checks.check_same(functools.partial(open_model, leverage_run / "best.ckpt"), frames[:1])


def test_what_cannot_wait(makes, make_model, as_calculator, frames, write_calibration):
    with pytest.raises(InputError, match="uncertainties='later': choose 'always' or 'on request'"):
        makes()(uncertainties="later")
    with pytest.raises(InputError, match="'on request': the model has no readout"):
        as_calculator(make_model()[0], uncertainties="on request")
    # Not when the uncertainties are read: long after.
    for calibration in ({"factors": {"H": 1.0}}, {"uq_family": "gaussian"}):
        narrow = makes()(uncertainties="on request", calibration=write_calibration(**calibration))
        with pytest.raises(InputError, match=r"calibration\.json"):
            narrow.calculate(frames[0])
