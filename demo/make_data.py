"""Make the demo's reference data: 2-methoxyacetamide, GFN2-xTB, Langevin molecular dynamics.

Run with ``python3 noxfile.py -s make_data`` (an environment of its own with tblite), 6 minutes on one core.
Training and validation frames come from one trajectory, test and out-of-distribution frames from one each, with
another seed and an equilibration of their own. What the files hold is told in ``demo/data/README.md``.
``--molecule`` makes the same of another one, by its name in ASE's g2 collection or from a file with its geometry.
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.collections import g2
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.optimize import BFGS
from tblite.ase import TBLite

METHOD = "GFN2-xTB"
ACCURACY = 0.1  # a tenth of tblite's default SCC thresholds
TIMESTEP_FS = 0.5
FRICTION_PER_FS = 0.01
EQUILIBRATION_STEPS = 10_000  # 5 ps
STRIDE = 200  # 100 fs between frames, several periods of everything but the torsions

# CH3-O-CH2-CO-NH2 in its lowest conformer, the amide hydrogen pointing at the ether oxygen.
SYMBOLS = "COCC" + "NO" + "H" * 7
POSITIONS = """
 2.226 -1.312 -0.274    0.878 -0.923 -0.372    0.596  0.262  0.335   -0.875  0.653  0.200   -1.590 -0.178 -0.577
-1.328  1.630  0.751    2.514 -1.487  0.770    2.322 -2.239 -0.836    2.892 -0.553 -0.701    0.820  0.145  1.406
 1.204  1.100 -0.039   -2.571 -0.005 -0.720   -1.143 -0.975 -0.995
"""


def calculator() -> TBLite:
    """Return a silent GFN2-xTB calculator."""
    return TBLite(method=METHOD, accuracy=ACCURACY, verbosity=0)


def relaxed_molecule(name: str | None = None) -> Atoms:
    """Return the demo's molecule, or one by name or file, at the GFN2-xTB minimum, forces below 1e-3 eV/Å."""
    if name is None:
        atoms = Atoms(SYMBOLS, np.array(POSITIONS.split(), dtype=float).reshape(-1, 3))
    else:
        atoms = molecule(name) if name in g2.names else read(name)
    atoms.calc = calculator()
    BFGS(atoms, logfile=None).run(fmax=1e-3, steps=500)
    return atoms


def labelled_copy(atoms: Atoms) -> Atoms:
    """Return a centred frame with ``REF_energy`` (eV, total) and ``REF_forces`` (eV/Å)."""
    frame = Atoms(atoms.symbols, atoms.positions - atoms.get_center_of_mass())
    frame.info["REF_energy"] = round(atoms.get_potential_energy(), 8)
    frame.arrays["REF_forces"] = atoms.get_forces()
    return frame


def trajectory(name: str, start: Atoms, temperature: float, frames: int, seed: int) -> list[Atoms]:
    """Return ``frames`` decorrelated frames at ``temperature`` (K); progress goes to standard output."""
    print(f"{name}: {frames} frames at {temperature:.0f} K", flush=True)
    rng = np.random.default_rng(seed)
    atoms = start.copy()
    atoms.calc = calculator()
    thermalize_momenta(atoms, temperature_K=temperature, rng=rng)
    # fixcm=False: ASE's fixcm does not sample the canonical ensemble of a small molecule. Frames are centred instead.
    dynamics = Langevin(
        atoms,
        TIMESTEP_FS * units.fs,
        temperature_K=temperature,
        friction=FRICTION_PER_FS / units.fs,
        fixcm=False,
        rng=rng,
    )
    dynamics.run(EQUILIBRATION_STEPS)
    taken: list[Atoms] = []
    began = time.monotonic()
    while len(taken) < frames:
        dynamics.run(STRIDE)
        taken.append(labelled_copy(atoms))
        if len(taken) % 25 == 0:
            print(f"  {len(taken):4d}/{frames} frames  {time.monotonic() - began:5.0f} s", flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output folder (default: the demo's data)")
    parser.add_argument("--molecule", metavar="NAME", help="another one, e.g. C5H5N or my.xyz; needs --out")
    arguments = parser.parse_args()
    if arguments.molecule and arguments.out is None:
        parser.error("--molecule needs --out: the demo's data are of its own molecule")
    if arguments.molecule and arguments.molecule not in g2.names and not Path(arguments.molecule).is_file():
        parser.error(f"--molecule {arguments.molecule}: no name in ASE's g2 collection, and no file")
    out = arguments.out or Path(__file__).parent / "data"
    out.mkdir(parents=True, exist_ok=True)
    print(f"{METHOD}, tblite {version('tblite')}, ASE {version('ase')}", flush=True)
    start = relaxed_molecule(arguments.molecule)
    fit = trajectory("train and valid", start, 300.0, 350, seed=11)
    write(out / "valid.extxyz", fit[::7], format="extxyz")
    del fit[::7]
    write(out / "train.extxyz", fit, format="extxyz")
    write(out / "test.extxyz", trajectory("test", start, 300.0, 150, seed=12), format="extxyz")
    write(out / "ood.extxyz", trajectory("ood", start, 900.0, 100, seed=13), format="extxyz")


if __name__ == "__main__":
    main()
