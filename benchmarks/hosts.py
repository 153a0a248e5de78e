"""What e²IP costs inside its hosts, against the stock model and a committee of five, in one interleaved run.

    python benchmarks/hosts.py --host nequip        # in the NequIP environment; writes runs/hosts_nequip.json
    python benchmarks/hosts.py --host mace          # in the MACE environment; writes runs/hosts_mace.json
    python benchmarks/hosts.py --table runs/hosts_nequip.json runs/hosts_mace.json --plot cost.png

Measured are prediction and training step, times and peak memory, from 21 to 10 000 atoms. With E2IP_DATA set, the
folder of reference data, the 21 atoms are aspirin; without it seven water molecules. Every system runs in a
process of its own: one that fails, for want of memory for example, is reported and the others go on. Machines that do
other work at the same time give noisy times; ratios are taken within rounds and hold up better, and ``--clock cpu``
shows the time that the process itself used.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # for `host_cost` where this file is not the script

from host_cost.settings import MODES, TASKS, UNAVAILABLE, Settings  # noqa: E402

SYSTEMS = (21, 192, 600, 1500, 3000, 10002)


def measure(settings: Settings, write) -> None:
    """All tasks of one system in one mode; ``write`` gets the results so far after each task."""
    import torch
    from host_cost.measure import hardware, peak_memory, time_interleaved
    from host_cost.systems import make_system
    from rich.console import Console

    torch.set_num_threads(settings.threads)
    console = Console(stderr=True)
    name, frame = make_system(settings.atoms)
    atoms = settings.frames * len(frame)
    with console.status(f"{name}: neighbours") as status:
        host = importlib.import_module(f"host_cost.{settings.host}_models").Host(settings, frame)
        results = []
        for task in settings.tasks:
            label = f"{settings.host}, {name}, {settings.mode}, {task}"
            result = {"system": name, "atoms": atoms, "frames": settings.frames, "edges": host.edges}
            result |= {"periodic": bool(frame.pbc.all()), "mode": settings.mode, "task": task}
            results.append(result)
            try:
                status.update(f"{label}: building models")
                functions = getattr(host, task)()
                if not settings.committee:
                    del functions["committee"]
                result["times"] = time_interleaved(
                    functions,
                    settings.rounds,
                    settings.seconds,
                    settings.device,
                    warm_up=warm_up_calls(settings),
                    progress=lambda text, label=label: status.update(f"{label}: {text}"),
                )
                if task == "inference":
                    # Warm by now: the host's own first call differs in the last bit, before TorchScript has optimised.
                    result |= {"same_forces": torch.equal(*(functions[v]()["forces"] for v in ("baseline", "e2ip")))}
                if task == "inference" and settings.mode == "eager":
                    from host_cost.profiling import seconds_inside

                    done = len(result["times"]["e2ip"]["wall"])
                    status.update(f"{label}: time inside the readout")
                    inside, whole = seconds_inside(settings.host, functions["e2ip"], settings.device, done)
                    result |= {"inside": inside, "inside_of": whole}
                if settings.memory:
                    status.update(f"{label}: peak memory")
                    result["memory"] = {v: peak_memory(functions[v], settings.device) for v in functions}
                if settings.profile and settings.mode == "eager":
                    from host_cost.profiling import profile_parts

                    status.update(f"{label}: profile")
                    result["profile"] = profile_parts(settings.host, functions, host.parts)
            except Exception as error:  # whatever it is, it goes into the report and the next task has its chance
                result["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                console.print_exception(max_frames=5)
            functions = None
            write({"versions": versions(host.package), "hardware": hardware(settings.device), "results": results})


def warm_up_calls(settings: Settings) -> int:
    """Calls before the measurement: TorchScript optimises in its second one; what takes long needs little warming."""
    if settings.mode != "eager":
        return 4
    return 2 if settings.atoms < 3000 else 1


def versions(package: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in (package, "torch", "e2ip-plugins")}


def expected_memory(results: list[dict], settings: Settings, task: str) -> float:
    """Bytes that a task should need by what smaller systems took: proportional to atoms. 0 where nothing is known."""
    known = [r for r in results if (r["mode"], r["task"]) == (settings.mode, task) and r.get("memory", {}).get("e2ip")]
    if not known:
        return 0.0
    largest = max(known, key=lambda r: r["atoms"])
    peak = max(statistics.median(peaks) for peaks in largest["memory"].values())
    return peak * settings.frames * settings.atoms / largest["atoms"]


def run(arguments: argparse.Namespace) -> dict:
    """Every system and mode in a process of its own."""
    from host_cost.measure import available_memory
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.exists():
        kept = arguments.out.replace(arguments.out.with_name(arguments.out.name + ".previous"))
        console.print(f"earlier results kept as {kept}")
    report = {"host": arguments.host, "versions": {}, "hardware": "", "device": arguments.device}
    report |= {"kernel": os.environ.get("E2IP_KERNEL", "auto")}
    report |= {
        "cutoff": arguments.cutoff,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "size": arguments.size,
        "results": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for mode in arguments.modes:
            for atoms in arguments.systems:
                tasks = [task for task in MODES[mode] if task in arguments.tasks]
                settings = Settings(
                    arguments.host,
                    mode,
                    atoms,
                    tasks=(),
                    device=arguments.device,
                    dtype=arguments.dtype,
                    size=arguments.size,
                    rounds=arguments.rounds,
                    seconds=arguments.seconds,
                    threads=arguments.threads,
                    frames=frames_per_batch(mode, arguments.frames),
                    memory=arguments.memory,
                    profile=arguments.profile,
                    committee=atoms <= arguments.max_committee_atoms,
                    cutoff=arguments.cutoff,
                    cache=folder,
                )
                skipped, doable = [], []
                for task in tasks:
                    entry = {"system": f"{atoms} atoms", "atoms": atoms, "mode": mode, "task": task}
                    needed = expected_memory(report["results"], settings, task) if arguments.device == "cpu" else 0.0
                    if (arguments.host, mode) in UNAVAILABLE:
                        skipped.append(entry | {"failed": UNAVAILABLE[arguments.host, mode]})
                    elif task == "training" and atoms > arguments.max_train_atoms:
                        skipped.append(entry | {"failed": f"left out by --max-train-atoms {arguments.max_train_atoms}"})
                    elif needed > 0.8 * available_memory():
                        skipped.append(entry | {"failed": f"left out: would need about {needed / 2**30:.0f} GiB"})
                    else:
                        doable.append(task)
                asked = dataclasses.replace(settings, tasks=tuple(doable))
                processes = [
                    in_own_process(asked, Path(folder), arguments.threads)
                    for _ in range(arguments.processes if doable else 0)
                ]
                measured = joined(processes) if processes else {"results": []}
                report |= {key: value for key, value in measured.items() if key != "results"}
                report["results"] += skipped + measured["results"]
                for result in skipped + measured["results"]:
                    console.print(summary(result))
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def frames_per_batch(mode: str, wanted: int) -> int:
    """What the host can do: its train-time compilation leaves single frames eager, its ASE export takes only those."""
    return {"compile": max(2, wanted), "aoti": 1}.get(mode, wanted)


def in_own_process(settings: Settings, folder: Path, threads: int) -> dict:
    """Results of `measure` in a fresh interpreter; tasks that it did not survive are reported as failed."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    # Hosts and TorchScript warn by the hundred while they build models.
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "hosts.py"),
        "--worker",
        settings.to_json(),
        "--out",
        str(out),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    code = subprocess.run(command, env=environment).returncode
    measured = json.loads(out.read_text()) if out.exists() else {"results": []}
    done = {result["task"] for result in measured["results"]}
    reason = "killed, probably for want of memory" if code == -9 else f"process ended with status {code}"
    for task in settings.tasks:
        if task not in done:
            entry = {"system": f"{settings.atoms} atoms", "atoms": settings.atoms, "mode": settings.mode, "task": task}
            measured["results"].append(entry | {"failed": reason})
    return measured


