"""The training loss: every term of the stock loss but the forces', whose weight keeps its meaning."""

import numpy as np
import pytest
import torch

from e2ip_plugins.readout.loss import force_loss
from e2ip_plugins.readout.settings import Settings

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
    model = make_model(options=(("preset", preset),))
    output = model(batch.to_dict(), training=True, compute_stress=True, compute_virials=True)
    return batch, output


def settings_of(**options):
    return Settings.of("e2ip", options, 0.05)


def per_atom(batch, output, settings):
    loss, _ = force_loss(settings.build(), batch.forces, output["forces"], output)
    return loss


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_other_terms_are_stock_and_forces_are_weighted_per_atom(labelled, name, preset):
    from mace import modules

    from mace_ext.training.loss import E2IPLoss

    batch, output = labelled
    stock = getattr(modules, name)(energy_weight=3.0, forces_weight=7.0)
    settings = settings_of(preset=preset)
    # The stock loss of a model with perfect forces has the other terms and nothing else.
    others = stock(ref=batch, pred={**output, "forces": batch.forces})
    weights = torch.cat([torch.full((n,), (1.0 + i) * (2.0 - 0.5 * i)) for i, n in enumerate(batch.ptr.diff())])
    expected = others + 7.0 * (weights * per_atom(batch, output, settings)).mean()
    found = E2IPLoss(stock, settings)(ref=batch, pred=output)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_masked_atoms_count_nowhere(labelled):
    from mace import modules

    from mace_ext.training.loss import E2IPLoss

    batch, output = labelled
    loss = E2IPLoss(modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=1.0), settings_of())
    whole = per_atom(batch, output, settings_of())
    batch.forces[4, 1] = float("nan")
    kept = torch.ones(len(batch.forces))
    kept[4] = 0.0
    weights = (batch.weight * batch.forces_weight)[batch.batch]
    found = loss(ref=batch, pred=output)
    assert found.item() == pytest.approx((kept * weights * whole).sum().item() / (len(kept) - 1), rel=1e-12)
    found.backward()
    # The reference itself is not touched.
    assert torch.isnan(batch.forces[4, 1])


@pytest.mark.parametrize("forces", ["likelihood", "host", "fixed"])
@pytest.mark.parametrize(("weight", "value"), [("weight", 0.0), ("forces_weight", 0.0), ("forces_weight", -1.0)])
def test_force_term_is_as_if_frames_without_weight_had_no_atoms(labelled, weight, value, forces):
    from mace import modules

    from mace_ext.training.loss import E2IPLoss

    batch, output = labelled
    settings = Settings.of("e2ip", {}, 0.05, forces)
    coefficients = output["e2ip_coefficients"]

    def evaluated(energy_weight, forces_weight):
        """Loss, and its gradient in the coefficients of the readout."""
        stock = modules.WeightedEnergyForcesLoss(energy_weight=energy_weight, forces_weight=forces_weight)
        value = E2IPLoss(stock, settings)(ref=batch, pred=output)
        (gradient,) = torch.autograd.grad(value, coefficients, retain_graph=True)
        return value.item(), gradient, stock(ref=batch, pred=output).item()

    batch[weight][1] = value
    whole = per_atom(batch, output, settings)
    atoms = batch.batch != 1
    alone = (7.0 * (batch.weight * batch.forces_weight)[batch.batch] * whole)[atoms].mean()
    (expected,) = torch.autograd.grad(alone, coefficients, retain_graph=True)
    _, _, energy = evaluated(3.0, 0.0)
    found, gradient, stock = evaluated(3.0, 7.0)
    wanted = {"likelihood": energy + alone.item(), "host": stock, "fixed": alone.item()}
    assert found == pytest.approx(wanted[forces], rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    # No atom at all counts.
    batch[weight][:] = 0.0
    found, gradient, stock = evaluated(3.0, 7.0)
    assert found == (0.0 if forces == "fixed" else stock) and not gradient.any()


def test_processes_average_to_the_mean_over_all_their_atoms(labelled, monkeypatch):
    from mace import modules

    from mace_ext.training import loss

    batch, output = labelled
    stock = modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=7.0)
    batch.forces[4, 1] = float("nan")
    expected = loss.E2IPLoss(stock, settings_of())(ref=batch, pred=output).item()
    counted, weights = torch.isfinite(batch.forces).all(-1), batch.forces_weight.clone()
    monkeypatch.setattr(loss, "distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = []
    for frames in ([0], [1, 2]):  # of two processes, each of which has the atoms of its frames alone
        mine = torch.isin(torch.arange(3), torch.tensor(frames))
        batch.forces_weight = weights * mine
        others = int((counted & ~mine[batch.batch]).sum())
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, others=others: count.add_(others))
        shares.append(loss.E2IPLoss(stock, settings_of())(ref=batch, pred=output).item())
    assert np.mean(shares) == pytest.approx(expected, rel=1e-12)


def test_gradient_in_the_forces_is_that_of_the_mean_square_error_at_errors_of_one_unit(labelled):
    """What lets a user keep their forces_weight: by default both losses pull alike."""
    from mace import modules

    from mace_ext.training.loss import E2IPLoss

    batch, output = labelled
    unit = 0.05
    n = len(batch.forces)
    forces = (batch.forces + unit * torch.nn.functional.normalize(torch.randn(n, 3), dim=-1) * 3**0.5).requires_grad_()
    # Σ0 = σ_ref² I, all but certain: s = 0, t = 0, ν and κ large.
    coefficients = torch.zeros(n, 8)
    coefficients[:, 1:3] = 1e7
    pred = {
        **{key: value.detach() for key, value in output.items() if value is not None},
        "forces": forces,
        "e2ip_coefficients": coefficients,
        "e2ip_force_unit": torch.full((n,), unit),
    }
    stock = modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=1.0)
    (expected,) = torch.autograd.grad(stock(ref=batch, pred=pred), forces)
    (found,) = torch.autograd.grad(E2IPLoss(stock, settings_of())(ref=batch, pred=pred), forces)
    assert torch.allclose(found, expected, rtol=1e-5)
