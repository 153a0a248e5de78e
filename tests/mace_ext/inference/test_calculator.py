"""`MACECalculator` with e²IP models: results, units, committees, padding, MACE heads, dynamics."""

import copy
import functools
import logging
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import ase.io
import ase.outputs
import numpy as np
import pytest
import torch
from ase import units
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.mixing import AverageCalculator, MixedCalculator, SumCalculator
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from e3nn.util import jit
from forked_commands import run_command
from mace.calculators import MACECalculator

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FORCE_VIEWS

E2IP = families.get("e2ip")
NAMES = {key.name for key in E2IP.output_keys()}
VIEWS = {key.name for key in FORCE_VIEWS}
DERIVED = FORCE_VIEWS + E2IP.own_views
STOCK = {"energy", "energies", "free_energy", "node_energy", "forces", "stress"}


def results_of(atoms, models, **settings):
    """Results and calculator of one evaluation."""
    atoms = atoms.copy()
    atoms.calc = MACECalculator(models=models, device="cpu", default_dtype="float64", **settings)
    atoms.get_forces()
    return atoms.calc.results, atoms.calc


def properties_of(calculator):
    """Uncertainties that `get_property` takes; ASE's mixing calculators would add up those that iteration gives."""
    assert not NAMES & set(calculator.implemented_properties)
    return {name for name in NAMES if name in calculator.implemented_properties}


def test_every_output_key_is_a_property_and_equals_the_models(make_model, make_batch, frames):
    model = make_model()
    results, calculator = results_of(frames[2], model)
    expected = model(make_batch([frames[2]]))
    assert NAMES == properties_of(calculator)
    assert results["uq_family"] == "niw"
    for key in E2IP.output_keys():
        assert results[key.name].shape == (len(frames[2]), *key.shape)
        np.testing.assert_array_equal(results[key.name], expected[key.name].detach().numpy())
        if key in DERIVED:
            value = E2IP.derive({k.name: expected[k.name].detach() for k in E2IP.parameter_keys})[key.name]
            torch.testing.assert_close(torch.from_numpy(results[key.name]), value, rtol=1e-14, atol=1e-17)
    atoms = frames[2].copy()
    atoms.calc = calculator
    assert atoms.calc.get_property("forces_cov", atoms).shape == (len(atoms), 3, 3)


def test_units_are_squared_on_covariances(make_model, frames):
    model, factor = make_model(), 27.211386 / 0.529177
    plain, _ = results_of(frames[0], model)
    converted, _ = results_of(frames[0], model, energy_units_to_eV=27.211386, length_units_to_A=0.529177)
    np.testing.assert_allclose(converted["forces"], plain["forces"] * factor, rtol=1e-12)
    for key in DERIVED:
        power = 2 if key.unit == "eV²/Å²" else 1
        np.testing.assert_allclose(converted[key.name], plain[key.name] * factor**power, rtol=1e-10, atol=1e-14)
    for key in ("e2ip_nu", "e2ip_kappa"):
        np.testing.assert_array_equal(converted[key], plain[key])


@pytest.mark.parametrize("readouts", [("e2ip", "e2ip", "e2ip"), ("e2ip", "isotropic")])
@pytest.mark.parametrize("unit", [1.0, 27.211386])
def test_committee_obeys_the_law_of_total_variance(toy_family, make_model, frames, unit, readouts):
    """Each member's views are those of its own family; the mixture is of none and has no parameters."""
    models = [make_model(readout=readout, seed=seed) for seed, readout in enumerate(readouts)]
    single = [results_of(frames[0], model, energy_units_to_eV=unit)[0] for model in models]
    assert [member["uq_family"] for member in single] == [families.get(readout).uq_family for readout in readouts]
    committee, calculator = results_of(frames[0], models, energy_units_to_eV=unit)
    forces = np.array([member["forces"] for member in single])
    deviation = forces - forces.mean(0)
    spread = np.einsum("mni,mnj->nij", deviation, deviation) / len(models)
    aleatoric = np.mean([member["forces_aleatoric_cov"] for member in single], axis=0)
    epistemic = np.mean([member["forces_epistemic_cov"] for member in single], axis=0) + spread
    std = np.sqrt(np.trace(epistemic, axis1=1, axis2=2) / 3)
    for name, expected in (
        ("forces_aleatoric_cov", aleatoric),
        ("forces_epistemic_cov", epistemic),
        ("forces_cov", aleatoric + epistemic),
        ("forces_epistemic_std", std),
    ):
        np.testing.assert_allclose(committee[name], expected, rtol=1e-10, atol=1e-14)
    # The stock committee results stay.
    assert {"forces_comm", "energy_var"} <= set(committee)
    assert VIEWS == NAMES & set(committee) == properties_of(calculator)
    assert not {"uq_family", "isotropic_log_std"} & set(committee)


