"""`e2ip evaluate` against the host's own tool, and its memory over many frames.

    python benchmarks/evaluate.py models --host mace --work DIR
    python benchmarks/evaluate.py time   --host mace --work DIR [--frames 400] [--rounds 3]
    python benchmarks/evaluate.py memory --host mace --work DIR [--frames 100000] [--kill 0.3 0.7]
    python benchmarks/evaluate.py figure --out docs/figures/evaluate.png RESULT.json ...

To be run with the Python of the host's environment. ``models`` trains a small and a usual model for one epoch on the
demo's frames. ``time`` runs both commands on the same frames, in an order drawn anew for every round, each with many
frames and with one: the difference is what the frames cost, without the start. The machine may be busy: what counts is
the processor time of the command. ``memory`` watches the resident memory of one evaluation of many water molecules,
kills it on the way (SIGKILL), has it go on, and checks that every frame is in the output once.

Results are JSON files in ``docs/results``; ``figure`` draws those of ``memory``.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
#: Frames of a batch in both tools, of the demo's molecule.
BATCH, ATOMS = 32, 13
SMALL = {
    "mace": ["--num_channels=8", "--correlation=2", "--max_ell=2", "--num_radial_basis=4", "--radial_MLP=[8]"],
    "nequip": ["training_module.model.model.num_features=4", "training_module.model.model.l_max=1"],
}
ENDING = {"mace": "model", "nequip": "ckpt"}


def run(command: list, folder: Path) -> tuple[float, float]:
    """Processor and wall time of a command in seconds."""
    before, start = os.times(), time.perf_counter()
    log = folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run([str(c) for c in command], env=ENVIRONMENT, cwd=folder, stdout=file, stderr=file)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{log.read_text()[-3000:]}")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, time.perf_counter() - start


def demo(name: str) -> list:
    import ase.io

    return ase.io.read(ROOT / "demo" / "data" / f"{name}.extxyz", ":")


def write(path: Path, frames: list) -> Path:
    import ase.io

    ase.io.write(path, frames, format="extxyz")
    return path


def model_of(host: str, size: str, work: Path) -> Path:
    return work / f"{host}_{size}.{ENDING[host]}"


def make_models(host: str, work: Path) -> None:
    """One epoch on 32 frames; what a model has learned does not matter here."""
    train, valid = write(work / "train.xyz", demo("train")[:32]), write(work / "valid.xyz", demo("valid")[:8])
    for size in ("usual", "small"):
        folder = work / f"{host}_{size}"
        folder.mkdir(exist_ok=True)
        more = SMALL[host] if size == "small" else []
        if host == "mace":
            command = [BIN / "mace_run_train", "--config", ROOT / "configs" / "mace_e2ip.yaml", "--name=m"]
            command += [f"--train_file={train}", f"--valid_file={valid}", "--max_num_epochs=1", "--device=cpu", *more]
        else:
            command = [BIN / "nequip-train", "-cp", ROOT / "configs", "-cn", "nequip_e2ip", f"hydra.run.dir={folder}"]
            command += [f"train_file={train}", f"val_file={valid}", "max_epochs=1", "run=[train]"]
            command += ["chemical_species=[H,C,N,O]", *more]
        run(command, folder)
        (folder / ("m.model" if host == "mace" else "best.ckpt")).replace(model_of(host, size, work))
        print(f"{model_of(host, size, work)}: trained", flush=True)


def commands(host: str, model: Path, source: Path, folder: Path) -> dict[str, list]:
    """Ours and the host's own, with the same columns and batches."""
    ours = [BIN / "e2ip", "evaluate", model, source, folder / "ours.xyz", "--overwrite"]
    ours += ["--batch-atoms", BATCH * ATOMS]
    if host == "mace":
        theirs = [BIN / "mace_eval_configs", "--configs", source, "--model", model, "--output", folder / "theirs.xyz"]
        return {"ours": ours, "theirs": [*theirs, "--default_dtype=float32", f"--batch_size={BATCH}"]}
    (folder / "test_dataset0.xyz").unlink(missing_ok=True)
    theirs = [BIN / "nequip-train", "-cp", ROOT / "configs", "-cn", "nequip_e2ip", f"hydra.run.dir={folder}"]
    # Statistics of the training set are computed whatever is run.
    one = folder / "one.xyz"
    theirs += ["run=[test]", f"train_file={one}", f"val_file={one}", f"test_file={source}"]
    loaded = f"{{_target_: nequip.model.ModelFromCheckpoint, checkpoint_path: {model}, compile_mode: eager}}"
    theirs += ["~training_module.model", f"+training_module.model={loaded}"]
    columns = "e2ip_log_sigma0,e2ip_nu,e2ip_kappa,e2ip_sigma0,e2ip_leverage,forces_cov,forces_aleatoric_cov"
    columns += ",forces_epistemic_cov,forces_uncertainty,forces_epistemic_std"
    theirs += ["chemical_species=[H,C,N,O]", f"data.val_dataloader.batch_size={BATCH}"]
    return {"ours": ours, "theirs": [*theirs, f"trainer.callbacks.3.extra_fields=[{columns}]"]}


