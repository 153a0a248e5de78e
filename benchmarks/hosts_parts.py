"""Time inside the readout and memory of a call: what `hosts.py` measures beside whole calls."""

import ctypes
import gc
import importlib
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch

#: Where all of the readout happens in a prediction.
_READOUTS = {
    "nequip": ("nequip_ext.model.readout", "GraphReadout", "forward"),
    "mace": ("mace_ext.model.model", "ScaleShiftMACE", "_outputs"),
}


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def seconds_inside(host: str, call: Callable, device: str, repeats: int) -> list[float]:
    """Return seconds spent in the readout during each of several predictions in eager mode.

    The difference of two whole predictions has the noise of both; this has that of the small part alone.
    """
    module, owner, method = _READOUTS[host]
    inside: list[float] = []

    def timed(function: Callable) -> Callable:
        def run(*args):
            synchronise(device)
            start = time.perf_counter()
            result = function(*args)
            synchronise(device)
            inside.append(time.perf_counter() - start)
            return result

        return run

    owner_class = getattr(importlib.import_module(module), owner)
    with unittest.mock.patch.object(owner_class, method, timed(getattr(owner_class, method))):
        for _ in range(repeats):
            call()
    return inside


def peak_memory(call: Callable, device: str = "cpu", repeats: int = 3) -> list[int]:
    """Return the bytes by which the resident set grows at most during a call, for each of several calls; Linux only.

    On a GPU: by which the memory of tensors grows at most.

    Blocks from 64 kB on are returned to the system when they are freed, or the allocator's leftovers of former calls
    would hide most of the growth.
    """
    if device != "cpu":
        return [_peak_on_gpu(call) for _ in range(repeats)]
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not clear.exists():
        return []
    libc = ctypes.CDLL("libc.so.6")
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(threshold, 64 * 1024)

    def high_water() -> int:
        return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])

    peaks = []
    call()  # what it leaves behind for good (gradients, caches) exists before the first measurement
    for _ in range(repeats):
        gc.collect()
        libc.malloc_trim(0)
        clear.write_text("5")  # resets the high-water mark
        before = high_water()
        call()
        # The kernel adds up its counts of pages late: a call that takes next to nothing may seem to take less.
        peaks.append(max(0, high_water() - before))
    return peaks


def _peak_on_gpu(call: Callable) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launches_on_gpu(call: Callable) -> int:
    """Return how many kernels and copies a call launches on a GPU."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if event.device_type.name == "CUDA")
