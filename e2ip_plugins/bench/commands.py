"""The hosts' stock commands for a run: training, and predictions for every file."""

import sys
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

from e2ip_plugins import families
from e2ip_plugins.bench.plan import EARLY_EPOCHS, METHODS, DataSet, Preset, Run, backbone, framework, labels
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE

#: Condition numbers of a training, step by step (`e2ip_plugins.families.condition_trace`), in its folder.
TRACE = "condition.csv"

#: In the folder of a training that ended because a factorisation failed.
FAILED = "factorisation_failed"

#: Model that a training leaves, by host.
MODELS = {"mace": "model.model", "nequip": "best.ckpt"}

#: Learning rate at the end, relative to the start; exponential in between.
FINAL_RATE = 0.05


class Stage(NamedTuple):
    """One command of a run and what it writes; repeated from its last checkpoint if it was killed."""

    name: str
    command: List[str]
    writes: Tuple[str, ...] = ()


def check_host(host: str) -> None:
    """`InputError` where this environment has no such host."""
    network, host = backbone(host), framework(host)
    if find_spec(host) is None:
        raise InputError(
            f"--host {host}: not installed here; run e2ip bench in an environment with e2ip-plugins[{host}], with the "
            "same --out if tables are to have both hosts"
        )
    if not entry_points(group="e2ip_plugins.calculator", name=host):
        raise InputError("this installation of e2ip-plugins is older than its code: install it anew (pip install .)")
    if network is not None and find_spec("torch_geometric") is None:
        raise InputError(
            "--backbone needs torch-geometric: install the extra 'backbones', pip install "
            '"e2ip-plugins[nequip,backbones]"'
        )


def prediction(run: Run, dataset: DataSet, label: str) -> str:
    """Name of the file of predictions in a run's folder."""
    return f"{label}.xyz" if run.host == "mace" else f"test_dataset{labels(dataset).index(label)}.xyz"