def measure_time(host: str, work: Path, frames: int, rounds: int) -> None:
    """Seconds of processor per frame, ours over theirs, in every round."""
    model, folder, test = model_of(host, "usual", work), work / f"{host}_time", demo("test")
    folder.mkdir(exist_ok=True)
    sources = {1: write(folder / "one.xyz", test[:1]), frames: write(folder / "many.xyz", (test * 20)[:frames])}
    rng, found = random.Random(0), []
    for number in range(rounds):
        times: dict[str, dict[int, tuple[float, float]]] = {"ours": {}, "theirs": {}}
        order = [(name, count) for name in times for count in sources]
        rng.shuffle(order)
        for name, count in order:
            times[name][count] = run(commands(host, model, sources[count], folder)[name], folder)
        per_frame = {name: (t[frames][0] - t[1][0]) / (frames - 1) for name, t in times.items()}
        found.append(
            {
                "processor": {name: {str(count): t[count][0] for count in t} for name, t in times.items()},
                "wall": {name: {str(count): t[count][1] for count in t} for name, t in times.items()},
                "per_frame": per_frame,
                "ratio": per_frame["ours"] / per_frame["theirs"],
                "ratio_of_commands": times["ours"][frames][0] / times["theirs"][frames][0],
            }
        )
        print(f"round {number + 1}: {json.dumps(found[-1])}", flush=True)
        result = {
            "what": "time",
            **about(host),
            "frames": frames,
            "atoms": ATOMS,
            "batch": BATCH,
            "ratio": statistics.median(r["ratio"] for r in found),
            "ratio_of_commands": statistics.median(r["ratio_of_commands"] for r in found),
            "rounds": found,
        }
        save(f"evaluate_time_{host}", result)


def about(host: str) -> dict:
    from importlib.metadata import version

    package = {"mace": "mace-torch", "nequip": "nequip"}[host]
    return {"host": host, "version": version(package), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}


def save(name: str, result: dict) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def water(path: Path, frames: int) -> Path:
    """So many water molecules, each with some noise."""
    import numpy as np
    from ase.build import molecule

    rng, atoms = np.random.default_rng(0), molecule("H2O")
    with path.open("w") as file:
        for _ in range(frames):
            positions = atoms.positions + rng.normal(scale=0.05, size=(3, 3))
            lines = (f"{s} {x:.8f} {y:.8f} {z:.8f}\n" for s, (x, y, z) in zip(atoms.symbols, positions, strict=True))
            file.write('3\nProperties=species:S:1:pos:R:3 pbc="F F F"\n' + "".join(lines))
    return path


