"""The trial that a Triton kernel has to pass before its first use.

Here with functions that compute the same in place of the launchers; with the kernels themselves in Triton's
interpreter, when TRITON_INTERPRET=1 (see test_triton.py).
"""

import logging
import types

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import check, distribution, nll_terms, paths, plain
from e2ip_plugins.maths.kernels.autograd import plain_gradients

#: σ_ref, mode and dampers.
REST = (0.0433641, False, (14.0, 15.0), (4.0, 5.0))
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
RESULTS = [(kernel, k) for kernel, names in check._RESULTS.items() for k in range(len(names))]


def plain_launchers() -> types.SimpleNamespace:
    def backward(coefficients, residual, force_unit, by_nll, by_regulariser, constants):
        with torch.no_grad():
            weights = (by_nll, by_regulariser)
            return plain_gradients(plain.nll_terms, (coefficients, residual), force_unit, constants, weights)

    return types.SimpleNamespace(forward=plain.nll_terms, backward=backward, distribution=plain.distribution)


@pytest.fixture
def launchers(monkeypatch, nothing_known):
    """What stands for `triton_launch`; ``auto`` takes it on the CPU."""
    module = paths.triton_launch() if paths.interpreted() else plain_launchers()
    monkeypatch.setattr(paths, "triton_launch", lambda: module)
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    monkeypatch.setattr(paths, "TRITON_DEVICES", ("cpu",))
    return module


@pytest.fixture
def calls(launchers, monkeypatch):
    """Names of the launchers in the order in which they are called."""
    names = []

    def counted(name, launcher):
        def call(*arguments):
            names.append(name)
            return launcher(*arguments)

        return call

    for name in check._RESULTS:
        monkeypatch.setattr(launchers, name, counted(name, getattr(launchers, name)))
    return names


@pytest.fixture
def break_kernel(launchers, monkeypatch):
    """Function that makes one result of a launcher wrong, or the launcher raise an error."""

    def change(kernel, position=0, by=None, error=None):
        launcher = getattr(launchers, kernel)

        def broken(*arguments):
            if error is not None:
                raise error
            results = [x.clone() for x in launcher(*arguments)]
            part = check._parts(kernel, results)[position]
            part.copy_(by(part))
            return results

        monkeypatch.setattr(launchers, kernel, broken)

    return change


@pytest.fixture
def evaluate(draw, leaves, gradients):
    """Function that gives loss, gradients and distribution of the same atoms."""

    def all_results(path=None):
        inputs = leaves(draw(20))
        outputs = nll_terms(*inputs, *REST, path=path)
        return [*outputs, *gradients(inputs, outputs), *distribution(inputs[0], *REST, path=path)]

    return all_results


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", list(check._RESULTS))
def test_right_kernels_pass(launchers, kernel, dtype):
    assert check.failure(launchers, kernel, CPU, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "position"), RESULTS)
def test_every_wrong_result_is_found(launchers, break_kernel, kernel, position, dtype):
    wrong = 1e-3 if dtype == torch.float32 else 1e-8
    break_kernel(kernel, position, lambda x: x * (1 + wrong))
    error = check.failure(launchers, kernel, CPU, dtype)
    assert str(error).startswith(check._RESULTS[kernel][position] + " is off by ")


def test_nan_is_wrong(launchers, break_kernel):
    break_kernel("forward", 1, lambda x: torch.cat([x[:-1], x[-1:] * float("nan")]))
    assert "regulariser is off by nan in torch.float32" in str(check.failure(launchers, "forward", CPU, torch.float32))


def test_atoms_cover_what_kernels_branch_on():
    coefficients, residual, unit = check._arguments("forward", False, CPU, torch.float64)
    (s, nu, kappa), t, size = coefficients[:, :3].unbind(1), coefficients[:, 3:], residual.norm(dim=1) / unit
    assert set(zip((s.abs() > 14.0).tolist(), (t.norm(dim=1) > 4.0).tolist(), strict=True)) == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert (t == 0).all(1).any() and (size == 0).any() and size.max() > 100 and ((size > 0) & (size < 0.1)).any()
    assert 24 <= len(s) <= 99 and nu.min() < 0 < nu.max() and kappa.min() < 0 < kappa.max()
    assert check._arguments("forward", True, CPU, torch.float64)[0][:, 2].isnan().all()