def joined(processes: list[dict]) -> dict:
    """Results of several processes as one: the rounds of all, and ``by_process`` the ratio of each."""
    first, *others = processes
    for result in first["results"] if others else ():
        same = [result, *(other for p in others for other in p["results"] if other["task"] == result["task"])]
        failed = [each["failed"] for each in same if "failed" in each]
        if failed:
            result["failed"] = failed[0]
            continue
        result["by_process"] = [ratio(each["times"]) for each in same]
        if "same_forces" in result:
            result["same_forces"] = all(each["same_forces"] for each in same)
        for variant, clocks in result["times"].items():
            for clock in clocks:
                clocks[clock] = [seconds for each in same for seconds in each["times"][variant][clock]]
    return first


def ratio(times: dict) -> float:
    """Median over rounds of e²IP's time relative to the baseline's."""
    return statistics.median(a / b for a, b in zip(times["e2ip"]["wall"], times["baseline"]["wall"], strict=True))


def summary(result: dict) -> str:
    label = f"{result['system']}, {result['mode']}, {result['task']}"
    if "failed" in result:
        return f"{label}: {result['failed']}"
    times = {variant: timed["wall"] for variant, timed in result["times"].items()}
    medians = ", ".join(f"{variant} {1e3 * statistics.median(seconds):.1f} ms" for variant, seconds in times.items())
    text = f"{label}: {medians}; e2ip / baseline {ratio(result['times']):.3f}, {len(times['e2ip'])} rounds"
    processes = result.get("by_process", ())
    return text + (f", processes {min(processes):.3f} to {max(processes):.3f}" if processes else "")


