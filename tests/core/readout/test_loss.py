"""The force block: presets, scale, masking."""

import math

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.presets_tmp import KCAL_PER_MOL
from e2ip_plugins.maths.student import negative_log_likelihood
from e2ip_plugins.readout.loss import PULL_CEILING, force_loss, force_loss_settings, masked_mean

F64 = torch.float64


def inputs(count=8, unit=KCAL_PER_MOL):
    gen = torch.Generator().manual_seed(0)
    log = 0.5 * torch.randn(count, 6, dtype=F64, generator=gen)
    log[:, :3] += 2 * math.log(unit)
    return {
        "reference": torch.randn(count, 3, dtype=F64, generator=gen) * unit,
        "forces": torch.randn(count, 3, dtype=F64, generator=gen) * unit,
        "log_sigma0": log,
        "nu": torch.rand(count, dtype=F64, generator=gen) * 10 + 5,
        "kappa": torch.rand(count, dtype=F64, generator=gen) + 0.1,
        "force_unit": torch.full((count,), unit, dtype=F64),
    }


def test_paper_preset_is_the_paper_loss():
    data = inputs()
    loss, mask = force_loss(**data, settings=force_loss_settings("paper"))
    residual = data["reference"] - data["forces"]
    reg = (data["nu"] + data["kappa"]) * residual.norm(dim=-1) / KCAL_PER_MOL
    nll = negative_log_likelihood(data["log_sigma0"], data["nu"], data["kappa"], residual)
    torch.testing.assert_close(loss, nll + 0.1 * reg)
    assert mask.all()


def test_default_loss_is_the_likelihood_in_value_and_in_the_parameters():
    data = inputs()
    wanted = ("log_sigma0", "nu", "kappa")
    for key in wanted:
        data[key].requires_grad_()
    loss, _ = force_loss(**data, settings=force_loss_settings("default"))
    nll = negative_log_likelihood(data["log_sigma0"], data["nu"], data["kappa"], data["reference"] - data["forces"])
    factor = 2 * KCAL_PER_MOL**2 / 3
    torch.testing.assert_close(loss - loss[0], factor * (nll - nll[0]))
    ours = torch.autograd.grad(loss.sum(), [data[key] for key in wanted])
    theirs = torch.autograd.grad(factor * nll.sum(), [data[key] for key in wanted])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_default_loss_is_never_negative():
    data = inputs()
    data["forces"] = data["reference"]
    data["log_sigma0"] = torch.zeros(8, 6, dtype=F64)
    data["log_sigma0"][:, :3] = 2 * math.log(KCAL_PER_MOL) - 15 / math.sqrt(3)
    data["nu"], data["kappa"] = torch.full((8,), 1e8, dtype=F64), torch.full((8,), 1e8, dtype=F64)
    loss, _ = force_loss(**data, settings=force_loss_settings("default"))
    assert (loss >= 0).all() and (loss < 1e-6).all()


def relative_pull(sigmas: list[float]) -> torch.Tensor:
    """Force gradient of the default loss over that of the mean square error, for σ in force units."""
    count = len(sigmas)
    data = inputs(count)
    data["log_sigma0"] = torch.zeros(count, 6, dtype=F64)
    data["log_sigma0"][:, :3] = 2 * (math.log(KCAL_PER_MOL) + torch.tensor(sigmas, dtype=F64).log())[:, None]
    data["nu"], data["kappa"] = torch.full((count,), 1e9, dtype=F64), torch.full((count,), 1e9, dtype=F64)
    data["forces"].requires_grad_()
    loss, _ = force_loss(**data, settings=force_loss_settings("default"))
    (pull,) = torch.autograd.grad(loss.sum(), data["forces"])
    ratio = pull / (2 / 3 * (data["forces"] - data["reference"]).detach())
    torch.testing.assert_close(ratio, ratio[:, :1].expand(count, 3), rtol=1e-5, atol=0)
    return ratio[:, 0]


def test_default_loss_weights_good_atoms_by_precision():
    torch.testing.assert_close(relative_pull([0.5, 2.0]), torch.tensor([4.0, 0.25], dtype=F64), rtol=1e-5, atol=0)


def test_default_loss_weights_bad_atoms_alike():
    expected = torch.full((2,), 1 / PULL_CEILING**2, dtype=F64)
    torch.testing.assert_close(relative_pull([5.0, 50.0]), expected, rtol=1e-5, atol=0)
    good, bad, worse = relative_pull([1.0, PULL_CEILING, 40.0])
    torch.testing.assert_close(bad, worse, rtol=1e-5, atol=0)
    torch.testing.assert_close(good / bad, torch.tensor(PULL_CEILING**2, dtype=F64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_references_are_masked_without_touching_gradients(bad):
    data = inputs()
    data["reference"][3, 1] = bad
    data["log_sigma0"].requires_grad_(), data["forces"].requires_grad_()
    loss, mask = force_loss(**data, settings=force_loss_settings("paper"))
    assert mask.tolist() == [True] * 3 + [False] + [True] * 4 and loss[3] == 0
    grads = torch.autograd.grad(masked_mean(loss, mask), (data["forces"], data["log_sigma0"]))
    assert all(torch.isfinite(g).all() and torch.equal(g[3], torch.zeros_like(g[3])) for g in grads)
    good = {k: torch.cat([v[:3], v[4:]]) for k, v in data.items()}
    torch.testing.assert_close(
        masked_mean(loss, mask), force_loss(**good, settings=force_loss_settings("paper"))[0].mean()
    )


def test_loss_does_not_depend_on_the_units_of_the_host():
    """Everything scaled by f: NLL + λ reg shifts by exactly 3 ln f, whatever λ."""
    settings = force_loss_settings("paper")
    data = inputs()
    loss, _ = force_loss(**data, settings=settings)
    f = 23.06
    for key in ("reference", "forces", "force_unit"):
        data[key] = data[key] * f
    data["log_sigma0"] = data["log_sigma0"].clone()
    data["log_sigma0"][:, :3] += 2 * math.log(f)
    scaled, _ = force_loss(**data, settings=settings)
    torch.testing.assert_close(scaled, loss + 3 * math.log(f))


def test_options_that_do_not_go_together():
    with pytest.raises(InputError, match="coupled"):
        force_loss_settings("default", "coupled", 0.1)
    with pytest.raises(InputError, match="evidence_weight"):
        force_loss_settings("default", "independent", -0.1)
    with pytest.raises(InputError, match="unknown evidence"):
        force_loss_settings("default", "both")
    with pytest.raises(InputError, match="unknown e2ip preset"):
        force_loss_settings("papper")
