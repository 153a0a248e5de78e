"""Synthetic predictions whose right scores are known, and a leverage with made-up moments."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of

#: Rooms whose tests compute in double precision.
DOUBLE_PRECISION = ("active", "evaluation", "fitting", "leverage", "predictions", "readout")


@pytest.fixture(autouse=True)
def _default_dtype(request):
    """Set torch's default precision, which other tests in the same process may have changed, and restore theirs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if request.path.parent.name in DOUBLE_PRECISION else torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def draw():
    """Function that gives error, log Σ0, ν and κ of n atoms; references come from the predictive itself."""
    return _draw


@pytest.fixture(scope="session")
def law():
    """Function that gives the predicted distributions from log Σ0, ν and κ."""
    return lambda log_sigma0, nu, kappa: law_of(
        E2IP, {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa}
    )


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


class Region(NamedTuple):
    """Where atoms of a kind are: mean (D,) and covariance (D, D) of their features, what h is multiplied with."""

    kind: int
    mean: np.ndarray
    covariance: np.ndarray
    norm: float


@pytest.fixture(scope="session")
def fill_leverage():
    """Function that fills a leverage as a fit would, with made-up moments, and gives its regions."""
    return _fill_leverage


def _fill_leverage(leverage, regions=None, seed=0, spread=1.0):
    """``regions``: number for every kind; ``spread``: distance of their means."""
    rng = np.random.default_rng(seed)
    kinds, size = leverage.centres.shape
    made = []
    regions = [1] * kinds if regions is None else regions
    leverage.resize(sum(number > 0 for number in regions), max(regions))
    row = 0
    for kind, number in enumerate(regions):
        centre = rng.normal(size=size)
        leverage.centres[kind] = torch.from_numpy(centre)
        if not number:
            continue
        root = rng.normal(size=(size, size)) / np.sqrt(size) + 0.3 * np.eye(size)
        values, axes = np.linalg.eigh(root @ root.T)
        whitening = axes / np.sqrt(values)
        leverage.whitening[:, row], leverage.axes[kind] = torch.from_numpy(whitening), row
        for i in range(number):
            stretch, mean = 0.5 + rng.random(size), centre + spread * rng.normal(size=size)
            region = Region(kind, mean, (axes * values / stretch**2) @ axes.T, 0.2 + rng.random())
            leverage.region_stretch[kind, i] = torch.from_numpy(stretch)
            leverage.region_offsets[kind, i] = torch.from_numpy((mean - centre) @ whitening * stretch)
            leverage.region_norms[kind, i] = region.norm
            made.append(region)
        row += 1
    leverage.log_variance.copy_(torch.from_numpy(rng.normal(size=kinds) - 5.0))
    leverage.log_factor.copy_(torch.from_numpy(0.3 * rng.normal(size=kinds)))
    leverage.growth.copy_(torch.from_numpy(0.5 + rng.random(len(leverage.growth))))
    leverage.surplus.copy_(torch.from_numpy(0.5 * rng.random(len(leverage.growth))))
    leverage.fitted.fill_(True)
    return made


@pytest.fixture(scope="session")
def refused():
    """Function that calls a function with arguments, and checks that it raises an `InputError` with a message."""

    def check(message, function, *arguments, **options):
        with pytest.raises(InputError, match=message):
            function(*arguments, **options)

    return check
