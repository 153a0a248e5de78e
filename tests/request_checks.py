"""What holds in both hosts of a calculator that computes uncertainties on request."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np

from e2ip_plugins.md import Monitor, with_results
from e2ip_plugins.readout.readout import Readout

STD = "forces_epistemic_std"


def same(first, second):
    """Assert that two results have the same names in the same order, and equal values to the last bit."""
    assert list(first) == list(second)
    for name in first:
        assert type(first[name]) is type(second[name]), name
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def counted():
    """Return a context in which calls of the readouts are counted: its value's ``call_count``."""
    return mock.patch.object(Readout, "forward", autospec=True, side_effect=Readout.forward)


def check_same(make_calculator, frames):
    """Check the results of ``make_calculator(uncertainties=…)`` for all frames."""
    always, on_request = make_calculator(uncertainties="always"), make_calculator(uncertainties="on request")
    # TorchScript inside e3nn optimises after first calls, which differ from later ones in the last bit.
    for atoms in [*frames, *frames]:
        always.calculate(atoms), on_request.calculate(atoms)
        on_request.results.complete()
    for atoms in frames:
        for calculator in (always, on_request):
            calculator.calculate(atoms)
        lazy = on_request.results
        assert lazy.pending
        for name in ("energy", "free_energy", "forces"):
            np.testing.assert_array_equal(lazy[name], always.results[name])
        assert lazy.pending
        kept = lazy.copy()
        same(kept, always.results)
        assert not lazy.pending and type(kept) is type(always.results)
        same(lazy, always.results)
        assert set(lazy.names) == set(getattr(always.results, "names", ()))


def check_mapping(make_calculator, atoms):
    """Check what asks for uncertainties, what does not, and that the readout runs once for a geometry."""
    expected = make_calculator(uncertainties="always")
    expected.calculate(atoms)
    expected, kind = expected.results, type(expected.results)
    atoms, calculator = atoms.copy(), make_calculator(uncertainties="on request")
    atoms.calc = calculator
    with counted() as readout:
        atoms.get_potential_energy(), atoms.get_forces(), atoms.calc.results["energy"]
        assert "energy" in calculator.results and "nothing" not in calculator.results
        assert calculator.results.get("nothing", 1) == 1 and "dipole" not in calculator.results
        assert readout.call_count == 0 and calculator.results.pending
        np.testing.assert_array_equal(calculator.get_property(STD, atoms), expected[STD])
        calculator.get_property("forces_cov", atoms), atoms.get_forces(), with_results(atoms)
        assert readout.call_count == 1
    questions = {
        "in": lambda results: STD in results,
        "name": lambda results: results["uq_family"] == expected["uq_family"],
        "get": lambda results: results.get("uq_family") == expected["uq_family"],
        "len": lambda results: len(results) == len(expected),
        "dict": lambda results: same(dict(results), dict(expected)) is None,
        "stars": lambda results: same({**results}, {**expected}) is None,
        "list": lambda results: list(results) == list(expected),
        "pickle": lambda results: same(pickle.loads(pickle.dumps(results)), expected) is None,
        "deepcopy": lambda results: type(copy.deepcopy(results)) is kind,
        "copy": lambda results: type(copy.copy(results)) is kind,
        "update": lambda results: results.update({STD: 1.0}) is None and results[STD] == 1.0,
        "pop": lambda results: results.pop(STD) is not None and STD not in results,
        "with_results": lambda _: np.array_equal(with_results(atoms).arrays[STD], expected[STD]),
    }
    for name, question in questions.items():
        calculator.reset()
        atoms.get_forces()
        assert calculator.results.pending, name
        assert question(calculator.results), name
        assert not calculator.results.pending, name


def check_not_stale(make_calculator, atoms, name="forces_cov"):
    """Check that results are of their geometry: asked for late, by a copied calculator, and by threads."""
    always, calculator = make_calculator(uncertainties="always"), make_calculator(uncertainties="on request")
    moved = [atoms.copy() for _ in range(6)]
    expected, waiting = [], []
    for seed, frame in enumerate(moved):
        frame.rattle(0.02, seed=seed)
        frame.calc = calculator
        frame.get_forces()
        waiting.append(calculator.results)
        expected.append(always.get_property(name, frame))
    # Dynamics moves atoms and cell in place.
    started = [(frame.positions.copy(), frame.cell.array.copy()) for frame in moved]
    for frame in moved:
        frame.positions += np.arange(3 * len(frame)).reshape(-1, 3)
        frame.cell.array[:] *= 2.0
    for results, covariance in zip(waiting, expected, strict=True):
        np.testing.assert_array_equal(results[name], covariance)
    for frame, (positions, cell) in zip(moved, started, strict=True):
        frame.positions[:], frame.cell.array[:] = positions, cell
    calculator.reset()
    moved[0].get_forces()
    for copied in (copy.deepcopy(calculator), pickle.loads(pickle.dumps(calculator)), copy.copy(calculator)):
        np.testing.assert_array_equal(copied.get_property(name, moved[0]), expected[0])
        np.testing.assert_array_equal(copied.get_property(name, moved[1]), expected[1])
        copied.get_property("forces", moved[2])
        assert copied.results.pending

    def evaluate(frame):
        return frame.get_forces(), calculator.get_property(name, frame)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evaluate, 2 * moved))
    for (_, covariance), right in zip(found, 2 * expected, strict=True):
        np.testing.assert_allclose(covariance, right, rtol=1e-10, atol=1e-14)


def check_monitored(make_calculator, make_dynamics, atoms, steps=20, interval=10):
    """Check that a run with a monitor evaluates the readout at its checks alone, and ends where it ends with always."""
    ends = []
    for uncertainties in ("always", "on request"):
        moving = atoms.copy()
        moving.calc = make_calculator(uncertainties=uncertainties)
        with counted() as readout:
            monitor = Monitor(moving, {STD: 1e3})
            dynamics = make_dynamics(moving)
            dynamics.attach(monitor, interval=interval)
            dynamics.run(steps)
        ends.append((moving.positions, monitor.values[STD], readout.call_count))
    (positions, values, _), (lazy_positions, lazy_values, count) = ends
    np.testing.assert_array_equal(lazy_positions, positions)
    np.testing.assert_array_equal(lazy_values, values)
    assert monitor.checks == count == steps // interval + 1
