"""The Triton kernels: every test of the fused loss in Triton's interpreter, and a build for a GPU without one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_in_the_interpreter():
    # In a process of its own: Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    files = [str(HERE / name) for name in ("test_fused.py", "test_fused_accuracy.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_operators_on_the_cpu():
    from e2ip_plugins.fused import plain, triton_kernels
    from e2ip_plugins.fused.settings import Constants

    constants = Constants(14.0, 15.0, 4.0, 5.0)
    gen = torch.Generator().manual_seed(0)
    shapes = ((4,), (4, 5), (4,), (4,), (4, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=gen).requires_grad_() for shape in shapes]
    unit = torch.tensor(0.5, dtype=torch.float64)

    def operator(*x):
        return triton_kernels.traced_nll_terms(*x, unit, constants)

    expected = plain.nll_terms(*inputs, unit, constants[:2], constants[2:4])
    for a, b in zip(operator(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(operator, inputs)
    one = [x[:1].detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(operator, one)
    op, _ = triton_kernels._operators()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (*inputs, unit.expand(4), *constants), test_utils=checks)


@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel", "_distribution_kernel"])
def test_builds_for_a_gpu(name):
    """Compute capability 9.0, without a GPU: float64 constants keep their digits, nothing is spilled to the stack."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from e2ip_plugins.fused import triton_kernels

    kernel = getattr(triton_kernels, name)
    constants = {"S_KNEE": 14.0, "S_CEILING": 15.0, "T_KNEE": 4.0, "T_CEILING": 5.0, "PULL_CEILING": 4.0}
    constants |= {"COUPLED": False, "REGULARISER": True, "DOUBLE": True, "BLOCK": triton_kernels.BLOCK}
    signature, fixed = {}, {}
    for k, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], fixed[(k,)] = "constexpr", constants[argument]
        else:
            signature[argument] = "*fp64" if argument.endswith("_ptr") else "i32"
    options = {"num_warps": 4, **triton_kernels._FUSION}
    built = triton_kernels.triton.compile(
        ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options
    )
    # 1/24! as a double.
    assert "0d3AFF2CF01972F578" in built.asm["ptx"]


def test_benchmark_in_the_interpreter(tmp_path):
    script = HERE.parent.parent / "benchmarks" / "kernel.py"
    command = [
        sys.executable,
        str(script),
        "--quick",
        "--pipelines",
        "paper",
        "eager",
        "triton",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    report = json.loads((tmp_path / "kernel.json").read_text())
    assert [set(block["results"]) for block in report["blocks"]] == [{"paper", "eager", "triton"}] * 3
    assert "| triton |" in (tmp_path / "kernel.md").read_text()
