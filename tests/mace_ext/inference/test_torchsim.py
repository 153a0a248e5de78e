"""torch-sim's batches: the same numbers as `MACECalculator`, one structure at a time."""

import importlib
import sys
from importlib.metadata import version

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk
from mace.calculators import MACECalculator

from e2ip_plugins import families
from e2ip_plugins.errors import InputError, UncertaintyWarning

ts = pytest.importorskip("torch_sim")
from torch_sim.models.mace import MaceModel  # noqa: E402

from mace_ext.inference.torchsim import TorchSimModel  # noqa: E402

CPU = torch.device("cpu")


def state_of(frames):
    return ts.io.atoms_to_state(frames, CPU, torch.float64)


def opened(model, **options):
    return TorchSimModel(model, device=CPU, **options)


@pytest.fixture
def calibration(write_calibration):
    return write_calibration(1e-4, factors={"H": 2.0, "C": 3.0, "O": 0.5})


@pytest.mark.parametrize(
    ("readout", "calibrated"), [("e2ip", False), ("e2ip", True), ("mve", False), ("shallow", False)]
)
def test_results_are_the_calculators(make_model, frames, calibration, readout, calibrated):
    model, options = make_model(readout=readout), {"calibration": calibration} if calibrated else {}
    batched, calculator = opened(make_model(readout=readout), **options), None
    # One call of torch-sim takes structures that are all periodic, or none of them.
    for together in (frames[:2], frames[2:]):
        results, first = batched(state_of(together)), 0
        for i, atoms in enumerate(together):
            calculator = MACECalculator(models=model, device="cpu", default_dtype="float64", **options)
            calculator.calculate(atoms)
            expected, rows = calculator.results, slice(first, first := first + len(atoms))
            assert results["energy"][i].item() == pytest.approx(expected["energy"], abs=1e-9)
            for key in ("forces", *(key.name for key in families.get(readout).output_keys())):
                np.testing.assert_allclose(results[key][rows], expected[key], rtol=1e-9, atol=1e-12, err_msg=key)
    assert (batched.uq_family, batched.uq_model) == (calculator.results["uq_family"], calculator.results["uq_model"])


@pytest.mark.parametrize("readout", ["e2ip", "shallow"])
def test_results_on_request_are_those_of_always(make_model, frames, calibration, request_checks, readout):
    options = {"calibration": calibration} if readout == "e2ip" else {}
    model, state = make_model(readout=readout), state_of(frames[:2])
    always, on_request = (opened(model, uncertainties=when, **options) for when in ("always", "on request"))
    for _ in range(3):
        expected = always(state_of(frames[:2]))
    with request_checks.counted() as readouts:
        results = on_request(state)
        torch.testing.assert_close(results["forces"], expected["forces"], rtol=0.0, atol=0.0)
        assert results.pending and readouts.call_count == 0
        # An integrator may move atoms in place.
        state.positions.detach().mul_(2.0)
        assert set(results) == set(expected) and readouts.call_count == 1
    for name, values in expected.items():
        torch.testing.assert_close(results[name], values, rtol=0.0, atol=0.0)
    with pytest.raises(InputError, match="uncertainties='later'"):
        opened(model, uncertainties="later")


def test_periodic_structures_and_the_stock_results(make_model):
    crystals = [bulk("C", "diamond", 3.57), bulk("C", "diamond", 3.6, cubic=True)]
    for atoms in crystals:
        atoms.rattle(0.05, seed=1)
    found = opened(make_model(), compute_stress=True)(state_of(crystals))
    stock = MaceModel(make_model(readout=None), device=CPU, compute_stress=True)(state_of(crystals))
    for name, values in stock.items():
        torch.testing.assert_close(found[name], values, rtol=0.0, atol=0.0)
    assert found["forces_cov"].shape == (10, 3, 3)


