"""What works with the installed release of a host: the contract, trainings of one epoch, predictions, the calculator.

    python benchmarks/releases.py mace --out runs/releases        # in an environment with e2ip-plugins[mace]
    python benchmarks/releases.py --table docs/results/releases/*.json

Every release leaves its model below ``--out``, and opens those that others have left there. Exit status 1 where a step
has failed.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "demo" / "data"
PACKAGES = {"mace": "mace-torch", "nequip": "nequip"}
#: Frames of each file, from its beginning: what a training of one epoch needs.
FRAMES = {"train": 20, "valid": 8, "test": 8}
#: One frame as the models of other releases predict it must agree to so many eV, eV/Å or (eV/Å)², in float32.
TOLERANCE = 1e-3
#: Those of the ready configs for NequIP without the box around molecules, as an option of `nequip-train`.
TRANSFORMS = (
    "data.transforms=[{_target_:nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper,"
    "model_type_names:[H,C,N,O],chemical_species_to_atom_type_map:{H:H,C:C,N:N,O:O}},"
    "{_target_:nequip.data.transforms.NeighborListTransform,r_max:${cutoff_radius}}]"
)


def run(*command: Any, **environment: str) -> None:
    """A command of the host, in the environment of this interpreter."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"{command[0]}: {lines[-1] if lines else done.returncode}")


def data_files(folder: Path) -> dict[str, Path]:
    """The first frames of the demo's data."""
    import ase.io

    files = {}
    for name, count in FRAMES.items():
        files[name] = folder / f"{name}.extxyz"
        ase.io.write(files[name], ase.io.read(DATA / f"{name}.extxyz", f":{count}"))
    return files


def check_predictions(path: Path) -> str:
    """Scores of a file that the host has written."""
    from e2ip_plugins.report.compare import compare, load_models

    (model,) = compare(load_models([path]))["models"]
    scores = model["overall"]
    assert model["uq_family"] == "niw" and scores["nll"] == scores["nll"], model
    return f"{FRAMES['test']} predicted, NLL {scores['nll']:.2f}"


