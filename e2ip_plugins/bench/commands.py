"""The hosts' stock commands for a run: training, and predictions for every file."""

import sys
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

from e2ip_plugins import families
from e2ip_plugins.bench.catalogue import (
    BACKBONE_RATE,
    EARLY_EPOCHS,
    METHODS,
    DataSet,
    Preset,
    backbone,
    framework,
    read_yaml,
)
from e2ip_plugins.bench.plan import Run
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FRAME_OUTPUTS, LEVERAGE

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
    if network and find_spec("torch_geometric") is None:
        raise InputError(
            "--backbone needs torch-geometric: install the extra 'backbones', pip install "
            '"e2ip-plugins[nequip,backbones]"'
        )


def prediction(run: Run, dataset: DataSet, label: str) -> str:
    """Name of the file of predictions in a run's folder."""
    if run.host == "mace" or METHODS[run.method].fit:
        return f"{label}.xyz"
    return f"test_dataset{dataset.labels.index(label)}.xyz"


def stages(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[Stage]:
    """What to run, in this order, in the run's ``folder``."""
    method = METHODS[run.method]
    if method.fit:
        return _fit(run, dataset, files, folder)
    train = (_mace if run.host == "mace" else _nequip)(run, dataset, preset, files, folder)
    for described in (dataset, method):
        train += described.arguments.get(framework(run.host), ())
    if method.early:
        return [Stage("train", train, (MODELS[framework(run.host)], TRACE))]
    if run.host != "mace":
        if (checkpoint := folder / "last.ckpt").exists():
            train.append(f"++ckpt_path={checkpoint}")
        return [Stage("train", train, tuple(prediction(run, dataset, label) for label in dataset.labels))]
    predict = [_tool("mace_eval_configs"), "--model=model.model", "--default_dtype=float32"]
    predict.append(f"--batch_size={dataset.valid_batch_size}")
    predict += [option for option in preset.arguments.get("mace", ()) if option.startswith("--device")]
    return [Stage("train", train, ("model.model",)), *_predictions(run, dataset, files, predict)]


def _predictions(run: Run, dataset: DataSet, files: Dict[str, Path], command: List[str]) -> List[Stage]:
    """A stage for every file; ``command`` is MACE's or `e2ip evaluate`."""
    of_mace, stages = command[0].endswith("mace_eval_configs"), []
    for label in dataset.labels:
        name = prediction(run, dataset, label)
        ends = [f"--configs={files[label]}", f"--output={name}"] if of_mace else [str(files[label]), name]
        stages.append(Stage(label, [*command, *ends], (name,)))
    return stages


def _fit(run: Run, dataset: DataSet, files: Dict[str, Path], folder: Path) -> List[Stage]:
    e2ip, model = _tool("e2ip"), MODELS[framework(run.host)]
    fit = [e2ip, "fit", str(base(run, folder)), f"--train={files['train']}", f"--valid={files['valid']}"]
    fit += [f"--output={model}"]
    return [Stage("train", fit, (model,)), *_predictions(run, dataset, files, [e2ip, "evaluate", model])]


def epochs(run: Run, dataset: DataSet, preset: Preset, whole: bool = False) -> int:
    """Epochs of a training; ``whole``: also of one that is stopped after its beginning."""
    method, host = METHODS[run.method], framework(run.host)
    if method.early and not whole:
        return EARLY_EPOCHS
    return max(2, round(method.epochs * preset.epochs * preset.lengths.get(run.dataset, dataset.epochs)[host]))


def base(run: Run, folder: Path) -> Path:
    """Model that a run of a method with a ``base`` begins with; its folder is beside the run's."""
    path = folder.parent / run._replace(method=METHODS[run.method].base).name / MODELS[framework(run.host)]
    if not path.exists():
        raise InputError(
            f"{path} is missing, to which {run.name} gives a readout: remove the folder {path.parent} to train it anew"
        )
    return path


def _decay(run: Run, dataset: DataSet, preset: Preset) -> str:
    """Factor on the learning rate per epoch."""
    return f"{FINAL_RATE ** (1 / epochs(run, dataset, preset, whole=True)):.6g}"


def _mace(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[str]:
    method, count = METHODS[run.method], epochs(run, dataset, preset)
    train = [_tool("mace_run_train"), f"--config={_config('mace_baseline.yaml')}", f"--max_num_epochs={count}"]
    train += [] if method.early else ["--restart_latest"]
    train += ["--name=model", f"--seed={run.seed}", f"--lr={method.learning_rate:g}", f"--r_max={dataset.cutoff}"]
    train += [f"--lr_scheduler_gamma={_decay(run, dataset, preset)}", f"--batch_size={dataset.batch_size}"]
    # MACE's figures of a training take seconds, which is most of a short one.
    train += [f"--valid_batch_size={dataset.valid_batch_size}", "--plot=False", *preset.arguments.get("mace", ())]
    train += [f"--train_file={files['train']}", f"--valid_file={files['valid']}"]
    if method.readout:
        train.append(f"--readout={method.readout}")
        train += [f"--e2ip_{name}={value}" for name, value in method.options.items()]
    if method.base:
        train += ["--e2ip_forces=fixed", f"--foundation_model={base(run, folder)}"]
    return train


def _nequip(run: Run, dataset: DataSet, preset: Preset, files: Dict[str, Path], folder: Path) -> List[str]:
    method, count = METHODS[run.method], epochs(run, dataset, preset)
    network, other = ("training_module.model.model" if method.readout else "training_module.model"), backbone(run.host)
    config = "nequip_e2ip" if method.readout else "nequip_baseline"
    if other and method.readout:
        config = f"nequip_{other}"
    rate = method.learning_rate * (BACKBONE_RATE if other else 1.0)
    scheduler = "training_module.lr_scheduler.scheduler"
    train = [_tool("nequip-train"), "-cp", str(_config("")), "-cn", config]
    train += [f"hydra.run.dir={folder}", f"seed={run.seed}", f"max_epochs={count}"]
    train += ["run=[train]"] if method.early else []
    train += [f"batch_size={dataset.batch_size}", f"cutoff_radius={dataset.cutoff}"]
    train += [f"learning_rate={rate:g}", f"{scheduler}._target_=torch.optim.lr_scheduler.ExponentialLR"]
    train += [f"+{scheduler}.gamma={_decay(run, dataset, preset)}", f"~{scheduler}.factor", f"~{scheduler}.patience"]
    train += [f"chemical_species=[{','.join(dataset.species)}]", "+trainer.enable_progress_bar=false"]
    train += [f"train_file={files['train']}", f"val_file={files['valid']}"]
    train.append(f"test_file=[{','.join(str(files[label]) for label in dataset.labels)}]")
    if method.base:
        train += ["forces=fixed", "+training_module.val_metrics.coeffs.e2ip_nll=1.0", f"~{network}"]
        train += [f"+{network}._target_=nequip.model.ModelFromCheckpoint"]
        train += [f"+{network}.checkpoint_path={base(run, folder)}"]
    else:
        if other and not method.readout:
            train += [f"~{network}", f"+{network}={{{_inner_model(_config(f'nequip_{other}.yaml'))}}}"]
        train += [f"{network}.{option}" for option in preset.arguments.get(run.host, ())]
    if method.readout:
        train += [f"readout={method.readout}", *(_nequip_option(*item) for item in method.options.items())]
        columns = [key.name for key in (*families.get(method.readout).parameter_keys, LEVERAGE, *FRAME_OUTPUTS)]
        train.append(f"trainer.callbacks.3.extra_fields=[{','.join([*columns, 'forces_cov'])}]")
    return train


def _inner_model(config: Path) -> str:
    """The section of the network in a ready config, in Hydra's grammar."""
    section = read_yaml(config)["training_module"]["model"]["model"]
    return ",".join(f"{name}:{value}" for name, value in section.items())


def _nequip_option(name: str, value: object) -> str:
    # The ready config lists those of the default family.
    listed = [option.name for option in families.get(families.DEFAULT).options]
    return f"{name}={value}" if name in listed else f"+training_module.model.{name}={value}"


def _tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise InputError(
            f"{name} is not beside {sys.executable}: MACE, NequIP or this package is not installed completely"
        )
    return str(path)


def _config(name: str) -> Path:
    """A ready config, installed with the package or in the checkout that it is run from."""
    package = Path(str(resources.files("e2ip_plugins")))
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder / name
    raise InputError("the ready configs are not installed: install e2ip-plugins anew")
