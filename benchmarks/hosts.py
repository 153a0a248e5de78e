"""What e²IP costs inside MACE and NequIP, against the stock model and a committee of five, in one interleaved run.

    python benchmarks/hosts.py --host nequip        # in the NequIP environment; writes runs/hosts_nequip.json
    python benchmarks/hosts.py --host mace          # in the MACE environment; writes runs/hosts_mace.json
    python benchmarks/hosts.py --table runs/hosts_nequip.json runs/hosts_mace.json --plot cost.png
    python benchmarks/hosts.py --table benchmarks/results/hosts.json --only scaling_nequip,scaling_mace

Measured are prediction and training step, times and peak memory, from 21 to 10 000 atoms. With E2IP_DATA set, the
folder of reference data, the 21 atoms are aspirin; without it seven water molecules. Every system runs in a
process of its own: one that fails, for want of memory for example, is reported and the others go on. Machines that do
other work at the same time give noisy times; ratios are taken within rounds and hold up better.
"""

import argparse
import ctypes
import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch
from common import ROOT, alternate, environment, hardware, load, parser_of, save, seconds_of
from hosts_models import MODES, TASKS, Host, Settings, make_system
from hosts_tables import draw, tables

SYSTEMS = (21, 192, 600, 1500, 3000, 10002)
#: Largest system with training steps.
MAX_TRAIN_ATOMS = 3000
#: Where all of the readout happens in a prediction.
_READOUTS = {
    "nequip": ("nequip_ext.model.readout", "GraphReadout", "forward"),
    "mace": ("mace_ext.model.model", "ScaleShiftMACE", "_outputs"),
}


