"""What is trained for which table: data sets, methods, presets and benchmarks, as data."""

from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from e2ip_plugins.errors import InputError


class Backbone(NamedTuple):
    """A network in place of NequIP's own.

    Attributes
    ----------
    config : str
        Ready config with it and a readout.
    learning_rate : float
        Factor on that of NequIP's own network.
    """

    config: str
    learning_rate: float


BACKBONES: Dict[str, Backbone] = {name: Backbone(f"nequip_{name}", 0.1) for name in ("painn", "alphanet")}

#: Whoever trains: frameworks, and NequIP with another network, ``nequip-NAME``.
HOSTS = ("mace", "nequip", *(f"nequip-{name}" for name in BACKBONES))


def framework(host: str) -> str:
    """The framework of one of `HOSTS`."""
    return host.partition("-")[0]


def backbone(host: str) -> Optional[Backbone]:
    """The network of one of `HOSTS`; None: the framework's own."""
    return BACKBONES.get(host.partition("-")[2])


class DataSet(NamedTuple):
    """Frames of one table and how long to train on them.

    Attributes
    ----------
    train : str
        extxyz file below the data folder, of which the first frames are used.
    tests : dict
        Test file by label; ``ood`` is out of distribution.
    species : tuple of str
    frames : (int, int)
        For training and for validation.
    further : int
        Frames after those that models never see, for calibrations that the validation frames are too few for.
    valid : str
        File with the validation frames; empty: those that follow the training frames.
    spread : bool
        Validation frames evenly out of all that are used, where neighbours in the file belong together.
    epochs : dict
        By host.
    batch_size, valid_batch_size : int
    cutoff : float
        In Å.
    """

    train: str
    tests: Mapping[str, str]
    species: Tuple[str, ...]
    frames: Tuple[int, int]
    epochs: Mapping[str, int]
    valid: str = ""
    further: int = 0
    spread: bool = False
    batch_size: int = 5
    valid_batch_size: int = 50
    cutoff: float = 5.0


_MOLECULE = {"mace": 24, "nequip": 24}

DATASETS: Dict[str, DataSet] = {
    "demo": DataSet(
        "demo/data/train.extxyz",
        {"test": "demo/data/test.extxyz", "ood": "demo/data/ood.extxyz"},
        ("H", "C", "N", "O"),
        (300, 50),
        {"mace": 40, "nequip": 60},
        valid="demo/data/valid.extxyz",
    ),
    "acac": DataSet(
        "acac/acac_train_300K.extxyz",
        {"test": "acac/acac_test_300K.extxyz", "ood": "acac/acac_test_600K.extxyz"},
        ("H", "C", "O"),
        (450, 50),
        _MOLECULE,
    ),
    **{
        name: DataSet(
            f"rmd17/{name}_split01_train.extxyz",
            {"test": f"rmd17/{name}_split01_test.extxyz"},
            species,
            (450, 50),
            _MOLECULE,
            further=500,
        )
        for name, species in (("aspirin", ("H", "C", "O")), ("azobenzene", ("H", "C", "N")))
    },
    "silica": DataSet(
        "silica/zeolite_train.extxyz",
        {"test": "silica/zeolite_test.extxyz", "ood": "silica/zeolite_ood.extxyz"},
        ("O", "Si"),
        (360, 40),
        {"mace": 20, "nequip": 20},
        spread=True,
        batch_size=2,
        valid_batch_size=8,
    ),
    "water": DataSet(
        "water/water_train.extxyz",
        {"test": "water/water_test.extxyz", "ood": "water/water_ood_surface.extxyz"},
        ("H", "O"),
        (139, 20),
        {"mace": 16, "nequip": 16},
        spread=True,
        batch_size=1,
        valid_batch_size=4,
        cutoff=4.5,
    ),
    # Of `FETCHED`.
    "fullwater": DataSet(
        "fullwater/fullwater_train.extxyz",
        {"test": "fullwater/fullwater_test.extxyz"},
        ("H", "O"),
        (1274, 159),
        {"mace": 20, "nequip": 20},
        valid="fullwater/fullwater_valid.extxyz",
        batch_size=1,
        valid_batch_size=4,
    ),
    **{
        name: DataSet(
            f"{name}/{name}_train.extxyz",
            {"test": f"{name}/{name}_test.extxyz"},
            ("H", "C"),
            frames,
            {"mace": 40, "nequip": 40},
            valid=f"{name}/{name}_valid.extxyz",
            batch_size=2,
            valid_batch_size=4,
        )
        for name, frames in (("buckyball", (540, 60)), ("nanotube", (720, 80)))
    },
}


#: What `e2ip fetch` gets.
FETCHED = ("fullwater", "buckyball", "nanotube")


