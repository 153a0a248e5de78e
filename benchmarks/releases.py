"""What works with the installed release of a host: the contract, trainings of one epoch, predictions, the calculator.

    python benchmarks/releases.py mace --work runs/releases       # in an environment with e2ip-plugins[mace]
    python benchmarks/releases.py --table                         # adds the results of --work, prints all

Every release leaves its model below ``--work``, and opens those that others have left there. Exit status 1 where a
step has failed.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase.calculators.calculator import Calculator
from common import DEMO_DATA, ROOT, environment, load, markdown, parser_of, save

from e2ip_plugins.report.compare import compare, load_models

PACKAGES = {"mace": "mace-torch", "nequip": "nequip"}
#: Frames of each file, from its beginning: what a training of one epoch needs.
FRAMES = {"train": 20, "valid": 8, "test": 8}
#: Largest difference of one frame from what another release predicts, in eV, eV/Å or (eV/Å)², in float32.
TOLERANCE = 1e-3
STEPS = ("contract", "stock", "readout", "evaluation", "existing", "calculator")
#: Transforms of the ready configs for NequIP without the box around molecules, as an option of `nequip-train`.
TRANSFORMS = (
    "data.transforms=[{_target_:nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper,"
    "model_type_names:[H,C,N,O],chemical_species_to_atom_type_map:{H:H,C:C,N:N,O:O}},"
    "{_target_:nequip.data.transforms.NeighborListTransform,r_max:${cutoff_radius}}]"
)


def run(*command: str | Path, **variables: str) -> None:
    """Run a command in the environment of this interpreter."""
    done = subprocess.run(list(map(str, command)), env=environment() | variables, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"{command[0]}: {lines[-1] if lines else done.returncode}")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Steps:
    """Steps of one release, in a folder of its own; MACE and NequIP each have a subclass.

    Attributes
    ----------
    host, suffix : str
        Its name and the suffix of its model files.
    """

    host: str
    suffix: str

    def __init__(self, work: Path) -> None:
        self.work, self.release = work, version(PACKAGES[self.host])
        self.folder = work / f"{self.host}-{self.release}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: self.folder / f"{name}.extxyz" for name in FRAMES}
        for name, count in FRAMES.items():
            ase.io.write(self.files[name], ase.io.read(DEMO_DATA / f"{name}.extxyz", f":{count}"))
        self.model = self.folder / f"e2ip{self.suffix}"

    def problem(self) -> str:
        """Return what is wrong with the names that we call, replace or import."""
        raise NotImplementedError

    def calculator_of(self, path: Path) -> Calculator:
        raise NotImplementedError

    def contract(self) -> str:
        problem = self.problem()
        assert not problem, problem
        return "holds"

    def score(self, path: Path) -> str:
        """Return what `e2ip compare` makes of a file of predictions."""
        (model,) = compare(load_models([path]))["models"]
        nll = model["overall"]["nll"]
        assert model["uq_family"] == "niw" and nll == nll, model
        return f"{FRAMES['test']} predicted, NLL {nll:.2f}"

    def fit_and_strip(self, stock: Path) -> str:
        """Check `e2ip fit`, `evaluate` and `strip`, after which the same fit must predict the same forces."""
        fitted, stripped, again = (stock.with_name(f"{n}{self.suffix}") for n in ("fitted", "stripped", "again"))
        fit = ("--train", self.files["train"], "--valid", self.files["valid"], "--overwrite", "--output")
        run("e2ip", "fit", stock, *fit, fitted)
        run("e2ip", "strip", fitted, "--overwrite", "--output", stripped)
        run("e2ip", "fit", stripped, *fit, again)
        forces = []
        for model in (fitted, again):
            run("e2ip", "evaluate", model, self.files["test"], model.with_suffix(".xyz"), "--overwrite")
            forces.append([atoms.get_forces() for atoms in ase.io.read(model.with_suffix(".xyz"), ":")])
        assert np.array_equal(*forces), "forces differ once a readout was taken off"
        return "readout trained alone, fitted, evaluated, taken off"

    def predict(self, model: Path) -> dict[str, Any]:
        """Return energy, forces and covariances of one frame."""
        atoms = ase.io.read(self.files["test"], 0)
        atoms.calc = self.calculator_of(model)
        forces = atoms.get_forces().tolist()
        covariances = atoms.calc.results["forces_cov"].tolist()
        return {"energy": float(atoms.get_potential_energy()), "forces": forces, "forces_cov": covariances}

    def calculator(self) -> str:
        (self.folder / "expected.json").write_text(json.dumps(self.predict(self.model)))
        return ""

    def open_other(self, folder: Path) -> str:
        """Open the model of another release, which must predict what that did."""
        predicted = self.predict(folder / self.model.name)
        for name, value in json.loads((folder / "expected.json").read_text()).items():
            difference = np.abs(np.asarray(predicted[name]) - np.asarray(value)).max()
            if not difference < TOLERANCE:
                raise RuntimeError(f"{name} differs by {difference:.2g}")
        return ""

    def attempt(self, label: str, step: Callable[..., str], *arguments: Path) -> dict[str, Any]:
        """Return result, time and failure of a step; one that fails does not keep the others from running."""
        start = time.monotonic()
        try:
            entry: dict[str, Any] = {"ok": True, "text": step(*arguments)}
        except Exception as error:
            traceback.print_exc()
            entry = {"ok": False, "text": f"{type(error).__name__}: {error}"}
        print(f"{self.host} {self.release} {label}: {'ok' if entry['ok'] else 'FAILED'} {entry['text']}", flush=True)
        return entry | {"seconds": round(time.monotonic() - start, 1)}

    def open_others(self) -> dict[str, dict]:
        """Try the files of other releases."""
        others = sorted(path.parent for path in self.work.glob(f"{self.host}-*/expected.json"))
        names = {folder.name.removeprefix(f"{self.host}-"): folder for folder in others if folder != self.folder}
        return {name: self.attempt(f"model of {name}", self.open_other, folder) for name, folder in names.items()}


class Mace(Steps):
    """Steps in MACE."""

    host, suffix = "mace", ".model"

    def problem(self) -> str:
        from mace_ext import seams

        for module in seams.SEAMS:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
        return seams.problem()

    def train(self, name: str, *options: str, **variables: str) -> None:
        """Train for one epoch with the options of the demo, on a tiny model."""
        command = ["mace_run_train", "--config", ROOT / "configs" / "mace_baseline.yaml", "--name", name]
        command += ["--num_channels=8", "--max_ell=2", "--correlation=3", "--max_num_epochs=1", "--plot=False"]
        command += [f"--train_file={self.files['train']}", f"--valid_file={self.files['valid']}"]
        run(*command, "--work_dir", self.folder, *options, **variables)

    def stock(self) -> str:
        """Train a stock model with the plugin and one without: the same weights to the last bit."""
        self.train("with")
        self.train("without", E2IP_DISABLE="1")
        states = [torch.load(self.folder / f"{n}.model", weights_only=False).state_dict() for n in ("with", "without")]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        return "same weights with and without the plugin"

    def readout(self) -> str:
        """Train with the readout; its figures are in MACE's results file."""
        self.train("e2ip", "--readout=e2ip")
        (results,) = (self.folder / "results").glob("e2ip_run-*_train.txt")
        last = [json.loads(line) for line in results.read_text().splitlines() if '"eval"' in line][-1]
        assert (self.folder / "e2ip_compiled.model").exists(), "no TorchScript model"
        return f"validation NLL {last['e2ip_nll']:.2f}"

    def evaluation(self) -> str:
        """Predict with `mace_eval_configs`."""
        output = self.folder / "test.xyz"
        files = ("--configs", self.files["test"], "--model", self.model, "--output", output)
        run("mace_eval_configs", *files, "--default_dtype", "float32")
        return self.score(output)

    def existing(self) -> str:
        """Train the readout alone on the stock model, and fit it without a training."""
        stock = self.folder / "with.model"
        fixed = ("--readout=e2ip", "--e2ip_forces=fixed", f"--foundation_model={stock}", "--default_dtype=float32")
        self.train("fixed", *fixed)
        return self.fit_and_strip(stock)

    def calculator_of(self, path: Path) -> Calculator:
        from mace.calculators import MACECalculator

        return MACECalculator(model_paths=str(path), device="cpu")


