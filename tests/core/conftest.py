"""Synthetic predictions whose right scores are known."""

import numpy as np
import pytest
import torch

from e2ip_plugins.families.e2ip import E2IP


@pytest.fixture(autouse=True)
def _default_dtype():
    """Torch's own, whatever hosts' tests in the same process have set, which they find again."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def draw():
    """Function that gives error, log Σ0, ν and κ of n atoms; references come from the predictive itself."""
    return _draw


@pytest.fixture(scope="session")
def law():
    """Function that gives the predicted distributions from log Σ0, ν and κ."""
    return lambda log_sigma0, nu, kappa: E2IP.law({"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa})


def _draw(n, seed=0, inflate=1.0, nu=None, spread=0.8):
    """n atoms whose references are drawn from the predictive itself, errors inflated by a factor."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(n, 3, 3)))[0]
    log_eigenvalues = -6.0 + rng.normal(size=(n, 1)) + spread * rng.normal(size=(n, 3))
    nu = 5.5 + 10.0 * rng.random(n) if nu is None else np.full(n, nu)
    kappa = np.exp(rng.normal(size=n))
    scale = np.exp(log_eigenvalues) * (nu * (kappa + 1) / (kappa * (nu - 2)))[:, None]
    t = rng.normal(size=(n, 3)) / np.sqrt(rng.chisquare(nu - 2) / (nu - 2))[:, None]
    error = inflate * np.einsum("nij,nj->ni", axes, np.sqrt(scale) * t)
    L = np.einsum("nij,nj,nkj->nik", axes, log_eigenvalues, axes)
    log_sigma0 = np.stack([L[:, 0, 0], L[:, 1, 1], L[:, 2, 2], L[:, 1, 2], L[:, 0, 2], L[:, 0, 1]], axis=-1)
    return error, log_sigma0, nu, kappa
