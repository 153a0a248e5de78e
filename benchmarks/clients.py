"""Which outputs of a model with a readout come through other people's tools.

    python3 noxfile.py -s clients               # every client, in an environment of their own
    python benchmarks/clients.py                # every client that is installed here
    python benchmarks/clients.py --clients neb  # one of them
    python benchmarks/clients.py --table        # the table of docs/howto/other-tools.md

A tiny MACE model of tests/fixtures drives every client for a few steps: the physics is nonsense, the interfaces are
not. Every client is a function that returns what it handed back. Results join benchmarks/results/clients.json. LAMMPS,
i-PI and torch-sim have tests of their own.
"""

import json
import lzma
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import bulk
from common import DEMO_DATA, ROOT, markdown, parser_of

#: What is looked for in what a client hands back.
OUTPUTS = ("energy", "forces", "stress", "forces_cov", "e2ip_leverage", "energy_uncertainty")


def calculator(**options: object) -> object:
    """Return the calculator of the fixture, which lies unpacked in the working folder."""
    from mace.calculators import MACECalculator

    return MACECalculator(model_paths="tiny.model", device="cpu", default_dtype="float64", **options)


def molecule(index: int = 0) -> Atoms:
    """Return a frame of the demo with a calculator."""
    atoms = ase.io.read(DEMO_DATA / "test.extxyz", index)
    # Labels of the file would be taken for predictions.
    atoms = Atoms(atoms.numbers, atoms.positions)
    atoms.calc = calculator()
    return atoms


def crystal() -> Atoms:
    """Return diamond with a calculator."""
    atoms = bulk("C", "diamond", a=3.57)
    atoms.calc = calculator()
    return atoms


def outputs(names: Iterable[str]) -> list[str]:
    """Return which of `OUTPUTS` are among some names, whatever stands before them."""
    return [name for name in OUTPUTS if any(n == name or n.endswith(f"_{name}") for n in names)]


def optimisers() -> list[str]:
    """ASE: BFGS, LBFGS and FIRE, and BFGS with a moving cell."""
    from ase.filters import FrechetCellFilter
    from ase.optimize import BFGS, FIRE, LBFGS

    for optimiser in (BFGS, LBFGS, FIRE):
        atoms = molecule()
        optimiser(atoms, logfile=None).run(steps=2)
    cell = crystal()
    BFGS(FrechetCellFilter(cell), logfile=None).run(steps=2)
    return outputs([*atoms.calc.results, *(name for name in cell.calc.results if name == "stress")])


def dynamics() -> list[str]:
    """ASE: Langevin dynamics, with a trajectory of e2ip_plugins.md.with_results."""
    from ase import units
    from ase.md.langevin import Langevin

    from e2ip_plugins.md import with_results

    atoms, frames = molecule(), []
    run = Langevin(atoms, 0.5 * units.fs, temperature_K=300, friction=0.01, rng=np.random.default_rng(0))
    run.attach(lambda: frames.append(with_results(atoms)))
    run.run(2)
    ase.io.write("md.xyz", frames)
    last = ase.io.read("md.xyz", -1)
    return outputs([*last.arrays, *last.info, *last.calc.results])


def neb() -> list[str]:
    """ASE: a nudged elastic band of five images that share a calculator."""
    from ase.mep import NEB
    from ase.optimize import FIRE

    ends = molecule(0), molecule(1)
    images = [ends[0], *(ends[0].copy() for _ in range(3)), ends[1]]
    shared = calculator()
    for image in images:
        image.calc = shared
    band = NEB(images, allow_shared_calculator=True, method="improvedtangent")
    band.interpolate()
    FIRE(band, logfile=None).run(steps=2)
    # Of a shared calculator every image asks again.
    names = set(outputs(shared.results))
    return [name for name in OUTPUTS if name in names and np.size(shared.get_property(name, images[2]))]


def ase_phonons() -> list[str]:
    """ASE: phonons from finite displacements; its cache has forces alone."""
    from ase.phonons import Phonons

    phonons = Phonons(crystal(), calculator(), supercell=(2, 2, 2), delta=0.02, name="phonons")
    phonons.run()
    phonons.read()
    cached = [json.loads(path.read_text()) for path in Path("phonons").glob("cache.*.json")]
    return outputs({name for entry in cached for name in entry})


def phonopy() -> list[str]:
    """phonopy: displacements from it, forces from the calculator; covariances are read in the same loop."""
    from phonopy import Phonopy
    from phonopy.structure.atoms import PhonopyAtoms

    cell = crystal()
    unit = PhonopyAtoms(symbols=cell.symbols, cell=cell.cell[:], scaled_positions=cell.get_scaled_positions())
    phonon, calc, forces, names = Phonopy(unit, 2 * np.eye(3)), calculator(), [], set()
    phonon.generate_displacements(distance=0.02)
    for displaced in phonon.supercells_with_displacements:
        atoms = Atoms(displaced.symbols, cell=displaced.cell, scaled_positions=displaced.scaled_positions, pbc=True)
        atoms.calc = calc
        forces.append(atoms.get_forces())
        names.update(calc.results)
    phonon.forces = forces
    phonon.produce_force_constants()
    assert np.isfinite(phonon.force_constants).all()
    return outputs(names)


