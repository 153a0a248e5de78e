"""The Triton kernels: every test of the fused loss in Triton's interpreter, and a build for a GPU without one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from e2ip_plugins.maths.kernels.constants import Constants

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
DAMPERS = ((14.0, 15.0), (4.0, 5.0))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_in_the_interpreter():
    # In a process of its own: Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    files = [str(HERE / name) for name in ("test_values.py", "test_accuracy.py", "test_check.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize("coupled", [False, True])
def test_operators_on_the_cpu(coupled):
    from e2ip_plugins.maths.kernels import paths, plain

    assert paths.has_operators()

    constants = Constants(coupled, *DAMPERS)
    gen = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=gen).requires_grad_() for shape in ((4, 8), (4, 3))]
    unit = torch.tensor(0.5, dtype=torch.float64)

    def operator(*x):
        return torch.ops.e2ip.nll_terms(*x, unit.expand(len(x[0])), *constants)

    expected = plain.nll_terms(*inputs, unit, constants)
    for a, b in zip(operator(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(operator, inputs)
    one = [x[:1].detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(operator, one)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.e2ip.nll_terms.default, (*inputs, unit.expand(4), *constants), test_utils=checks)
    flattening = torch.tensor([0.0, 0.3, 0.9, 1.0], dtype=torch.float64, requires_grad=True)
    arguments = (inputs[0], flattening, unit.expand(4), *constants)
    torch.library.opcheck(torch.ops.e2ip.distribution.default, arguments, test_utils=checks)

    def spread(*x):
        return torch.ops.e2ip.distribution(*x, unit.expand(len(x[0])), *constants)[:4]

    assert torch.autograd.gradcheck(spread, (inputs[0], flattening))
    assert torch.autograd.gradgradcheck(spread, (one[0], flattening.detach()[1:2].requires_grad_()))


def test_what_traces_for_a_gpu_gets_operators_where_triton_is_asked_for(monkeypatch):
    """As in NequIP's compilation and export, which trace with make_fx first."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from e2ip_plugins.maths.kernels import distribution, nll_terms

    def readout(coefficients, residual, unit):
        nll, _ = nll_terms(coefficients, residual, unit, False, *DAMPERS)
        return nll, *distribution(coefficients, unit, False, *DAMPERS)

    def operators(device):
        # Fake tensors need no GPU.
        with FakeTensorMode():
            inputs = [torch.empty(shape, device=device) for shape in ((4, 8), (4, 3), ())]
            graph = make_fx(readout)(*inputs).graph
        return [str(node.target) for node in graph.nodes if "e2ip" in str(node.target)]

    monkeypatch.setenv("E2IP_KERNEL", "triton")
    assert operators("cuda") == ["e2ip.nll_terms.default", "e2ip.distribution.default"]
    assert operators("cpu") == []


def test_operators_hand_over_no_expanded_tensors(monkeypatch):
    """σ_ref and gradients of sums are expanded, and Inductor fails on a kernel's argument that is."""
    from torch._subclasses import FakeTensorMode

    from e2ip_plugins.maths.kernels import paths

    handed = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **_: handed.extend(x for x in arguments if isinstance(x, torch.Tensor))

    assert paths.has_operators()
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: Recorder())
    with FakeTensorMode():
        # Nobody else has as many atoms: torch keeps the outputs for fake tensors.
        coefficients, one = torch.empty(37, 8), torch.empty(()).expand(37)
        torch.ops.e2ip.distribution(coefficients, one, one, False, *DAMPERS)
        torch.ops.e2ip.nll_terms_backward(coefficients, coefficients[:, :3], one, one, one, False, *DAMPERS)
    assert len(handed) == 8 + 7 and all(x.is_contiguous() for x in handed)


def test_torch_compile_takes_the_operators_in(monkeypatch):
    """In one graph, with gradients; here as for a GPU, but with the plain form inside the operators."""
    from e2ip_plugins.maths.kernels import nll_terms, paths

    def loss(*inputs):
        return nll_terms(*inputs, 0.5, False, *DAMPERS)[0].sum()

    def backend(module, _):
        found.extend(str(node.target) for node in module.graph.nodes if "e2ip" in str(node.target))
        return module

    found, gen = [], torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=gen).requires_grad_() for shape in ((4, 8), (4, 3))]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    monkeypatch.setattr(paths, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setenv("E2IP_KERNEL", "triton")
    grads = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*inputs), inputs)
    assert found == ["e2ip.nll_terms"]
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["forward", "backward", "distribution"])
def test_passes_its_check_on_a_gpu(kernel, dtype):
    from e2ip_plugins.maths.kernels import check, paths

    assert check.failure(paths.triton_launch(), kernel, torch.device("cuda", 0), dtype) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_launches_on_a_gpu():
    """One kernel for the distribution, one each way for the loss; nothing makes the host wait."""
    from torch.profiler import ProfilerActivity, profile

    from e2ip_plugins.maths.kernels import distribution, nll_terms

    inputs = [torch.randn(shape, device="cuda").requires_grad_() for shape in ((100, 8), (100, 3))]
    unit = torch.tensor(0.5, device="cuda")

    def map_alone():
        with torch.no_grad():
            distribution(inputs[0], unit, False, *DAMPERS, path="triton")

    def loss():
        nll, _ = nll_terms(*inputs, unit, False, *DAMPERS, path="triton")
        torch.autograd.grad(nll, inputs, torch.ones_like(nll))

    for function, kernels in ((map_alone, {"distribution_kernel"}), (loss, {"forward_kernel", "backward_kernel"})):
        function()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ours = [event.key for event in profiled.key_averages() if event.key.endswith("_kernel")]
        assert kernels <= set(ours)
        # For the loss, also the vector of ones.
        assert sum(event.count for event in profiled.key_averages() if event.device_type.name == "CUDA") <= 3


@pytest.fixture(scope="module")
def triton_build(load_script):
    """benchmarks/triton_build.py as a module."""
    return load_script("benchmarks/triton_build.py")


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel", "distribution_kernel"])
def test_builds_for_a_gpu(triton_build, name, double, tmp_path):
    """Compute capability 9.0, without a GPU: float64 constants keep their digits, nothing is spilled to the stack."""
    built = triton_build.build(name, double, Constants(False, *DAMPERS))
    # 1/24! as a double.
    assert ("0d3AFF2CF01972F578" in built.asm["ptx"]) == double
    spilled = triton_build.spilled_bytes(built, tmp_path)
    if spilled is None:
        pytest.skip("no assembler here tells of spilled registers")
    assert spilled == 0


def test_issue_bound(triton_build):
    """An H200 (132 multiprocessors, 1.98 GHz) cannot need more than twice the memory floor for a million atoms."""
    constants = Constants(False, *DAMPERS)
    bound = {kind: triton_build.issue_bound(kind, False, constants, 90, 132, 1.98e9) for kind in triton_build.KERNELS}
    assert 0 < bound["map"] < bound["forward"] < bound["forward+backward"] < 2 * 148 / 4.3e12


@pytest.mark.nightly
def test_benchmark_in_the_interpreter(tmp_path):
    script = ROOT / "benchmarks/kernel.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path / "kernel.json")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    report = json.loads((tmp_path / "kernel.json").read_text())["cpu"]
    assert [block["pass"] for block in report["blocks"]] == ["map", "forward", "forward+backward"]
    assert all({"paper", "eager", "triton"} <= set(block["results"]) for block in report["blocks"])
    assert "| triton |" in done.stdout