def test_once_per_process(calls, evaluate):
    evaluate()
    # Each in both evidence modes, then the call itself.
    assert sorted(calls) == sorted(3 * ["forward", "backward", "distribution"])
    calls.clear()
    evaluate()
    assert calls == ["forward", "backward", "distribution"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"by": lambda x: x * 1.01}, "{} is off by"),
        ({"error": RuntimeError("Failed to find C compiler\nlong story")}, "Failed to find C compiler)"),
        ({"error": AssertionError()}, "(AssertionError)"),
    ],
)
@pytest.mark.parametrize("kernel", list(check._RESULTS))
def test_a_broken_kernel_means_eager_with_one_warning(
    break_kernel, evaluate, kernel, fault, reason, caplog, assert_same
):
    expected = evaluate("eager")
    break_kernel(kernel, **fault)
    with caplog.at_level(logging.WARNING):
        found = [evaluate() for _ in range(2)]
    for results in found:
        assert_same(results, expected, 1e-12)
    (message,) = warnings(caplog)
    assert f"on cpu: Triton's {kernel} kernel fails its check, continuing with eager" in message
    assert reason.format(check._RESULTS[kernel][0]) in message


def test_a_broken_kernel_leaves_the_others_alone(break_kernel, calls, evaluate):
    break_kernel("backward", error=RuntimeError("no"))
    evaluate()
    calls.clear()
    evaluate()
    nll_terms(*check._arguments("forward", False, CPU, torch.float64), *REST[1:])
    assert calls == ["distribution", "forward"]


def test_a_broken_kernel_that_was_asked_for_is_an_error(break_kernel, evaluate, caplog):
    cause = RuntimeError("no assembler")
    break_kernel("forward", error=cause)
    for _ in range(2):
        with pytest.raises(InputError, match=r"forward kernel fails its check on cpu \(no assembler\)") as caught:
            evaluate("triton")
        assert caught.value.__cause__ is cause
    assert warnings(caplog) == []


@pytest.mark.skipif(paths.interpreted(), reason="no kernel runs to its end")
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), torch.cuda.OutOfMemoryError("full")])
@pytest.mark.parametrize("kernel", list(check._RESULTS))
def test_errors_of_the_real_call_reach_the_caller(break_kernel, evaluate, kernel, error, caplog):
    evaluate()
    break_kernel(kernel, error=error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            evaluate()
    assert warnings(caplog) == []


def test_a_full_memory_says_nothing_about_a_kernel(break_kernel, evaluate):
    break_kernel("forward", error=torch.cuda.OutOfMemoryError("full"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluate()
    assert check._outcomes == {}


def test_the_modes_of_the_caller_are_not_those_of_the_check(launchers):
    def refuse(_):
        raise AssertionError("a tensor was saved")

    with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        for kernel in check._RESULTS:
            assert check.failure(launchers, kernel, CPU, torch.float32) is None
    assert len(check._outcomes) == 3


def test_no_check_while_a_graph_is_captured(calls, launchers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert check.failure(launchers, "forward", torch.device("cuda", 0), torch.float32) is None
    assert calls == [] and check._outcomes == {}


@pytest.mark.skipif(paths.interpreted(), reason="no kernel runs")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_no_check_while_something_traces(calls, draw, monkeypatch):
    from torch.fx.experimental.proxy_tensor import make_fx

    # Not even operators, so that this runs without Triton.
    monkeypatch.setattr(paths, "has_operators", lambda: False)
    monkeypatch.setenv("E2IP_KERNEL", "triton")
    inputs = draw(4)

    def both(*inputs):
        return *nll_terms(*inputs, *REST), *distribution(inputs[0], *REST)

    make_fx(both)(*inputs)
    torch.func.jvp(both, tuple(inputs), tuple(inputs))
    torch.jit.trace(both, tuple(inputs), check_trace=False)
    torch.compile(both, backend="aot_eager", fullgraph=True)(*inputs)
    assert calls == [] and check._outcomes == {}


@pytest.mark.skipif(not paths.interpreted(), reason="changes what runs on the GPU")
@pytest.mark.parametrize("kernel", list(check._RESULTS))
def test_a_wrong_constant_in_the_kernel_is_found(launchers, monkeypatch, kernel):
    import triton.language as tl

    from e2ip_plugins.maths.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "_MIN_NU", tl.constexpr(5.01))
    assert "is off by" in str(check.failure(launchers, kernel, CPU, torch.float32))
