"""Which kernel computes: one switch, one choice, one log line.

``E2IP_KERNEL`` (or the argument ``path``, which wins) is one of

``auto``
    On CUDA ``triton`` where Triton is installed. On the CPU ``compiled`` from `COMPILE_FROM` atoms on, because
    compilation takes half a minute (see `compiled`). Otherwise ``eager``.
``eager``
    Few torch operations, value and gradients in one pass (`eager`).
``compiled``
    One loop made by torch.compile (`soa`); needs a C++ compiler. Where that fails: ``eager``, with a warning.
``triton``
    One kernel each way (`triton_kernels`); needs CUDA, or TRITON_INTERPRET=1.

While anything traces or transforms the call (TorchScript, torch.compile, torch.export, make_fx, torch.func, forward
AD), it is the plain composition of `plain` instead; on CUDA, with ``triton`` asked for, torch.compile, torch.export and
make_fx (and with them NequIP's compilation) get operators that they can look into. The choice is logged once per
process, device and path.
"""

import functools
import importlib
import importlib.util
import logging
import os
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from e2ip_plugins.errors import InputError

VARIABLE = "E2IP_KERNEL"
PATHS = ("auto", "eager", "compiled", "triton")

#: Atoms from which on ``auto`` compiles on the CPU.
COMPILE_FROM = 10_000

#: Of `triton_kernels` that this file and `api` are written for.
_INTERFACE = 2

logger = logging.getLogger("e2ip_plugins")
_logged = set()
_compile_failed = set()
_launch_failed = set()


def requested(path: Optional[str] = None) -> str:
    """The path asked for by argument or environment; unknown ones raise `InputError`."""
    source = "path"
    if path is None:
        source, path = VARIABLE, os.environ.get(VARIABLE, "").strip() or "auto"
    path = path.lower()
    if path not in PATHS:
        raise InputError(f"{source} is '{path}'; choose from: {', '.join(PATHS)}")
    return path


@functools.cache
def has_triton() -> bool:
    """Whether Triton and fitting kernels of ours are there: a packaged model may run without or with others."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "e2ip_plugins")):
        return False
    return getattr(triton_kernels(), "INTERFACE", None) == _INTERFACE


def triton_kernels():
    """The module `triton_kernels`, imported when first used: it cannot be imported without Triton."""
    # By name, so that packaged models, which carry the modules that they see imported, do without it.
    return importlib.import_module("e2ip_plugins.maths.kernels.triton_kernels")


def interpreted() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose(device: torch.device, count: int, path: Optional[str] = None) -> str:
    """``eager``, ``compiled`` or ``triton`` for so many atoms on a device; `InputError` where that cannot be."""
    wish = requested(path)
    chosen, on_cpu = wish, device.type == "cpu"
    if wish == "triton":
        if not has_triton():
            raise InputError(f"{VARIABLE} is 'triton', but Triton is not installed; install it or choose 'auto'")
        if device.type != "cuda" and not interpreted():
            raise InputError(
                f"{VARIABLE} 'triton' needs tensors on CUDA, got '{device}'; choose 'auto', or set TRITON_INTERPRET=1"
            )
    elif wish == "auto":
        if on_cpu:
            chosen = "compiled" if count >= COMPILE_FROM else "eager"
        else:
            fits = device.type == "cuda" and device.type not in _launch_failed and has_triton()
            chosen = "triton" if fits else "eager"
    if chosen == "compiled" and (count < 2 or device.type in _compile_failed):
        # torch.compile makes further versions for no and for one atom.
        chosen = "eager"
    if (device, chosen) not in _logged:
        _logged.add((device, chosen))
        logger.info("e2ip kernel on %s: %s (%s=%s, %d atoms)", device, chosen, VARIABLE, wish, count)
    return chosen


def compile_failed(device: torch.device, error: Exception) -> None:
    """From now on ``eager`` in place of ``compiled`` on this kind of device."""
    if device.type not in _compile_failed:
        _compile_failed.add(device.type)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("e2ip kernel on %s: torch.compile failed, continuing with eager (%s)", device, reason)


def launch_failed(device: torch.device, error: Exception, path: Optional[str] = None) -> None:
    """From now on ``eager`` in place of ``triton``, with a warning; raises ``error`` where ``triton`` was asked for."""
    if requested(path) == "triton" or isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    _launch_failed.add(device.type)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    logger.warning("e2ip kernel on %s: Triton failed, continuing with eager (%s)", device, reason)


def operators_welcome() -> bool:
    """Whether what traces this call takes operators in: torch.compile, torch.export and make_fx do."""
    if torch.compiler.is_compiling():
        return True
    if torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return False
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._functorch.peek_interpreter_stack() is None


def transformed(tensors: "list[Tensor]") -> bool:
    """Whether something traces, transforms or replaces this call: then it must see plain operations."""
    if torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    # make_fx, FakeTensorMode and other dispatch modes; torch.func.
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return True
    return False