def predict(calculator: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Energy, forces and covariances of one frame."""
    import ase.io

    atoms = ase.io.read(files["test"], 0)
    atoms.calc = calculator
    found = {"energy": float(atoms.get_potential_energy()), "forces": atoms.get_forces().tolist()}
    return {**found, "forces_cov": calculator.results["forces_cov"].tolist()}


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise where two predictions of one frame differ."""
    import numpy as np

    for name, value in expected.items():
        difference = np.abs(np.asarray(found[name]) - np.asarray(value)).max()
        if not difference < TOLERANCE:
            raise RuntimeError(f"{name} differs by {difference:.2g}")


class Mace:
    """Steps in MACE."""

    model, suffix = "e2ip.model", ".model"

    def __init__(self, folder: Path, files: dict[str, Path]) -> None:
        self.folder, self.files = folder, files

    def contract(self) -> tuple[str, list[str]]:
        """What is wrong, and which optional names are missing."""
        from e2ip_plugins import contract
        from mace_ext import seams

        for module in seams.SEAMS:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
        lacking = [n for n in seams.OPTIONAL if contract.problems({n: ()} if n in seams.SEAMS else _term(n))]
        return seams.problem(), lacking

    def train(self, name: str, *options: str, **environment: str) -> None:
        """One epoch with the options of the demo, on a tiny model."""
        config = ROOT / "configs" / "mace_baseline.yaml"
        small = ["--num_channels=8", "--max_ell=2", "--correlation=3", "--max_num_epochs=1", "--plot=False"]
        data = [f"--train_file={self.files['train']}", f"--valid_file={self.files['valid']}"]
        command = ["mace_run_train", "--config", config, "--name", name, "--work_dir", self.folder, *small, *data]
        run(*command, *options, **environment)

    def stock(self) -> str:
        """A stock training with the plugin and one without: the same weights to the last bit."""
        import torch

        self.train("with")
        self.train("without", E2IP_DISABLE="1")
        states = [torch.load(self.folder / f"{n}.model", weights_only=False).state_dict() for n in ("with", "without")]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        return "same weights with and without the plugin"

    def readout(self) -> str:
        """Training with the readout; its figures are in MACE's results file."""
        self.train("e2ip", "--readout=e2ip")
        (results,) = (self.folder / "results").glob("e2ip_run-*_train.txt")
        last = [json.loads(line) for line in results.read_text().splitlines() if '"eval"' in line][-1]
        assert (self.folder / "e2ip_compiled.model").exists(), "no TorchScript model"
        return f"validation NLL {last['e2ip_nll']:.2f}"

    def evaluation(self) -> str:
        """`mace_eval_configs`."""
        output = self.folder / "test.xyz"
        files = ["--configs", self.files["test"], "--model", self.folder / self.model, "--output", output]
        run("mace_eval_configs", *files, "--default_dtype", "float32")
        return check_predictions(output)

    def existing(self) -> str:
        """The stock model: the readout alone trained on it, and fitted without a training."""
        model = f"--foundation_model={self.folder / 'with.model'}"
        self.train("fixed", "--readout=e2ip", "--e2ip_forces=fixed", model, "--default_dtype=float32")
        return fit_and_strip(self.folder / "with.model", self.files)

    def calculator(self, path: Path) -> Any:
        """Of a model file."""
        from mace.calculators import MACECalculator

        return MACECalculator(model_paths=str(path), device="cpu")


class Nequip:
    """Steps in NequIP."""

    model, suffix = "e2ip.ckpt", ".ckpt"

    def __init__(self, folder: Path, files: dict[str, Path]) -> None:
        self.folder, self.files = folder, files

    def contract(self) -> tuple[str, list[str]]:
        """What is wrong, and which optional names are missing."""
        import nequip  # noqa: F401

        from e2ip_plugins import contract as core
        from nequip_ext import contract

        lacking = [n for n in contract.OPTIONAL if core.problems({n: ()} if n in contract.TERMS else _term(n))]
        return contract.problem(), lacking

    def train(self, name: str, stock: Path | None = None) -> Path:
        """One epoch and test with the config of that name, on a tiny model or for the readout of a ``stock`` one."""
        from nequip.data.transforms import NonPeriodicCellTransform

        folder = self.folder / (name if stock is None else "fixed")
        inner = "training_module.model" if name == "nequip_baseline" else "training_module.model.model"
        data = {"train_file": "train", "val_file": "valid", "test_file": "test"}
        options = [f"{option}={self.files[file]}" for option, file in data.items()]
        options += ["chemical_species=[H,C,N,O]", "max_epochs=1", f"hydra.run.dir={folder}"]
        options.append("+trainer.enable_progress_bar=false")
        if stock is None:
            options += [f"{inner}.num_features=8", f"{inner}.l_max=1"]
        else:
            options += ["forces=fixed", "+training_module.val_metrics.coeffs.e2ip_nll=1.0", f"~{inner}"]
            options += [f"+{inner}._target_=nequip.model.ModelFromCheckpoint", f"+{inner}.checkpoint_path={stock}"]
        if "padding" not in inspect.signature(NonPeriodicCellTransform.__init__).parameters:
            # 0.16 puts no box around molecules that come without a cell: the ready configs need 0.17.
            options.append(TRANSFORMS)
        run("nequip-train", "-cp", ROOT / "configs", "-cn", name, *options)
        return folder

    def stock(self) -> str:
        """A stock training."""
        folder = self.train("nequip_baseline")
        assert (folder / "best.ckpt").exists() and (folder / "test_dataset0.xyz").exists()
        return "trained and tested"

    def readout(self) -> str:
        """Training with the readout, whose leverage is fitted at the end."""
        import torch

        best = self.train("nequip_e2ip") / "best.ckpt"
        state = torch.load(best, weights_only=False, map_location="cpu")["state_dict"]
        assert any(name.endswith("leverage.fitted") and bool(value) for name, value in state.items())
        (self.folder / self.model).write_bytes(best.read_bytes())
        return "trained and tested, leverage fitted"

    def evaluation(self) -> str:
        """What NequIP's own callback wrote."""
        return check_predictions(self.folder / "nequip_e2ip" / "test_dataset0.xyz")

    def existing(self) -> str:
        """The stock model: the readout alone trained on it, and fitted without a training."""
        stock = self.folder / "nequip_baseline" / "best.ckpt"
        self.train("nequip_e2ip", stock)
        return fit_and_strip(stock, self.files)

    def calculator(self, path: Path) -> Any:
        """Of a checkpoint."""
        from nequip_ext import E2IPCalculator

        return E2IPCalculator.from_saved_model(str(path))


def fit_and_strip(stock: Path, files: dict[str, Path]) -> str:
    """`e2ip fit`, `evaluate` and `strip`, after which the same fit must predict the same forces, as files have them."""
    import ase.io
    import numpy as np

    folder = stock.parent
    fitted, stripped = (folder / f"{name}{stock.suffix}" for name in ("fitted", "stripped"))
    run("e2ip", "fit", stock, "--train", files["train"], "--valid", files["valid"], "--output", fitted, "--overwrite")
    run("e2ip", "strip", fitted, "--output", stripped, "--overwrite")
    again, forces = folder / f"again{stock.suffix}", []
    run("e2ip", "fit", stripped, "--train", files["train"], "--valid", files["valid"], "--output", again, "--overwrite")
    for model in (fitted, again):
        predicted = folder / f"{model.stem}.xyz"
        run("e2ip", "evaluate", model, files["test"], predicted, "--overwrite")
        forces.append(np.concatenate([atoms.get_forces() for atoms in ase.io.read(predicted, ":")]))
    assert np.array_equal(*forces), "forces differ once a readout was taken off"
    return "readout trained alone, fitted, evaluated, taken off"


def _term(name: str) -> dict[str, tuple[str]]:
    module, _, attribute = name.rpartition(".")
    return {module: (attribute,)}


@contextlib.contextmanager
def noted(row: dict[str, Any], step: str) -> Iterator[Callable[[str], None]]:
    """Result, time and failure of a step, in the row and on the terminal."""
    start = time.monotonic()
    entry: dict[str, Any] = {"ok": False, "text": ""}
    row[step] = entry
    try:
        yield lambda text: entry.update(text=text)
        entry["ok"] = True
    except Exception as error:
        traceback.print_exc()
        entry["text"] = f"{type(error).__name__}: {error}"
    entry["seconds"] = round(time.monotonic() - start, 1)
    print(f"{row['host']} {row['release']} {step}: {'ok' if entry['ok'] else 'FAILED'} {entry['text']}", flush=True)


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure(host: str, out: Path) -> dict[str, Any]:
    """All steps with the installed release; one that fails does not keep the others from running."""
    release = version(PACKAGES[host])
    folder = out.resolve() / f"{host}-{release}"
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "e3nn", "numpy", "nequip-allegro", "lightning")
    row: dict[str, Any] = {"host": host, "release": release, "python": platform.python_version()}
    row["packages"] = {name: version(name) for name in packages if version(name)}
    files = data_files(folder)
    steps: Any = {"mace": Mace, "nequip": Nequip}[host](folder, files)
    with noted(row, "contract") as say:
        problem, row["lacking"] = steps.contract()
        assert not problem, problem
        say("holds")
    for step in ("stock", "readout", "evaluation", "existing"):
        with noted(row, step) as say:
            say(getattr(steps, step)())
    with noted(row, "calculator"):
        found = predict(steps.calculator(folder / steps.model), files)
        (folder / "expected.json").write_text(json.dumps(found))
    return {**row, **open_others(host, out)}