def dataset(name: str) -> DataSet:
    """Data set by name; ``NAME-30`` has 30 % of its training frames."""
    base, _, percent = name.partition("-")
    found = DATASETS[base]
    if percent:
        train, valid = found.frames
        found = found._replace(frames=(train * int(percent) // 100, valid))
    return found


def labels(dataset: DataSet) -> Tuple[str, ...]:
    """Files that models predict, in order: all but the training frames."""
    return ("valid", *(["further"] if dataset.further else []), *dataset.tests, "rotated")


class Method(NamedTuple):
    """One way to an uncertainty.

    Attributes
    ----------
    title : str
        In tables.
    readout : str
        Predictive family; empty: the host's model as it is.
    options : dict
        Of the family.
    ensemble : str
        Title of the ensemble that its runs are members of; empty: none is made of them.
    mace, nequip : tuple of str
        Further arguments of the training commands.
    learning_rate : float
    early : bool
        Only the first `EARLY_EPOCHS` epochs, of which nothing but the condition numbers is asked; that a factorisation
        fails is a result, not a failure of the run.
    base : str
        Method whose model, of the same seed, gets this readout and keeps its energies and forces; empty: none.
    epochs : float
        Factor on the data sets' epochs.
    """

    title: str
    readout: str = ""
    options: Mapping[str, object] = {}
    ensemble: str = ""
    mace: Tuple[str, ...] = ()
    nequip: Tuple[str, ...] = ()
    learning_rate: float = 0.01
    early: bool = False
    base: str = ""
    epochs: float = 1.0


#: Of the readout alone, relative to a whole training: less than a tenth of its time, start and tables apart, because
#: nothing goes back through the network, which is evaluated in the first epoch only.
FIXED_EPOCHS = 1 / 6
#: Three times that of a whole training: steps are few. On MACE's validation frames better at every length tried.
FIXED_RATE = 0.03

# The paper's weights go with its raw NLL; optimiser and schedule are those of the other rows.
_PAPER_MACE = ("--energy_weight=1", "--forces_weight=10000", "--clip_grad=10")
_PAPER_NEQUIP = ("training_module.loss.coeffs.forces=10000.0",)

METHODS: Dict[str, Method] = {
    "stock": Method("stock model", ensemble="DE"),
    "e2ip": Method("e²IP", "e2ip"),
    "e2ip-coupled": Method("e²IP, coupled", "e2ip", {"evidence": "coupled"}),
    "e2ip-independent": Method("e²IP, independent", "e2ip", {"evidence": "independent"}),
    "e2ip-fixed": Method(
        "stock model with e²IP's readout", "e2ip", base="stock", epochs=FIXED_EPOCHS, learning_rate=FIXED_RATE
    ),
    "e2ip-paper": Method("e²IP, preset paper", "e2ip", {"preset": "paper"}, mace=_PAPER_MACE, nequip=_PAPER_NEQUIP),
    "e2ip-cholesky": Method("e²IP w/o equivariance", "e2ip-cholesky"),
    "eip": Method("eIP", "eip"),
    "eip-nig": Method("eIP, likelihood of the NIG", "eip", {"likelihood": "nig"}),
    "mve": Method("MVE", "mve", ensemble="MVE-DE"),
    "mve-spd": Method("MVE, equivariant covariance", "mve-spd"),
    "shallow": Method("SE", "shallow"),
    "shallow-components": Method("SE, likelihood of components", "shallow", {"likelihood": "components", "beta": 0.0}),
}
_ALL = tuple(METHODS)

#: Of a training whose beginning alone is looked at.
EARLY_EPOCHS = 1
EARLY_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)

METHODS["e2ip-undamped"] = Method("e²IP, no dampers", "e2ip-ablation", {"damper": "off"})
METHODS["e2ip-paper-undamped"] = Method(
    "e²IP, preset paper, no dampers",
    "e2ip-ablation",
    {"preset": "paper", "damper": "off"},
    mace=_PAPER_MACE,
    nequip=_PAPER_NEQUIP,
)
EARLY: Dict[str, Method] = {
    f"{numerics}-{damper}-{rate:g}": Method(
        f"{numerics}, damper {damper}, learning rate {rate:g}",
        "e2ip-ablation",
        {"preset": "paper", "numerics": numerics, "damper": damper},
        learning_rate=rate,
        early=True,
        mace=_PAPER_MACE,
        nequip=_PAPER_NEQUIP,
    )
    for numerics in ("published", "closed")
    for damper in ("on", "off")
    for rate in EARLY_RATES
}
METHODS.update(EARLY)


class Preset(NamedTuple):
    """How much of everything.

    Attributes
    ----------
    seeds : int
        Runs of a method.
    members : int
        Runs of a method that ensembles are made of.
    epochs : float
        Factor on the data sets' epochs.
    frames : int, optional
        Frames of each kind at most.
    mace, nequip, painn, alphanet : tuple of str
        Arguments of the training commands; those of NequIP are its network's.
    """

    seeds: int
    members: int
    epochs: float
    frames: Optional[int] = None
    mace: Tuple[str, ...] = ()
    nequip: Tuple[str, ...] = ()
    painn: Tuple[str, ...] = ()
    alphanet: Tuple[str, ...] = ()

    def arguments(self, host: str) -> Tuple[str, ...]:
        """Of one of `HOSTS`."""
        return getattr(self, host.rpartition("-")[2])


_SMALL = ("--num_channels=16", "--max_ell=2", "--correlation=2")

PRESETS: Dict[str, Preset] = {
    # Whether everything runs, in minutes.
    "smoke": Preset(
        1,
        2,
        0.125,
        20,
        ("--max_ell=1", "--correlation=1", "--num_channels=8"),
        ("num_features=8",),
        ("num_features=16", "num_layers=2"),
        ("num_features=16", "num_layers=2", "num_radial=8"),
    ),
    # A network and a number of epochs for two cores.
    "cpu": Preset(
        2, 5, 1.0, None, _SMALL, (), ("num_features=64",), ("num_features=64", "num_layers=2", "num_radial=16")
    ),
    # For a GPU: the hosts' usual sizes, and five seeds as in the paper.
    "paper": Preset(
        5,
        5,
        5.0,
        None,
        ("--max_ell=3", "--correlation=3", "--num_channels=64", "--device=cuda"),
        ("num_features=64", "num_layers=3"),
        # Sizes in the paper.
        ("num_layers=6", "num_radial=128"),
    ),
}


class Benchmark(NamedTuple):
    """One table.

    Attributes
    ----------
    sets, methods : tuple of str
    about : str
        One sentence for the page.
    """

    sets: Tuple[str, ...]
    methods: Tuple[str, ...]
    about: str


_MAIN = ("stock", "e2ip", "e2ip-fixed", "e2ip-coupled", "eip", "e2ip-cholesky", "mve", "mve-spd", "shallow")

BENCHMARKS: Dict[str, Benchmark] = {
    "rmd17": Benchmark(("aspirin", "azobenzene"), _ALL, "Molecules in the gas phase, in distribution."),
    "water": Benchmark(("water",), _MAIN, "Liquid water; ood: its surface."),
    "silica": Benchmark(("silica",), _MAIN, "Zeolites; ood: frameworks that no training frame has."),
    "shift": Benchmark(("demo", "acac"), _MAIN, "Trained on cold frames; ood: hot ones."),
    "efficiency": Benchmark(
        ("aspirin-30", "aspirin-50", "aspirin-70", "aspirin"),
        ("stock", "e2ip", "eip", "e2ip-cholesky"),
        "Parts of the training set of aspirin.",
    ),
    "fullwater": Benchmark(("fullwater",), _MAIN, "Liquid water, all published frames, 80/10/10 as in the paper."),
    "md22": Benchmark(
        tuple(f"{name}{part}" for name in ("buckyball", "nanotube") for part in ("-30", "-50", "-70", "")),
        ("stock", "e2ip", "eip", "e2ip-cholesky"),
        "Parts of the training sets of two large systems; every test frame turned at random.",
    ),
    "rotation": Benchmark(
        ("aspirin",),
        ("stock", "e2ip", "mve-spd", "e2ip-cholesky", "eip", "mve"),
        "Every test frame turned at random: predictions turn with it, or they do not.",
    ),
    "damping": Benchmark(
        ("aspirin", "water"),
        ("e2ip", "e2ip-undamped", "e2ip-paper", "e2ip-paper-undamped", *EARLY),
        "What bounds the conditioning of the covariances, and what happens without it.",
    ),
}


class Run(NamedTuple):
    """One training and its predictions."""

    dataset: str
    host: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder; tables that need the same run share it."""
        return f"{self.dataset}_{self.host}_{self.method}_s{self.seed}"

    @classmethod
    def of(cls, name: str, dataset: str, host: str) -> "Run":
        """The one that has this `name`."""
        method, seed = name.removeprefix(f"{dataset}_{host}_").rsplit("_s", 1)
        return cls(dataset, host, method, int(seed))


def runs(host: str, preset: Preset, sets: Tuple[str, ...], methods: Tuple[str, ...]) -> List[Run]:
    """Every run of a table, the first seed of every method first."""
    found = []
    for seed in range(1, max(preset.seeds, preset.members) + 1):
        for name in sets:
            for method in methods:
                # Of early trainings so many, too: whether one fails is a matter of chance. And of readouts that are
                # trained alone, because they take little.
                many = METHODS[method].ensemble or METHODS[method].early or METHODS[method].base
                if seed <= (preset.members if many else preset.seeds):
                    found.append(Run(name, host, method, seed))
    return found


def chosen(given: Optional[str], known: Tuple[str, ...], option: str) -> Tuple[str, ...]:
    """Names separated by commas, all of them ``known``; None: all."""
    if given is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise InputError(f"{option}: unknown '{name}'; this benchmark has: {', '.join(known)}")
    if not names:
        raise InputError(f"{option} names nothing; this benchmark has: {', '.join(known)}")
    return names