class Nequip(Steps):
    """Steps in NequIP."""

    host, suffix = "nequip", ".ckpt"

    def problem(self) -> str:
        import nequip  # noqa: F401

        from nequip_ext import contract

        return contract.problem()

    def train(self, name: str, stock: Path | None = None) -> Path:
        """Train and test for one epoch, on a tiny model or for the readout of a ``stock`` one; return the folder."""
        from nequip.data.transforms import NonPeriodicCellTransform

        folder = self.folder / ("fixed" if stock else name)
        inner = "training_module.model" if name == "nequip_baseline" else "training_module.model.model"
        data = {"train_file": "train", "val_file": "valid", "test_file": "test"}
        options = [f"{option}={self.files[file]}" for option, file in data.items()]
        options += ["chemical_species=[H,C,N,O]", "max_epochs=1", f"hydra.run.dir={folder}"]
        options.append("+trainer.enable_progress_bar=false")
        if stock:
            options += ["forces=fixed", "+training_module.val_metrics.coeffs.e2ip_nll=1.0", f"~{inner}"]
            options += [f"+{inner}._target_=nequip.model.ModelFromCheckpoint", f"+{inner}.checkpoint_path={stock}"]
        else:
            options += [f"{inner}.num_features=8", f"{inner}.l_max=1"]
        if "padding" not in inspect.signature(NonPeriodicCellTransform.__init__).parameters:
            # 0.16 puts no box around molecules that come without a cell: the ready configs need 0.17.
            options.append(TRANSFORMS)
        run("nequip-train", "-cp", ROOT / "configs", "-cn", name, *options)
        return folder

    def stock(self) -> str:
        """Train a stock model."""
        folder = self.train("nequip_baseline")
        assert (folder / "best.ckpt").exists() and (folder / "test_dataset0.xyz").exists()
        return "trained and tested"

    def readout(self) -> str:
        """Train with the readout, whose leverage is fitted at the end."""
        best = self.train("nequip_e2ip") / "best.ckpt"
        state = torch.load(best, weights_only=False, map_location="cpu")["state_dict"]
        assert any(name.endswith("leverage.fitted") and bool(value) for name, value in state.items())
        self.model.write_bytes(best.read_bytes())
        return "trained and tested, leverage fitted"

    def evaluation(self) -> str:
        """Read what NequIP's own callback wrote."""
        return self.score(self.folder / "nequip_e2ip" / "test_dataset0.xyz")

    def existing(self) -> str:
        """Train the readout alone on the stock model, and fit it without a training."""
        stock = self.folder / "nequip_baseline" / "best.ckpt"
        self.train("nequip_e2ip", stock)
        return self.fit_and_strip(stock)

    def calculator_of(self, path: Path) -> Calculator:
        from nequip_ext import E2IPCalculator

        return E2IPCalculator.from_saved_model(str(path))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""

    def mark(entry: dict[str, Any] | None) -> str:
        return "–" if entry is None else "yes" if entry["ok"] else f"**no**: {entry['text']}"

    def order(row: dict[str, Any]) -> tuple:
        return row["host"], *([int(n) for n in row[key].split(".")] for key in ("release", "python"))

    columns = ["release", "Python", "torch", "e3nn", "contract", "stock", "e²IP (four steps)", "opens files of"]
    lines = []
    for row in sorted(rows, key=order):
        name = {"mace": "mace-torch", "nequip": "NequIP"}[row["host"]]
        marks = [mark(row.get(step)) for step in ("readout", "evaluation", "calculator", "existing")]
        opened = [other if entry["ok"] else f"~~{other}~~" for other, entry in row["opens"].items()]
        cells = [f"{name} {row['release']}", row["python"], row["packages"]["torch"], row["packages"]["e3nn"]]
        lines.append([*cells, mark(row["contract"]), mark(row["stock"]), ", ".join(marks), ", ".join(opened)])
    return markdown(columns, lines)


