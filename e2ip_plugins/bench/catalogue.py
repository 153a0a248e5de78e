"""Data sets, methods, presets and tables of benchmarks, read from YAML files, ours or a user's."""

import re
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from ase.data import chemical_symbols

from e2ip_plugins.errors import InputError

#: Folder of the YAML files that come with the package.
SHIPPED = Path(__file__).parent / "shipped"

#: Data sets that `e2ip fetch` downloads.
FETCHED = ("fullwater", "buckyball", "nanotube")

#: Files of a data set that no test may be named after.
RESERVED = ("train", "valid", "further", "rotated")

#: Epochs of a method that is asked for the beginning of a training only.
EARLY_EPOCHS = 1

T = TypeVar("T")

#: What a value in a YAML file should be, for messages: by key, else by type.
WANTED: Dict[object, str] = {
    "tests": "a mapping like {test: test.xyz, hot: hot.xyz}, labels that are numbers in quotes",
    "species": "a list like [Cu, Au]",
    "frames": "a list like [450, 50]",
    "keys": "a mapping like {energy: dft_energy, forces: dft_forces}",
    "epochs": "a mapping like {mace: 40, nequip: 40}",
    "arguments": "a mapping like {mace: [--E0s=isolated], nequip: []}",
    "methods": "a list like [stock, e2ip]",
    "sets": "a list like [my, my2]",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


#: Networks in place of NequIP's own, which the ready configs ``nequip_NAME`` have with a readout, and a factor on the
#: learning rate for them.
BACKBONES, BACKBONE_RATE = ("painn", "alphanet"), 0.1

#: Whoever trains: frameworks, and NequIP with another network, ``nequip-NAME``.
HOSTS = ("mace", "nequip", *(f"nequip-{name}" for name in BACKBONES))


def framework(host: str) -> str:
    """The framework of one of `HOSTS`."""
    return host.partition("-")[0]


def backbone(host: str) -> str:
    """The network of one of `HOSTS`; empty: the framework's own."""
    return host.partition("-")[2]


@dataclass(frozen=True)
class DataSet:
    """Frames and how long to train on them; the keys of a data set's YAML file.

    Attributes
    ----------
    train : str
        extxyz file, below the folder of the YAML file, the folder of data or the current one.
    tests : dict
        Test file by label. The first is in distribution, all others count as out of it.
    species : tuple of str
    frames : (int, int)
        Number of training and validation frames, the first of their files; all, where ``valid`` is a file.
    valid : str
        File with the validation frames; empty: those that follow the training frames.
    further : int
        Number of frames after those, which models never see, for calibrations that the validation frames are too few
        for.
    spread : bool
        Take validation frames evenly out of all that are used, where neighbours in the file belong together.
    keys : dict
        Names of ``energy`` and ``forces`` in the files.
    epochs : dict
        Epochs of a training with preset `cpu`, by framework.
    batch_size, valid_batch_size : int
    cutoff : float
        In Å.
    arguments : dict
        Further arguments of the training commands, by framework.
    script : str
        Python script with arguments that makes the files in the folder that it gets as ``--out``.
    methods : tuple of str
        Methods that are trained unless others are asked for.
    about : str
        One sentence at the head of the table.
    """

    train: str
    tests: Dict[str, str]
    species: Tuple[str, ...]
    frames: Tuple[int, ...] = ()
    valid: str = ""
    further: int = 0
    spread: bool = False
    keys: Dict[str, str] = field(default_factory=dict)
    epochs: Dict[str, int] = field(default_factory=lambda: {"mace": 40, "nequip": 40})
    batch_size: int = 5
    valid_batch_size: int = 50
    cutoff: float = 5.0
    arguments: Dict[str, Tuple[str, ...]] = field(default_factory=dict)
    script: str = ""
    methods: Tuple[str, ...] = ("stock", "e2ip")
    about: str = ""

    @property
    def labels(self) -> Tuple[str, ...]:
        """Files that models predict, in order: all except the training frames."""
        return ("valid", *(["further"] if self.further else []), *self.tests, "rotated")


@dataclass(frozen=True)
class Method:
    """One way to an uncertainty.

    Attributes
    ----------
    title : str
        In tables.
    readout : str
        Predictive family; empty: the stock model.
    options : dict
        Options of the family.
    ensemble : str
        Title of the ensemble that its runs are members of; empty: none is made of them.
    members : int
        Runs that the ensemble is made of, the first ones; 0: as many as the preset says, and as many are trained.
    arguments : dict
        Further arguments of the training commands, by framework.
    learning_rate : float
    early : bool
        Only the first `EARLY_EPOCHS` epochs are trained, of which the condition numbers are kept; that a factorisation
        fails is a result, not a failure of the run.
    base : str
        Method whose model, of the same seed, gets this readout and keeps its energies and forces; empty: none.
    fit : bool
        The readout is not trained but made by `e2ip fit`.
    epochs : float
        Factor on the data sets' epochs.
    """

    title: str
    readout: str = ""
    options: Dict[str, object] = field(default_factory=dict)
    ensemble: str = ""
    members: int = 0
    arguments: Dict[str, Tuple[str, ...]] = field(default_factory=dict)
    learning_rate: float = 0.01
    early: bool = False
    base: str = ""
    fit: bool = False
    epochs: float = 1.0


@dataclass(frozen=True)
class Preset:
    """How much of everything.

    Attributes
    ----------
    seeds : int
        Runs of a method.
    members : int
        Runs of a method that ensembles are made of.
    epochs : float
        Factor on the data sets' epochs.
    lengths : dict
        Epochs by framework in place of a data set's, by its name.
    frames : int, optional
        Largest number of frames of each file.
    arguments : dict
        Arguments of the training commands, by host; those of NequIP are its network's.
    """

    seeds: int
    members: int
    epochs: float = 1.0
    lengths: Dict[str, Dict[str, int]] = field(default_factory=dict)
    frames: Optional[int] = None
    arguments: Dict[str, Tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What one call of `e2ip bench` may train: names of data sets and methods, and one sentence for the page."""

    sets: Tuple[str, ...]
    methods: Tuple[str, ...] = ("stock", "e2ip")
    about: str = ""


def _fits(value: object, kind: Any) -> bool:
    """Whether a value from YAML is of a type, as annotated."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Union:
        return any(_fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) and _fits(v, inner[1]) for k, v in value.items())
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(one, inner[0]) for one in value)
    if origin is float:
        origin = (int, float)
    return isinstance(value, origin) and (origin in (bool, object) or not isinstance(value, bool))


