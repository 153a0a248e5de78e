"""LAMMPS on several processes: whether trajectories agree, and what the observer costs beside forces of the model.

    python benchmarks/lammps_processes.py run --host mace --model fitted.model --frame si.xyz --name "silicon, MACE"
    python benchmarks/lammps_processes.py table

`run` moves the frame by 100 steps with the driver on one, two and four processes, whose positions are compared, and
times steps of the driver without uncertainties and of the observer in turn: that ratio, over the observer's interval,
is what an observer adds to a pair style that costs as much as the model's own forces on that number of processes.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase.io.lammpsdata import write_lammps_data
from common import ROOT, load, markdown, parser_of, save

from e2ip_plugins.md.lammps import LammpsClusterDriver, LammpsObserver, open_lammps

#: Kelvin; steps of 0.5 fs that are compared; rounds of a timing, and steps of each.
TEMPERATURE, STEPS, ROUNDS, TIMED = 300, 100, 7, 3
#: Steps that are never reached.
FAR = 10**9


def start(data: Path, cutoff: float) -> Any:
    """Return LAMMPS with the atoms of a data file and no forces."""
    lmp = open_lammps(cmdargs=["-screen", "none", "-log", "none"])
    lmp.commands_string(f"""
        units metal
        atom_modify map array
        box tilt large
        read_data {data}
        timestep 0.0005
        neighbor 1.0 bin
        pair_style zero 2.0
        pair_coeff * *
        comm_modify cutoff {cutoff}
        fix integrate all nve
        velocity all create {TEMPERATURE} 1
    """)
    return lmp


def case(options: argparse.Namespace) -> None:
    """Run as one process of several; the first one prints positions by id, and milliseconds per step of both."""
    model = importlib.import_module(f"{options.host}_ext.inference.batches").open_model(options.model)
    driven, observed = start(options.data, options.cutoff), start(options.data, options.cutoff)
    LammpsClusterDriver(driven, model, options.species, interval=FAR, skin=1.0)
    LammpsObserver(observed, model, options.species, interval=1, skin=1.0)
    driven.command(f"run {STEPS}")
    observed.command("run 1")
    order = np.argsort(driven.gather_concat("id", 0, 1))
    positions = np.asarray(driven.gather_concat("x", 1, 3)).reshape(-1, 3)[order]
    times: dict[str, list[float]] = {"driver": [], "observer": []}
    for _ in range(ROUNDS):
        for name, lmp in (("driver", driven), ("observer", observed)):
            started = time.perf_counter()
            # Without the evaluation at the beginning of a run.
            lmp.command(f"run {TIMED} pre no post no")
            times[name].append(1000.0 * (time.perf_counter() - started) / TIMED)
    if driven.extract_setting("world_rank") == 0:
        print(json.dumps({"positions": positions.tolist(), **times}))
    for lmp in (driven, observed):
        lmp.close()
    # mpiexec kills all others when a process leaves without this, which waits for them.
    driven.lib.lammps_mpi_finalize()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return differences of positions and times of all numbers of processes."""
    frame = ase.io.read(options.frame, index=0).repeat(options.repeat)
    result: dict[str, Any] = {"atoms": len(frame), "cutoff": options.cutoff}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "frame.data"
        species = sorted(set(frame.symbols))
        write_lammps_data(data, frame, specorder=species, masses=True, units="metal")
        first = np.zeros(0)
        for number in options.processes:
            command = [Path(sys.executable).with_name("mpiexec"), "-n", number, sys.executable, __file__, "case"]
            command += ["--host", options.host, "--model", options.model, "--data", data, "--cutoff", options.cutoff]
            done = subprocess.run([*map(str, command), "--species", *species], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            printed = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
            positions = np.array(printed["positions"])
            first = first if len(first) else positions
            ratios = [b / a for a, b in zip(printed["driver"], printed["observer"], strict=True)]
            result[str(number)] = {
                "difference": float(np.abs(positions - first).max()),
                "driver_ms": statistics.median(printed["driver"]),
                "observer_ms": statistics.median(printed["observer"]),
                "ratio": statistics.median(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
            }
            print(f"{options.name}, {number} processes: {result[str(number)]}", flush=True)
    return result


def table(content: dict[str, Any]) -> str:
    """Return the figures of docs/howto/lammps.md."""
    rows = []
    for name, figures in content.items():
        for number, of_number in figures.items():
            if not number.isdigit():
                continue
            difference = f"{of_number['difference']:.0e}" if number != "1" else ""
            ratio = f"{of_number['ratio']:.2f} ({of_number['ratio_least']:.2f} to {of_number['ratio_most']:.2f})"
            rows.append([name, str(figures["atoms"]), number, difference, ratio])
    heads = ["system", "atoms", "processes", f"Å after {STEPS} steps", "observer / forces"]
    return markdown(heads, rows)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True)
    one, two, three = (commands.add_parser(name) for name in ("run", "case", "table"))
    for command in (one, two):
        command.add_argument("--host", choices=("mace", "nequip"), required=True)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--cutoff", type=float, default=21.0, help="of the communication, in Å")
    one.add_argument("--frame", type=Path, required=True, help="periodic frame")
    one.add_argument("--repeat", type=int, default=1)
    one.add_argument("--name", required=True, help="of the row")
    one.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    two.add_argument("--data", type=Path, required=True)
    two.add_argument("--species", nargs="+", required=True)
    for command in (one, three):
        command.add_argument("--out", type=Path, default=ROOT / "runs" / "lammps.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.command == "case":
        case(options)
    elif options.command == "run":
        save(options.out, {options.name: run(options)})
    else:
        print(table(load(options.out)))


if __name__ == "__main__":
    main()
