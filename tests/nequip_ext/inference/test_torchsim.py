"""torch-sim's batches: the same numbers as `E2IPCalculator`, one structure at a time."""

import importlib
import sys

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from nequip_ext.fitting.passes import fit_frames

ts = pytest.importorskip("torch_sim")
pytest.importorskip("nequip.integrations.torchsim")

from nequip.integrations.torchsim import NequIPTorchSimCalc  # noqa: E402

from nequip_ext.inference.torchsim import TorchSimModel  # noqa: E402

CPU = torch.device("cpu")
#: Tolerances of sums in another order, by the precision of the model.
TOLERANCE = {"float64": dict(rtol=1e-10, atol=1e-10), "float32": dict(rtol=1e-5, atol=1e-5)}
OF_FRAMES = ("energy_uncertainty", "energy_error_vector", "stress_uncertainty", "stress_cov")


def state_of(frames):
    return ts.io.atoms_to_state(frames, CPU, torch.float64)


@pytest.fixture(scope="module")
def solids():
    """Periodic: a tilted cell smaller than the cutoff, a cubic one with an atom outside, a molecule in a box."""
    tilted = Atoms("CO", [[0, 0, 0], [1.1, 0.8, 0.9]], cell=[[2.6, 0, 0], [0.9, 2.5, 0], [-0.7, 0.6, 2.9]], pbc=True)
    built = [tilted, bulk("C", "diamond", cubic=True), molecule("CH3OH", cell=[9.0, 8.0, 7.0], pbc=True)]
    for seed, atoms in enumerate(built):
        atoms.rattle(0.08, seed=seed)
    built[1].positions[0] += 2 * built[1].cell[0]
    return built


@pytest.fixture(scope="module")
def molecules():
    """Molecules of different sizes, without a cell; one atom has no neighbours."""
    built = [molecule("CH3CH2OH"), Atoms("O"), molecule("H2O")]
    for seed, atoms in enumerate(built):
        atoms.rattle(0.1, seed=seed)
    return built


@pytest.fixture
def fitted(make_model, gnn_config, energy_checks):
    """Function that fits the error bars of a model with the options; energies and stresses among them."""

    def fit(dtype="float64", **options):
        model = make_model(gnn_config(model_dtype=dtype), evidence="leverage", **options)[1].eval()
        crystal = bulk("C", "diamond", cubic=True)
        crystal.rattle(0.03, seed=5)
        options = {"stress": True, "spread": 30.0}
        sets = [energy_checks.labelled_frames(crystal, count, seed, **options) for count, seed in ((9, 0), (6, 1))]
        fit_frames(model, *sets, 3, True, lambda text: None)
        return model

    return fit


