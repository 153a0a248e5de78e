"""``--readout shallow``, whose members' forces are derivatives; more about it in test_model.py."""

import numpy as np
import pytest
import torch
from forked_commands import run_command

from e2ip_plugins import families
from mace_ext.model.model import for_loss

KEYS = families.get("shallow").output_keys()


def test_covariance_is_that_of_the_members_energies(make_model, make_batch, frames):
    """K - 1 coefficients, differentiated one after the other, and by differences."""
    model = make_model(readout="shallow", options=(("members", 4),))
    seen = {}
    model.e2ip_readout.trunks[0].register_forward_hook(lambda _, __, out: seen.update(energies=out))

    def energies(positions):
        batch = make_batch(frames[:1])
        batch["positions"] = positions
        model.host_forward(batch, compute_force=False)
        model.uncertainty_outputs(batch)
        return seen["energies"]

    with for_loss(model):
        found = model(make_batch(frames[:1]))
    positions = torch.from_numpy(frames[0].positions.copy()).requires_grad_()
    shares = energies(positions)
    forces = [-torch.autograd.grad(shares[:, k].sum(), positions, retain_graph=True)[0] for k in range(3)]
    torch.testing.assert_close(found["e2ip_coefficients"], torch.cat(forces, 1), rtol=1e-10, atol=1e-15)
    step = 1e-4
    for atom, axis in ((0, 0), (4, 2)):
        moved = [positions.detach().clone() for _ in range(2)]
        moved[0][atom, axis] += step
        moved[1][atom, axis] -= step
        up, down = (energies(x).sum(0) for x in moved)
        difference = ((down - up) / (2 * step)).detach()
        scale = found["e2ip_coefficients"].abs().max()
        assert (found["e2ip_coefficients"][atom, axis::3] - difference).abs().max() < 1e-6 * scale
    # The readout's unit of energy is 1e4 force units; what keeps covariances from being singular adds less than 1 %.
    members = 1e4 * 0.05 * torch.stack(forces, 1)
    sample = torch.einsum("nki,nkj->nij", members, members) / 3
    torch.testing.assert_close(found["forces_cov"], sample, rtol=0.0, atol=float(0.01 * sample.abs().max()) + 1e-6)


def test_every_weight_of_the_readout_learns(make_model, make_batch, frames):
    """DDP does not take weights without gradients; other MACE heads' are zero."""
    model = make_model(readout="shallow", heads=("one", "two"))
    batch = make_batch(frames, heads=["one", "two"], head="two")
    model(batch, training=True)["forces_cov"].sum().backward()
    for trunk, learns in zip(model.e2ip_readout.trunks, (False, True), strict=True):
        for name, parameter in trunk.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.any()) == learns, name
    assert model.node_embedding.linear.weight.grad.abs().max() > 0


def test_isolated_atoms_have_the_least_covariance(make_model, make_batch):
    from ase import Atoms

    batch = make_batch([Atoms("O"), Atoms("CO", [[0, 0, 0], [0, 0, 1.2]])])
    output = make_model(readout="shallow")(batch, training=True)
    assert torch.allclose(output["forces_cov"][0], 1.7334e-4 * 0.05**2 * torch.eye(3), rtol=1e-4)
    assert output["e2ip_plateau"].tolist() == [1, 0, 0]
    assert all(output[key.name].isfinite().all() for key in KEYS)


def test_calculator_units_committees_and_gradients(make_model, make_batch, frames, check_gradient, tmp_path):
    from mace.calculators import MACECalculator

    paths = []
    for seed in (0, 1):
        paths.append(str(tmp_path / f"{seed}.model"))
        torch.save(make_model(readout="shallow", seed=seed), paths[-1])
    calculator = MACECalculator(paths[0], default_dtype="float64")
    calculator.calculate(frames[0])
    expected = torch.load(paths[0], weights_only=False)(make_batch(frames[:1]))
    assert calculator.results["uq_family"] == "ensemble"
    for key in KEYS:
        np.testing.assert_allclose(calculator.results[key.name], expected[key.name].detach(), rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(calculator.results["forces"], expected["forces"].detach())
    other = MACECalculator(paths[0], default_dtype="float64", energy_units_to_eV=2.0)
    other.calculate(frames[0])
    np.testing.assert_allclose(other.results["forces_cov"], 4 * calculator.results["forces_cov"], rtol=1e-7)
    committee = MACECalculator(paths, default_dtype="float64")
    committee.calculate(frames[0])
    spread = committee.results["forces_comm"] - committee.results["forces_comm"].mean(0)
    both = np.mean([_covariance(path, frames[0]) for path in paths], axis=0)
    both += np.einsum("mni,mnj->nij", spread, spread) / 2
    np.testing.assert_allclose(committee.results["forces_cov"], both, rtol=1e-6, atol=1e-10)

    check_gradient(calculator, frames[:1])


def _covariance(path, atoms):
    from mace.calculators import MACECalculator

    calculator = MACECalculator(path, default_dtype="float64")
    calculator.calculate(atoms)
    return calculator.results["forces_cov"]


def test_training_to_predictions(train, predict, data_files, tmp_path):
    run = train("--readout=shallow", "--e2ip_members=4", "--ema", max_num_epochs=3)
    nll = [line["shallow_nll"] for line in run.validation]
    assert nll[-1] < nll[0]
    model = run.folder / f"{run.name}.model"
    assert (run.folder / f"{run.name}_compiled.model").exists()
    assert bool(torch.load(model, weights_only=False).e2ip_readout.leverage.fitted)
    for atoms in predict(model, data_files["valid"], tmp_path / "predicted.xyz"):
        assert atoms.info["MACE_uq_family"] == "ensemble" and (atoms.arrays["MACE_ensemble_epistemic_share"] == 1).all()
        assert np.isfinite(atoms.arrays["MACE_ensemble_log_cov"]).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--e2ip_members=1",), "--e2ip_members must be a whole number of at least 2, got 1"),
        (("--e2ip_members=few",), "members must be a int, got 'few'"),
        (("--e2ip_forces=host",), "forces 'host' does not go with readout 'shallow'"),
    ],
)
def test_what_cannot_be_ends_before_training(training_command, flags, message, tmp_path):
    done = run_command(training_command("--readout=shallow", *flags), cwd=tmp_path)
    assert done.returncode == 2 and message.replace("--e2ip_", "") in done.stderr.replace("--e2ip_", "")
