"""Which kernel computes: one switch, one choice, one log line.

``E2IP_KERNEL`` (or the argument ``path``, which wins) is one of

``auto``
    On CUDA ``triton``, where Triton is installed and its kernels have passed their `check`. Otherwise ``eager``.
``eager``
    Torch operations: few of them for the distribution (`inference`), the plain form in float64 for the loss.
``triton``
    One kernel each way (`triton_kernels`); needs CUDA, or TRITON_INTERPRET=1. `InputError` where the check fails.

While anything traces or transforms the call (TorchScript, torch.compile, torch.export, make_fx, torch.func, forward
AD), it is the plain composition of `plain` instead; on CUDA, with ``triton`` asked for, torch.compile, torch.export and
make_fx (and with them NequIP's compilation) get operators that they can look into. The choice is logged once per
process, device and path.
"""

import functools
import importlib
import logging
import os
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import check

VARIABLE = "E2IP_KERNEL"
PATHS = ("auto", "eager", "triton")

#: Kinds of device that the Triton kernels are for.
TRITON_DEVICES = ("cuda",)

#: Those of `triton_launch` that this folder calls.
_SIGNATURES = 6

#: What `tracer_of` finds.
NOT_TRACED, GRAPH, TRANSFORM = "not traced", "graph", "transform"

logger = logging.getLogger("e2ip_plugins")


def requested(path: Optional[str] = None) -> str:
    """The path asked for by argument or environment; unknown ones raise `InputError`."""
    source = "path"
    if path is None:
        source, path = VARIABLE, os.environ.get(VARIABLE, "").strip() or "auto"
    path = path.lower()
    if path not in PATHS:
        raise InputError(f"{source} is '{path}'; choose from: {', '.join(PATHS)}")
    return path


# By name, so that packaged models, which carry the modules that they see imported, do without Triton.
def triton_launch():
    """The module `triton_launch`, imported when first used: it cannot be imported without Triton."""
    return importlib.import_module("e2ip_plugins.maths.kernels.triton_launch")


@functools.cache
def has_triton() -> bool:
    """Whether Triton and fitting kernels of ours are there: a packaged model may run without or with others."""
    return not why_no_triton()


@functools.cache
def why_no_triton() -> str:
    """Return why our Triton kernels cannot be loaded; empty if they can."""
    try:
        fits = getattr(triton_launch(), "SIGNATURES", None) == _SIGNATURES
    except Exception as error:  # An older Triton may lack anything that the kernels name.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"Triton is not installed, or too old ({reason})"
    return "" if fits else "this model was packaged with another version of e2ip-plugins"


@torch.compiler.assume_constant_result
def has_operators() -> bool:
    """Whether torch.ops.e2ip is there for what traces a call. torch.compile takes the answer without looking inside."""
    if has_triton():
        triton_launch().register()
    return has_triton()


def interpreted() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose(
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str],
    path: Optional[str] = None,
    failure: Optional[Callable] = None,
) -> str:
    """``eager`` or ``triton`` for a call that needs these functions of `triton_launch`; `InputError` if impossible.

    ``failure``, of other kernels: from name, device and dtype to what is wrong with one, as `check.failure`.
    """
    wish, chosen = requested(path), "eager"
    if wish == "triton":
        if not has_triton():
            raise InputError(
                f"{VARIABLE} is 'triton', but Triton is not installed or does not load; install it or choose 'auto'"
            )
        if device.type not in TRITON_DEVICES and not interpreted():
            raise InputError(
                f"{VARIABLE} 'triton' needs tensors on CUDA, got '{device}'; choose 'auto', or set TRITON_INTERPRET=1"
            )
    if wish == "auto" and device.type in TRITON_DEVICES and not has_triton():
        message = f"e2ip kernel on {device}: {why_no_triton()}, continuing with eager, which is slower on small systems"
        _log_once(logging.WARNING, message)
    elif wish == "triton" or (wish == "auto" and device.type in TRITON_DEVICES):
        chosen = "triton" if _usable(kernels, device, dtype, wish, failure) else "eager"
    _log_once(logging.INFO, f"e2ip kernel on {device}: {chosen} ({VARIABLE}={wish})")
    return chosen


def _failure(kernel: str, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    return check.failure(triton_launch(), kernel, device, dtype)


def _usable(
    kernels: Sequence[str], device: torch.device, dtype: torch.dtype, wish: str, failure: Optional[Callable]
) -> bool:
    """Whether all of these kernels pass their check; one that was asked for and does not raises `InputError`."""
    for kernel in kernels:
        error = (failure or _failure)(kernel, device, dtype)
        if error is None:
            continue
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if wish == "triton":
            raise InputError(
                f"Triton's {kernel} kernel fails its check on {device} ({reason}); choose 'auto' or 'eager'"
            ) from error
        # Without the dtype: the other one mostly fails for the same reason.
        message = f"e2ip kernel on {device}: Triton's {kernel} kernel fails its check, continuing with eager ({reason})"
        _log_once(logging.WARNING, message)
        return False
    return True


@functools.cache
def _log_once(level: int, message: str) -> None:
    """Log a message, unless it has been logged in this process."""
    logger.log(level, message)


def _dispatch_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


def tracer_of(tensors: Sequence[Tensor]) -> str:
    """Return who traces this call; the one place that asks what torch does not tell in public.

    Returns
    -------
    str
        `NOT_TRACED`: nobody, it is computed here and now. `GRAPH`: torch.compile, torch.export, make_fx, fake tensors
        or another dispatch mode, which also take operators. `TRANSFORM`: torch.jit.trace, torch.func, forward AD or a
        tensor subclass, which must see plain operations.
    """
    # First, because torch.compile cannot look into what follows.
    if torch.compiler.is_compiling():
        return GRAPH
    # No public function tells of an open level of forward AD, a torch.func transformation or a dispatch mode.
    inside_func = torch._C._functorch.peek_interpreter_stack() is not None
    if inside_func or forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return TRANSFORM
    if _dispatch_modes() > 0:
        return GRAPH
    if any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors):
        return TRANSFORM
    return NOT_TRACED
