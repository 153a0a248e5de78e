"""Times and peak memory of functions that are compared with each other."""

import ctypes
import gc
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from e2ip_plugins.fitting.moments import number_of_regions

_MIN_ROUNDS, _MIN_ROUNDS_SLOW, _SLOW = 5, 3, 10.0


def synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def time_interleaved(
    functions: dict[str, Callable],
    rounds: int,
    seconds: float,
    device: str,
    warm_up: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every call, by variant: ``wall`` and ``cpu`` (of all threads of this process), equally long lists.

    Every round runs every function once, in an order drawn anew, so that none always follows the same one and
    a drift of the machine hits all alike. Ratios are to be taken within rounds.
    """
    progress = _once_a_second(progress)
    for name, function in functions.items():
        for i in range(warm_up):
            progress(f"warm-up {name} {i + 1}/{warm_up}")
            function()
    synchronise(device)
    times = {name: {"wall": [], "cpu": []} for name in functions}
    order, rng = list(functions), random.Random(0)
    started = time.perf_counter()
    gc.collect()
    gc.disable()  # a collection in the middle of one variant would be counted as its cost
    try:
        for i in range(rounds):
            rng.shuffle(order)
            for name in order:
                progress(f"round {i + 1}/{rounds} {name}")
                synchronise(device)
                wall, cpu = time.perf_counter(), time.process_time()
                functions[name]()
                synchronise(device)
                times[name]["wall"].append(time.perf_counter() - wall)
                times[name]["cpu"].append(time.process_time() - cpu)
            slowest = max(timed["wall"][-1] for timed in times.values())
            # It leaves caches cold for whoever comes next: seldom between short steps, whose ratios would scatter.
            if slowest > 1.0 or i % 16 == 15:
                gc.collect()
            enough = _MIN_ROUNDS_SLOW if slowest > _SLOW else _MIN_ROUNDS
            if i + 1 >= enough and time.perf_counter() - started > seconds:
                break
    finally:
        gc.enable()
    return times


def _once_a_second(progress: Callable[[str], None]) -> Callable[[str], None]:
    """Less often than steps of a millisecond end: what draws the message would leave them cold caches."""
    told = float("-inf")

    def tell(text: str) -> None:
        nonlocal told
        if time.perf_counter() - told >= 1.0:
            progress(text)
            told = time.perf_counter()

    return tell


def peak_memory(function: Callable, device: str, repeats: int = 3) -> list[int]:
    """Bytes by which memory grows at most during a call, for each of several calls.

    On CUDA torch's own count of tensors. On Linux the growth of the resident set (high-water mark in the kernel),
    with blocks from 64 kB on returned to the system when they are freed, or the allocator's leftovers of
    former calls would hide most of the growth. Elsewhere an empty list.
    """
    if torch.device(device).type == "cuda":
        return [_peak_cuda(function, device) for _ in range(repeats)]
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL("libc.so.6")
    if not hasattr(libc, "mallopt"):
        return []
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024)
    function()  # what it leaves behind for good (gradients, caches) is there before the first measurement
    return [_peak_resident(function, libc) for _ in range(repeats)]


def _peak_cuda(function: Callable, device: str) -> int:
    gc.collect()
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_resident(function: Callable, libc: ctypes.CDLL) -> int:
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmHWM")
    function()
    # The kernel adds up its counts of pages per processor, late and in batches: a call that takes next to nothing
    # may seem to take less.
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """An entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def hardware(device: str) -> str:
    """Name of the GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def available_memory() -> float:
    """Bytes that a new process on this machine may take; infinite where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def as_fitted(readout: Any) -> None:
    """Give an untrained readout a leverage as large as 450 frames of aspirin make it, seven atoms a species each."""
    leverage = readout.leverage
    kinds, features = leverage.centres.shape
    leverage.resize(kinds, number_of_regions(450 * 7, features, kinds))
    leverage.axes.copy_(torch.arange(kinds))
    # Far from all regions: near one κ is large, and NequIP compares what it compiles by absolute errors.
    drawn = torch.randn(leverage.whitening.shape, generator=torch.Generator().manual_seed(0))
    leverage.whitening.copy_(drawn)
    leverage.region_stretch.fill_(1.0)
    leverage.region_offsets.zero_()
    leverage.fitted.fill_(True)
