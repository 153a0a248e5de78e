"""Memory and time of `e2ip fit` over the number of frames; a fit that is killed, and one in parts. MACE.

    python benchmarks/fit_stream.py memory --work DIR [--frames 3000 30000]
    python benchmarks/fit_stream.py resume --work DIR [--count 2000]
    python benchmarks/fit_stream.py table                    # of the results

To be run with the Python of the MACE environment. A small model is trained for one epoch on the demo's frames. The
frames of the fits are molecules of four to six atoms, rattled, and their labels those of springs. ``memory`` watches
the resident memory of a fit with a tenth as many validation frames for every number of frames. ``resume`` kills a fit
in the pass over the training set and in that over the validation set (SIGKILL), has it go on, and compares the model
with that of a fit without a stop, bit by bit; and with one of two parts.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ase.build import molecule
from common import environment, hardware, load, markdown, parser_of, save
from evaluate import SMALL, make_model

#: Molecules of elements that the demo's model knows.
MOLECULES = ("NH3", "CH4", "HCOOH", "CH3OH", "H2CO")
#: Standard deviation of the positions in Å, and the springs' constant in eV/Å².
RATTLE, SPRING = 0.08, 20.0
#: Frames of a batch in ``memory``.
BATCH = 50


def write_frames(path: Path, count: int, seed: int) -> None:
    """Write so many rattled molecules with energies and forces of springs, unless they exist."""
    if path.exists():
        return
    rng, temporary = np.random.default_rng(seed), path.with_suffix(".part")
    with temporary.open("w") as file:
        for i in range(count):
            atoms = molecule(MOLECULES[i % len(MOLECULES)])
            moves = rng.normal(scale=RATTLE, size=atoms.positions.shape)
            rows = zip(atoms.symbols, (atoms.positions + moves).tolist(), (-SPRING * moves).tolist(), strict=True)
            lines = (
                " ".join([symbol, *(f"{x:.8f}" for x in (*place, *force))]) + "\n" for symbol, place, force in rows
            )
            energy = 0.5 * SPRING * float(np.square(moves).sum())
            columns = "Properties=species:S:1:pos:R:3:REF_forces:R:3"
            file.write(f'{len(atoms)}\n{columns} REF_energy={energy:.8f} pbc="F F F"\n' + "".join(lines))
    temporary.rename(path)


def command_of(model: Path, folder: Path, output: str, *options: str) -> list[str]:
    """Return the command of a fit."""
    files = [f"--train={folder / 'train.xyz'}", f"--valid={folder / 'valid.xyz'}", f"--output={folder / output}"]
    return ["e2ip", "fit", str(model), *files, *options]


def start(command: list[str], folder: Path) -> subprocess.Popen:
    """Start a command."""
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(command, env=environment(), cwd=folder, stdout=log, stderr=log)


def resident(process: subprocess.Popen) -> int:
    """Return the resident bytes of a process, 0 where it has none."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
    except (OSError, StopIteration):
        return 0


def finished(process: subprocess.Popen, folder: Path) -> None:
    """Wait for a process; end with its log if it has failed."""
    if process.wait():
        sys.exit((folder / "log.txt").read_text()[-3000:])


def measure_memory(work: Path, model: Path, frames: int) -> dict[str, Any]:
    """Return peak memory and time of a fit."""
    folder = work / f"frames-{frames}"
    folder.mkdir(exist_ok=True)
    write_frames(folder / "train.xyz", frames, 0)
    write_frames(folder / "valid.xyz", frames // 10, 1)
    before, began = os.times(), time.monotonic()
    process = start(command_of(model, folder, "fitted.model", "--overwrite", f"--batch-size={BATCH}"), folder)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process))
        time.sleep(0.2)
    finished(process, folder)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    size = sum((folder / name).stat().st_size for name in ("train.xyz", "valid.xyz"))
    print(f"{frames} frames: {peak / 2**20:.0f} MiB, {processor:.0f} s of processor time", flush=True)
    result = {"frames": frames, "peak_bytes": peak, "seconds": time.monotonic() - began, "file_bytes": size}
    return {**result, "processor_seconds": processor, "hardware": hardware()}


