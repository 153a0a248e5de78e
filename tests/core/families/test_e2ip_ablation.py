"""``e2ip-ablation``: ``e2ip`` in other numerics, and without dampers."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.spd import sym6_to_matrix

F64 = torch.float64
UNIT = 0.05


def build(name="e2ip-ablation", **options):
    kind = families.get(name)
    return kind(kind.resolve({"preset": "paper", **options}))


def example(norm, count=40, dtype=F64):
    """Coefficients with ‖t‖ = norm, and residuals."""
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.randn(count, 8, dtype=F64, generator=generator)
    coefficients[:, 3:] *= norm / coefficients[:, 3:].norm(dim=1, keepdim=True)
    residual = UNIT * torch.randn(count, 3, dtype=F64, generator=generator)
    return coefficients.to(dtype).requires_grad_(), residual.to(dtype).requires_grad_()


def loss_and_gradients(module, coefficients, residual):
    unit = torch.tensor(UNIT, dtype=coefficients.dtype)
    outputs = module(coefficients, unit)
    outputs |= {"e2ip_force_unit": unit.expand(len(residual)), "e2ip_coefficients": coefficients}
    loss = module.force_loss(residual, outputs)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (coefficients, residual)), outputs


@pytest.mark.parametrize("numerics", ["closed", "published"])
@pytest.mark.parametrize("norm", [1.0, 4.9])
def test_with_dampers_it_is_e2ip(numerics, norm):
    coefficients, residual = example(norm)
    mine = loss_and_gradients(build(numerics=numerics), coefficients, residual)
    theirs = loss_and_gradients(build("e2ip"), coefficients, residual)
    for got, want in zip(mine[:3], theirs[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    for key in build().output_keys():
        torch.testing.assert_close(mine[3][key.name], theirs[3][key.name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [3.0, 12.0, 40.0])
def test_without_dampers_covariances_are_the_exponential_of_what_the_trunk_says(norm):
    coefficients, _ = example(norm, 5)
    outputs = build(damper="off")(coefficients, torch.tensor(UNIT, dtype=F64))
    logs = sym6_to_matrix(outputs["e2ip_log_sigma0"]).detach().numpy()
    traceless = logs - np.trace(logs, axis1=1, axis2=2)[:, None, None] / 3 * np.eye(3)
    np.testing.assert_allclose(np.linalg.norm(traceless, axis=(1, 2)), norm, rtol=1e-12)
    s = coefficients[:, 0].detach().numpy()
    np.testing.assert_allclose(np.trace(logs, axis1=1, axis2=2), math.sqrt(3) * s + 6 * math.log(UNIT), rtol=1e-12)
    for log, sigma0 in zip(logs, outputs["e2ip_sigma0"].detach().numpy(), strict=True):
        np.testing.assert_allclose(sigma0, expm(log), atol=1e-11 * np.abs(sigma0).max())


def test_without_dampers_the_closed_form_keeps_its_digits_where_the_published_numerics_end():
    """Condition numbers of up to e^(√2 · 16) = 7e9, in single precision."""
    exact = loss_and_gradients(build(damper="off"), *example(16.0))
    single = loss_and_gradients(build(damper="off"), *example(16.0, dtype=torch.float32))
    torch.testing.assert_close(single[0].double(), exact[0], rtol=1e-3, atol=1e-3)
    assert all(value.isfinite().all() for value in single[:3])
    with pytest.raises(ArithmeticError, match=r"Cholesky factorisation of Σ0 failed for \d+ of 40 atoms"):
        loss_and_gradients(build(damper="off", numerics="published"), *example(16.0, dtype=torch.float32))
    # It is the precision that fails, not the formula.
    published = loss_and_gradients(build(damper="off", numerics="published"), *example(16.0))
    torch.testing.assert_close(published[0], exact[0], rtol=1e-5, atol=1e-5)


def test_bad_options():
    for given, message in (
        ({"numerics": "eigh"}, "unknown numerics 'eigh'; choose from: closed, published"),
        ({"damper": "no"}, "unknown damper 'no'; choose from: on, off"),
    ):
        with pytest.raises(InputError, match=message):
            families.get("e2ip-ablation").resolve(given)
