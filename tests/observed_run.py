"""Run LAMMPS with a `LammpsObserver` or `LammpsClusterDriver`, and compare with one periodic calculation.

    mpiexec -n 2 python tests/observed_run.py HOST MODEL FRAME observer|driver CUTOFF

Process 0 prints one line of JSON: the largest differences, relative to the largest value, over all observed steps.
"""

import importlib
import json
import sys
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units

from e2ip_plugins.evaluation.batches import columns_of
from e2ip_plugins.md import Monitor, MonitorStop
from e2ip_plugins.md.lammps import LammpsClusterDriver, LammpsObserver, open_lammps
from e2ip_plugins.md.lammps.observer import SilentMonitor

KEYS = ("forces_epistemic_std", "e2ip_leverage", "forces_cov")


def start(frame, cutoff):
    """LAMMPS with a periodic frame at 5000 K, and species of its types."""
    species = sorted(set(frame.symbols))
    lmp = open_lammps(cmdargs=["-screen", "none", "-log", "none"])
    cell = frame.cell.standard_form()[0]
    box = " ".join(f"0 {side:.17g}" for side in np.diag(cell))
    lmp.commands_string(f"""
        units metal
        atom_modify map array
        box tilt large
        region box prism {box} {cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g}
        create_box {len(species)} box
        timestep 0.0005
        neighbor 1.0 bin
        pair_style zero 2.0
        pair_coeff * *
        comm_modify cutoff {cutoff}
        fix integrate all nve
        thermo_style custom step pe
        compute virial all pressure NULL virial
        thermo_style custom step pe c_virial[*]
    """)
    for i, symbol in enumerate(species):
        lmp.command(f"mass {i + 1} {Atoms(symbol).get_masses()[0]:.17g}")
    positions = frame.get_scaled_positions() @ cell
    types = [species.index(symbol) + 1 for symbol in frame.symbols]
    lmp.create_atoms(len(frame), list(range(1, len(frame) + 1)), types, positions.ravel().tolist())
    lmp.command("velocity all create 5000 1")
    return lmp, species


def main(host, model_file, frame_file, kind, cutoff):
    model = importlib.import_module(f"{host}_ext.inference.batches").open_model(Path(model_file))
    frame = ase.io.read(frame_file)
    lmp, species = start(frame, cutoff)
    first, steps, worst = lmp.extract_setting("world_rank") == 0, [], {}
    observer = (LammpsObserver if kind == "observer" else LammpsClusterDriver)(
        lmp, model, species, keys=KEYS, interval=5, skin=1.0
    )
    lmp.command("thermo_style custom step pe c_virial[*] f_e2ip[1] f_e2ip[2]")

    def compare(name, value, expected):
        difference = np.abs(value - expected).max() / np.abs(expected).max()
        worst[name] = max(worst.get(name, 0.0), float(difference))

    def check():
        # A copy: the calculator's results belong to the positions that it was made for.
        atoms, results = observer.atoms.copy(), observer.atoms.calc.results
        assert atoms.pbc.all() and len(atoms) == len(frame)
        graph = model.graph(atoms)[0]
        outputs = model.uncertainties([graph])
        expected = columns_of(model, outputs, list(atoms.symbols))
        for key in KEYS:
            compare(key, results[key], expected[key])
        # Of the whole system: no atom counts twice where several processes have copies of it.
        for key in ("energy_error_vector", "energy_uncertainty"):
            compare(key, results[key], outputs[key][0].cpu().numpy())
        if kind == "driver":
            compare("forces", results["forces"], model.evaluate([graph], False)["forces"].cpu().numpy())
        steps.append(atoms.info["lammps_step"])

    observer.attach(check)
    lmp.command("run 10")
    shown = lmp.last_thermo()
    compare("f_e2ip", shown["f_e2ip[1]"], observer.atoms.calc.results["energy_uncertainty"])
    assert shown["f_e2ip[2]"] == 10
    if kind == "driver":
        evaluated = model.evaluate([model.graph(observer.atoms.copy())[0]], True)
        compare("energy", shown["PotEng"], evaluated["energy"].cpu().numpy())
        pressures = -evaluated["stress"][0].cpu().numpy() / (1e5 * units.Pascal)
        values = [shown[f"c_virial[{i + 1}]"] for i in range(6)]
        compare("virial", np.array(values), pressures[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]])
    lmp.command("run 2")
    assert lmp.last_thermo()["f_e2ip[2]"] == 10
    known = lmp.numpy.extract_atom("i_e2ip_step")[: lmp.extract_setting("nlocal")]
    assert (known == 10).all()
    # Every process stops at the same step, and the first one writes the frame.
    limit = {KEYS[0]: 0.5 * float(observer.atoms.calc.results[KEYS[0]].max())}
    observer.watch(
        lambda atoms: (Monitor if first else SilentMonitor)(atoms, limit, action="stop", frames="stopped.xyz")
    )
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
        reach = observer._reach.uncertainties
        print(json.dumps({"steps": steps, "processes": lmp.extract_setting("world_size"), "reach": reach, **worst}))
    lmp.close()
    # mpiexec kills all others when a process leaves without this, which waits for them.
    lmp.lib.lammps_mpi_finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
