"""The predictive Student-t against SciPy's and mpmath's densities, its moments and its gradients."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import multivariate_t

from e2ip_plugins.maths import spd
from e2ip_plugins.maths import student as niw

F64 = torch.float64


def draw(count: int, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    t = spd.damp_vector(4 * torch.randn(count, 5, dtype=F64, generator=gen), 4.0, 5.0)
    log = spd.tangent_to_sym6(4 * torch.randn(count, dtype=F64, generator=gen), t)
    log[:, :3] += 2 * math.log(0.0433641)
    root = torch.randn(count, 3, dtype=F64, generator=gen) * torch.rand(count, 1, dtype=F64, generator=gen).mul(6).exp()
    return log, spd.half_exp_matvec(log, root, 1.0)


def reference_nll(m: float, log_det_lambda: float, mahalanobis_lambda: float) -> float:
    """-log density of a 3-variate Student-t with 60 digits, straight from its definition."""
    with mpmath.workdps(60):
        m, x = mpmath.mpf(m), mpmath.mpf(mahalanobis_lambda)
        value = (
            mpmath.loggamma(m / 2)
            - mpmath.loggamma((m + 3) / 2)
            + mpmath.mpf(3) / 2 * mpmath.log(m * mpmath.pi)
            + mpmath.mpf(log_det_lambda) / 2
            + (m + 3) / 2 * mpmath.log1p(x / m)
        )
        return float(value)


def test_nll_matches_scipy():
    log, residual = draw(300)
    gen = torch.Generator().manual_seed(1)
    nu = 5 + 10 ** (torch.rand(300, dtype=F64, generator=gen) * 7 - 3)
    nu = nu.clamp(max=1e4)
    kappa = 10 ** (torch.rand(300, dtype=F64, generator=gen) * 8 - 4)
    ours = niw.negative_log_likelihood(log, nu, kappa, residual)
    sigma0 = torch.linalg.matrix_exp(spd.sym6_to_matrix(log))
    scale = niw.predictive_scale_factor(nu, kappa)[:, None, None] * sigma0
    theirs = [
        -multivariate_t.logpdf(r, np.zeros(3), s, df=float(n) - 2)
        for r, s, n in zip(residual.numpy(), scale.numpy(), nu, strict=True)
    ]
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("nu", [5.0, 5.5, 8.0, 30.0, 1e3, 1e5, 1e8])
@pytest.mark.parametrize("kappa", [1e-6, 1e-2, 1.0, 1e3, 1e8])
def test_nll_matches_mpmath(nu, kappa):
    for mahalanobis in (0.0, 1e-3, 1.0, 50.0, 1e4):
        s = 2.0
        log = spd.tangent_to_sym6(torch.tensor([s], dtype=F64), torch.zeros(1, 5, dtype=F64))
        # Isotropic, so that M is exact: ‖residual‖² e^{-s/√3}
        residual = torch.zeros(1, 3, dtype=F64)
        residual[0, 1] = math.sqrt(mahalanobis) * math.exp(s / (2 * math.sqrt(3)))
        ours = niw.negative_log_likelihood(
            log, torch.tensor([nu], dtype=F64), torch.tensor([kappa], dtype=F64), residual
        ).item()
        with mpmath.workdps(60):
            k, n = mpmath.mpf(kappa), mpmath.mpf(nu)
            factor = n * (k + 1) / (k * (n - 2))
            m_lambda = mpmath.mpf(residual[0, 1].item()) ** 2 * mpmath.exp(-mpmath.mpf(s) / mpmath.sqrt(3)) / factor
            log_det = 3 * mpmath.log(factor) + mpmath.sqrt(3) * s
            expected = reference_nll(n - 2, log_det, m_lambda)
        assert abs(ours - expected) <= 1e-10 * max(1.0, abs(expected))


def test_evidence_bounds_and_coupling():
    raw = torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4], dtype=F64)
    nu, kappa = niw.evidence(raw, raw.flip(0))
    assert (nu >= 5).all() and (kappa >= 1e-6).all() and torch.isfinite(nu).all()
    nu, kappa = niw.evidence(raw, None)
    torch.testing.assert_close(kappa, nu - 5 + 1e-6, rtol=0, atol=1e-10)


def test_likelihood_does_not_identify_kappa():
    """The reason for `coupled`: κ and Σ0 enter only through (1+κ)/κ Σ0."""
    log, residual = draw(10)
    nu, kappa = torch.full((10,), 9.0, dtype=F64), torch.full((10,), 0.3, dtype=F64)
    other = torch.full((10,), 5.0, dtype=F64)
    moved = log.clone()
    moved[:, :3] += math.log((1 + 1 / 0.3) / (1 + 1 / 5.0))
    torch.testing.assert_close(
        niw.negative_log_likelihood(log, nu, kappa, residual), niw.negative_log_likelihood(moved, nu, other, residual)
    )


@pytest.mark.parametrize("raw_nu", [-3.0, 0.0, 5.0, 60.0])
@pytest.mark.parametrize("norm", [0.0, 1.0, 4.5])
def test_gradients_of_the_loss(raw_nu, norm):
    t = (norm * torch.tensor([[0.5, -0.5, 0.5, 0.1, 0.4898979]], dtype=F64)).requires_grad_()
    s = torch.tensor([-0.4], dtype=F64, requires_grad=True)
    nu_hat = torch.tensor([raw_nu], dtype=F64, requires_grad=True)
    kappa_hat = torch.tensor([0.3], dtype=F64, requires_grad=True)
    residual = torch.tensor([[0.4, -0.1, 0.2]], dtype=F64, requires_grad=True)

    def block(s, t, nu_hat, kappa_hat, residual):
        log = spd.tangent_to_sym6(s, spd.damp_vector(t, 4.0, 5.0))
        nu, kappa = niw.evidence(nu_hat, kappa_hat)
        unit = torch.ones(1, dtype=F64)
        return niw.negative_log_likelihood(log, nu, kappa, residual), niw.evidence_regulariser(
            nu, kappa, residual, unit
        )

    inputs = (s, t, nu_hat, kappa_hat, residual)
    assert torch.autograd.gradcheck(block, inputs, rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(block, inputs, rtol=1e-5, atol=1e-6)


def test_regulariser_at_zero_residual():
    residual = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    unit = torch.full((2,), 0.0433641, dtype=F64)
    value = niw.evidence_regulariser(torch.full((2,), 6.0), torch.ones(2), residual, unit)
    (grad,) = torch.autograd.grad(value.sum(), residual)
    assert torch.equal(value, torch.zeros(2, dtype=F64)) and torch.equal(grad, torch.zeros(2, 3, dtype=F64))


def test_float32_loss_and_its_nu_gradient_at_large_evidence():
    log, residual = draw(200)
    nu = torch.full((200,), 1e4, dtype=F64)
    kappa = torch.ones(200, dtype=F64)
    values, grads = [], []
    for dtype in (torch.float64, torch.float32):
        n = nu.to(dtype).requires_grad_()
        value = niw.negative_log_likelihood(log.to(dtype), n, kappa.to(dtype), residual.to(dtype))
        (grad,) = torch.autograd.grad(value.sum(), n)
        values.append(value.detach().double()), grads.append(grad.double())
    # The Mahalanobis form has a relative error of about 8e-6 in float32, and the NLL grows with M/2.
    mahalanobis = spd.half_exp_matvec(log, residual, -1.0).square().sum(-1)
    assert ((values[1] - values[0]).abs() <= 1e-5 * (1 + 0.5 * mahalanobis)).all()
    # The lgamma form is off by a factor of 20 here.
    assert ((grads[1] - grads[0]).abs() / grads[0].abs().clamp(min=1e-6)).median() < 0.05