def matcalc() -> list[str]:
    """matcalc: a relaxation, the dictionary that it returns; the calculator keeps the outputs of the last structure."""
    from matcalc import RelaxCalc

    cell = crystal()
    cell.calc = None
    return outputs(RelaxCalc(calculator(), max_steps=2, relax_cell=True, fmax=0.5).calc(cell))


def quacc() -> list[str]:
    """quacc: its runner and summary, of which recipes are made."""
    os.environ["QUACC_RESULTS_DIR"] = os.environ["QUACC_SCRATCH_DIR"] = str(Path.cwd())
    from quacc.runners.ase import Runner
    from quacc.schemas.ase import Summarize

    atoms = molecule()
    final = Runner(atoms, atoms.calc).run_calc()
    summary = Summarize(additional_fields={"name": "clients"}).run(final, atoms)
    return outputs(summary["results"])


def wfl() -> list[str]:
    """wfl: its generic calculation over a file of configurations."""
    from wfl.autoparallelize import AutoparaInfo
    from wfl.calculators import generic
    from wfl.configset import ConfigSet, OutputSpec

    atoms = molecule()
    atoms.calc = None
    info = AutoparaInfo(num_python_subprocesses=0)
    done = generic.calculate(
        ConfigSet([atoms]),
        OutputSpec(),
        calculator(),
        properties=["energy", "forces", "forces_cov"],
        output_prefix="m_",
        autopara_info=info,
    )
    (result,) = list(done)
    return outputs([*result.arrays, *result.info])


def _worker(index: int) -> dict:
    atoms = molecule(index)
    atoms.get_forces()
    return atoms.calc.results


def joblib() -> list[str]:
    """joblib: frames in two processes, a calculator in each, whose results come back."""
    from joblib import Parallel, delayed

    results = Parallel(n_jobs=2)(delayed(_worker)(index) for index in range(2))
    return outputs(set(results[0]) & set(results[1]))


def janus_core() -> list[str]:
    """janus-core: a single point of a MACE model file, with the file that it writes."""
    from janus_core.calculations.single_point import SinglePoint

    ase.io.write("in.xyz", Atoms(molecule().numbers, molecule().positions))
    point = SinglePoint(
        struct="in.xyz", arch="mace", model="tiny.model", device="cpu", write_results=True, file_prefix="janus"
    )
    point.run()
    (written,) = Path().glob("janus*.extxyz")
    frame = ase.io.read(written)
    return outputs([*frame.arrays, *frame.info, *frame.calc.results] if frame.calc else [*frame.arrays, *frame.info])


#: Clients by name: the distribution that they come with, and what runs them.
CLIENTS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "optimisers": ("ase", optimisers),
    "dynamics": ("ase", dynamics),
    "neb": ("ase", neb),
    "phonons": ("ase", ase_phonons),
    "phonopy": ("phonopy", phonopy),
    "matcalc": ("matcalc", matcalc),
    "quacc": ("quacc", quacc),
    "wfl": ("wfl", wfl),
    "joblib": ("joblib", joblib),
    "janus-core": ("janus-core", janus_core),
}


def tried(name: str) -> dict:
    """Run one client in a folder of its own; return its version and what came through, or the error."""
    distribution, run = CLIENTS[name]
    try:
        result: dict = {"version": f"{distribution} {version(distribution)}"}
    except PackageNotFoundError:
        return {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        packed = max((ROOT / "tests" / "fixtures").glob("[0-9]*/mace/tiny.model.xz"))
        os.chdir(folder)
        Path("tiny.model").write_bytes(lzma.decompress(packed.read_bytes()))
        try:
            result |= {"outputs": run()}
        # A client may fail in any way; the table says how.
        except Exception as error:
            traceback.print_exc()
            result |= {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        finally:
            os.chdir(before)
    return result


def table(results: dict[str, dict]) -> str:
    """Return the table of docs/howto/other-tools.md."""
    lines = []
    for name, result in results.items():
        marks = ["yes" if output in result.get("outputs", ()) else "–" for output in OUTPUTS]
        if "error" in result:
            marks = ["failed", *[""] * (len(OUTPUTS) - 1)]
        what = CLIENTS[name][1].__doc__.split(";")[0].rstrip(".")
        lines.append([what, result["version"], *marks])
    return markdown(["client", "tried", *(f"`{name}`" for name in OUTPUTS)], lines)


def main() -> None:
    """Try the clients, keep the results and print the table."""
    parser = parser_of(__doc__, "clients", "out", "table")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="which ones, separated by commas")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in [] if options.table else options.clients.split(","):
        result = tried(name)
        print(f"{name}: {result or 'is not installed here'}", flush=True)
        if result:
            results[name] = result
    results = {name: results[name] for name in CLIENTS if name in results}
    if not options.table:
        options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