def check_same(results, calculator, frames, names, tolerance):
    """Compare a batch with ASE's results, structure by structure."""
    first = 0
    for i, atoms in enumerate(frames):
        calculator.calculate(atoms)
        expected, rows = calculator.results, slice(first, first := first + len(atoms))
        np.testing.assert_allclose(results["energy"][i], expected["energy"], **tolerance)
        for name in ("forces", "e2ip_leverage", *names):
            np.testing.assert_allclose(results[name][rows], expected[name], **tolerance, err_msg=name)
        for name in OF_FRAMES:
            assert (name in results) == (name in expected), name
            if name in results:
                # Components of the vector and of the covariance are sums that may cancel.
                scaled = {**tolerance, "atol": tolerance["rtol"] * np.linalg.norm(expected[name])}
                np.testing.assert_allclose(results[name][i], expected[name], **scaled, err_msg=name)
        if atoms.pbc.all():
            voigt = results["stress"][i].numpy()[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
            np.testing.assert_allclose(voigt, expected["stress"], **tolerance)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_results_are_the_calculators(fitted, as_calculator, solids, molecules, write_calibration, dtype, calibrated):
    options = {"calibration": write_calibration(factors={"H": 2.0, "C": 3.0, "O": 0.5})} if calibrated else {}
    model = fitted(dtype)
    batched, calculator = TorchSimModel(model, **options), as_calculator(model, **options)
    names = [key.name for key in families.get("e2ip").output_keys()]
    # One state of torch-sim has structures that are all periodic, or none of them.
    for frames in (solids, molecules, solids[::-1]):
        check_same(batched(state_of(frames)), calculator, frames, names, TOLERANCE[dtype])
    assert (batched.uq_family, batched.uq_model) == (calculator.results["uq_family"], calculator.results["uq_model"])


def test_neighbours_of_the_whole_batch_at_once(make_model, solids, molecules):
    pytest.importorskip("nvalchemiops")
    model = make_model()[1].eval()
    for frames in (solids, molecules):
        expected = TorchSimModel(model)(state_of(frames))
        results = TorchSimModel(model, neighborlist_backend="alchemiops")(state_of(frames))
        for name in ("energy", "forces", "forces_cov"):
            torch.testing.assert_close(results[name], expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("readout", ["mve", "shallow"])
def test_other_families(make_model, as_calculator, molecules, readout):
    model = make_model(readout=readout)[1].eval()
    names = [key.name for key in families.get(readout).output_keys()]
    results = TorchSimModel(model)(state_of(molecules))
    check_same(results, as_calculator(model), molecules, names, TOLERANCE["float64"])


def test_the_same_atoms_in_other_structures(make_model):
    """The host's model looks at the atomic numbers alone."""
    small, large = bulk("C", "diamond"), bulk("C", "diamond", cubic=True)
    for seed, atoms in enumerate((small, large)):
        atoms.rattle(0.05, seed=seed)
    model = TorchSimModel(make_model()[1].eval())
    first, second = model(state_of([small, large])), model(state_of([large, small]))
    torch.testing.assert_close(second["energy"], first["energy"].flip(0), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(second["forces_cov"][8:], first["forces_cov"][:2], rtol=1e-10, atol=1e-14)


def test_energies_and_forces_are_those_of_the_stock_model(make_model, as_calculator, solids):
    stock, model = make_model()
    transforms = as_calculator(model).transforms
    expected = NequIPTorchSimCalc(stock.eval(), transforms=transforms)(state_of(solids))
    results = TorchSimModel(model)(state_of(solids))
    for name, values in expected.items():
        torch.testing.assert_close(results[name], values, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("readout", ["e2ip", "shallow"])
def test_results_on_request_are_those_of_always(make_model, molecules, request_checks, readout):
    model, state = make_model(readout=readout)[1].eval(), state_of(molecules)
    always, on_request = (TorchSimModel(model, uncertainties=when) for when in ("always", "on request"))
    for _ in range(3):
        expected = always(state_of(molecules))
    with request_checks.counted() as readouts:
        results = on_request(state)
        torch.testing.assert_close(results["forces"], expected["forces"], rtol=0.0, atol=0.0)
        assert {name for name, _ in results.items()} == {"energy", "forces", "stress"}
        assert results.pending and readouts.call_count == 0
        # An integrator may move atoms in place.
        state.positions.detach().mul_(2.0)
        assert set(results) == set(expected) and readouts.call_count == 1
    for name, values in expected.items():
        torch.testing.assert_close(results[name], values, rtol=0.0, atol=0.0, equal_nan=True)


def test_dynamics_and_properties_of_a_trajectory(unpack, train_frames, tmp_path, request_checks):
    """What docs/howto/torch-sim.md shows, with a checkpoint."""
    model = TorchSimModel(unpack("nequip", "best.ckpt"), uncertainties="on request")
    names = [tmp_path / f"{i}.h5" for i in range(2)]

    def uncertainty(state, model):
        return model(state)["forces_epistemic_std"]

    reporter = ts.TrajectoryReporter(names, state_frequency=5, prop_calculators={5: {"std": uncertainty}})
    with request_checks.counted() as readouts:
        final = ts.integrate(
            system=train_frames,
            model=model,
            integrator=getattr(ts, "Integrator", ts.integrators).nvt_langevin,
            n_steps=10,
            temperature=300.0,
            timestep=0.0005,
            trajectory_reporter=reporter,
        )
    assert readouts.call_count <= 6
    for i, name in enumerate(names):
        with ts.TorchSimTrajectory(name) as trajectory:
            std = trajectory.get_array("std")
        assert (std > 0.0).all()
        np.testing.assert_allclose(std[-1], model(final[i])["forces_epistemic_std"], rtol=1e-4)


@pytest.fixture
def train_frames():
    """A molecule of the training, and one bond alone."""
    return [molecule("CH3OH"), molecule("CO")]


def test_what_a_user_should_know(monkeypatch):
    monkeypatch.delitem(sys.modules, "nequip_ext.inference.torchsim")
    monkeypatch.setitem(sys.modules, "nequip.integrations.torchsim", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torch-sim and NequIP 0\.17 or newer: pip install"):
        importlib.import_module("nequip_ext.inference.torchsim")


def test_bad_input(make_model, molecules, write_calibration, tmp_path):
    stock, model = make_model()
    with pytest.raises(InputError, match="the model: has no readout of e2ip-plugins"):
        TorchSimModel(stock)
    with pytest.raises(InputError, match=r"calibration\.json: is for predictions of family"):
        TorchSimModel(model, calibration=write_calibration(uq_family="gaussian"))
    with pytest.raises(InputError, match="uncertainties='later'"):
        TorchSimModel(model, uncertainties="later")
    with pytest.raises(InputError, match=r"none\.ckpt: cannot be opened as a model of NequIP"):
        TorchSimModel(tmp_path / "none.ckpt")
    batched, atoms = TorchSimModel(model), molecules[0].copy()
    atoms.positions[1, 2] = np.nan
    with pytest.raises(InputError, match="the batch: the position of atom 1 is not finite"):
        batched(state_of([atoms]))
    with pytest.raises(InputError, match="the batch: has Si, which the model does not know; it knows H, C, O"):
        batched(state_of([bulk("Si", "diamond", 5.43)]))


@pytest.mark.nightly
def test_compiled_models(tmp_path, train, train_files, compile_for, train_frames):
    checkpoint = train("nequip_e2ip", tmp_path / "run", train_files, "max_epochs=1", "run=[train]") / "best.ckpt"
    expected = TorchSimModel(checkpoint)(state_of(train_frames))
    compiled = compile_for(checkpoint, "e2ip_batch")
    results = TorchSimModel(compiled)(state_of(train_frames))
    for name in ("energy", "forces", "forces_cov", "e2ip_leverage"):
        torch.testing.assert_close(results[name], expected[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="'on request': the readout is a part of the compiled file"):
        TorchSimModel(compiled, uncertainties="on request")
    with pytest.raises(InputError, match="takes one structure at a time: compile the model anew"):
        TorchSimModel(compile_for(checkpoint, "e2ip_ase"))