@pytest.mark.parametrize("mixture", [SumCalculator, AverageCalculator, lambda calcs: MixedCalculator(*calcs, 0.3, 0.7)])
def test_mixtures_of_ase_add_up_no_uncertainties(make_model, frames, mixture):
    calculators = [results_of(frames[0], make_model(seed=seed))[1] for seed in (0, 1)]
    stock = [results_of(frames[0], make_model(readout=None, seed=seed))[1] for seed in (0, 1)]
    mixed, expected = frames[0].copy(), frames[0].copy()
    mixed.calc, expected.calc = mixture(calculators), mixture(stock)
    np.testing.assert_array_equal(mixed.get_forces(), expected.get_forces())
    assert mixed.get_potential_energy() == expected.get_potential_energy()
    assert set(mixed.calc.results) == set(expected.calc.results)
    assert set(mixed.calc.implemented_properties) == set(expected.calc.implemented_properties)
    with pytest.raises(PropertyNotImplementedError, match="e2ip_nu property not implemented"):
        mixed.calc.get_property("e2ip_nu", mixed)
    assert calculators[0].get_property("e2ip_nu", mixed).shape == (len(mixed),)


def test_committee_with_a_stock_member_has_no_uncertainties_and_says_so(make_model, frames, caplog):
    for models in ([make_model(), make_model(readout=None)], [make_model(readout=None), make_model()]):
        with caplog.at_level(logging.WARNING):
            results, calculator = results_of(frames[1], models)
        assert "1 of 2 models have an e2ip readout" in caplog.text
        assert not NAMES & set(results) and not properties_of(calculator)
        caplog.clear()


def test_structures_without_meaning(make_model, frames):
    """MACE itself leaves an atom without a position out, and predicts the rest; stock models stay as they are."""
    broken, strange = frames[1].copy(), frames[1].copy()
    broken.positions[1, 2] = np.nan
    strange.symbols[1] = "N"
    for atoms, message in ((broken, "position of atom 1 is not finite"), (strange, "has N.*it knows H, C, O")):
        atoms.calc = MACECalculator(models=make_model(), device="cpu", default_dtype="float64")
        with pytest.raises(InputError, match=message):
            atoms.get_forces()
        with pytest.raises(InputError, match=message):
            atoms.calc.uncertainty_gradient(atoms)
    results_of(broken, make_model(readout=None))


def test_padding_changes_nothing(make_model, frames):
    model = make_model()
    plain, _ = results_of(frames[0], model)
    padded, _ = results_of(frames[0], model, pad_num_atoms=16, pad_num_edges=256)
    for key in E2IP.output_keys():
        np.testing.assert_allclose(padded[key.name], plain[key.name], rtol=1e-10, atol=1e-14)


def test_rebuilt_model_of_compile_mode_keeps_its_readout(make_model, make_batch, frames):
    # What MACECalculator(compile_mode=...) does before torch.compile, which takes minutes on a CPU.
    from mace.tools.compile import prepare
    from mace.tools.scripts_utils import extract_model

    model = make_model(heads=("one", "two"), hidden_irreps="8x0e")
    rebuilt = prepare(extract_model)(model=model, map_location="cpu")
    batch = make_batch(frames[:1], heads=["one", "two"], head="two")
    expected = model({**batch})
    for key, value in rebuilt({**batch}).items():
        if key in NAMES:
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("run", ["dynamics", "optimisation"])
def test_uncertainties_follow_the_atoms(make_model, frames, tmp_path, run):
    model, atoms = make_model(), frames[0].copy()
    atoms.calc = MACECalculator(models=model, device="cpu", default_dtype="float64")
    start = atoms.get_positions()
    trajectory = str(tmp_path / "run.traj")
    if run == "dynamics":
        VelocityVerlet(atoms, 1.0 * units.fs, trajectory=trajectory).run(3)
    else:
        BFGS(atoms, trajectory=trajectory, logfile=None).run(fmax=1e-6, steps=3)
    assert np.abs(atoms.get_positions() - start).max() > 1e-4
    fresh, _ = results_of(atoms, model)
    atoms.get_forces()
    np.testing.assert_allclose(atoms.calc.results["forces_cov"], fresh["forces_cov"], rtol=1e-10, atol=1e-14)
    stored = ase.io.read(trajectory, index=-1)
    np.testing.assert_allclose(stored.get_forces(), fresh["forces"], rtol=1e-10, atol=1e-14)


# Calibrations


def test_calibrated_results_and_gradients(make_model, frames, check_calibrated):
    make = functools.partial(MACECalculator, models=make_model(), device="cpu", default_dtype="float64")
    check_calibrated(make, frames[:1])


