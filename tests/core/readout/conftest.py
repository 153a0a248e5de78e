"""Double precision, how 2e features turn, and a leverage with made-up moments."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from e2ip_plugins.maths import spd


@pytest.fixture(autouse=True)
def double_precision(_default_dtype):
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def wigner2():
    """Function that gives the representation (5, 5) of an orthogonal matrix on 2e, from the pinned basis itself."""
    zero, eye = torch.zeros(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    basis = spd.sym6_to_matrix(spd.tangent_to_sym6(zero, eye))
    return lambda rotation: torch.einsum("aij,ik,bkl,jl->ab", basis, rotation, basis, rotation)


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
