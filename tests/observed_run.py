"""Run LAMMPS with a `LammpsObserver`, and compare with the periodic calculation in one process.

    mpiexec -n 2 python tests/observed_run.py HOST MODEL FRAME [STYLE]

Process 0 prints one line of JSON: the largest differences, relative to the largest value, over all observed steps.
"""

import importlib
import json
import sys
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms

from e2ip_plugins.evaluation.batches import columns_of
from e2ip_plugins.md import Monitor, MonitorStop
from e2ip_plugins.md.lammps import LammpsObserver, open_lammps
from e2ip_plugins.md.lammps.observer import SilentMonitor

KEYS = ("forces_epistemic_std", "e2ip_leverage", "forces_cov")


def main(host: str, model_file: str, frame_file: str, style: str = "metal") -> None:
    model = importlib.import_module(f"{host}_ext.inference.batches").open_model(Path(model_file))
    frame = ase.io.read(frame_file)
    species = sorted(set(frame.symbols))
    lmp = open_lammps(cmdargs=["-screen", "none", "-log", "none"])
    cell = frame.cell.standard_form()[0]
    box = " ".join(f"0 {side:.17g}" for side in np.diag(cell))
    lmp.commands_string(f"""
        units {style}
        atom_modify map array
        box tilt large
        region box prism {box} {cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g}
        create_box {len(species)} box
        timestep {0.0005 if style == "metal" else 0.5}
        pair_style zero 2.0
        pair_coeff * *
        comm_modify cutoff 14.0
        fix integrate all nve
    """)
    for i, symbol in enumerate(species):
        lmp.command(f"mass {i + 1} {Atoms(symbol).get_masses()[0]:.17g}")
    positions = frame.get_scaled_positions() @ cell
    types = [species.index(symbol) + 1 for symbol in frame.symbols]
    lmp.create_atoms(len(frame), list(range(1, len(frame) + 1)), types, positions.ravel().tolist())
    lmp.command("velocity all create 5000 1")
    observer = LammpsObserver(lmp, model, species, keys=KEYS, every=5, skin=1.0)
    worst = dict.fromkeys(KEYS, 0.0)
    steps = []

    def compare() -> None:
        # A copy: the calculator's results belong to the positions that it was made for.
        atoms, results = observer.atoms.copy(), observer.atoms.calc.results
        assert atoms.pbc.all() and len(atoms) == len(frame)
        expected = columns_of(model, model.uncertainties([model.graph(atoms)[0]]), list(atoms.symbols))
        for key in KEYS:
            difference = np.abs(results[key] - expected[key]).max() / np.abs(expected[key]).max()
            worst[key] = max(worst[key], float(difference))
        steps.append(atoms.info["lammps_step"])

    observer.attach(compare)
    lmp.command("run 12")
    columns = lmp.numpy.extract_atom("d_e2ip_leverage")[: lmp.extract_setting("nlocal")]
    assert np.isfinite(columns).all()
    known = lmp.numpy.extract_atom("i_e2ip_step")[: lmp.extract_setting("nlocal")]
    assert (known == 10).all()
    # Every process stops at the same step, and the first one writes the frame.
    first = lmp.extract_setting("world_rank") == 0
    limit = {KEYS[0]: 0.5 * float(observer.atoms.calc.results[KEYS[0]].max())}
    kind = Monitor if first else SilentMonitor
    observer.watch(lambda atoms: kind(atoms, limit, action="stop", frames="stopped.xyz"))
    try:
        lmp.command("run 20")
    except MonitorStop as stop:
        assert stop.frame.info["lammps_step"] == 15, stop.frame.info
    else:
        raise AssertionError("the monitor did not stop the run")
    assert lmp.extract_global("ntimestep") == 15
    if first:
        frames = ase.io.read("stopped.xyz", index=":")
        assert len(frames) == 1 and len(frames[0]) == len(frame) and KEYS[0] in frames[0].arrays
        counts = lmp.extract_setting("world_size")
        print(json.dumps({"steps": steps, "processes": counts, "cutoff": observer.cutoff, **worst}), flush=True)
    lmp.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