def test_calibrations_that_do_not_fit_are_refused(make_model, frames, write_calibration, check_refused_calibrations):
    settings = dict(device="cpu", default_dtype="float64")
    for model in (make_model(), jit.compile(make_model())):
        check_refused_calibrations(functools.partial(MACECalculator, models=model, **settings), frames[0])
    with pytest.raises(InputError, match="is for one model, not for the mixture of the 2 of a committee"):
        MACECalculator(models=[make_model(), make_model(seed=1)], calibration=write_calibration(), **settings)
    with pytest.raises(InputError, match="the model: has no predicted distribution"):
        MACECalculator(models=make_model(readout=None), calibration=write_calibration(), **settings)


STOCK_SCRIPT = """
import pickle, sys
import ase.io, mace.calculators
atoms = ase.io.read(sys.argv[2])
atoms.calc = mace.calculators.MACECalculator(model_paths=[sys.argv[1]] * 2, device="cpu", default_dtype="float64")
atoms.get_forces()
import mace.calculators.mace as module
patched = hasattr(module.MACECalculator.calculate, "__wrapped__")
pickle.dump((atoms.calc.results, atoms.calc.implemented_properties, patched), open(sys.argv[3], "wb"))
"""


def test_stock_models_give_the_stock_results_to_the_bit(model_files, frames, tmp_path):
    ase.io.write(tmp_path / "atoms.traj", frames[2])
    found = {}
    for name, change in (("ours", {}), ("stock", {"E2IP_DISABLE": "1"})):
        target = tmp_path / f"{name}.pickle"
        arguments = [model_files["baseline"], tmp_path / "atoms.traj", target]
        done = run_command([sys.executable, "-c", STOCK_SCRIPT, *arguments], env={**os.environ, **change})
        assert done.returncode == 0, done.stderr
        found[name] = pickle.loads(target.read_bytes())
    (with_plugin, properties, patched), (without, stock_properties, stock_patched) = found["ours"], found["stock"]
    assert patched and not stock_patched
    assert properties == stock_properties and STOCK <= set(with_plugin)
    assert list(with_plugin) == list(without)
    for key, value in without.items():
        np.testing.assert_array_equal(with_plugin[key], value)


def test_threads_that_share_a_calculator_take_turns(make_model, frames):
    """Stock MACE gives forces of other frames then."""
    calculator = MACECalculator(models=make_model(), device="cpu", default_dtype="float64")
    moved = [frames[i % 3].copy() for i in range(12)]
    for seed, atoms in enumerate(moved):
        atoms.rattle(0.02, seed=seed)
        atoms.calc = calculator
    expected = [(atoms.get_forces(), calculator.get_property("forces_cov", atoms)) for atoms in moved]
    model = calculator.models[0]

    def evaluate(atoms):
        return atoms.get_forces(), calculator.get_property("forces_cov", atoms)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evaluate, moved))
    for threaded, alone in zip(found, expected, strict=True):
        np.testing.assert_allclose(threaded[0], alone[0], atol=1e-12)
        np.testing.assert_allclose(threaded[1], alone[1], atol=1e-12)
    assert calculator.models == [model]
    for copied in (copy.deepcopy(calculator), pickle.loads(pickle.dumps(calculator))):
        atoms = moved[0].copy()
        atoms.calc = copied
        np.testing.assert_allclose(atoms.get_forces(), expected[0][0], atol=1e-12)


def test_an_error_in_a_calculation_leaves_the_calculator_as_it_was(make_model, frames):
    calculator = MACECalculator(models=make_model(), device="cpu", default_dtype="float64")
    model = calculator.models[0]
    forces = calculator.get_property("forces", frames[0])
    with mock.patch.object(calculator, "_atoms_to_batch", side_effect=RuntimeError("out of memory")):
        with pytest.raises(RuntimeError, match="out of memory"):
            calculator.get_property("forces", frames[1])
    assert calculator.models == [model]
    np.testing.assert_array_equal(calculator.get_property("forces", frames[0]), forces)


def test_functions_of_ase_that_know_its_own_results_work_as_with_stock_mace(make_model, frames):
    """They trip over MACE's ``node_energy``, and over nothing of ours."""
    with mock.patch.dict(ase.outputs.all_outputs):
        ase.outputs._defineprop("node_energy", dtype=float, shape=("natoms",))
        for settings in ({"readout": None}, {}, {"readout": "shallow"}):
            atoms = frames[0].copy()
            atoms.calc = MACECalculator(models=make_model(**settings), device="cpu", default_dtype="float64")
            found = atoms.get_properties(["energy", "forces"])
            np.testing.assert_array_equal(found["forces"], atoms.get_forces())
            assert set(atoms.calc.export_properties()) - {"natoms"} == STOCK & set(atoms.calc.results)
            assert ("forces_cov" in atoms.calc.results) == (settings.get("readout", "") is not None)
    atoms.calc.results = {name: value for name, value in atoms.calc.results.items() if name in ("energy", "forces")}
    assert set(atoms.calc.export_properties()) == {"natoms", "energy", "forces"}
