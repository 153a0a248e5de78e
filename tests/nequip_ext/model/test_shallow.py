"""``readout: shallow``, whose members' forces are derivatives; more about it in test_model.py and test_compile.py."""

import json

import ase.io
import numpy as np
import pytest
import torch
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import COEFFICIENTS_KEY, KCAL_PER_MOL
from nequip_ext import E2IPCalculator, E2IPLoss, E2IPModel
from nequip_ext.model.readout import find_readout

KEYS = families.get("shallow").output_keys()


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
    # The readout's unit of energy is 1e4 force units; what keeps covariances from being singular adds less than 1 %.
    members = 1e4 * KCAL_PER_MOL * torch.stack(forces, 1)
    sample = torch.einsum("nki,nkj->nij", members, members) / 3
    torch.testing.assert_close(found["forces_cov"], sample, rtol=0.0, atol=float(0.01 * sample.abs().max()) + 1e-6)


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
    assert torch.allclose(output["forces_cov"][0], 1.7334e-4 * KCAL_PER_MOL**2 * torch.eye(3), rtol=1e-4)
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


def test_training_to_comparison(tmp_path, train, train_files, run_tool, logged):
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
    run_tool("e2ip", "compare", folder / "test_dataset0.xyz", cwd=tmp_path)
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


def test_forces_of_the_host_are_refused(gnn_config):
    with pytest.raises(InputError, match=r"forces 'host' does not go with readout 'shallow'"):
        E2IPModel(model=gnn_config(), seed=1, readout="shallow", forces="host")
