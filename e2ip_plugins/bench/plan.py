"""What a call of `e2ip bench` trains: its options, the names in them looked up, and the runs that follow."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from e2ip_plugins.bench.catalogue import BACKBONES, HOSTS, METHODS, PRESETS, SHIPPED, DataSet, Preset, Table, read_table
from e2ip_plugins.errors import InputError


class Run(NamedTuple):
    """One training and its predictions."""

    dataset: str
    host: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder; tables that need the same run share it."""
        return f"{self.dataset}_{self.host}_{self.method}_s{self.seed}"


def ensemble_size(method: str, preset: Preset) -> int:
    """Return the number of runs that the ensemble of a method is made of; 0 where none is."""
    described = METHODS[method]
    return (described.members or preset.members) if described.ensemble else 0


def runs(host: str, preset: Preset, sets: Sequence[str], methods: Sequence[str]) -> List[Run]:
    """Every run of a table, the first seed of every method first."""
    wanted = []
    for seed in range(1, max(preset.seeds, preset.members) + 1):
        for name in sets:
            for method in methods:
                described = METHODS[method]
                # As many early trainings, too: whether one fails is a matter of chance. And as many readouts on a
                # finished model: they take little.
                many = (described.ensemble and not described.members) or described.early or described.base
                if seed <= (preset.members if many else preset.seeds):
                    wanted.append(Run(name, host, method, seed))
    return wanted


@dataclass(frozen=True)
class Options:
    """Options of `e2ip bench`, as its command line has them."""

    name: str
    host: str = ""
    preset: str = "smoke"
    data: Optional[Path] = None
    out: Path = Path("e2ip_bench")
    backbone: str = ""
    sets: Optional[str] = None
    methods: Optional[str] = None
    seeds: Optional[int] = None
    epochs: float = 1.0
    jobs: int = 1
    cluster: str = ""
    tables: bool = False
    results: Optional[Path] = None


@dataclass(frozen=True)
class Plan:
    """What the options of a call amount to.

    Attributes
    ----------
    name : str
        Name of the table.
    table : Table
        All data sets and methods of it, also those that this call does not train.
    sets : dict
        Every data set of the table by name.
    runs : tuple of Run
        Trainings of this call.
    preset : Preset
        Its epochs have been multiplied by those of the options.
    roots : tuple of Path
        Folders of data files.
    options : Options
    """

    name: str
    table: Table
    sets: Dict[str, DataSet]
    runs: Tuple[Run, ...]
    preset: Preset
    roots: Tuple[Path, ...]
    options: Options

    @property
    def out(self) -> Path:
        """Folder of runs and tables."""
        return self.options.out

    @property
    def methods(self) -> Tuple[str, ...]:
        """Methods of the table and those that this call trains besides."""
        return tuple(dict.fromkeys((*self.table.methods, *(run.method for run in self.runs))))

    @classmethod
    def of(cls, options: Options) -> "Plan":
        """Resolve every name; `InputError` for one that is unknown."""
        name, table, sets, folder = read_table(options.name)
        if options.preset not in PRESETS:
            raise InputError(f"--preset {options.preset}: choose from {', '.join(PRESETS)}")
        preset = PRESETS[options.preset]
        preset = replace(preset, epochs=options.epochs * preset.epochs)
        host = f"{options.host}-{options.backbone}" if options.backbone else options.host
        if options.backbone and host not in HOSTS:
            known = ", ".join(BACKBONES)
            raise InputError(f"--backbone {options.backbone}: networks of NequIP ({known}); give --host nequip with it")
        if host not in HOSTS and not (options.tables and not host):
            raise InputError("--host: give mace or nequip, whichever is installed here")
        names = _chosen("--sets", options.sets, table.sets, table.sets)
        methods = _chosen("--methods", options.methods, table.methods, METHODS)
        roots = (
            *([folder] if SHIPPED not in folder.parents else []),
            *([options.data] if options.data else []),
            Path.cwd(),
        )
        of_hosts = [run for one in ([host] if host else HOSTS) for run in runs(one, preset, names, methods)]
        of_seeds = tuple(run for run in of_hosts if options.seeds is None or run.seed <= options.seeds)
        return cls(name, table, sets, of_seeds, preset, roots, options)


def _chosen(option: str, names: Optional[str], default: Collection[str], known: Collection[str]) -> Tuple[str, ...]:
    """Return the names that an option has, separated by commas; `InputError` for one that is not ``known``."""
    if names is None:
        return tuple(default)
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in known:
            raise InputError(f"{option}: unknown '{name}'; choose from {', '.join(known)}")
    if not chosen:
        raise InputError(f"{option} names nothing; choose from {', '.join(known)}")
    return chosen