def test_the_same_atoms_in_other_structures(make_model):
    """torch-sim 0.3 looks at the atomic numbers alone."""
    small, large = bulk("C", "diamond", 3.57), bulk("C", "diamond", 3.57, cubic=True)
    for seed, atoms in enumerate((small, large)):
        atoms.rattle(0.05, seed=seed)
    model = opened(make_model())
    first, second = model(state_of([small, large])), model(state_of([large, small]))
    torch.testing.assert_close(second["energy"], first["energy"].flip(0), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(second["forces_cov"][8:], first["forces_cov"][:2], rtol=1e-10, atol=1e-14)


def test_dynamics_and_properties_of_a_trajectory(make_model, frames, tmp_path):
    """What docs/howto/torch-sim.md shows."""
    model = opened(make_model(), compute_stress=False, uncertainties="on request")
    names = [tmp_path / f"{i}.h5" for i in range(2)]

    def uncertainty(state, model):
        return model(state)["forces_epistemic_std"]

    reporter = ts.TrajectoryReporter(names, state_frequency=5, prop_calculators={5: {"std": uncertainty}})
    final = ts.integrate(
        system=frames[:2],
        model=model,
        integrator=getattr(ts, "Integrator", ts.integrators).nvt_langevin,
        n_steps=10,
        temperature=300.0,
        timestep=0.0005,
        trajectory_reporter=reporter,
    )
    for i, name in enumerate(names):
        with ts.TorchSimTrajectory(name) as trajectory:
            std = trajectory.get_array("std")
        # Releases after 0.3 report the first state, too.
        reports = 2 if version("torch-sim-atomistic").startswith("0.3.") else 3
        assert std.shape == (reports, len(frames[i])) and (std > 0.0).all()
        own = model(final[i])["forces_epistemic_std"]
        np.testing.assert_allclose(std[-1], own, rtol=1e-5)


def test_what_a_user_should_know(make_model, monkeypatch):
    with pytest.warns(UncertaintyWarning, match="leverage was never fitted"):
        opened(make_model(options=(("evidence", "leverage"),)))
    monkeypatch.delitem(sys.modules, "mace_ext.inference.torchsim")
    monkeypatch.setitem(sys.modules, "torch_sim.models.mace", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torch-sim: pip install .*torchsim"):
        importlib.import_module("mace_ext.inference.torchsim")


def test_bad_input(make_model, frames, calibration, tmp_path):
    with pytest.raises(InputError, match="the model: has no readout of e2ip-plugins"):
        opened(make_model(readout=None))
    with pytest.raises(InputError, match="has 2 heads"):
        opened(make_model(heads=("a", "b")))
    with pytest.raises(InputError, match="compile_mode='default': readouts need an eager model"):
        opened(make_model(), compile_mode="default")
    with pytest.raises(InputError, match=r"calibration\.json: is for predictions of family 'niw'"):
        opened(make_model(readout="mve"), calibration=calibration)
    with pytest.raises(InputError, match=r"none\.model: is not a model file"):
        opened(tmp_path / "none.model")
    model, atoms = opened(make_model()), frames[0].copy()
    atoms.positions[1, 2] = np.nan
    with pytest.raises(InputError, match=r"the batch: the position of atom 1 is not finite"):
        model(state_of([atoms]))
    with pytest.raises(InputError, match="the batch: has Si, which the model does not know; it knows H, C, O"):
        model(state_of([bulk("Si", "diamond", 5.43)]))


def test_the_benchmark_times_all_ways(load_script, make_model, frames, tmp_path, monkeypatch, capsys):
    torch.save(make_model(dtype=torch.float32), tmp_path / "my.model")
    ase.io.write(tmp_path / "frames.xyz", frames[:2], format="extxyz")
    files = [str(tmp_path / "my.model"), str(tmp_path / "frames.xyz")]
    monkeypatch.setattr("sys.argv", ["torchsim.py", *files, "--rounds", "1"])
    load_script("benchmarks/torchsim.py").main()
    ways = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "ms per frame" in line]
    assert ways == ["ASE, one by one", "torch-sim", "e2ip evaluate"]