def measure(settings: Settings, write: Callable[[dict], None]) -> None:
    """Measure all tasks of one system in one mode; ``write`` gets the results so far after each task."""
    torch.set_num_threads(1)
    system, frame = make_system(settings.atoms)
    host = importlib.import_module(f"hosts_{settings.host}").Host(settings, frame)
    about = {name: importlib.metadata.version(name) for name in (host.package, "torch", "e2ip-plugins")}
    report: dict = {"versions": about, "hardware": hardware(settings.device), "results": []}
    for task in settings.tasks:
        result = {"system": system, "atoms": settings.frames * len(frame), "edges": host.edges}
        result |= {"periodic": bool(frame.pbc.all()), "mode": settings.mode, "task": task}
        report["results"].append(result)
        try:
            measure_task(settings, host, task, result)
        except Exception as error:  # whatever it is, it goes into the report and the next task has its chance
            result["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        write(report)


def measure_task(settings: Settings, host: Host, task: str, result: dict) -> None:
    """Add times, memory and parts of one task to its result."""
    calls = host.calls(task, settings.committee)

    def clock(call: Callable) -> float:
        synchronise(settings.device)
        return seconds_of(lambda: (call(), synchronise(settings.device)))

    # TorchScript optimises in its second call; what takes long needs little warming.
    warm_up = 4 if settings.mode != "eager" else 2 if settings.atoms < MAX_TRAIN_ATOMS else 1
    result["times"] = alternate(calls, settings.rounds, warm_up, settings.seconds, clock)
    if task == "inference" and settings.mode == "eager":
        rounds = len(result["times"]["e2ip"])
        result["inside"] = seconds_inside(settings.host, calls["e2ip"], settings.device, rounds)
    if settings.memory:
        result["memory"] = {name: peak_memory(call, settings.device) for name, call in calls.items()}
    if settings.device != "cpu":
        result["launches"] = {name: launches_on_gpu(call) for name, call in calls.items()}
        print(f"{result['system']}, {settings.mode}, {task}, launches: {result['launches']}", flush=True)


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


def run(options: argparse.Namespace) -> dict:
    """Measure every system and mode, each in a process of its own."""
    report = {"host": options.host, "device": options.device, "size": options.size}
    report |= {"kernel": os.environ.get("E2IP_KERNEL", "auto"), "cutoff": options.cutoff, "results": []}
    names = [field.name for field in dataclasses.fields(Settings) if hasattr(options, field.name)]
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            for atoms in options.systems:
                possible = TASKS if atoms <= MAX_TRAIN_ATOMS else ("inference",)
                asked = {name: getattr(options, name) for name in names}
                asked |= {"mode": mode, "atoms": atoms, "cache": folder}
                asked["tasks"] = [t for t in MODES[options.host][mode] if t in options.tasks and t in possible]
                measured = joined([in_process(Settings(**asked), Path(folder)) for _ in range(options.processes)])
                results = measured.pop("results")
                report |= measured
                report["results"] += results
                print("\n".join(map(summary, results)), flush=True)
                save(options.out, {options.out.stem.removeprefix("hosts_"): report})
    return report


def in_process(settings: Settings, folder: Path) -> dict:
    """Return the results of `measure` in a fresh interpreter; tasks that it did not survive are reported as failed."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    # MACE, NequIP and TorchScript warn by the hundred while they build models.
    text = json.dumps(dataclasses.asdict(settings))
    command = [sys.executable, "-W", "ignore", __file__, "--worker", text, "--out", str(out)]
    variables = {"KINETO_LOG_LEVEL": "99"} | environment()  # the profiler's own messages
    code = subprocess.run(command, env=variables).returncode
    measured = json.loads(out.read_text()) if out.exists() else {"results": []}
    done = {result["task"] for result in measured["results"]}
    entry = {"system": f"{settings.atoms} atoms", "atoms": settings.atoms, "mode": settings.mode}
    reason = "killed, probably for want of memory" if code == -9 else f"process ended with status {code}"
    measured["results"] += [entry | {"task": t, "failed": reason} for t in settings.tasks if t not in done]
    return measured


def joined(processes: list[dict]) -> dict:
    """Return the results of several processes as one: the rounds of all, and ``by_process`` the ratio of each."""
    first = processes[0]
    for result in first["results"] if len(processes) > 1 else ():
        same = [other for p in processes for other in p["results"] if other["task"] == result["task"]]
        failed = [other["failed"] for other in same if "failed" in other]
        if failed:
            result["failed"] = failed[0]
            continue
        result["by_process"] = [ratio(other["times"]) for other in same]
        result["times"] = {name: [s for other in same for s in other["times"][name]] for name in result["times"]}
    return first


def ratio(times: dict[str, list[float]]) -> float:
    """Return the median over rounds of e²IP's time relative to the baseline's."""
    return statistics.median(a / b for a, b in zip(times["e2ip"], times["baseline"], strict=True))


def summary(result: dict) -> str:
    label = f"{result['system']}, {result['mode']}, {result['task']}"
    if "failed" in result:
        return f"{label}: {result['failed']}"
    medians = ", ".join(f"{name} {1e3 * statistics.median(s):.1f} ms" for name, s in result["times"].items())
    text = f"{label}: {medians}; e2ip / baseline {ratio(result['times']):.3f}, {len(result['times']['e2ip'])} rounds"
    processes = result.get("by_process", ())
    return text + (f", processes {min(processes):.3f} to {max(processes):.3f}" if processes else "")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = parser_of(__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--host", choices=("nequip", "mace"), help="measure in this host, which must be installed")
    action.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="print tables of earlier results")
    action.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON, or Markdown of --table; runs/hosts_{host or backbone}.json")
    parser.add_argument("--plot", type=Path, help="with --table: file for the plot of cost against atoms")
    parser.add_argument("--only", type=names, help="with --table: names of results, separated by commas")
    parser.add_argument("--systems", type=names, default=SYSTEMS, help="atoms, 21 is the molecule")
    parser.add_argument("--modes", type=names, default=("eager",), help="eager; NequIP: compile, aoti; MACE: script")
    parser.add_argument("--tasks", type=names, default=TASKS, help=",".join(TASKS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="at most, per system and task")
    parser.add_argument("--seconds", type=float, default=300.0, help="per system and task, then no more rounds")
    parser.add_argument("--processes", type=int, default=1, help="per system: ratios of a few ms differ between them")
    parser.add_argument("--cutoff", type=float, default=0.0, help="in Å, 0: 5; memory grows with its cube")
    parser.add_argument("--no-committee", dest="committee", action="store_false", help="no committee of five")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--backbone", choices=("painn", "alphanet"), help="in place of NequIP's own")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that everything runs")
    options = parser.parse_args(arguments)
    options.size = options.backbone or ("tiny" if options.quick else "full")
    options.systems = [int(atoms) for atoms in options.systems]
    if options.host:
        options.out = options.out or ROOT / "runs" / f"hosts_{options.backbone or options.host}.json"
        unknown = {*options.modes, *options.tasks} - {*MODES[options.host], *TASKS}
        if unknown:
            parser.error(f"unknown mode or task: {', '.join(sorted(unknown))}")
        if importlib.util.find_spec(options.host) is None:
            parser.error(f"{options.host} is not installed in {sys.executable}: use its environment")
        if options.backbone and options.host != "nequip":
            parser.error("--backbone goes with --host nequip")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.worker:
        # If memory runs out, the kernel is to end this process and not another one.
        Path("/proc/self/oom_score_adj").write_text("1000")
        measure(Settings(**json.loads(options.worker)), lambda data: options.out.write_text(json.dumps(data)))
    elif options.table:
        reports = {name: report for path in options.table for name, report in load(path).items()}
        chosen = [reports[name] for name in options.only or reports]
        text = tables(chosen)
        options.out.write_text(text) if options.out else print(text)
        if options.plot:
            draw(chosen, options.plot)
    elif not any("times" in result for result in run(options)["results"]):
        sys.exit("nothing could be measured")


if __name__ == "__main__":
    main()