def watched(command: list, folder: Path, seen: list, stop_at: float, reached) -> bool:
    """Run a command until it ends or has written ``stop_at`` frames, then kill it; whether it ended."""
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([str(c) for c in command], env=ENVIRONMENT, cwd=folder, stdout=log, stderr=log)
        start = time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024
            except (OSError, StopIteration):
                continue
            done = reached()
            if done is not None and not (seen and seen[-1][1] == done):
                seen.append([time.monotonic() - start, done, resident])
                if done > stop_at:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    return False
    if process.returncode:
        sys.exit((folder / "log.txt").read_text()[-3000:])
    return True


def measure_memory(host: str, work: Path, frames: int, kills: list[float]) -> None:
    """Memory against frames, over all runs until the file is complete."""
    folder = work / f"{host}_memory"
    folder.mkdir(exist_ok=True)
    source, output = water(folder / "in.xyz", frames), folder / "out.xyz"
    for path in folder.glob("out.xyz*"):
        path.unlink()
    journal = folder / "out.xyz.part.json"

    def reached():
        try:
            return (json.loads(journal.read_text())["state"] or {"written": 0})["written"]
        except (OSError, ValueError):
            return None

    command = [BIN / "e2ip", "evaluate", model_of(host, "small", work), source, output]
    runs = []
    for stop_at in [*(share * frames for share in sorted(kills)), float("inf")]:
        seen: list = []
        ended = watched(command, folder, seen, stop_at, reached)
        if not seen:
            sys.exit("too few frames to watch: raise --frames")
        thin = max(1, len(seen) // 60)
        runs.append({"killed": not ended, "seconds_frames_bytes": [*seen[:-1:thin], seen[-1]]})
        first, last = seen[0], seen[-1]
        print(f"frames {first[1]} to {last[1]}, {last[2] / 2**20:.0f} MiB{'' if ended else ', killed'}", flush=True)
    with output.open() as file:
        numbers = [int(line.split("input_frame=")[1].split()[0]) for line in file if "input_frame=" in line]
    result = {
        "what": "memory",
        **about(host),
        "frames": frames,
        "input_bytes": source.stat().st_size,
        "output_bytes": output.stat().st_size,
        "every_frame_once": numbers == list(range(frames)),
        "runs": runs,
    }
    save(f"evaluate_memory_{host}", result)
    print(f"{len(numbers)} frames written, every one once and in order: {result['every_frame_once']}")


def draw(paths: list[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for number, path in enumerate(paths):
        result = json.loads(path.read_text())
        for i, one in enumerate(result["runs"]):
            frames, memory = ([row[k] for row in one["seconds_frames_bytes"]] for k in (1, 2))
            label = f"{result['host'].upper().replace('NEQUIP', 'NequIP')}" if i == 0 else None
            axes.plot([f / 1e3 for f in frames], [m / 2**20 for m in memory], color=f"C{number}", label=label)
            if one["killed"]:
                axes.plot(frames[-1] / 1e3, memory[-1] / 2**20, "x", color=f"C{number}")
    axes.set(xlabel="thousand frames written (x: SIGKILL)", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for name in ("models", "time", "memory"):
        sub = what.add_parser(name)
        sub.add_argument("--host", choices=("mace", "nequip"), required=True)
        sub.add_argument("--work", type=Path, required=True)
        if name != "models":
            sub.add_argument("--frames", type=int, default=400 if name == "time" else 100_000)
    what.choices["time"].add_argument("--rounds", type=int, default=3)
    what.choices["memory"].add_argument("--kill", type=float, nargs="*", default=[0.3, 0.7])
    figure = what.add_parser("figure")
    figure.add_argument("results", type=Path, nargs="+")
    figure.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "figure":
        return draw(args.results, args.out)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "models":
        make_models(args.host, args.work)
    elif args.what == "time":
        measure_time(args.host, args.work, args.frames, args.rounds)
    else:
        measure_memory(args.host, args.work, args.frames, args.kill)


if __name__ == "__main__":
    main()