def open_others(host: str, out: Path) -> dict[str, Any]:
    """Which files of other releases the installed one opens, and whether it predicts what they did."""
    release = version(PACKAGES[host])
    folder = out.resolve() / f"{host}-{release}"
    files = {name: folder / f"{name}.extxyz" for name in FRAMES}
    steps: Any = {"mace": Mace, "nequip": Nequip}[host](folder, files)
    opens = {}
    for other in sorted(out.resolve().glob(f"{host}-*/{steps.model}")):
        if other.parent != folder and (other.parent / "expected.json").exists():
            name = other.parent.name.removeprefix(f"{host}-")
            opened: dict[str, Any] = {"host": host, "release": release}
            with noted(opened, f"model of {name}"):
                agree(predict(steps.calculator(other), files), json.loads((other.parent / "expected.json").read_text()))
            opens[name] = opened[f"model of {name}"]
    return {"opens": opens}


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""

    def mark(entry: dict[str, Any] | None) -> str:
        return "–" if entry is None else "yes" if entry["ok"] else f"**no**: {entry['text']}"

    lines = [
        "| release | Python | torch | e3nn | contract | stock | e²IP (four steps) | opens files of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["host"], _numbers(row["release"]), _numbers(row["python"]))):
        name = {"mace": "mace-torch", "nequip": "NequIP"}[row["host"]]
        marks = [mark(row.get(step)) for step in ("readout", "evaluation", "calculator", "existing")]
        opened = [other if entry["ok"] else f"~~{other}~~" for other, entry in row["opens"].items()]
        cells = [f"{name} {row['release']}", row["python"], row["packages"]["torch"], row["packages"]["e3nn"]]
        cells += [mark(row["contract"]), mark(row["stock"]), ", ".join(marks), ", ".join(opened)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", nargs="?", choices=PACKAGES)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "releases", help="folder of runs and results")
    parser.add_argument("--open", action="store_true", help="after a full run: open files of others alone, once more")
    parser.add_argument("--table", type=Path, nargs="+", help="result files to print as a table instead")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(path.read_text()) for path in args.table]))
        return
    if args.host is None:
        parser.error("give a host, or --table with result files")
    warnings.simplefilter("ignore")
    python, torch = ".".join(platform.python_version_tuple()[:2]), version("torch").partition("+")[0]
    result = args.out / f"{args.host}-{version(PACKAGES[args.host])}-python{python}-torch{torch}.json"
    if args.open:
        row = {**json.loads(result.read_text()), **open_others(args.host, args.out)}
    else:
        row = measure(args.host, args.out)
    result.write_text(json.dumps(row, indent=1) + "\n")
    steps = [row[step] for step in ("contract", "stock", "readout", "evaluation", "calculator")]
    sys.exit(not all(entry["ok"] for entry in [*steps, *row["opens"].values()]))


if __name__ == "__main__":
    main()
