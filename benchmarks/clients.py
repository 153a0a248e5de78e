"""Run a model with a readout in other people's tools, and print which results come through.

    pip install phonopy joblib matcalc wfl quacc janus-core
    python benchmarks/clients.py my-e2ip.model structure.xyz             # or names of tools after the files

The model is a MACE .model. Tools that are not installed are skipped.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase.io
from ase import Atoms
from mace.calculators import MACECalculator


def calculator(model: str, **options: Any) -> MACECalculator:
    return MACECalculator(model, device="cpu", default_dtype="float64", **options)


def ase_optimiser(model: str, atoms: Atoms) -> Any:
    from ase.optimize import BFGS

    from e2ip_plugins.md import with_results

    atoms.calc = calculator(model, uncertainties="on request")
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=20)
    return sorted(with_results(atoms).arrays)


def phonopy(model: str, atoms: Atoms) -> Any:
    from phonopy import Phonopy
    from phonopy.structure.atoms import PhonopyAtoms

    cell = PhonopyAtoms(atoms.get_chemical_symbols(), cell=atoms.cell[:], scaled_positions=atoms.get_scaled_positions())
    phonons = Phonopy(cell, supercell_matrix=[[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    phonons.generate_displacements(distance=0.02)
    forces, deviations, calc = [], [], calculator(model, uncertainties="on request")
    for displaced in phonons.supercells_with_displacements[:2]:
        frame = Atoms(displaced.symbols, cell=displaced.cell, scaled_positions=displaced.scaled_positions, pbc=True)
        frame.calc = calc
        forces.append(frame.get_forces())
        deviations.append(float(calc.results["forces_uncertainty"].max()))
    return {"largest force uncertainties of the first displaced cells": deviations}


def _one(model: str, atoms: Atoms) -> list[str]:
    atoms.calc = calculator(model)
    atoms.get_forces()
    return sorted(atoms.calc.results)


def joblib(model: str, atoms: Atoms) -> Any:
    from joblib import Parallel, delayed

    return Parallel(n_jobs=2)(delayed(_one)(model, atoms.copy()) for _ in range(2))[0]


def matcalc(model: str, atoms: Atoms) -> Any:
    from matcalc import RelaxCalc

    return sorted(RelaxCalc(calculator(model), fmax=0.1, relax_cell=False).calc(atoms))


def wfl(model: str, atoms: Atoms) -> Any:
    from wfl.calculators.generic import calculate
    from wfl.configset import ConfigSet, OutputSpec

    ase.io.write("in.xyz", atoms)
    properties = ["energy", "forces"]
    calculate(ConfigSet("in.xyz"), OutputSpec("out.xyz"), calculator(model), properties, output_prefix="mace_")
    frame = ase.io.read("out.xyz")
    return [*sorted(frame.arrays), *sorted(frame.info)]


def quacc(model: str, atoms: Atoms) -> Any:
    from quacc.runners.ase import Runner
    from quacc.schemas.ase import Summarize

    final = Runner(atoms, calculator(model)).run_calc()
    return sorted(Summarize().run(final, atoms)["results"])


def janus(model: str, atoms: Atoms) -> Any:
    from janus_core.calculations.single_point import SinglePoint

    ase.io.write("in.xyz", atoms)
    options = {"calc_kwargs": {"default_dtype": "float64"}, "properties": ["energy", "forces"], "write_results": True}
    SinglePoint(struct="in.xyz", arch="mace_mp", model=model, **options).run()
    frame = ase.io.read(next(Path().glob("**/*results*.extxyz")))
    return [*sorted(frame.arrays), *sorted(frame.info)]


CLIENTS: dict[str, Callable[[str, Atoms], Any]] = {
    client.__name__: client for client in (ase_optimiser, phonopy, joblib, matcalc, wfl, quacc, janus)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("structure", help="a periodic structure; its last frame is taken")
    parser.add_argument("clients", nargs="*", help=", ".join(CLIENTS))
    options = parser.parse_args()
    model, atoms = str(Path(options.model).resolve()), ase.io.read(options.structure)
    # Without results and labels of the file.
    frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    os.chdir(tempfile.mkdtemp())
    for name in options.clients or CLIENTS:
        try:
            print(f"{name}: {CLIENTS[name](model, frame.copy())}", flush=True)
        except ModuleNotFoundError as error:
            print(f"{name}: not installed ({error.name})", flush=True)


if __name__ == "__main__":
    main()