def main() -> None:
    parser = parser_of(__doc__, "releases", "work", "out", "table")
    parser.add_argument("host", nargs="?", choices=PACKAGES)
    parser.add_argument("--open", action="store_true", help="after a full run: open files of others alone, once more")
    options = parser.parse_args()
    if options.table:
        save(options.out, {path.stem: json.loads(path.read_text()) for path in options.work.glob("*.json")})
        print(table(list(load(options.out).values())))
        return
    if options.host is None:
        parser.error("give a host, or --table")
    warnings.simplefilter("ignore")
    steps = {"mace": Mace, "nequip": Nequip}[options.host](options.work.resolve())
    python, torch_release = platform.python_version(), version("torch").partition("+")[0]
    name = f"{options.host}-{steps.release}-python{python.rpartition('.')[0]}-torch{torch_release}"
    path = options.work / f"{name}.json"
    if options.open:
        row = json.loads(path.read_text())
    else:
        packages = ("torch", "e3nn", "numpy", "nequip-allegro", "lightning")
        row = {"host": options.host, "release": steps.release, "python": python}
        row["packages"] = {package: version(package) for package in packages if version(package)}
        row |= {step: steps.attempt(step, getattr(steps, step)) for step in STEPS}
    row["opens"] = steps.open_others()
    path.write_text(json.dumps(row, indent=1) + "\n")
    sys.exit(not all(entry["ok"] for entry in [*(row[step] for step in STEPS), *row["opens"].values()]))


if __name__ == "__main__":
    main()
