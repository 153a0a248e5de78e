"""The Triton kernels built for a GPU that need not exist here: what they spill, and how fast they can issue."""

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from e2ip_plugins.maths.kernels import triton_kernels, triton_launch
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.readout.kernels import fused, trial
from e2ip_plugins.readout.kernels import triton_launch as readout_launch

#: Kernels of each pass of `kernel.py`.
_FORWARD = ("forward_kernel",)
KERNELS = {"map": ("distribution_kernel",), "forward": _FORWARD, "forward+backward": (*_FORWARD, "backward_kernel")}
#: Kernels of the readout that are built.
READOUT_KERNELS = ("atom_kernel", "pair_kernel", "neighbour_kernel", "output_kernel", "envelope_kernel")
#: Pointers to other numbers than the model's.
_TYPES = dict.fromkeys(("species_ptr", "heads_ptr", "axes_ptr", "sender_ptr", "receiver_ptr"), "*i64")
_TYPES |= dict.fromkeys(("columns_ptr", "vector_columns_ptr", "tensor_columns_ptr", "power_ptr"), "*i32")
_TYPES |= {"fitted_ptr": "*i1"}
#: Warp instructions that a multiprocessor starts per cycle, since compute capability 7.0; threads of a warp.
_ISSUED_PER_CYCLE, _WARP = 4, 32


def build(name: str, double: bool, constants: Constants, capability: int = 90) -> CompiledKernel:
    """Return a kernel as Triton compiles it, with the assembler's output in ``asm``."""
    fixed = triton_launch.fixed(constants, double) | {"REGULARISER": True}
    return _built(getattr(triton_kernels, name), fixed, double, capability)


def build_readout(name: str, double: bool, pooled: bool, features: int = 128, capability: int = 90) -> CompiledKernel:
    """Return a kernel of `e2ip_plugins.readout.kernels`, for so many 0e features and 1o channels."""
    case = trial.make_case(pooled)
    names = ("invariant", "equivariant", "species", "neighbours", "edges", "node_heads")
    _, flags = fused.inputs(case.readout, *(case.arguments[name] for name in names), energies=True)
    flags |= {"features": features, "vectors": features}
    pairs = readout_launch.pair_constants(flags)
    fixed = {
        "atom_kernel": readout_launch.atom_constants(flags),
        "pair_kernel": pairs,
        "neighbour_kernel": {"MOST": flags["max_leverage"], "TOUCHING": flags["touching"], "BLOCK": pairs["BLOCK"]},
        "output_kernel": readout_launch.output_constants(flags, double),
        "envelope_kernel": {"BLOCK": pairs["BLOCK"]},
    }[name]
    dtype = {} if name == "envelope_kernel" else {"DTYPE": tl.float64 if double else tl.float32}
    return _built(getattr(readout_launch, name), fixed | dtype, double, capability)


def _built(kernel: Any, fixed: dict, double: bool, capability: int) -> CompiledKernel:
    def type_of(argument: str) -> str:
        if argument in fixed:
            return "constexpr"
        return _TYPES.get(argument, ("*fp64" if double else "*fp32") if argument.endswith("_ptr") else "i32")

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
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
