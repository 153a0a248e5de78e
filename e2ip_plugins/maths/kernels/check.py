"""Before a Triton kernel is first used on a device, it computes a few dozen atoms whose results are known.

What a compiler for this GPU made of it is then compared with the plain form in float64, once per process, device and
dtype. Only errors of this trial are caught: those of the real call that follows reach the caller.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import plain
from e2ip_plugins.maths.kernels.autograd import plain_gradients
from e2ip_plugins.maths.kernels.constants import Constants

#: Largest error allowed, relative to an atom's result plus 0.1. In IEEE arithmetic the kernels reach 1e-6 and 1e-14;
#: a GPU divides and exponentiates approximately in float32, and a constant rounded to float32 would cost 1e-8.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}

_RESULTS = {
    "forward": ("NLL", "regulariser"),
    "backward": ("gradient in s", "gradient in ν̂", "gradient in κ̂", "gradient in t", "gradient in the residual"),
    "distribution": ("log Σ0", "Σ0", "ν", "κ", "plateau"),
}

_outcomes: Dict[tuple, Optional[Exception]] = {}


def failure(
    launchers, kernel: str, device: torch.device, dtype: torch.dtype, trial: Optional[Callable] = None
) -> Optional[Exception]:
    """What is wrong with the function ``kernel`` of ``launchers`` (`triton_launch`) on a device; None if nothing is.

    ``trial``, of other kernels: from that function, its name, device and dtype to what is wrong.
    """
    key = (kernel, device, dtype)
    if key not in _outcomes:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Nothing may wait there; who captures a graph has run its work before.
            return None
        # In a thread of its own none of the caller's modes is on: autocast, inference mode, hooks on saved tensors.
        with ThreadPoolExecutor(1) as thread:
            _outcomes[key] = thread.submit(trial or _trial, getattr(launchers, kernel), *key).result()
    return _outcomes[key]


def _trial(launcher: Callable, kernel: str, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    cpu = torch.device("cpu")
    for coupled in (False, True):
        constants = Constants(coupled, (14.0, 15.0), (4.0, 5.0))
        expected = _reference(kernel, _arguments(kernel, coupled, cpu, torch.float64), constants)
        arguments = _arguments(kernel, coupled, device, dtype)
        if device.type == "cuda":
            # An error of earlier work, which CUDA reports late, is not the kernel's.
            torch.cuda.synchronize(device)
        try:
            found = [x.to(cpu, torch.float64) for x in launcher(*arguments, constants)]
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as failed:  # Compiler, assembler, linker and driver have classes of their own.
            return failed
        for name, ours, theirs in zip(_RESULTS[kernel], _parts(kernel, found), _parts(kernel, expected), strict=True):
            error = _largest_error(ours, theirs)
            # NaN is not within any tolerance.
            if not error <= TOLERANCE[dtype]:
                return ArithmeticError(f"{name} is off by {error:.1e} in {dtype}")
    return None


def _parts(kernel: str, results: Sequence[Tensor]) -> List[Tensor]:
    """What `_RESULTS` names; of results that are one tensor each could hide behind another."""
    if kernel != "backward":
        return list(results)
    by_coefficients, by_residual = results
    return [*by_coefficients[:, :3].unbind(1), by_coefficients[:, 3:], by_residual]


def _arguments(kernel: str, coupled: bool, device: torch.device, dtype: torch.dtype) -> List[Tensor]:
    """What the launcher takes before the constants, the same numbers in every dtype."""
    f64 = {"dtype": torch.float64, "device": "cpu"}
    s = torch.tensor([-16.0, -0.5, 0.75, 14.5], **f64)
    size_t = torch.tensor([0.0, 2.0, 4.5, 30.0], **f64)
    size_residual = torch.tensor([0.0, 0.05, 1.0, 300.0], **f64)
    s, size_t, size_residual = torch.cartesian_prod(s, size_t, size_residual).unbind(1)
    n = len(s)
    wave = torch.sin(torch.arange(10 * n, **f64)).view(n, 10)
    t = torch.nn.functional.normalize(wave[:, :5]) * size_t.unsqueeze(1)
    evidence = 3.0 + 5.0 * wave[:, 5:7]
    residual = torch.nn.functional.normalize(wave[:, 7:]) * size_residual.unsqueeze(1)
    # One σ_ref for all in one mode, one per atom in the other.
    unit = torch.tensor(0.5, **f64) if coupled else torch.linspace(0.5, 2.0, n, **f64)
    residual = residual * unit.unsqueeze(-1)
    weights = (torch.linspace(0.5, 1.5, n, **f64), torch.linspace(1.0, 0.125, n, **f64))

    def put(x: Tensor) -> Tensor:
        return x.float().to(device, dtype)

    coefficients = torch.cat([s.unsqueeze(1), evidence, t], 1)
    if coupled:
        # Not read.
        coefficients[:, 2] = float("nan")
    flattening = torch.linspace(0.0, 1.0, n, **f64)
    inputs = [coefficients, flattening if kernel == "distribution" else residual]
    return [*map(put, inputs), put(unit).expand(n), *map(put, weights if kernel == "backward" else ())]


def _reference(kernel: str, arguments: Sequence[Tensor], constants: Constants) -> Sequence[Optional[Tensor]]:
    # Without autograd, so that gradients are not recorded either.
    with torch.no_grad():
        if kernel == "distribution":
            return plain.distribution(*arguments, constants)
        if kernel == "forward":
            return plain.nll_terms(*arguments, constants)
        return plain_gradients(plain.nll_terms, arguments[:2], arguments[2], constants, arguments[3:])


def _largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Of all atoms, the error in the norm of the atom's block, relative to that norm plus 0.1."""
    ours, theirs = (x.reshape(len(theirs), -1) for x in (ours, theirs))
    return ((ours - theirs).norm(dim=1) / (theirs.norm(dim=1) + 0.1)).max().item()
