"""`E2IPCalculator` in ASE's own calls, which know the stock properties alone."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import ase.io
import numpy as np
import pytest
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.mixing import SumCalculator
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.keys import MODEL_KEY
from nequip_ext.compat import NequIPCalculator


@pytest.fixture
def evaluated(make_model, gnn_config, as_calculator, frames):
    """A periodic frame with a calculator that has evaluated it."""
    atoms = frames[1].copy()
    atoms.calc = as_calculator(make_model(gnn_config())[1])
    atoms.get_potential_energy()
    return atoms


def test_a_single_point_calculator_takes_the_results(evaluated, tmp_path):
    results = evaluated.calc.results
    fixed = SinglePointCalculator(evaluated, **results)
    assert set(fixed.results) == set(results) and np.array_equal(fixed.results["forces_cov"], results["forces_cov"])
    # A file has what it has from NequIP's own calculator, and is read as before.
    frame = evaluated.copy()
    frame.calc, frame.arrays["forces_cov"] = fixed, results["forces_cov"].reshape(-1, 9)
    for name in ("out.xyz", "out.traj"):
        ase.io.write(tmp_path / name, frame)
        read = ase.io.read(tmp_path / name)
        assert "forces_cov" not in read.calc.results
        np.testing.assert_allclose(read.get_forces(), results["forces"], atol=1e-7)
    assert ase.io.read(tmp_path / "out.xyz").arrays["forces_cov"].shape == (len(frame), 9)


def test_ases_properties_are_those_of_nequips_calculator_and_the_uncertainties(evaluated):
    ours = evaluated.calc.export_properties()
    stock = NequIPCalculator(evaluated.calc.model, "cpu", transforms=evaluated.calc.transforms)
    stock.calculate(evaluated)
    for name, value in stock.export_properties().items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    asked = evaluated.get_properties(["energy", "forces", "forces_cov"])
    np.testing.assert_allclose(asked["forces_cov"], evaluated.calc.results["forces_cov"], rtol=1e-12)


def test_mixtures_of_ase_add_up_no_uncertainties(make_model, gnn_config, as_calculator, frames):
    models = [make_model(gnn_config(seed=seed))[1] for seed in (0, 1)]
    calculators = [as_calculator(model) for model in models]
    stock = [NequIPCalculator(calc.model, "cpu", transforms=calc.transforms) for calc in calculators]
    mixed, expected = frames[1].copy(), frames[1].copy()
    mixed.calc, expected.calc = SumCalculator(calculators), SumCalculator(stock)
    np.testing.assert_allclose(mixed.get_forces(), expected.get_forces(), atol=1e-12)
    assert set(mixed.calc.results) == set(expected.calc.results)
    assert set(mixed.calc.implemented_properties) == set(expected.calc.implemented_properties)
    with pytest.raises(PropertyNotImplementedError, match="e2ip_nu property not implemented"):
        mixed.calc.get_property("e2ip_nu", mixed)
    for same in (calculators[0], copy.deepcopy(calculators[0]), pickle.loads(pickle.dumps(calculators[0]))):
        assert same.get_property("e2ip_nu", mixed).shape == (len(mixed),)
        assert "e2ip_nu" not in [*same.implemented_properties]


def test_names_are_found_by_name(evaluated):
    results = evaluated.calc.results
    for same in (results, results.copy(), copy.deepcopy(results), pickle.loads(pickle.dumps(results))):
        assert same["uq_family"] == same.get("uq_family") == "niw" and MODEL_KEY in same and "uq_family" not in [*same]
        assert same.get("nothing", 1) == 1 and "nothing" not in same and set(same) == set(results)
    with pytest.raises(KeyError):
        results["nothing"]


def test_threads_that_share_a_calculator_take_turns(make_model, gnn_config, as_calculator, frames):
    """NequIP's own calculator gives forces of other frames then, or an error."""
    calculator = as_calculator(make_model(gnn_config())[1])
    moved = [frames[i % 3].copy() for i in range(12)]
    for seed, atoms in enumerate(moved):
        atoms.rattle(0.02, seed=seed)
        atoms.calc = calculator

    def evaluate(atoms):
        return atoms.get_forces(), calculator.get_property("forces_cov", atoms)

    expected = [evaluate(atoms) for atoms in moved]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evaluate, moved))
    for threaded, alone in zip(found, expected, strict=True):
        np.testing.assert_allclose(threaded[0], alone[0], atol=1e-12)
        np.testing.assert_allclose(threaded[1], alone[1], atol=1e-12)
    for copied in (copy.deepcopy(calculator), pickle.loads(pickle.dumps(calculator))):
        np.testing.assert_allclose(copied.get_property("forces", moved[0]), expected[0][0], atol=1e-12)
