"""The fused loss and distribution: one result on every path, right derivatives, well-behaved on bad input.

Runs for Triton too, in its interpreter, when TRITON_INTERPRET=1 (see test_triton.py).
"""

import doctest

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import api, distribution, inference, nll_terms, plain
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.spd import split_trace, sym6_to_matrix

F64 = torch.float64
UNIT = 0.0433641
DAMPERS = ((14.0, 15.0), (4.0, 5.0))
#: σ_ref, mode and dampers; as the composition takes them.
REST = (UNIT, False, *DAMPERS)
COMPOSED = (torch.tensor(UNIT, dtype=F64), Constants(False, *DAMPERS))


def test_examples_of_the_documentation(path, monkeypatch):
    monkeypatch.setenv("E2IP_KERNEL", path)
    done = doctest.testmod(api)
    assert done.attempted >= 6 and done.failed == 0


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
    return [torch.cat([torch.stack([s, nu, kappa], 1), t], 1), residual]


@pytest.mark.parametrize("per_atom_unit", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equals_the_composition(path, dtype, coupled, per_atom_unit, draw, leaves, gradients, assert_same):
    unit = torch.full((), UNIT, dtype=F64)
    ours, theirs = leaves(draw(60, dtype)), leaves(draw(60, F64))
    if per_atom_unit:
        unit = UNIT * torch.linspace(1, 3, 60, dtype=F64)
    fused = nll_terms(*ours, unit.to(dtype), coupled, *DAMPERS, path=path)
    composed = plain.nll_terms(*theirs, unit, Constants(coupled, *DAMPERS))
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    assert all(x.dtype == dtype for x in fused)
    assert_same([*fused, *gradients(ours, fused)], [*composed, *gradients(theirs, composed)], tolerance)
    with torch.no_grad():
        fused = distribution(ours[0], unit.to(dtype), coupled, *DAMPERS, path=path)
        composed = plain.distribution(theirs[0], theirs[0].new_zeros(60), unit, Constants(coupled, *DAMPERS))
    assert_same(list(fused), list(composed), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_flattening(path, dtype, draw, leaves):
    """The damped traceless part T of log Σ0 becomes T/√(1 + f ‖T‖²), in value and gradient; the trace stays."""
    coefficients = leaves(draw(60, dtype))[0]
    flattening = torch.linspace(0.0, 4.0, 60, dtype=dtype).requires_grad_()
    log_sigma0, sigma0, *_ = distribution(coefficients, *REST, path=path, flattening=flattening)
    whole = distribution(coefficients, *REST, path=path)[0].detach()
    mean, traceless = split_trace(whole.double())
    expected_mean, expected = split_trace(log_sigma0.detach().double())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(expected_mean, mean, **tolerance)
    norm2 = 2.0 * traceless.square().sum(-1) - traceless[:, :3].square().sum(-1)
    shape = 1.0 / (1.0 + flattening.detach().double() * norm2).sqrt()
    torch.testing.assert_close(expected, shape.unsqueeze(-1) * traceless, **tolerance)
    matrix = sym6_to_matrix(log_sigma0.detach().double())
    torch.testing.assert_close(sym6_to_matrix(sigma0.detach().double()), torch.matrix_exp(matrix), **tolerance)
    (gradient,) = torch.autograd.grad(log_sigma0[:, 3].sum(), flattening)
    torch.testing.assert_close(gradient.double(), -0.5 * shape**3 * norm2 * traceless[:, 3], **tolerance)


@pytest.mark.parametrize("coupled", [False, True])
def test_gradcheck_and_gradgradcheck(path, coupled, leaves):
    def function(*inputs):
        return nll_terms(*inputs, UNIT, coupled, *DAMPERS, path=path)

    inputs = leaves(special_points())
    assert torch.autograd.gradcheck(function, inputs, eps=1e-7, rtol=1e-6, atol=1e-5, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, eps=1e-7, rtol=1e-5, atol=1e-3, fast_mode=True)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_coupled_evidence_does_not_read_kappa(path, value, draw, leaves, gradients):
    results = []
    for kappa in (1.0, value):
        coefficients, residual = draw(5)
        coefficients[:, 2] = kappa
        inputs = leaves([coefficients, residual])
        outputs = nll_terms(*inputs, UNIT, True, *DAMPERS, path=path)
        spread = distribution(inputs[0], UNIT, True, *DAMPERS, path=path)
        by_spread = torch.autograd.grad(sum(x.sum() for x in spread), inputs[0])[0]
        grads = gradients(inputs, outputs)
        assert (grads[0][:, 2] == 0).all() and (by_spread[:, 2] == 0).all()
        results.append([x.detach() for x in (*outputs, *grads, *spread, by_spread)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_gradients_at_zero_residual(path, leaves, gradients):
    coefficients, residual = special_points()
    inputs = leaves([coefficients, torch.zeros_like(residual)])
    outputs = nll_terms(*inputs, *REST, path=path)
    composed = leaves(inputs)
    theirs = plain.nll_terms(*composed, *COMPOSED)
    for a, b in zip(gradients(inputs, outputs), gradients(composed, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    outputs = nll_terms(*inputs, *REST, path=path)
    first = torch.autograd.grad(outputs[0].sum(), inputs[1], create_graph=True)[0]
    assert torch.isfinite(torch.autograd.grad(first.sum(), inputs[1])[0]).all()


def test_an_input_made_of_another_one_counts_once(path, draw, leaves, assert_same):
    (coefficients,) = leaves(draw(5)[:1])

    def gradient(function, *options):
        outputs = function(coefficients, torch.tanh(coefficients[:, :3]) + coefficients[:, 3:6], *options)
        first = torch.autograd.grad(outputs[0].sum(), coefficients, create_graph=True)[0]
        return first, torch.autograd.grad(first.sum(), coefficients)[0]

    ours = gradient(lambda *a: nll_terms(*a, path=path), *REST)
    theirs = gradient(plain.nll_terms, *COMPOSED)
    assert_same(list(ours), list(theirs), 1e-12)


def test_forward_derivatives(path, draw):
    inputs = tuple(draw(4))
    tangents = tuple(torch.ones_like(x) for x in inputs)

    def nll(*x):
        return nll_terms(*x, *REST, path=path)[0]

    _, tangent = torch.func.jvp(nll, inputs, tangents)
    step = 1e-6
    moved = [nll(*(x + sign * step for x in inputs)) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (moved[0] - moved[1]) / (2 * step), rtol=1e-5, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(x, y) for x, y in zip(inputs, tangents, strict=True)]
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(nll(*dual)).tangent, tangent)
    one = torch.func.vmap(lambda *x: nll(*(y[None] for y in x))[0])(*inputs)
    torch.testing.assert_close(one, nll(*inputs))


@pytest.mark.parametrize("where", ["s", "raw_nu", "raw_kappa", "t1", "t5", "residual"])
@pytest.mark.parametrize("composed", [False, True], ids=["fused", "plain"])
def test_bad_atoms_stay_alone(path, composed, where, draw, leaves, gradients):
    clean, bad = leaves(draw(9, torch.float32)), draw(9, torch.float32)
    position, column = (1, 0) if where == "residual" else (0, api.COLUMNS.index(where))
    atoms = torch.tensor([2, 4, 7])
    bad[position][atoms, column] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    bad = leaves(bad)
    others = torch.ones(9, dtype=torch.bool).index_fill(0, atoms, False)
    results = []
    for inputs in (clean, bad):
        if composed:
            unit = torch.tensor(UNIT)
            outputs = plain.nll_terms(*inputs, unit, Constants(False, *DAMPERS))
            spread = plain.distribution(inputs[0], inputs[0].new_zeros(9), unit, Constants(False, *DAMPERS))
        else:
            outputs = nll_terms(*inputs, *REST, path=path)
            spread = distribution(inputs[0], *REST, path=path)
        results.append([x.detach() for x in (*outputs, *gradients(inputs, outputs), *spread)])
    for a, b in zip(*results, strict=True):
        # To rounding: vectorised and remaining elements may round differently.
        torch.testing.assert_close(a[others], b[others], rtol=1e-6, atol=1e-12)
    nll, _, *grads = results[1][:4]
    lost = [2, 4, 7] if position == 0 else [2]
    assert torch.isnan(nll[lost]).all() and torch.isnan(grads[position][lost, column]).all()
    if position == 0:
        assert torch.isnan(results[1][5][lost]).all()  # Σ0


def test_below_every_knee_nothing_is_damped(path, draw, leaves, assert_same):
    """The eager path leaves the dampers out there; one atom on a plateau must not change the others."""
    inputs = [x / 10 for x in draw(30)]
    assert inputs[0][:, 0].abs().max() < 14 and inputs[0][:, 3:].abs().max() < 4 / 5**0.5
    further = [torch.cat([x, torch.full_like(x[:1], 20.0)]) for x in inputs]
    results = []
    for given in (inputs, further):
        given, theirs = leaves(given), leaves(given)
        outputs = nll_terms(*given, *REST, path=path)
        composed = plain.nll_terms(*theirs, *COMPOSED)
        grads = torch.autograd.grad(outputs[0].sum(), given)
        assert_same([*outputs, *grads], [*composed, *torch.autograd.grad(composed[0].sum(), theirs)], 1e-13)
        with torch.no_grad():
            outputs = [*outputs, *grads, *distribution(given[0], *REST, path=path)]
        results.append([x.detach() for x in outputs])
    assert results[0][-1].sum() == 0 and results[1][-1].sum() == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b[:30], rtol=1e-14, atol=1e-15)


def test_what_inference_keeps_is_of_use_to_autograd(draw, leaves, gradients):
    """Tables are made once, whatever the mode of the first call; results are nobody else's."""
    inference._tables.cache_clear()
    arguments = torch.full((), UNIT, dtype=F64), True, *DAMPERS
    coefficients, residual = (0.1 * x for x in draw(4, F64))  # below every knee
    with torch.inference_mode():
        expected = distribution(coefficients, *arguments, path="eager")
        expected[4].fill_(7.0)
    recorded = leaves([coefficients, residual])
    found = distribution(recorded[0], *arguments, path="eager")
    assert torch.equal(found[1], expected[1]) and not found[4].any()
    assert torch.autograd.grad(found[1].sum(), recorded[0])[0].any()
    assert all(gradient.any() for gradient in gradients(recorded, nll_terms(*recorded, *arguments, path="eager")))


@pytest.mark.parametrize("size", [1e19, 1e160, 1e305])
def test_no_finite_coefficient_overflows(path, size, draw, assert_same):
    coefficients = draw(5)[0]
    coefficients[2, 3:], coefficients[3, 0] = torch.tensor([1.0, 0.5, -0.3, 0.1, 0.0], dtype=F64) * size, -size
    ours = distribution(coefficients, *REST, path=path)
    theirs = plain.distribution(coefficients, torch.zeros(len(coefficients)).to(coefficients), *COMPOSED)
    assert_same(list(ours), list(theirs), 1e-13)
    assert ours[-1][2:4].tolist() == [1, 1]


def test_debug_mode_names_column_and_atoms(path, monkeypatch, draw):
    coefficients, residual = draw(20)
    coefficients[[3, 7], 5] = float("nan")
    nll_terms(coefficients, residual, *REST, path=path)
    monkeypatch.setenv("E2IP_DEBUG", "1")
    with pytest.raises(InputError, match=r"^coefficient t3 is NaN or infinite for 2 of 20 atoms: 3, 7"):
        nll_terms(coefficients, residual, *REST, path=path)
    with pytest.raises(InputError, match=r"^coefficient t3 is NaN"):
        distribution(coefficients, *REST, path=path)
    coefficients, residual = draw(20)
    nll_terms(coefficients, residual, *REST, path=path)
    residual[1, 1] = float("inf")
    with pytest.raises(InputError, match=r"^residual is NaN or infinite for 1 of 20 atoms: 1 "):
        nll_terms(coefficients, residual, *REST, path=path)
    coefficients[4, 2] = float("inf")
    distribution(coefficients, UNIT, True, *DAMPERS, path=path)
    with pytest.raises(InputError, match=r"^coefficient raw_kappa is NaN"):
        distribution(coefficients, *REST, path=path)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("count", [0, 1])
def test_few_atoms(path, count, debug, monkeypatch, draw, leaves, gradients):
    monkeypatch.setenv("E2IP_DEBUG", debug)
    inputs = leaves(draw(count))
    outputs = nll_terms(*inputs, *REST, path=path)
    assert outputs[0].shape == outputs[1].shape == (count,)
    grads = gradients(inputs, outputs)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    with torch.no_grad():
        shapes = [tuple(x.shape) for x in distribution(inputs[0], *REST, path=path)]
    assert shapes == [(count, 6), (count, 6), (count,), (count,), (count,)]


def test_not_contiguous(path, draw, leaves, gradients, assert_same):
    inputs = draw(30)
    strided = [torch.stack([x, -x], -1)[..., 0] for x in inputs]
    transposed = [x.t().contiguous().t() for x in inputs]
    results = []
    for tensors in (leaves(inputs), [x.requires_grad_() for x in strided], [x.requires_grad_() for x in transposed]):
        outputs = nll_terms(*tensors, *REST, path=path)
        results.append([*outputs, *gradients(tensors, outputs)])
    assert_same(results[0], results[1], 1e-14)
    assert_same(results[0], results[2], 1e-14)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(path, half, draw, leaves, gradients, assert_same):
    inputs = leaves(draw(30, half))
    outputs = nll_terms(*inputs, *REST, path=path)
    single = leaves([x.float() for x in inputs])
    expected = nll_terms(*single, *REST, path=path)
    assert_same(list(outputs), list(expected), 1e-7)
    grads = gradients(inputs, outputs)
    assert all(x.dtype == half for x in grads) and outputs[0].dtype == torch.float32
    for a, b in zip(grads, gradients(single, expected), strict=True):
        torch.testing.assert_close(a, b.to(half), rtol=1e-2, atol=1e-3)


def test_mixed_dtypes_are_promoted(path, draw, leaves, gradients):
    coefficients, residual = draw(10)
    inputs = leaves([coefficients.float(), residual])
    outputs = nll_terms(*inputs, *REST, path=path)
    assert outputs[0].dtype == F64
    assert [x.dtype for x in gradients(inputs, outputs)] == [x.dtype for x in inputs]


def test_bad_arguments(path, monkeypatch, draw):
    coefficients, residual = inputs = draw(4)
    for bad, message in (
        ((coefficients[:, :7], residual), r"coefficients has shape \(4, 7\), expected \(N, 8\)"),
        ((coefficients[0], residual), r"coefficients has shape \(8,\)"),
        ((coefficients[0, 0], residual), r"coefficients has shape \(\)"),
        ((coefficients, residual[:3]), r"residual has shape \(3, 3\), expected \(N, 3\) with the same N"),
    ):
        with pytest.raises(InputError, match=message):
            nll_terms(*bad, *REST, path=path)
    with pytest.raises(InputError, match=r"path is 'fast'; choose from: auto, eager, triton$"):
        nll_terms(*inputs, *REST, path="fast")
    with pytest.raises(InputError, match="path is 'compiled'; choose from"):
        nll_terms(*inputs, *REST, path="compiled")
    monkeypatch.setenv("E2IP_KERNEL", "fast")
    with pytest.raises(InputError, match="E2IP_KERNEL is 'fast'"):
        nll_terms(*inputs, *REST)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("per_atom_unit", [False, True])
def test_more_atoms_than_fit_the_cache(coupled, per_atom_unit, draw, leaves):
    """The eager path takes chunks of 8192 atoms; two halves that fit give what belongs to each atom."""
    n = inference.CHUNK + 1500
    inputs = draw(n)
    unit = UNIT * torch.linspace(1, 3, n, dtype=F64) if per_atom_unit else torch.tensor(UNIT, dtype=F64)

    def results(part):
        given = leaves([x[part] for x in inputs])
        rest = (unit[part] if per_atom_unit else unit, coupled, *DAMPERS)
        loss = nll_terms(*given, *rest, path="eager")
        weights = torch.linspace(1, 2, n, dtype=F64)[part]
        by_loss = torch.autograd.grad((weights * (loss[0] + 0.3 * loss[1])).sum(), given)
        spread = distribution(given[0], *rest, path="eager")
        by_spread = torch.autograd.grad(
            sum(x.flatten(1).sum(1) if x.dim() > 1 else x for x in spread) @ weights, given[:1]
        )
        with torch.no_grad():
            unrecorded = nll_terms(*given, *rest, path="eager")
        return [*loss, *by_loss, *spread, *by_spread, *unrecorded]

    whole, halves = results(slice(None)), [results(slice(0, n // 2)), results(slice(n // 2, n))]
    for found, *expected in zip(whole, *halves, strict=True):
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-11, atol=1e-13)