def state_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a model."""
    import torch

    return torch.load(path, weights_only=False).state_dict()


def measure_resume(work: Path, model: Path, count: int) -> dict[str, Any]:
    """Return how many tensors of a killed fit, and of one of two parts, differ from those of a fit without a stop."""
    folder = work / f"resume-{count}"
    folder.mkdir(exist_ok=True)
    write_frames(folder / "train.xyz", count, 0)
    write_frames(folder / "valid.xyz", count // 5, 1)
    finished(start(command_of(model, folder, "once.model", "--overwrite"), folder), folder)
    expected = state_of(folder / "once.model")
    kills, journal = 0, folder / "killed.model.fit.part.json"
    for name, frames in (("training set", count // 3), ("validation set", 1)):
        process = start(command_of(model, folder, "killed.model", "--overwrite"), folder)
        while process.poll() is None:
            time.sleep(0.02)
            if frames_of(journal, name) >= frames:
                process.kill()
                kills += process.wait() != 0
    finished(start(command_of(model, folder, "killed.model", "--overwrite"), folder), folder)
    parts = [start(command_of(model, folder, "parts.model", f"--part={i}/2", "--overwrite"), folder) for i in (1, 2)]
    for process in parts:
        finished(process, folder)
    finished(start(command_of(model, folder, "parts.model", "--merge=2", "--overwrite"), folder), folder)
    states = {name: state_of(folder / f"{name}.model") for name in ("killed", "parts")}
    differing = {
        name: sum(not bool((state[key] == values).all()) for key, values in expected.items())
        for name, state in states.items()
    }
    largest = max(
        float((states["parts"][key] - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-12))
        for key, values in expected.items()
        if values.is_floating_point() and values.numel()
    )
    print(f"{kills} kills, differing tensors {differing}, parts differ by {largest:.1e} at most", flush=True)
    return {
        "frames": count,
        "kills": kills,
        "tensors": len(expected),
        "differing": differing,
        "parts_differ_by": largest,
    }


def frames_of(journal: Path, name: str) -> int:
    """Return how many frames of a pass are done, as a journal tells."""
    try:
        return (json.loads(journal.read_text())["state"] or {"done": {}})["done"].get(name, 0)
    except (OSError, ValueError):
        return 0


def table(results: dict[str, dict]) -> str:
    """Return the Markdown table of ``memory``."""
    rows = [
        results[name]
        for name in sorted(results, key=lambda name: results[name]["frames"])
        if "peak_bytes" in results[name]
    ]
    return markdown(
        ["training frames", "file, MB", "peak memory, MiB", "processor time, s", "per frame, ms"],
        [
            [
                f"{row['frames']:,}".replace(",", " "),
                f"{row['file_bytes'] / 1e6:.1f}",
                f"{row['peak_bytes'] / 2**20:.0f}",
                f"{row['processor_seconds']:.0f}",
                f"{1e3 * row['processor_seconds'] / row['frames']:.1f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = parser_of(__doc__, "fit_stream", "work", "out")
    parser.add_argument("what", choices=("memory", "resume", "table"))
    parser.add_argument("--frames", type=int, nargs="+", default=[3000, 30000], help="numbers of training frames")
    parser.add_argument("--count", type=int, default=2000, help="training frames of resume")
    options = parser.parse_args()
    if options.what != "table":
        work = options.work.resolve()
        model = make_model("mace", work / "model", SMALL)
        if options.what == "memory":
            for frames in options.frames:
                save(options.out, {f"memory {frames}": measure_memory(work, model, frames)})
        else:
            save(options.out, {"resume": measure_resume(work, model, options.count)})
    print(table(load(options.out)))


if __name__ == "__main__":
    main()