def parse(kind: Type[T], values: Any, where: str) -> T:
    """One of the dataclasses above from what a YAML file holds; `InputError` names file and key."""
    hints, described = get_type_hints(kind), fields(kind)  # type: ignore[arg-type]
    required = [f.name for f in described if f.default is f.default_factory is MISSING]
    if not isinstance(values, dict):
        raise InputError(f"{where}: a mapping of keys to values should be here, with: {', '.join(hints)}")
    for key in (*values, *required):
        if key not in hints:
            known = (*hints, *(["like"] if kind is DataSet else []))
            raise InputError(f"{where}: unknown key '{key}'; known are: {', '.join(known)}")
        if key not in values:
            raise InputError(f"{where}: key '{key}' is missing")
        if not _fits(values[key], hints[key]):
            wanted = WANTED.get(key) or WANTED.get(hints[key], hints[key])
            if isinstance(values[key], list) and any(isinstance(one, bool) for one in values[key]):
                wanted = f"{wanted}; YAML takes No, Yes, On and Off for true or false: write 'No' in quotes"
            raise InputError(f"{where}: {key}: {values[key]!r} should be {wanted}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; `InputError` where it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = " ".join(str(error).replace('"<unicode string>"', path.name).split())
        raise InputError(f"{path}: cannot be read as YAML ({message})") from error


def _named(kind: Type[T], name: str) -> Dict[str, T]:
    path = SHIPPED / name
    return {k: parse(kind, v, f"{path}, {k}") for k, v in read_yaml(path).items() if not k.startswith(".")}


METHODS: Mapping[str, Method] = _named(Method, "methods.yaml")
PRESETS: Mapping[str, Preset] = _named(Preset, "presets.yaml")

#: Methods of which only the beginning of a training is looked at.
EARLY = {name: method for name, method in METHODS.items() if method.early}

#: Names of our tables and data sets, which `e2ip bench` takes beside a user's files.
TABLES, DATASETS = (tuple(sorted(p.stem for p in (SHIPPED / kind).glob("*.yaml"))) for kind in ("tables", "datasets"))


def dataset(name: str, folder: Path = SHIPPED / "datasets") -> DataSet:
    """A data set by the name of its file in a folder, or of ours; ``NAME-30`` has 30 % of its training frames."""
    path = next((p for p in (folder / f"{name}.yaml", SHIPPED / "datasets" / f"{name}.yaml") if p.is_file()), None)
    base, _, percent = name.rpartition("-")
    if path is None and base and percent.isdigit():
        whole = dataset(base, folder)
        if not whole.frames:
            raise InputError(f"{name}: a part of {base} needs the key 'frames' in {base}.yaml")
        return replace(whole, frames=(whole.frames[0] * int(percent) // 100, whole.frames[1]))
    if path is None:
        raise InputError(f"unknown data set '{name}'; choose from {', '.join(DATASETS)}, or give a YAML file")
    return _dataset(path)


def _dataset(path: Path) -> DataSet:
    values = read_yaml(path)
    if isinstance(values, dict) and "like" in values:
        values = {**non_defaults(dataset(str(values.pop("like")), path.parent)), **values}
    described = parse(DataSet, values, str(path))
    labels, counts = set(described.tests), described.frames
    numbers = "the numbers of training and validation frames in `train`"
    unnamed = [label for label in labels if not re.fullmatch(r"[\w-]+", label)]
    unknown = [symbol for symbol in described.species if symbol not in chemical_symbols[1:]]
    wrong = {
        "tests: name at least one file": not labels,
        f"tests: {', '.join(RESERVED)} are names of other files": labels & set(RESERVED),
        f"tests: labels are letters, digits, - and _, not '{''.join(unnamed[:1])}'": unnamed,
        "species: name at least one": not described.species,
        f"species: '{''.join(unknown[:1])}' is no chemical symbol": unknown,
        f"frames: give `valid: FILE`, or `frames: [N, M]`, {numbers}": len(counts) != (2 if counts else 0)
        or not (counts or described.valid),
        "frames: must be positive": any(count < 1 for count in counts),
        "further: needs the key 'frames'": described.further and not counts,
        "keys: known are energy and forces": set(described.keys) - {"energy", "forces"},
        "epochs: give both, mace and nequip": set(described.epochs) != {"mace", "nequip"},
        "arguments: known are mace and nequip": set(described.arguments) - {"mace", "nequip"},
    }
    for message, bad in wrong.items():
        if bad:
            raise InputError(f"{path}: {message}")
    _check_methods(described.methods, path)
    return described


def _check_methods(names: Tuple[str, ...], path: Path) -> None:
    for name in names:
        if name not in METHODS:
            raise InputError(f"{path}: methods: unknown '{name}'; choose from {', '.join(METHODS)}")


def read_table(name: str) -> Tuple[str, Table, Dict[str, DataSet], Path]:
    """Name, table, data sets and their folder, of one of ours or of a YAML file; a data set is a table of its own."""
    path = Path(name)
    if path.suffix not in ("", ".yaml"):
        raise InputError(f"{name}: the file of a data set or table ends in .yaml: rename it")
    if not path.suffix:
        kind = next((kind for kind in ("tables", "datasets") if (SHIPPED / kind / f"{name}.yaml").is_file()), None)
        if kind is None:
            raise InputError(
                f"unknown benchmark '{name}'; choose from: {', '.join(TABLES)}; data sets: {', '.join(DATASETS)}; or "
                "give a YAML file"
            )
        path = SHIPPED / kind / f"{name}.yaml"
    values = read_yaml(path)
    if isinstance(values, dict) and "sets" in values:
        table = parse(Table, values, str(path))
        _check_methods(table.methods, path)
    else:
        chosen = dataset(path.stem, path.parent)
        table = Table((path.stem,), chosen.methods, chosen.about)
    folder = SHIPPED / "datasets" if path.parent == SHIPPED / "tables" else path.parent
    return path.stem, table, {one: dataset(one, folder) for one in table.sets}, folder


def non_defaults(described: Union[DataSet, Method]) -> Dict[str, Any]:
    """Fields that differ from their defaults."""
    values = {one: getattr(described, one.name) for one in fields(described)}
    defaults = {one: one.default_factory() if one.default_factory is not MISSING else one.default for one in values}
    return {one.name: value for one, value in values.items() if value != defaults[one]}
