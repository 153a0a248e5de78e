"""Coefficients, derivatives and comparisons for the tests of the fused loss and distribution."""

import pytest
import torch

from e2ip_plugins.maths.kernels import check, paths

F64 = torch.float64


@pytest.fixture(params=["triton"] if paths.interpreted() else ["eager"])
def path(request):
    """Every path that can run here, for the argument of that name."""
    return request.param


@pytest.fixture
def nothing_known(monkeypatch):
    """As in a new process: no kernel has been checked, no choice has been logged."""
    monkeypatch.setattr(check, "_outcomes", {})
    paths._log_once.cache_clear()
    monkeypatch.delenv("E2IP_KERNEL", raising=False)


@pytest.fixture
def draw():
    """Function that gives coefficients and residual of so many atoms, some past the knees."""
    return _draw


@pytest.fixture
def leaves():
    """Function that makes inputs of which gradients can be taken."""
    return _leaves


@pytest.fixture
def gradients():
    """Function that gives the gradients of two weighted outputs in all inputs."""
    return _gradients


@pytest.fixture
def assert_same():
    """Function that compares tensors, relative to the largest number in each."""
    return _assert_same


def _draw(count: int, dtype=F64, seed: int = 0) -> list:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=F64, generator=gen)

    scales = torch.tensor([6.0] + 7 * [2.0], dtype=F64)
    return [x.to(dtype) for x in (scales * normal(count, 8), 0.1 * normal(count, 3))]


def _leaves(inputs: list) -> list:
    return [x.detach().clone().requires_grad_() for x in inputs]


def _gradients(inputs: list, outputs) -> list:
    weights = torch.linspace(1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    total = (weights * outputs[0] + 0.3 * weights.flip(0) * outputs[1]).sum()
    return list(torch.autograd.grad(total, inputs))


def _assert_same(ours: list, theirs: list, tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a.to(F64) - b.to(F64)).abs().max() <= tolerance * b.abs().max()
