"""`e2ip evaluate` against the tools of MACE and NequIP, and its memory over many frames.

    python benchmarks/evaluate.py time   mace --work DIR [--frames 400] [--rounds 3]
    python benchmarks/evaluate.py memory --work DIR [--frames 100000]           # MACE
    python benchmarks/evaluate.py table                 # table and figure of the results

To be run with the Python of the host's environment. Both train a model for one epoch on the demo's frames first.
``time`` runs both commands on the same frames, in an order drawn anew for every round, each with many frames and with
one: the difference is what the frames cost, without the start. The machine may be busy: what counts is the processor
time of the command. ``memory`` watches the resident memory of one evaluation of many water molecules, kills it twice
on the way (SIGKILL), has it go on, and checks that every frame is in the output once.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ase.io
import numpy as np
from ase.build import molecule
from common import DEMO_DATA, ROOT, Step, alternate, environment, load, markdown, parser_of, run, save
from matplotlib.figure import Figure

HOST_TOOLS = {"mace": "`mace_eval_configs`", "nequip": "`nequip-train` with `run=[test]`"}
#: Frames of a batch in both tools, and atoms of a frame of the demo.
BATCH, ATOMS = 32, 13
#: Options of MACE's small model of ``memory``.
SMALL = ["--num_channels=8", "--correlation=2", "--max_ell=2", "--num_radial_basis=4", "--radial_MLP=[8]"]
#: Shares of the frames after which ``memory`` kills the command.
KILLS = (0.3, 0.7)
#: Columns that `e2ip evaluate` writes, for NequIP's own callback.
COLUMNS = "e2ip_log_sigma0,e2ip_nu,e2ip_kappa,e2ip_sigma0,e2ip_leverage,forces_cov,forces_aleatoric_cov"
COLUMNS += ",forces_epistemic_cov,forces_uncertainty,forces_epistemic_std"
NEQUIP = ["nequip-train", "-cp", str(ROOT / "configs"), "-cn", "nequip_e2ip", "chemical_species=[H,C,N,O]"]


def make_model(host: str, folder: Path, options: list[str]) -> Path:
    """Train for one epoch on 32 frames; what a model has learned does not matter here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 32), ("valid", 8)):
        ase.io.write(folder / f"{name}.xyz", ase.io.read(DEMO_DATA / f"{name}.extxyz", f":{count}"), format="extxyz")
    if host == "mace":
        command = ["mace_run_train", "--config", str(ROOT / "configs" / "mace_e2ip.yaml"), "--name=m", "--device=cpu"]
        command += ["--train_file=train.xyz", "--valid_file=valid.xyz", "--max_num_epochs=1"]
    else:
        files = [f"train_file={folder / 'train.xyz'}", f"val_file={folder / 'valid.xyz'}"]
        command = [*NEQUIP, f"hydra.run.dir={folder}", *files, "max_epochs=1", "run=[train]"]
    run(folder, Step("model", [*command, *options]))
    return folder / ("m.model" if host == "mace" else "best.ckpt")


def processor_seconds(command: list[str], folder: Path) -> float:
    """Return the processor time of a command."""
    before, log = os.times(), folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(command, env=environment(), cwd=folder, stdout=file, stderr=file)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def commands(host: str, model: Path, source: Path, folder: Path) -> dict[str, list[str]]:
    """Return our command and that of MACE or NequIP, with the same columns and batches."""
    ours = ["e2ip", "evaluate", str(model), str(source), "ours.xyz", "--overwrite", f"--batch-atoms={BATCH * ATOMS}"]
    if host == "mace":
        theirs = ["mace_eval_configs", f"--configs={source}", f"--model={model}", "--output=theirs.xyz"]
        return {"ours": ours, "theirs": [*theirs, "--default_dtype=float32", f"--batch_size={BATCH}"]}
    # NequIP computes statistics of the training set whatever is run.
    one = folder / "1.xyz"
    loaded = f"{{_target_: nequip.model.ModelFromCheckpoint, checkpoint_path: {model}, compile_mode: eager}}"
    theirs = [*NEQUIP, f"hydra.run.dir={folder / source.stem}", "run=[test]", f"train_file={one}", f"val_file={one}"]
    theirs += [f"test_file={source}", "~training_module.model", f"+training_module.model={loaded}"]
    theirs += [f"data.val_dataloader.batch_size={BATCH}", f"trainer.callbacks.3.extra_fields=[{COLUMNS}]"]
    return {"ours": ours, "theirs": theirs}


