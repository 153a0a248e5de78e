"""The fused loss and distribution: one result on every path, right derivatives, well-behaved on bad input.

Runs for Triton too, in its interpreter, when TRITON_INTERPRET=1 (see test_fused_triton.py).
"""

import logging
import os

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import compiled, distribution, nll_terms, paths, plain

F64 = torch.float64
UNIT = 0.0433641
DAMPERS = ((14.0, 15.0), (4.0, 5.0))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# `soa` is the compiled path without the compiler: the same code, without the minute.
PATHS = ["triton"] if INTERPRETED else ["eager", "soa"]


def _path(name: str, monkeypatch) -> str:
    if name == "soa":
        monkeypatch.setattr(compiled, "kernel", compiled.graph)
        return "compiled"
    return name


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    return _path(request.param, monkeypatch)


@pytest.fixture(params=[*PATHS, "plain"])
def any_form(request, monkeypatch):
    """With the composition that TorchScript, exports and compilers see."""
    return _path(request.param, monkeypatch)


def draw(count: int, dtype=F64, coupled: bool = False, seed: int = 0) -> list:
    """s, t, raw ν, raw κ, residual; some past the knees."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=F64, generator=gen)

    s, t, nu, kappa = 6 * normal(count), 2 * normal(count, 5), 2 * normal(count), 2 * normal(count)
    residual = 0.1 * normal(count, 3)
    return [x if x is None else x.to(dtype) for x in (s, t, nu, None if coupled else kappa, residual)]


def special_points() -> list:
    """t = 0, two equal eigenvalues (both signs), inside, across the knee, on the plateau; s past its knee."""
    t = torch.zeros(7, 5, dtype=F64)
    t[1, 2], t[2, 2] = 2.0, -2.0
    t[3] = torch.tensor([0.3, -0.7, 0.2, 1.1, -0.4])
    t[4] = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0])
    t[5] = torch.tensor([6.0, -3.0, 2.0, 1.0, 1.0])
    t[6] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    s = torch.tensor([0.7, 0.7, -0.3, 1.5, 0.2, 0.5, 14.6], dtype=F64)
    nu = torch.tensor([0.3, -2.0, 4.0, 60.0, 0.0, 1.0, 2.0], dtype=F64)
    kappa = torch.tensor([-0.5, 1.0, 0.0, 30.0, -3.0, 2.0, 0.1], dtype=F64)
    residual = UNIT * torch.tensor([[0.4, -0.1, 0.2]], dtype=F64) * torch.tensor([1, 2, 3, 1, 1, 5, 0.3])[:, None]
    return [s, t, nu, kappa, residual]


def leaves(inputs: list) -> list:
    return [x if x is None else x.detach().clone().requires_grad_() for x in inputs]


def gradients(inputs: list, outputs) -> list:
    weights = torch.linspace(1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    total = (weights * outputs[0] + 0.3 * weights.flip(0) * outputs[1]).sum()
    return list(torch.autograd.grad(total, [x for x in inputs if x is not None]))


def assert_same(ours: list, theirs: list, tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a.to(F64) - b.to(F64)).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("per_atom_unit", [False, True])
@pytest.mark.parametrize("ceiling", [None, 4.0])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equals_the_composition(path, dtype, coupled, ceiling, per_atom_unit):
    unit = torch.full((), UNIT, dtype=F64)
    ours, theirs = leaves(draw(60, dtype, coupled)), leaves(draw(60, F64, coupled))
    if per_atom_unit:
        unit = UNIT * torch.linspace(1, 3, 60, dtype=F64)
    fused = nll_terms(*ours, unit.to(dtype), *DAMPERS, pull_ceiling=ceiling, path=path)
    composed = plain.nll_terms(*theirs, unit, *DAMPERS, ceiling)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    assert all(x.dtype == dtype for x in fused)
    assert_same([*fused, *gradients(ours, fused)], [*composed, *gradients(theirs, composed)], tolerance)
    with torch.no_grad():
        fused = distribution(*ours[:4], unit.to(dtype), *DAMPERS, path=path)
        composed = plain.distribution(*theirs[:4], unit, *DAMPERS)
    assert_same(list(fused), list(composed), tolerance)


def test_pull_ceiling_changes_the_pull_alone(path):
    inputs, all_grads = leaves(draw(200)), []
    for ceiling in (None, 4.0):
        nll, _ = nll_terms(*inputs, UNIT, *DAMPERS, pull_ceiling=ceiling, path=path)
        all_grads.append((nll, *torch.autograd.grad(nll.sum(), inputs)))
    (*without, pull), (*with_, kept) = all_grads
    assert_same(list(with_), list(without), 1e-14)
    with torch.no_grad():
        _, sigma0, nu, kappa, _ = distribution(*inputs[:4], UNIT, *DAMPERS)
        matrix = sigma0[:, [0, 5, 4, 5, 1, 3, 4, 3, 2]].view(-1, 3, 3)
        variance = torch.linalg.det((nu * (1 + 1 / kappa) / (nu - 2))[:, None, None] * matrix) ** (1 / 3)
    factor = (variance / (4.0 * UNIT) ** 2).clamp(min=1)
    assert (factor > 1).any() and (factor == 1).any()
    torch.testing.assert_close(kept, factor[:, None] * pull, rtol=1e-10, atol=0)


@pytest.mark.parametrize("coupled", [False, True])
def test_gradcheck_and_gradgradcheck(path, coupled):
    inputs = leaves(special_points())
    if coupled:
        inputs[3] = None

    def function(*tensors):
        rest = list(tensors)
        return nll_terms(*rest[:3], None if coupled else rest.pop(3), rest[3], UNIT, *DAMPERS, path=path)

    present = [x for x in inputs if x is not None]
    assert torch.autograd.gradcheck(function, present, eps=1e-7, rtol=1e-6, atol=1e-5, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, present, eps=1e-7, rtol=1e-5, atol=1e-3, fast_mode=True)


def test_gradients_at_zero_residual(path):
    inputs = leaves([x if k < 4 else torch.zeros_like(x) for k, x in enumerate(special_points())])
    outputs = nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    composed = leaves(inputs)
    theirs = plain.nll_terms(*composed, torch.tensor(UNIT, dtype=F64), *DAMPERS)
    for a, b in zip(gradients(inputs, outputs), gradients(composed, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    outputs = nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    first = torch.autograd.grad(outputs[0].sum(), inputs[4], create_graph=True)[0]
    assert torch.isfinite(torch.autograd.grad(first.sum(), inputs[4])[0]).all()


def test_an_input_made_of_another_one_counts_once(path):
    s, t, nu, _, residual = leaves(draw(5))

    def gradient(function, *options):
        outputs = function(s, t, nu, torch.tanh(nu) + s, residual, *options)
        first = torch.autograd.grad(outputs[0].sum(), nu, create_graph=True)[0]
        return first, torch.autograd.grad(first.sum(), nu)[0]

    ours = gradient(lambda *a: nll_terms(*a, path=path), UNIT, *DAMPERS)
    theirs = gradient(plain.nll_terms, torch.tensor(UNIT, dtype=F64), *DAMPERS)
    assert_same(list(ours), list(theirs), 1e-12)


def test_forward_derivatives(path):
    inputs = tuple(draw(4))
    tangents = tuple(torch.ones_like(x) for x in inputs)

    def nll(*x):
        return nll_terms(*x, UNIT, *DAMPERS, path=path)[0]

    _, tangent = torch.func.jvp(nll, inputs, tangents)
    step = 1e-6
    moved = [nll(*(x + sign * step for x in inputs)) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (moved[0] - moved[1]) / (2 * step), rtol=1e-5, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(x, y) for x, y in zip(inputs, tangents, strict=True)]
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(nll(*dual)).tangent, tangent)
    one = torch.func.vmap(lambda *x: nll(*(y[None] for y in x))[0])(*inputs)
    torch.testing.assert_close(one, nll(*inputs))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", range(5))
def test_bad_atoms_stay_alone(any_form, position, value):
    clean, bad = leaves(draw(9, torch.float32)), draw(9, torch.float32)
    bad[position][4] = value
    bad = leaves(bad)
    others = torch.arange(9) != 4
    results = []
    for inputs in (clean, bad):
        if any_form == "plain":
            unit = torch.tensor(UNIT)
            outputs = plain.nll_terms(*inputs, unit, *DAMPERS, 4.0)
            spread = plain.distribution(*inputs[:4], unit, *DAMPERS)
        else:
            outputs = nll_terms(*inputs, UNIT, *DAMPERS, pull_ceiling=4.0, path=any_form)
            spread = distribution(*inputs[:4], UNIT, *DAMPERS, path=any_form)
        results.append([x.detach() for x in (*outputs, *gradients(inputs, outputs), *spread)])
    for a, b in zip(*results, strict=True):
        # To rounding: vectorised and remaining elements may round differently.
        torch.testing.assert_close(a[others], b[others], rtol=1e-6, atol=1e-12)
    nll, _, *grads = results[1][:7]
    if position < 4 or value != value:
        assert torch.isnan(nll[4]) and torch.isnan(grads[position][4]).any()
    if position < 4:
        assert torch.isnan(results[1][8][4]).all()  # Σ0


def test_below_every_knee_nothing_is_damped(path):
    """The eager path leaves the dampers out there; one atom on a plateau must not change the others."""
    inputs = [x / 10 for x in draw(30)]
    assert inputs[0].abs().max() < 14 and inputs[1].abs().max() < 4 / 5**0.5
    further = [torch.cat([x, torch.full_like(x[:1], 20.0)]) for x in inputs]
    results = []
    for given in (inputs, further):
        given, theirs = leaves(given), leaves(given)
        outputs = nll_terms(*given, UNIT, *DAMPERS, path=path)
        composed = plain.nll_terms(*theirs, torch.tensor(UNIT, dtype=F64), *DAMPERS)
        grads = torch.autograd.grad(outputs[0].sum(), given)
        assert_same([*outputs, *grads], [*composed, *torch.autograd.grad(composed[0].sum(), theirs)], 1e-13)
        with torch.no_grad():
            outputs = [*outputs, *grads, *distribution(*given[:4], UNIT, *DAMPERS, path=path)]
        results.append([x.detach() for x in outputs])
    assert results[0][-1].sum() == 0 and results[1][-1].sum() == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b[:30], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("size", [1e19, 1e160, 1e305])
def test_no_finite_coefficient_overflows(path, size):
    inputs = draw(5)
    inputs[1][2], inputs[0][3] = torch.tensor([1.0, 0.5, -0.3, 0.1, 0.0], dtype=F64) * size, -size
    with torch.no_grad():
        ours = distribution(*inputs[:4], UNIT, *DAMPERS, path=path)
        theirs = plain.distribution(*inputs[:4], torch.tensor(UNIT, dtype=F64), *DAMPERS)
    assert_same(list(ours), list(theirs), 1e-13)
    assert ours[-1][2:4].tolist() == [1, 1]


@pytest.mark.skipif(INTERPRETED, reason="pretends that Triton is broken")
def test_broken_triton_falls_back_unless_asked_for(monkeypatch, caplog):
    class Broken:
        def forward(self, *_):
            raise RuntimeError("Failed to find C compiler")

        distribution = backward = forward

    class BrokenBackward(Broken):
        def forward(self, s, t, raw_nu, raw_kappa, residual, force_unit, constants):
            return plain.nll_terms(s, t, raw_nu, raw_kappa, residual, force_unit, constants[:2], constants[2:4])

    def evaluate():
        outputs = nll_terms(*leaves(inputs), UNIT, *DAMPERS)
        given = leaves(inputs)
        grads = gradients(given, nll_terms(*given, UNIT, *DAMPERS))
        return [*outputs, *grads, *distribution(*inputs[:4], UNIT, *DAMPERS)]

    inputs = draw(5)
    expected = evaluate()
    monkeypatch.setattr(paths, "choose", lambda *_: "triton")
    monkeypatch.setattr(paths, "_launch_failed", set())
    for module in (BrokenBackward, Broken):
        monkeypatch.setattr(paths, "triton_kernels", module)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = evaluate()
        assert "Triton failed, continuing with eager (Failed to find C compiler)" in caplog.text
        # A forward kernel that works is the plain composition here: its NLL and regulariser agree to rounding.
        exact = 2 if module is BrokenBackward else 0
        assert_same(found[:exact], expected[:exact], 1e-13)
        assert all(torch.equal(a, b) for a, b in zip(found[exact:], expected[exact:], strict=True))
    with pytest.raises(RuntimeError, match="C compiler"):
        nll_terms(*inputs, UNIT, *DAMPERS, path="triton")


def test_debug_mode_names_the_tensor(path, monkeypatch):
    inputs = draw(20)
    inputs[1][[3, 7], 2] = float("nan")
    nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    monkeypatch.setenv("E2IP_DEBUG", "1")
    with pytest.raises(InputError, match=r"t is NaN or infinite for 2 of 20 atoms: 3, 7"):
        nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    with pytest.raises(InputError, match="t is NaN"):
        distribution(*inputs[:4], UNIT, *DAMPERS, path=path)
    nll_terms(*draw(20), UNIT, *DAMPERS, path=path)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("count", [0, 1])
def test_few_atoms(path, count, debug, monkeypatch):
    monkeypatch.setenv("E2IP_DEBUG", debug)
    inputs = leaves(draw(count))
    outputs = nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    assert outputs[0].shape == outputs[1].shape == (count,)
    grads = gradients(inputs, outputs)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    with torch.no_grad():
        shapes = [tuple(x.shape) for x in distribution(*inputs[:4], UNIT, *DAMPERS, path=path)]
    assert shapes == [(count, 6), (count, 6), (count,), (count,), (count,)]


def test_not_contiguous(path):
    inputs = draw(30)
    strided = [torch.stack([x, -x], -1)[..., 0] for x in inputs]
    strided[1], strided[4] = inputs[1].t().contiguous().t(), inputs[4].t().contiguous().t()
    results = []
    for tensors in (leaves(inputs), [x.requires_grad_() for x in strided]):
        outputs = nll_terms(*tensors, UNIT, *DAMPERS, path=path)
        results.append([*outputs, *gradients(tensors, outputs)])
    assert_same(*results, 1e-14)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(path, half):
    inputs = leaves(draw(30, half))
    outputs = nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    single = leaves([x.float() for x in inputs])
    expected = nll_terms(*single, UNIT, *DAMPERS, path=path)
    assert_same(list(outputs), list(expected), 1e-7)
    grads = gradients(inputs, outputs)
    assert all(x.dtype == half for x in grads) and outputs[0].dtype == torch.float32
    for a, b in zip(grads, gradients(single, expected), strict=True):
        torch.testing.assert_close(a, b.to(half), rtol=1e-2, atol=1e-3)


def test_mixed_dtypes_are_promoted(path):
    inputs = [x if k == 4 else x.float() for k, x in enumerate(draw(10))]
    inputs = leaves(inputs)
    outputs = nll_terms(*inputs, UNIT, *DAMPERS, path=path)
    assert outputs[0].dtype == F64
    assert [x.dtype for x in gradients(inputs, outputs)] == [x.dtype for x in inputs]


def test_bad_arguments(path, monkeypatch):
    s, t, nu, kappa, residual = draw(4)
    for bad, message in (
        ((s, t[:, :4], nu, kappa, residual), r"t has shape \(4, 4\)"),
        ((s, t, nu[:3], kappa, residual), "raw_nu has shape"),
        ((s, t, nu, kappa, residual.to("meta")), "residual is on meta, s on cpu"),
        ((s, t, nu.long(), kappa, residual), "raw_nu has dtype"),
        ((s.numpy(), t, nu, kappa, residual), "s is a ndarray; a tensor is needed"),
        ((s, t, None, kappa, residual), "raw_nu is a NoneType"),
    ):
        with pytest.raises(InputError, match=message):
            nll_terms(*bad, UNIT, *DAMPERS, path=path)
    with pytest.raises(InputError, match="force_unit has shape"):
        nll_terms(s, t, nu, kappa, residual, torch.ones(3), *DAMPERS, path=path)
    for unit in (0.0, -1.0, float("nan"), float("inf")):
        for force_unit in (unit, torch.tensor(unit)):
            with pytest.raises(InputError, match=f"force_unit is {unit}; it must be"):
                nll_terms(s, t, nu, kappa, residual, force_unit, *DAMPERS, path=path)
    with pytest.raises(InputError, match="force_unit is on meta"):
        nll_terms(s, t, nu, kappa, residual, torch.ones((), device="meta"), *DAMPERS, path=path)
    for damper in ((5.0, 4.0), (5.0, 5.0), (-5.0, 6.0), (1.0, 2.0, 3.0)):
        with pytest.raises(InputError, match=r"tensor_damper is .* 0 < knee < ceiling"):
            distribution(s, t, nu, kappa, UNIT, DAMPERS[0], damper, path=path)
    with pytest.raises(InputError, match=r"pull_ceiling is 0\.0"):
        nll_terms(s, t, nu, kappa, residual, UNIT, *DAMPERS, pull_ceiling=0.0, path=path)
    with pytest.raises(InputError, match="path is 'fast'; choose from: auto, eager, compiled, triton"):
        nll_terms(s, t, nu, kappa, residual, UNIT, *DAMPERS, path="fast")
    monkeypatch.setenv("E2IP_KERNEL", "fast")
    with pytest.raises(InputError, match="E2IP_KERNEL is 'fast'"):
        nll_terms(s, t, nu, kappa, residual, UNIT, *DAMPERS)


@pytest.mark.skipif(INTERPRETED, reason="tests of the switch on the CPU")
def test_switch(monkeypatch, caplog):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(paths, "_logged", set())
    monkeypatch.setattr(paths, "_compile_failed", set())
    monkeypatch.delenv("E2IP_KERNEL", raising=False)
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    with caplog.at_level(logging.INFO, logger="e2ip_plugins"):
        assert [paths.choose(cpu, n) for n in (0, 100, 10**6)] == ["eager", "eager", "compiled"]
        assert paths.choose(cpu, 100) == "eager" and paths.choose(cuda, 100) == "triton"
        assert paths.choose(cuda, 100, "eager") == "eager"
    assert [r.getMessage() for r in caplog.records] == [
        "e2ip kernel on cpu: eager (E2IP_KERNEL=auto, 0 atoms)",
        "e2ip kernel on cpu: compiled (E2IP_KERNEL=auto, 1000000 atoms)",
        "e2ip kernel on cuda: triton (E2IP_KERNEL=auto, 100 atoms)",
        "e2ip kernel on cuda: eager (E2IP_KERNEL=eager, 100 atoms)",
    ]
    with pytest.raises(InputError, match="'triton' needs tensors on CUDA"):
        paths.choose(cpu, 100, "triton")
    monkeypatch.setattr(paths, "has_triton", lambda: False)
    assert paths.choose(cuda, 100) == "eager"
    with pytest.raises(InputError, match="Triton is not installed"):
        paths.choose(cuda, 100, "triton")
    monkeypatch.setenv("E2IP_KERNEL", " Compiled ")
    assert paths.choose(cpu, 100) == "compiled"


@pytest.mark.skipif(INTERPRETED, reason="the compiled path")
def test_falls_back_where_compilation_fails(monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(paths, "_compile_failed", set())
    monkeypatch.setattr(compiled, "kernel", broken)
    inputs = leaves(draw(5))
    for _ in range(2):
        outputs = nll_terms(*inputs, UNIT, *DAMPERS, path="compiled")
    expected = nll_terms(*inputs, UNIT, *DAMPERS, path="eager")
    assert_same(list(outputs), list(expected), 0)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "e2ip kernel on cpu: torch.compile failed, continuing with eager (no C++ compiler)"
    ]


class Loss(torch.nn.Module):
    def forward(self, s, t, nu, residual):
        nll, regulariser = nll_terms(s, t, nu, None, residual, UNIT, *DAMPERS, pull_ceiling=4.0)
        return (nll + 0.1 * regulariser).mean()


class Readout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("force_unit", torch.tensor(UNIT))

    def forward(self, s: torch.Tensor, t: torch.Tensor, nu: torch.Tensor, kappa: torch.Tensor):
        return distribution(s, t, nu, kappa, self.force_unit, (14.0, 15.0), (4.0, 5.0))


@pytest.mark.skipif(INTERPRETED, reason="traced code is plain on the CPU")
def test_inside_a_compiled_module():
    s, t, nu, _, residual = leaves(draw(12, torch.float32, coupled=True))
    expected = Loss()(s, t, nu, residual)
    # The graph that a compiler gets, and its gradients, without the wait for one.
    traced = torch.compile(Loss(), backend="aot_eager", fullgraph=True)(s, t, nu, residual)
    torch.testing.assert_close(traced, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(traced, (s, t, nu, residual)),
        torch.autograd.grad(expected, (s, t, nu, residual)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="traced code is plain on the CPU")
@pytest.mark.parametrize("how", ["script", "export", "make_fx"])
def test_traced_readout(how):
    inputs = draw(12, torch.float32)[:4]
    expected = Readout()(*inputs)
    if how == "script":
        traced = torch.jit.script(Readout())
    elif how == "export":
        atoms = torch.export.Dim("atoms", min=2)
        shapes = ({0: atoms},) * 4
        program = torch.export.export(Readout(), tuple(draw(7, torch.float32)[:4]), dynamic_shapes=shapes)
        assert not any("e2ip" in str(n.target) for n in program.graph.nodes)
        traced = program.module()
    else:
        from torch.fx.experimental.proxy_tensor import make_fx

        example = draw(12, torch.float32, seed=1)[:4]
        traced = make_fx(lambda *x: distribution(*x, UNIT, *DAMPERS))(*example)
    for a, b in zip(traced(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="TorchScript takes the plain form")
def test_scripted_loss():
    @torch.jit.script
    def loss(
        s: torch.Tensor, t: torch.Tensor, nu: torch.Tensor, kappa: torch.Tensor, r: torch.Tensor, unit: torch.Tensor
    ):
        return nll_terms(s, t, nu, kappa, r, unit, (14.0, 15.0), (4.0, 5.0), 4.0)

    inputs = draw(5)
    unit = torch.tensor(UNIT, dtype=F64)
    assert_same(list(loss(*inputs, unit)), list(nll_terms(*inputs, unit, *DAMPERS, 4.0)), 1e-12)


@pytest.mark.skipif(INTERPRETED, reason="the compiled path")
def test_compiled_path():
    """The one test that waits for the compiler: loss and distribution, each in one of the evidence modes."""
    inputs = leaves(draw(3000, torch.float32, coupled=True))
    results = []
    for path in ("compiled", "eager"):
        outputs = nll_terms(*inputs, UNIT, *DAMPERS, pull_ceiling=4.0, path=path)
        results.append([*outputs, *gradients(inputs, outputs)])
        with torch.no_grad():
            results[-1] += nll_terms(*[x if x is None else x[:77] for x in inputs], UNIT, *DAMPERS, 4.0, path=path)
    assert "cpu" not in paths._compile_failed
    assert_same(*results, 4e-6)

    clean, bad = draw(300, torch.float32)[:4], draw(300, torch.float32)[:4]
    bad[1][7, 3], bad[3][40] = float("nan"), float("inf")
    with torch.no_grad():
        expected = distribution(*clean, UNIT, *DAMPERS, path="eager")
        found = [distribution(*inputs, UNIT, *DAMPERS, path="compiled") for inputs in (clean, bad)]
    assert "cpu" not in paths._compile_failed
    assert_same(list(found[0]), list(expected), 4e-6)
    others = ~torch.isin(torch.arange(300), torch.tensor([7, 40]))
    assert all(torch.equal(a[others], b[others]) for a, b in zip(*found, strict=True))
    assert found[1][1][~others].isnan().all()  # Σ0

    key = (compiled.Constants(*DAMPERS[0], *DAMPERS[1], 4.0), torch.float32, True)
    assert compiled.kernel("loss_and_gradients", *key) is compiled.kernel("loss_and_gradients", *key)
