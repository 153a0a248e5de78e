"""The Triton kernels built for a GPU that need not exist here: what they spill, and how fast they can issue."""

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from e2ip_plugins.maths.kernels import triton_kernels, triton_launch
from e2ip_plugins.maths.kernels.constants import Constants

#: Kernels of each pass of `kernel.py`.
_FORWARD = ("forward_kernel",)
KERNELS = {"map": ("distribution_kernel",), "forward": _FORWARD, "forward+backward": (*_FORWARD, "backward_kernel")}
#: Warp instructions that a multiprocessor starts per cycle, since compute capability 7.0; threads of a warp.
_ISSUED_PER_CYCLE, _WARP = 4, 32


def build(name: str, double: bool, constants: Constants, capability: int = 90) -> CompiledKernel:
    """Return a kernel as Triton compiles it, with the assembler's output in ``asm``."""
    kernel = getattr(triton_kernels, name)
    fixed = triton_launch.fixed(constants, double) | {"REGULARISER": True}
    types = {True: "*fp64" if double else "*fp32", False: "i32"}
    signature = {name: "constexpr" if name in fixed else types[name.endswith("_ptr")] for name in kernel.arg_names}
    values = {(k,): fixed[argument] for k, argument in enumerate(kernel.arg_names) if argument in fixed}
    options = {"num_warps": 4, **triton_launch.FUSION}
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)


def spilled_bytes(built: CompiledKernel, folder: Path) -> int | None:
    """Return the bytes that registers could not hold, stored and loaded; None where no assembler here can tell."""
    (folder / "kernel.ptx").write_text(built.asm["ptx"])
    architecture = re.search(r"\.target (\w+)", built.asm["ptx"]).group(1)
    # Of the assemblers that Triton brings, not all know the version of its own PTX.
    for ptxas in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
        command = [ptxas, "-v", f"--gpu-name={architecture}", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return None


def instructions(built: CompiledKernel) -> int:
    """Return the number of machine instructions of a kernel, without the padding at its end."""
    lines = [line for line in built.asm["sass"].splitlines() if line.endswith(";")]
    return sum(not line.endswith("NOP;") for line in lines)


def issue_bound(kind: str, double: bool, constants: Constants, capability: int, processors: int, hertz: float) -> float:
    """Return seconds per atom that a pass needs to start its instructions, one atom per thread."""
    needed = sum(instructions(build(name, double, constants, capability)) for name in KERNELS[kind])
    return needed / (_WARP * _ISSUED_PER_CYCLE * processors * hertz)
