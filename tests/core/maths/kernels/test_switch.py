"""Which path is taken, and what those who trace or transform the call see."""

import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import check, distribution, nll_terms, paths

F64 = torch.float64
UNIT = 0.0433641
DAMPERS = ((14.0, 15.0), (4.0, 5.0))
#: σ_ref, mode and dampers.
REST = (UNIT, False, *DAMPERS)


def test_switch(monkeypatch, caplog, nothing_known):
    def choose(device, path=None):
        return paths.choose(device, torch.float32, ["forward"], path)

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    monkeypatch.setattr(paths, "triton_launch", lambda: None)  # which is there without Triton, too
    monkeypatch.setattr(check, "failure", lambda *_: None)
    with caplog.at_level(logging.INFO, logger="e2ip_plugins"):
        assert [choose(cpu) for _ in range(2)] == ["eager", "eager"]
        assert choose(cuda) == "triton" and choose(cuda, "eager") == "eager"
    assert [r.getMessage() for r in caplog.records] == [
        "e2ip kernel on cpu: eager (E2IP_KERNEL=auto)",
        "e2ip kernel on cuda: triton (E2IP_KERNEL=auto)",
        "e2ip kernel on cuda: eager (E2IP_KERNEL=eager)",
    ]
    with pytest.raises(InputError, match="'triton' needs tensors on CUDA"):
        choose(cpu, "triton")
    monkeypatch.setattr(paths, "has_triton", lambda: False)
    monkeypatch.setattr(paths, "why_no_triton", lambda: "Triton is not installed, or too old (no tl.add)")
    caplog.clear()
    assert choose(cuda) == choose(cuda) == "eager"
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "on cuda: Triton is not installed, or too old (no tl.add), continuing" in warned[0]
    with pytest.raises(InputError, match="Triton is not installed"):
        choose(cuda, "triton")
    monkeypatch.setenv("E2IP_KERNEL", " Eager ")
    assert choose(cuda) == "eager"
    monkeypatch.setenv("E2IP_KERNEL", "compiled")
    with pytest.raises(InputError, match=r"E2IP_KERNEL is 'compiled'; choose from: auto, eager, triton$"):
        choose(cpu)


class Watched(torch.Tensor):
    """A subclass, as other libraries make them."""


def of_torch_func(transform):
    def call(function, x):
        return transform(function)(x)

    return call


def forward_ad(function, x):
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(x, x))


def fake(function, _):
    with FakeTensorMode():
        function(torch.empty(3))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda f, x: f(x), paths.NOT_TRACED),
        (lambda f, x: f(torch.nn.Parameter(x)), paths.NOT_TRACED),
        (lambda f, x: torch.autograd.grad(f(x.requires_grad_()), x), paths.NOT_TRACED),
        (lambda f, x: f(x.as_subclass(Watched)), paths.TRANSFORM),
        (lambda f, x: torch.jit.trace(f, x, check_trace=False), paths.TRANSFORM),
        (of_torch_func(torch.func.vmap), paths.TRANSFORM),
        (of_torch_func(torch.func.grad), paths.TRANSFORM),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), paths.TRANSFORM),
        (lambda f, x: make_fx(torch.func.grad(f))(x), paths.TRANSFORM),
        (forward_ad, paths.TRANSFORM),
        (lambda f, x: make_fx(f)(x), paths.GRAPH),
        (fake, paths.GRAPH),
    ],
    ids="plain parameter backward subclass jit_trace vmap grad jvp grad_in_make_fx forward_ad make_fx fake".split(),
)
def test_tracer(call, expected):
    found = []

    def function(x):
        found.append(paths.tracer_of([x]))
        return x.sum()

    call(function, torch.ones(3))
    assert set(found) == {expected}
    # Nobody stays behind.
    assert paths.tracer_of([torch.ones(3)]) == paths.NOT_TRACED


def test_tracer_in_torch_compile():
    def function(x):
        return x + (1 if paths.tracer_of([x]) == paths.GRAPH else 0)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(3)).sum() == 3 and function(torch.zeros(3)).sum() == 0


class Loss(torch.nn.Module):
    def forward(self, coefficients, residual):
        nll, regulariser = nll_terms(coefficients, residual, UNIT, True, *DAMPERS)
        return (nll + 0.1 * regulariser).mean()


class Readout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("force_unit", torch.tensor(UNIT))

    def forward(self, coefficients: torch.Tensor):
        return distribution(coefficients, self.force_unit, False, (14.0, 15.0), (4.0, 5.0))


def test_inside_a_compiled_module(draw, leaves):
    inputs = leaves(draw(12, torch.float32))
    expected = Loss()(*inputs)
    # The graph that a compiler gets, and its gradients, without the wait for one.
    traced = torch.compile(Loss(), backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(traced, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(traced, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["script", "export", "make_fx"])
def test_traced_readout(how, draw):
    coefficients = draw(12, torch.float32)[0]
    expected = Readout()(coefficients)
    if how == "script":
        traced = torch.jit.script(Readout())
    elif how == "export":
        atoms = torch.export.Dim("atoms", min=2, max=10**9)  # torch 2.6 refuses its own default maximum
        program = torch.export.export(Readout(), (draw(7, torch.float32)[0],), dynamic_shapes=({0: atoms},))
        assert not any("e2ip" in str(n.target) for n in program.graph.nodes)
        traced = program.module()
    else:
        traced = make_fx(lambda x: distribution(x, *REST))(draw(12, torch.float32, seed=1)[0])
    for a, b in zip(traced(coefficients), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_scripted_loss(draw, assert_same):
    @torch.jit.script
    def loss(coefficients: torch.Tensor, residual: torch.Tensor, unit: torch.Tensor):
        return nll_terms(coefficients, residual, unit, False, (14.0, 15.0), (4.0, 5.0))

    inputs = draw(5)
    unit = torch.tensor(UNIT, dtype=F64)
    assert_same(list(loss(*inputs, unit)), list(nll_terms(*inputs, unit, *REST[1:])), 1e-12)