def measure_time(host: str, work: Path, frames: int, rounds: int) -> dict:
    """Return seconds of processor of whole commands, by round."""
    model, folder, test = (
        make_model(host, work / "model", []),
        work / "time",
        ase.io.read(DEMO_DATA / "test.extxyz", ":"),
    )
    folder.mkdir(exist_ok=True)
    calls = {}
    for count in (1, frames):
        source = folder / f"{count}.xyz"
        ase.io.write(source, (test * (count // len(test) + 1))[:count], format="extxyz")
        for name, command in commands(host, model, source, folder).items():

            def call(command: list[str] = command) -> float:
                for path in folder.rglob("test_dataset0.xyz"):  # to which NequIP would append
                    path.unlink()
                return processor_seconds(command, folder)

            calls[f"{name}, {count}"] = call
    seconds = alternate(calls, rounds, warm_up=0, clock=lambda call: call())
    return {"frames": frames, "seconds": seconds}


def write_water(path: Path, frames: int) -> None:
    """Write so many water molecules, each with some noise."""
    rng, atoms = np.random.default_rng(0), molecule("H2O")
    with path.open("w") as file:
        for _ in range(frames):
            positions = atoms.positions + rng.normal(scale=0.05, size=(3, 3))
            lines = (f"{s} {x:.8f} {y:.8f} {z:.8f}\n" for s, (x, y, z) in zip(atoms.symbols, positions, strict=True))
            file.write('3\nProperties=species:S:1:pos:R:3 pbc="F F F"\n' + "".join(lines))


def watched(command: list[str], folder: Path, stop_at: float, written: Callable[[], int | None]) -> list[list[float]]:
    """Return frames and resident bytes of a command until it ends, or has written ``stop_at`` frames and is killed."""
    curve: list[list[float]] = []
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, env=environment(), cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.5)
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                resident = 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
            except (OSError, StopIteration):
                continue
            frames = written()
            if frames is not None and not (curve and curve[-1][0] == frames):
                curve.append([frames, resident])
                if frames > stop_at:
                    process.kill()
                    process.wait()
                    return curve
    if process.returncode or not curve:
        sys.exit((folder / "log.txt").read_text()[-3000:] or "too few frames to watch: raise --frames")
    return curve


def measure_memory(work: Path, frames: int) -> dict:
    """Return memory against frames, over all runs until the file is complete."""
    model, folder = make_model("mace", work / "small", SMALL), work / "memory"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("out.xyz*"):
        path.unlink()
    write_water(folder / "in.xyz", frames)

    def written() -> int | None:
        try:
            return (json.loads((folder / "out.xyz.part.json").read_text())["state"] or {"written": 0})["written"]
        except (OSError, ValueError):
            return None

    runs, command = [], ["e2ip", "evaluate", str(model), "in.xyz", "out.xyz"]
    for stop_at in [*(share * frames for share in KILLS), float("inf")]:
        curve = watched(command, folder, stop_at, written)
        print(f"frames {curve[0][0]} to {curve[-1][0]}, {curve[-1][1] / 2**20:.0f} MiB", flush=True)
        runs.append([*curve[: -1 : max(1, len(curve) // 60)], curve[-1]])
    with (folder / "out.xyz").open() as file:
        numbers = [int(line.split("input_frame=")[1].split()[0]) for line in file if "input_frame=" in line]
    return {"frames": frames, "every_frame_once": numbers == list(range(frames)), "runs": runs}


def table(results: dict[str, dict]) -> str:
    """Return the Markdown table of ``time``: seconds per frame, ours over theirs."""
    rows = []
    for host, result in ((host, results[f"time {host}"]) for host in HOST_TOOLS if f"time {host}" in results):
        seconds, frames = {key: np.array(values) for key, values in result["seconds"].items()}, result["frames"]
        ours, theirs = (seconds[f"{name}, {frames}"] - seconds[f"{name}, 1"] for name in ("ours", "theirs"))
        ratios = ours / theirs
        text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        rows.append([host, HOST_TOOLS[host], text])
    return markdown(["host", "host's tool", "ratio: median, rounds"], rows)


def draw(results: dict[str, dict], path: Path) -> None:
    """Draw memory against frames, with a cross at every kill."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    runs = results["memory mace"]["runs"]
    for curve in runs:
        frames, mib = np.array(curve).T / [[1e3], [2**20]]
        axes.plot(frames, mib, color="C0")
    for curve in runs[:-1]:
        axes.plot(curve[-1][0] / 1e3, curve[-1][1] / 2**20, "x", color="C0")
    axes.set(xlabel="thousand frames written (x: SIGKILL)", ylabel="resident memory of MACE, MiB", ylim=(0, None))
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = parser_of(__doc__, "evaluate", "work", "out", "figure")
    parser.add_argument("what", choices=("time", "memory", "table"))
    parser.add_argument("host", choices=tuple(HOST_TOOLS), nargs="?", default="mace")
    parser.add_argument("--frames", type=int, help="default: 400, and 100000 for memory")
    parser.add_argument("--rounds", type=int, default=3, help="of time")
    options = parser.parse_args()
    work = options.work.resolve() / options.host
    if options.what == "time":
        result = measure_time(options.host, work, options.frames or 400, options.rounds)
    elif options.what == "memory":
        result = measure_memory(work, options.frames or 100_000)
    if options.what != "table":
        save(options.out, {f"{options.what} {options.host}": result})
    results = load(options.out)
    print(table(results))
    if "memory mace" in results:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