def stages(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[Stage]:
    """What to run, in this order, in the run's ``folder``."""
    return (_mace if run.host == "mace" else _nequip)(run, dataset, preset, files, folder)


def epochs(run: Run, dataset: DataSet, preset: Preset) -> int:
    """Epochs of a whole training."""
    return max(2, round(METHODS[run.method].epochs * preset.epochs * dataset.epochs[framework(run.host)]))


def base(run: Run, folder: Path) -> Path:
    """Model that a run of a method with a ``base`` begins with; its folder is beside the run's."""
    path = folder.parent / run._replace(method=METHODS[run.method].base).name / MODELS[framework(run.host)]
    if not path.exists():
        raise InputError(
            f"{path} is missing, whose readout {run.name} trains: remove the folder {path.parent} to train it anew"
        )
    return path


def _mace(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[Stage]:
    method, count = METHODS[run.method], epochs(run, dataset, preset)
    train = [_tool("mace_run_train"), f"--config={_config('mace_baseline.yaml')}"]
    train += [f"--max_num_epochs={EARLY_EPOCHS}"] if method.early else [f"--max_num_epochs={count}", "--restart_latest"]
    train += ["--name=model", f"--seed={run.seed}", f"--lr={method.learning_rate:g}", f"--r_max={dataset.cutoff}"]
    train += [f"--lr_scheduler_gamma={FINAL_RATE ** (1 / count):.6g}", f"--batch_size={dataset.batch_size}"]
    # MACE's figures of a training take seconds, which is most of a short one.
    train += [f"--valid_batch_size={dataset.valid_batch_size}", "--plot=False", *preset.mace]
    train += [f"--train_file={files['train']}", f"--valid_file={files['valid']}"]
    if method.readout:
        train.append(f"--readout={method.readout}")
        train += [f"--e2ip_{name}={value}" for name, value in method.options.items()]
    if method.base:
        train += ["--e2ip_forces=fixed", f"--foundation_model={base(run, folder)}"]
    train += method.mace
    if method.early:
        return [Stage("train", train, ("model.model", TRACE))]
    predict = [_tool("mace_eval_configs"), "--model=model.model", "--default_dtype=float32"]
    predict.append(f"--batch_size={dataset.valid_batch_size}")
    device = [option for option in preset.mace if option.startswith("--device")]
    found = [Stage("train", train, ("model.model",))]
    for label in labels(dataset):
        name = prediction(run, dataset, label)
        found.append(Stage(label, [*predict, *device, f"--configs={files[label]}", f"--output={name}"], (name,)))
    return found


def _nequip(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[Stage]:
    method, count = METHODS[run.method], epochs(run, dataset, preset)
    network, other = ("training_module.model.model" if method.readout else "training_module.model"), backbone(run.host)
    config = "nequip_e2ip" if method.readout else "nequip_baseline"
    if other and method.readout:
        config = other.config
    rate = method.learning_rate * (other.learning_rate if other else 1.0)
    scheduler = "training_module.lr_scheduler.scheduler"
    train = [_tool("nequip-train"), "-cp", str(_config("")), "-cn", config]
    train += [f"hydra.run.dir={folder}", f"seed={run.seed}"]
    train += ["run=[train]", f"max_epochs={EARLY_EPOCHS}"] if method.early else [f"max_epochs={count}"]
    train += [f"batch_size={dataset.batch_size}", f"cutoff_radius={dataset.cutoff}"]
    train += [f"learning_rate={rate:g}", f"{scheduler}._target_=torch.optim.lr_scheduler.ExponentialLR"]
    train += [f"+{scheduler}.gamma={FINAL_RATE ** (1 / count):.6g}", f"~{scheduler}.factor", f"~{scheduler}.patience"]
    train += [f"chemical_species=[{','.join(dataset.species)}]", "+trainer.enable_progress_bar=false"]
    train += [f"train_file={files['train']}", f"val_file={files['valid']}"]
    train.append(f"test_file=[{','.join(str(files[label]) for label in labels(dataset))}]")
    if method.base:
        train += ["forces=fixed", "+training_module.val_metrics.coeffs.e2ip_nll=1.0", f"~{network}"]
        train += [f"+{network}._target_=nequip.model.ModelFromCheckpoint"]
        train += [f"+{network}.checkpoint_path={base(run, folder)}"]
    else:
        if other and not method.readout:
            train += [f"~{network}", f"+{network}={{{_inner_model(_config(f'{other.config}.yaml'))}}}"]
        train += [f"{network}.{option}" for option in preset.arguments(run.host)]
    if method.readout:
        train += [f"readout={method.readout}", *(_nequip_option(*item) for item in method.options.items())]
        columns = [key.name for key in families.get(method.readout).parameter_keys]
        train.append(f"trainer.callbacks.3.extra_fields=[{','.join([*columns, 'forces_cov', LEVERAGE.name])}]")
    train += method.nequip
    if method.early:
        return [Stage("train", train, (TRACE,))]
    if (checkpoint := folder / "last.ckpt").exists():
        train.append(f"++ckpt_path={checkpoint}")
    return [Stage("train", train, tuple(prediction(run, dataset, label) for label in labels(dataset)))]


def _inner_model(config: Path) -> str:
    """The section of the network in a ready config, in Hydra's grammar."""
    import yaml  # of NequIP's

    section = yaml.safe_load(config.read_text(encoding="utf-8"))["training_module"]["model"]["model"]
    return ",".join(f"{name}:{value}" for name, value in section.items())


def _nequip_option(name: str, value: object) -> str:
    # The ready config lists those of the default family.
    listed = [option.name for option in families.get(families.DEFAULT).options]
    return f"{name}={value}" if name in listed else f"+training_module.model.{name}={value}"


def _tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise InputError(f"{name} is not beside {sys.executable}: the host's installation has no such command")
    return str(path)


def _config(name: str) -> Path:
    """A ready config, installed with the package or in the checkout that it is run from."""
    package = Path(str(resources.files("e2ip_plugins")))
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder / name
    raise InputError("the ready configs are not installed: install e2ip-plugins anew")