def protect_others_from_want_of_memory() -> None:
    """If memory runs out, the kernel is to end this process and not another one."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def parse(argv: list[str] | None) -> argparse.Namespace:
    def names(known: tuple):
        def split(text: str) -> tuple[str, ...]:
            unknown = set(text.split(",")) - set(known)
            if unknown:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
            return tuple(text.split(","))

        return split

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(positive(number) for number in text.split(","))

    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is less than 1")
        return int(text)

    class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--host", choices=("nequip", "mace"), help="measure in this host, which must be installed")
    action.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="print tables of earlier results")
    action.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON, written anew after every system; default runs/hosts_NAME.json, of host or backbone",
    )
    parser.add_argument("--plot", type=Path, help="with --table: file for the plot of cost against atoms")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="with --table: which times")
    parser.add_argument("--systems", type=numbers, help=f"atoms, 21 is the molecule; default {SYSTEMS}")
    parser.add_argument("--modes", type=names(tuple(MODES)), default=("eager",), help="eager,compile,aoti,script")
    parser.add_argument("--tasks", type=names(TASKS), default=TASKS, help="inference,training")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--rounds", type=positive, default=15, help="at most, per system and task")
    parser.add_argument("--seconds", type=float, default=300.0, help="per system and task, then no more rounds")
    parser.add_argument("--threads", type=positive, default=1, help="of torch")
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        help="per system; ratios of a few ms depend on where a process has its memory",
    )
    parser.add_argument("--frames", type=positive, default=1, help="frames per batch; compile: 2 at least, aoti: 1")
    parser.add_argument("--max-train-atoms", type=int, default=3000, help="no training steps for larger systems")
    parser.add_argument("--cutoff", type=float, default=0.0, help="in Å; default 5: memory grows with its cube")
    parser.add_argument("--max-committee-atoms", type=int, default=10**9, help="no committee for larger systems")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--profile", action="store_true", help="where the readout's time goes (eager mode)")
    parser.add_argument("--backbone", choices=("painn", "alphanet"), help="with --host nequip: in place of its own")
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds: shows that everything runs")
    arguments = parser.parse_args(argv)
    if arguments.host and arguments.out is None:
        arguments.out = ROOT.parent / "runs" / f"hosts_{arguments.backbone or arguments.host}.json"
    arguments.size = arguments.backbone or ("tiny" if arguments.quick else "full")
    if arguments.backbone and arguments.host != "nequip":
        parser.error("--backbone goes with --host nequip")
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 3)
    arguments.systems = arguments.systems or ((21, 24, 96) if arguments.quick else SYSTEMS)
    if arguments.plot and not arguments.table:
        parser.error("--plot goes with --table")
    for option, path in (("--out", arguments.out), ("--plot", arguments.plot)) if arguments.table else ():
        if path and not path.parent.is_dir():
            parser.error(f"{option}: there is no folder {path.parent}")
    if arguments.cutoff < 0:
        parser.error(f"--cutoff {arguments.cutoff} is negative")
    if arguments.host:
        check_measurable(parser, arguments)
    for path in arguments.table or ():
        try:
            known = "host" in json.loads(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--table: cannot read {path}: {error}")
        if not known:
            parser.error(f"--table: {path} is no result of this script")
    return arguments


def check_measurable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message, before anything is measured or written, where nothing can be."""
    if importlib.util.find_spec(arguments.host) is None:
        parser.error(f"{arguments.host} is not installed in {sys.executable}: use that host's environment")
    import torch

    if arguments.device != "cpu" and not (arguments.device.startswith("cuda") and torch.cuda.is_available()):
        parser.error(f"--device {arguments.device}: choose cpu, or cuda where torch finds a GPU")
    impossible = [UNAVAILABLE[arguments.host, m] for m in arguments.modes if (arguments.host, m) in UNAVAILABLE]
    if len(impossible) == len(arguments.modes):
        parser.error("--modes: " + "; ".join(impossible))
    from e2ip_plugins.errors import InputError
    from e2ip_plugins.maths.kernels import paths

    try:
        paths.requested()
    except InputError as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.worker:
        protect_others_from_want_of_memory()
        measure(Settings.from_json(arguments.worker), lambda data: arguments.out.write_text(json.dumps(data)))
    elif arguments.table:
        from host_cost import report

        reports = report.load(arguments.table)
        text = report.tables(reports, arguments.clock)
        if arguments.out:
            arguments.out.write_text(text)
        else:
            print(text)
        if arguments.plot:
            report.plot(reports, arguments.plot, arguments.clock)
    else:
        results = run(arguments)["results"]
        print(arguments.out)
        if not any("times" in result for result in results):
            sys.exit("nothing could be measured")


if __name__ == "__main__":
    main()
