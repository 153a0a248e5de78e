"""``readout: shallow``: members' forces are derivatives, and NequIP's own are what they were."""

import json
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.shallow import ENERGY_UNIT, FLOOR, SHRINKAGE
from e2ip_plugins.keys import COEFFICIENTS_KEY, KCAL_PER_MOL
from nequip_ext import E2IPCalculator, E2IPLoss, E2IPModel
from nequip_ext.model.readout import find_readout

KEYS = families.get("shallow").output_keys()
ARCHITECTURES = [
    pytest.param({"l_max": 0}, id="scalar-only"),
    pytest.param({"l_max": 2}, id="l2"),
    pytest.param({"l_max": 1, "num_layers": 1}, id="one-layer"),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_energy_and_forces_are_the_baselines(make_model, gnn_config, frames, to_data, architecture, dtype, training):
    baseline, model = make_model(gnn_config(model_dtype=dtype, **architecture), readout="shallow")
    baseline.train(training), model.train(training)
    for atoms in frames:
        expected, output = baseline(to_data(atoms)), model(to_data(atoms))
        for key in ("total_energy", "atomic_energy", "forces", "stress", "virial"):
            assert torch.equal(torch.nan_to_num(expected[key]), torch.nan_to_num(output[key])), key
        assert output["forces_cov"].requires_grad == training
        for key in KEYS:
            assert output[key.name].shape == (len(atoms), *(key.shape or (1,))), key.name
            assert output[key.name].dtype == torch.float64


def test_covariance_is_that_of_the_members_energies(make_model, gnn_config, frames, to_data):
    """K - 1 coefficients, differentiated one after the other, and by differences."""
    _, model = make_model(gnn_config(), readout="shallow", members=4)
    seen = {}
    find_readout(model).trunks[0].register_forward_hook(lambda _, __, out: seen.update(energies=out))
    data = to_data(frames[1])

    def energies(positions):
        model.model.func({**data, "pos": positions})
        return seen["energies"]

    found = model(dict(data))
    positions = data["pos"].clone().requires_grad_()
    shares = energies(positions)
    forces = [-torch.autograd.grad(shares[:, k].sum(), positions, retain_graph=True)[0] for k in range(3)]
    torch.testing.assert_close(found[COEFFICIENTS_KEY], torch.cat(forces, 1), rtol=1e-10, atol=1e-15)
    step, scale = 1e-4, found[COEFFICIENTS_KEY].abs().max()
    for atom, axis in ((0, 0), (4, 2)):
        moved = [data["pos"].clone().requires_grad_() for _ in range(2)]
        with torch.no_grad():
            moved[0][atom, axis] += step
            moved[1][atom, axis] -= step
        up, down = (energies(x).sum(0).detach() for x in moved)
        assert (found[COEFFICIENTS_KEY][atom, axis::3] - (down - up) / (2 * step)).abs().max() < 1e-6 * scale
    members = ENERGY_UNIT * KCAL_PER_MOL * torch.stack(forces, 1)
    sample = torch.einsum("nki,nkj->nij", members, members) / 3
    mean = sample.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(3)
    expected = (1 - SHRINKAGE) * sample + SHRINKAGE * mean + FLOOR * KCAL_PER_MOL**2 * torch.eye(3)
    torch.testing.assert_close(found["forces_cov"], expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rotations_and_reflections(make_model, gnn_config, frames, to_data, architecture):
    _, model = make_model(gnn_config(**architecture), readout="shallow")
    for atoms in frames[:2]:
        data, number = to_data(atoms), len(atoms)
        reference = model(dict(data))["forces_cov"]
        values = torch.linalg.eigvalsh(reference)
        assert (values[:, 2] / values[:, 0]).max() > 3.0
        moves = torch.linalg.qr(torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(0)))[0]
        moves[::2] *= torch.linalg.det(moves[::2])[:, None, None]  # proper rotations
        moves[1::2] *= -torch.linalg.det(moves[1::2])[:, None, None]  # with a reflection
        copies = [{**data, "pos": data["pos"] @ move.T, "cell": data["cell"] @ move.T} for move in moves]
        got = model(AtomicDataDict.batched_from_list(copies))["forces_cov"].reshape(20, number, 3, 3)
        expected = torch.einsum("rij,njk,rlk->rnil", moves, reference, moves)
        assert (got - expected).abs().max() / expected.abs().max() < 1e-10


def test_every_weight_learns(make_model, gnn_config, frames, to_data):
    """DDP does not take weights without gradients."""
    _, model = make_model(gnn_config(), readout="shallow")
    data = AtomicDataDict.batched_from_list([to_data(atoms) for atoms in frames])
    output = model.train()(dict(data))
    target = {**data, "forces": torch.randn(data["pos"].shape), "total_energy": torch.randn(3, 1)}
    E2IPLoss(readout="shallow")(output, target)["weighted_sum"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or "e2ip" not in name, name


def test_isolated_atoms_have_the_least_covariance(make_model, gnn_config, to_data):
    import ase

    _, model = make_model(gnn_config(), readout="shallow")
    far = ase.Atoms("OCO", [[0, 0, 0], [20, 0, 0], [20, 0, 1.2]])
    output = model(to_data(far))
    assert torch.allclose(output["forces_cov"][0], FLOOR * KCAL_PER_MOL**2 * torch.eye(3), rtol=1e-6)
    assert all(output[key.name].isfinite().all() for key in KEYS)


def test_without_positions_there_are_energies_and_forces_alone(make_model, gnn_config, frames, to_data):
    """What LAMMPS' ML-IAP gives the model are edges."""
    from nequip.nn.utils import with_edge_vectors_

    _, model = make_model(gnn_config(l_max=1), readout="shallow")
    model.eval()
    data = to_data(frames[0])
    edges = with_edge_vectors_(dict(data))
    output = model({key: edges[key].detach() for key in ("edge_vectors", "edge_index", "atom_types")})
    assert torch.equal(output["total_energy"], model(dict(data))["total_energy"]) and "edge_forces" in output
    assert not {key.name for key in KEYS} & set(output)


def test_traced_model_trains_like_the_eager_one(gnn_config, frames, to_data, monkeypatch):
    """``compile_mode: compile`` traces once, here in eval mode; the trace must fit other sizes and training."""
    monkeypatch.setattr(torch, "compile", lambda model, **k: model)
    eager = E2IPModel(model=gnn_config(l_max=1), seed=3, readout="shallow")
    traced = E2IPModel(model=gnn_config(l_max=1, compile_mode="compile"), seed=3, readout="shallow")
    molecule, periodic, water = (to_data(atoms) for atoms in frames)
    traced.eval()
    traced(AtomicDataDict.batched_from_list([molecule, water]))
    eager.train(), traced.train()
    for members in ([molecule, water], [water, periodic, molecule]):
        data = AtomicDataDict.batched_from_list(members)
        target = {**data, "forces": torch.randn(data["pos"].shape), "total_energy": torch.randn(len(members), 1)}
        gradients = []
        for model in (eager, traced):
            model.zero_grad()
            output = model(dict(data))
            unused = sum(0.0 * value.sum() for value in output.values() if value.requires_grad)
            (E2IPLoss(readout="shallow")(output, target)["weighted_sum"] + unused).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        for key in KEYS:
            assert torch.allclose(eager(dict(data))[key.name], output[key.name], rtol=1e-9, atol=1e-13), key.name
        expected, got = gradients
        assert expected.keys() == got.keys()
        for name, gradient in expected.items():
            assert torch.allclose(gradient, got[name], rtol=1e-7, atol=1e-11), name


def test_training_to_comparison(tmp_path, train, train_files, environment, logged):
    columns = "trainer.callbacks.3.extra_fields=[ensemble_log_cov,ensemble_epistemic_share,forces_cov]"
    folder = train(
        "nequip_e2ip",
        tmp_path / "run",
        train_files,
        "readout=shallow",
        "preset=null",
        "+training_module.model.members=4",
        # Twelve frames are three steps an epoch, of which an average over a hundred shows nothing.
        *("max_epochs=8", "learning_rate=0.02", "training_module.ema_decay=0.5"),
        columns,
    )
    nll = [figures["val0_epoch/shallow_nll"] for figures in logged(folder).values()]
    assert nll[-1] < nll[0], nll
    frames = ase.io.read(folder / "test_dataset0.xyz", ":")
    for frame in frames:
        assert frame.info["uq_family"] == "ensemble" and (frame.arrays["ensemble_epistemic_share"] == 1).all()
    command = [Path(sys.executable).with_name("e2ip"), "compare", folder / "test_dataset0.xyz"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (scores,) = json.loads((tmp_path / "e2ip_compare" / "compare.json").read_text())["models"]
    assert scores["uq_family"] == "ensemble" and np.isfinite(scores["overall"]["nll"])

    calculator = E2IPCalculator.from_saved_model(folder / "best.ckpt")
    atoms = frames[0].copy()
    calculator.calculate(atoms)
    cov = frames[0].arrays["forces_cov"].reshape(-1, 3, 3)
    assert np.allclose(calculator.results["forces_cov"], cov, rtol=1e-4, atol=1e-7)
    assert calculator.results["e2ip_leverage"].min() >= 0
    value, gradient = calculator.uncertainty_gradient(atoms)
    assert np.allclose(value, calculator.results["forces_epistemic_std"], rtol=1e-5)
    step, sums = 1e-3, []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[2, 1] += sign * step
        calculator.calculate(moved)
        sums.append(calculator.results["forces_epistemic_std"].sum())
    assert gradient[2, 1] == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-2, abs=1e-4)


@pytest.mark.nightly
def test_ahead_of_time_compiled_model(tmp_path, train, train_files, fast_compiler, frames):
    """``nequip-compile --target shallow_ase``."""
    columns = "trainer.callbacks.3.extra_fields=[ensemble_log_cov]"
    options = ("readout=shallow", "preset=null", "+training_module.model.members=4", columns, "max_epochs=1")
    folder = train("nequip_e2ip", tmp_path / "run", train_files, *options, env=fast_compiler)
    compiled = tmp_path / "model.nequip.pt2"
    command = [Path(sys.executable).with_name("nequip-compile"), folder / "best.ckpt", compiled, "--mode"]
    command += ["aotinductor", "--device", "cpu", "--target", "shallow_ase"]
    done = subprocess.run(command, env=fast_compiler, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = E2IPCalculator.from_saved_model(folder / "best.ckpt")
    calculator = E2IPCalculator.from_compiled_model(compiled, readout="shallow", chemical_species_to_atom_type_map=True)
    for atoms in frames:
        reference.calculate(atoms)
        calculator.calculate(atoms)
        for name in ("energy", "forces", "e2ip_leverage", *(key.name for key in KEYS)):
            assert np.allclose(calculator.results[name], reference.results[name], rtol=1e-4, atol=1e-5), name


def test_forces_of_the_host_are_refused(gnn_config):
    with pytest.raises(InputError, match=r"forces 'host' does not go with readout 'shallow'"):
        E2IPModel(model=gnn_config(), seed=1, readout="shallow", forces="host")
