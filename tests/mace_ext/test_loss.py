"""The training loss: every term of the stock loss but the forces', whose weight keeps its meaning."""

import numpy as np
import pytest
import torch

from e2ip_plugins.readout.loss import force_loss, force_loss_settings

LOSSES = {
    "WeightedEnergyForcesLoss": ("stress_weight",),
    "WeightedEnergyForcesStressLoss": (),
    "WeightedEnergyForcesVirialsLoss": ("stress_weight",),
    "WeightedHuberEnergyForcesStressLoss": (),
    "UniversalLoss": (),
    "WeightedEnergyForcesL1L2Loss": ("stress_weight",),
}


@pytest.fixture
def labelled(make_model, frames, request):
    """A batch with labels and a model's training output for it; the model has the test's preset."""
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric

    rng = np.random.default_rng(0)
    graphs = []
    for i, atoms in enumerate(frames):
        atoms = atoms.copy()
        atoms.info.update(REF_energy=float(i), REF_stress=rng.normal(size=6), REF_virials=rng.normal(size=(3, 3)))
        atoms.info.update(config_weight=1.0 + i, config_forces_weight=2.0 - 0.5 * i)
        atoms.arrays["REF_forces"] = rng.normal(size=(len(atoms), 3))
        keys = data.KeySpecification.from_defaults()
        config = data.config_from_atoms(atoms, key_specification=keys)
        graphs.append(data.AtomicData.from_config(config, z_table=AtomicNumberTable([1, 6, 8]), cutoff=4.0))
    batch = next(iter(torch_geometric.dataloader.DataLoader(graphs, batch_size=3, shuffle=False)))
    preset = request.getfixturevalue("preset") if "preset" in request.fixturenames else "default"
    model = make_model(readout=(preset, "coupled" if preset == "default" else "independent", 0.05))
    output = model(batch.to_dict(), training=True, compute_stress=True, compute_virials=True)
    return batch, output


def per_atom(batch, output, settings):
    names = ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa", "e2ip_force_unit")
    loss, _ = force_loss(batch.forces, output["forces"], *(output[name] for name in names), settings)
    return loss


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_other_terms_are_stock_and_forces_are_weighted_per_atom(labelled, name, preset):
    from mace import modules

    from mace_ext.loss import EvidentialLoss

    batch, output = labelled
    stock = getattr(modules, name)(energy_weight=3.0, forces_weight=7.0)
    settings = force_loss_settings(preset)
    # The stock loss of a model with perfect forces has the other terms and nothing else.
    others = stock(ref=batch, pred={**output, "forces": batch.forces})
    weights = torch.cat([torch.full((n,), (1.0 + i) * (2.0 - 0.5 * i)) for i, n in enumerate(batch.ptr.diff())])
    expected = others + 7.0 * (weights * per_atom(batch, output, settings)).mean()
    found = EvidentialLoss(stock, settings)(ref=batch, pred=output)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_masked_atoms_count_like_atoms_of_weight_zero(labelled):
    from mace import modules

    from mace_ext.loss import EvidentialLoss

    batch, output = labelled
    loss = EvidentialLoss(modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=1.0), force_loss_settings())
    whole = per_atom(batch, output, force_loss_settings())
    batch.forces[4, 1] = float("nan")
    kept = torch.ones(len(batch.forces))
    kept[4] = 0.0
    weights = (batch.weight * batch.forces_weight)[batch.batch]
    found = loss(ref=batch, pred=output)
    assert found.item() == pytest.approx((kept * weights * whole).mean().item(), rel=1e-12)
    found.backward()
    # The reference itself is not touched.
    assert torch.isnan(batch.forces[4, 1])


def test_gradient_in_the_forces_is_that_of_the_mean_square_error_at_errors_of_one_unit(labelled):
    """What lets a user keep their forces_weight: by default both losses pull alike."""
    from mace import modules

    from mace_ext.loss import EvidentialLoss

    batch, output = labelled
    unit = 0.05
    n = len(batch.forces)
    forces = (batch.forces + unit * torch.nn.functional.normalize(torch.randn(n, 3), dim=-1) * 3**0.5).requires_grad_()
    large = torch.full((n,), 1e7)
    pred = {
        **{key: value.detach() for key, value in output.items() if value is not None and "coefficients" not in key},
        "forces": forces,
        "e2ip_log_sigma0": 2 * np.log(unit) * torch.tensor([1.0, 1, 1, 0, 0, 0]).expand(n, 6),
        "e2ip_nu": large,
        "e2ip_kappa": large,
        "e2ip_force_unit": torch.full((n,), unit),
    }
    stock = modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=1.0)
    (expected,) = torch.autograd.grad(stock(ref=batch, pred=pred), forces)
    (found,) = torch.autograd.grad(EvidentialLoss(stock, force_loss_settings())(ref=batch, pred=pred), forces)
    assert torch.allclose(found, expected, rtol=1e-5)
