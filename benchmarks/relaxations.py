"""Print error bars of a vacancy, its barrier, a bulk modulus and phonons of copper, beside EMT's own values.

    python benchmarks/relaxations.py --work runs/relaxations

A small MACE model is trained on frames of ASE's EMT potential: some minutes on a core, kept in the folder.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.eos import EquationOfState
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from ase.phonons import Phonons
from common import ROOT, parser_of
from crystals import CRYSTALS, cold, dynamics

from e2ip_plugins.energies import MemberCalculator, difference, members
from e2ip_plugins.md import with_results

COPPER = CRYSTALS["copper"]
STRAINS = np.linspace(0.97, 1.03, 7)
MEMBERS, PHONON_MEMBERS = 200, 5


def without(atoms: Atoms, number: int = 0) -> Atoms:
    """Return the atoms without one."""
    atoms = atoms.copy()
    del atoms[number]
    return atoms


def prepare(folder: Path) -> Path:
    """Make frames of perfect, strained and defective crystals, train, and return the model."""
    model = folder / "run" / "copper.model"
    if model.exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train", 20), ("valid", 10))):
        rng = np.random.default_rng(seed)
        frames = cold(COPPER, 2 * count, rng)
        for temperature in (300.0, 900.0):
            frames += dynamics(without(COPPER.make()), temperature, count, rng)
        ase.io.write(folder / f"{name}.extxyz", frames, format="extxyz")
    options = "--num_channels=16 --max_ell=2 --correlation=2 --r_max=4 --energy_weight=100 --max_num_epochs=18"
    command = f"mace_run_train --config={ROOT}/configs/mace_baseline.yaml --readout=e2ip --name=copper {options}"
    command += f" --lr_scheduler_gamma=0.85 --train_file={folder}/train.extxyz --valid_file={folder}/valid.extxyz"
    with open(folder / "log.txt", "w") as log:
        subprocess.run([*command.split(), f"--work_dir={model.parent}"], check=True, stdout=log, stderr=log)
    return model


def relaxed(atoms: Atoms, make: Callable[[], object]) -> Atoms:
    """Return the atoms at rest, with a calculator."""
    atoms = atoms.copy()
    atoms.calc = make()
    BFGS(atoms, logfile=None).run(fmax=0.01)
    return atoms


def hop(make: Callable[[], object]) -> list[Atoms]:
    """Return the images of an atom that jumps into a neighbouring vacancy."""
    perfect = COPPER.make()
    jumping = 1 + int(np.argmin(perfect.get_distances(0, range(1, len(perfect)), mic=True)))
    last = perfect.copy()
    last.positions[jumping] += perfect.get_distance(jumping, 0, mic=True, vector=True)
    ends = [relaxed(without(atoms), make) for atoms in (perfect, last)]
    images = [ends[0], *(ends[0].copy() for _ in range(3)), ends[1]]
    band = NEB(images, climb=True, allow_shared_calculator=True)
    band.interpolate(mic=True)
    calculator = make()
    for image in images:
        image.calc = calculator
    FIRE(band, logfile=None).run(fmax=0.05, steps=60)
    return images


def frequencies(calculator: object, folder: Path) -> np.ndarray:
    """Return the three phonon energies at X in meV."""
    phonons = Phonons(bulk("Cu", "fcc", a=3.61), calculator, supercell=(3, 3, 3), delta=0.02, name=str(folder))
    phonons.run()
    phonons.read(acoustic=True)
    return 1000 * phonons.band_structure([[0.5, 0.0, 0.5]], verbose=False)[0]


def modulus(volumes: list[float], energies: np.ndarray) -> float:
    """Return the bulk modulus in GPa."""
    return EquationOfState(volumes, energies, "birchmurnaghan").fit()[2] / units.GPa


def energies_of(make: Callable[[], object], folder: Path) -> tuple[list[Atoms], list[Atoms], list[Atoms]]:
    """Return perfect crystal and vacancy, the band of a hop, and strained crystals, with a calculator."""
    perfect = COPPER.make()
    perfect.calc = make()
    strained = []
    for strain in STRAINS:
        strained.append(COPPER.make())
        strained[-1].set_cell(strain * perfect.cell, scale_atoms=True)
        strained[-1].calc = make()
    return [perfect, relaxed(without(COPPER.make()), make)], hop(make), strained


def main() -> None:
    folder = parser_of(__doc__, "relaxations", "work").parse_args().work
    model = prepare(folder)
    from mace.calculators import MACECalculator

    calculator = MACECalculator(str(model), device="cpu", default_dtype="float64", uncertainties="on request")
    defect, band, strained = energies_of(lambda: calculator, folder)
    for name, frames in (("defect", defect), ("band", band), ("strained", strained)):
        ase.io.write(folder / f"{name}.xyz", [with_results(atoms) for atoms in frames], format="extxyz")
    true_defect, true_band, true_strained = (
        [atoms.get_potential_energy() for atoms in frames] for frames in energies_of(EMT, folder)
    )
    top = int(np.argmax([atoms.get_potential_energy() for atoms in band]))
    volumes = [atoms.get_volume() for atoms in strained]
    moduli = [modulus(volumes, e) for e in members(folder / "strained.xyz", MEMBERS).T]
    scale = "0.96875"
    rows = [
        (
            "vacancy formation energy, eV",
            *difference(folder / "defect.xyz", f"1 - {scale}*0"),
            true_defect[1] - 31 / 32 * true_defect[0],
        ),
        ("barrier of its hop, eV", *difference(folder / "band.xyz", f"{top} - 0"), max(true_band) - true_band[0]),
        (
            "bulk modulus, GPa",
            modulus(volumes, [a.get_potential_energy() for a in strained]),
            np.std(moduli),
            modulus(volumes, true_strained),
        ),
    ]
    model_modes, true_modes = frequencies(calculator, folder / "ph"), frequencies(EMT(), folder / "ph-true")
    modes = [frequencies(MemberCalculator(calculator, k), folder / f"ph-{k}") for k in range(PHONON_MEMBERS)]
    spread = np.std(modes, axis=0, ddof=1)
    rows += [
        (f"phonon at X, {name}, meV", model_modes[i], spread[i], true_modes[i])
        for i, name in ((0, "transverse"), (2, "longitudinal"))
    ]
    print("| | model | error bar | EMT |\n|---|--:|--:|--:|")
    for name, *figures in rows:
        print(f"| {name} | {' | '.join(f'{x:.3f}' for x in figures)} |")
    for atoms, name in ((defect[1], "relaxed vacancy"), (band[top], "saddle point")):
        results = with_results(atoms)
        std, leverage = results.arrays["forces_uncertainty"].max(), results.arrays["e2ip_leverage"].max()
        print(f"{name}: largest standard deviation of a force {std:.3f} eV/Å, largest leverage {leverage:.1f}")


if __name__ == "__main__":
    main()
