"""The Triton kernels built for a GPU that need not be there: what they spill, and how fast they can issue."""

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from e2ip_plugins.maths.kernels import triton_kernels, triton_launch
from e2ip_plugins.maths.kernels.constants import Constants

#: Kernels of each pass of `kernel.py`.
KERNELS = {
    "map": ("distribution_kernel",),
    "forward": ("forward_kernel",),
    "forward+backward": ("forward_kernel", "backward_kernel"),
}

#: Warp instructions that a multiprocessor starts per cycle, since compute capability 7.0.
_ISSUED_PER_CYCLE, _WARP = 4, 32


def build(name: str, double: bool, constants: Constants, capability: int = 90):
    """A kernel as Triton compiles it, with the assembler's output in ``asm``."""
    kernel = getattr(triton_kernels, name)
    fixed = triton_launch.fixed(constants, double) | {"REGULARISER": True}
    pointer = "*fp64" if double else "*fp32"
    signature = {
        argument: "constexpr" if argument in fixed else pointer if argument.endswith("_ptr") else "i32"
        for argument in kernel.arg_names
    }
    values = {(k,): fixed[argument] for k, argument in enumerate(kernel.arg_names) if argument in fixed}
    options = {"num_warps": 4, **triton_launch.FUSION}
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(built, folder: Path) -> int | None:
    """Bytes that the registers did not hold, stored and loaded; None where no assembler here can tell."""
    (folder / "kernel.ptx").write_text(built.asm["ptx"])
    architecture = re.search(r"\.target (\w+)", built.asm["ptx"]).group(1)
    # Of the assemblers that Triton brings, not all know the version of its own PTX.
    for ptxas in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
        command = [ptxas, "-v", f"--gpu-name={architecture}", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return None


def instructions(built) -> int:
    """Machine instructions of a kernel, padding at its end not counted."""
    lines = [line for line in built.asm["sass"].splitlines() if line.endswith(";")]
    return sum(not line.endswith("NOP;") for line in lines)


def issue_bound(kind: str, double: bool, constants: Constants, capability: int, processors: int, hertz: float) -> float:
    """Seconds per atom that a pass needs to start its instructions, one atom per thread."""
    needed = sum(instructions(build(name, double, constants, capability)) for name in KERNELS[kind])
    return needed / (_WARP * _ISSUED_PER_CYCLE * processors * hertz)
