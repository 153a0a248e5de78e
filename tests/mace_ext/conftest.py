"""Tiny models and data, made in-process; the folder is skipped where MACE is not installed."""

import importlib.util

import pytest

if importlib.util.find_spec("mace") is None:
    collect_ignore_glob = ["*.py"]

SPECIES = (1, 6, 8)


@pytest.fixture(autouse=True)
def _default_dtype():
    """MACE sets torch's default dtype as it goes; every test starts and ends with float64."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def make_model():
    """Function that builds an untrained model; ``readout=None`` leaves it stock, ``options`` are (name, value) pairs.

    The weights of the readout are spread out: its covariances are far from isotropic and from each other.
    Each call returns a copy of its own; building takes a second, copying does not.
    """
    import copy
    import functools

    import mace  # noqa: F401  (before e3nn: e3nn 0.4.4 cannot load its constants otherwise)
    import numpy as np
    import torch
    from e3nn import o3
    from mace import modules

    from e2ip_plugins.readout.settings import Settings
    from mace_ext.model.model import add_readout

    def make(*args, **settings):
        return copy.deepcopy(build(*args, **settings))

    @functools.lru_cache
    def build(
        hidden_irreps="8x0e+8x1o",
        heads=("Default",),
        readout="e2ip",
        options=(),
        force_unit=0.05,
        seed=0,
        dtype=torch.float64,
        **settings,
    ):
        torch.set_default_dtype(dtype)
        torch.manual_seed(seed)
        arguments = dict(
            r_max=4.0,
            num_bessel=4,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
            num_interactions=2,
            num_elements=len(SPECIES),
            hidden_irreps=o3.Irreps(hidden_irreps),
            MLP_irreps=o3.Irreps("4x0e"),
            atomic_energies=np.zeros((len(heads), len(SPECIES))),
            avg_num_neighbors=6.0,
            atomic_numbers=list(SPECIES),
            correlation=2,
            gate=torch.nn.functional.silu,
            radial_MLP=[8],
            heads=list(heads),
            atomic_inter_scale=[1.0] * len(heads),
            atomic_inter_shift=[0.0] * len(heads),
        )
        arguments.update(settings)
        model = modules.ScaleShiftMACE(**arguments)
        if readout is not None:
            add_readout(model, Settings.of(readout, dict(options), force_unit), seed=seed)
            with torch.no_grad():
                for trunk in model.e2ip_readout.trunks:
                    trunk.out.weight.mul_(20.0)
                    if trunk.out.bias is not None:
                        trunk.out.bias.normal_()
        return model

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Function that turns ASE frames into the dictionary a model takes."""
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric

    def make(frames, heads=None, head="Default", species=SPECIES):
        table = AtomicNumberTable(list(species))
        graphs = [
            data.AtomicData.from_config(
                data.config_from_atoms(atoms, head_name=head), z_table=table, cutoff=4.0, heads=heads
            )
            for atoms in frames
        ]
        loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs), shuffle=False)
        return next(iter(loader)).to_dict()

    return make


@pytest.fixture(scope="session")
def frames():
    """A flexible molecule, a small one and a periodic cell, off their symmetric geometries."""
    from ase.build import molecule

    built = [molecule("CH3CH2OH"), molecule("H2O"), molecule("CH3OH", cell=[4.5, 5.0, 5.5], pbc=True)]
    for seed, atoms in enumerate(built):
        atoms.rattle(0.1, seed=seed)
    return built


@pytest.fixture(scope="session")
def model_files(tmp_path_factory, make_model):
    """Paths of saved models by name: ``e2ip``, ``baseline``, ``multihead``."""
    import torch

    folder = tmp_path_factory.mktemp("models")
    models = {
        "e2ip": make_model(),
        "baseline": make_model(readout=None),
        "multihead": make_model(heads=("one", "two")),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = folder / f"{name}.model"
        torch.save(model, paths[name])
    return paths


@pytest.fixture(scope="session")
def labelled():
    """Function that gives rattled copies of a molecule with made-up forces of about 0.3 eV/Å."""
    import numpy as np
    from ase.build import molecule

    from e2ip_plugins.predictions.labelled import Label, LabelledFrame

    def make(name, count, seed, width=0.1):
        rng, frames = np.random.default_rng(seed), []
        for i in range(count):
            atoms = molecule(name)
            atoms.rattle(width, rng=rng)
            frames.append(LabelledFrame(atoms, f"{name} {i}", Label(rng.normal(scale=0.3, size=(len(atoms), 3)))))
        return frames

    return make


@pytest.fixture(scope="session")
def fitted_file(tmp_path_factory, make_model, labelled):
    """Path of a model with a fitted leverage, forces of some eV/Å, and (wide) error bars of energies."""
    import numpy as np
    import torch

    from e2ip_plugins.predictions.labelled import Label
    from mace_ext.fitting.file import fit_file

    folder = tmp_path_factory.mktemp("fitted")
    torch.save(make_model(atomic_inter_scale=(20.0,)), folder / "fresh.model")
    train, valid = labelled("CH3OH", 12, 0, 0.05), labelled("CH3OH", 8, 1, 0.05)
    energies = np.random.default_rng(2).normal(scale=3000.0, size=len(valid))
    valid = [frame._replace(energy=Label(energy)) for frame, energy in zip(valid, energies, strict=True)]
    fit_file(folder / "fresh.model", train, valid, folder / "fitted.model", batch_size=12)
    return folder / "fitted.model"


@pytest.fixture(scope="session")
def predict():
    """Function that runs `mace_eval_configs` in this process with options by name; returns the frames written."""
    from unittest import mock

    import ase.io
    from mace.cli import eval_configs

    def run(model, configs, output, **settings):
        chosen = {"configs": configs, "model": model, "output": output, "batch_size": 2, **settings}
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()]
        with mock.patch("sys.argv", ["mace_eval_configs", *flags]):
            eval_configs.run(eval_configs.parse_args())
        return ase.io.read(output, ":")

    return run


@pytest.fixture(scope="session")
def data_files(tmp_path_factory):
    """Paths of ``train`` (12 frames) and ``valid`` (4), water with EMT energies and forces."""
    import ase.io
    from ase.build import molecule
    from ase.calculators.emt import EMT

    folder = tmp_path_factory.mktemp("data")
    paths = {}
    for name, count, offset in (("train", 12, 0), ("valid", 4, 100)):
        labelled = []
        for seed in range(count):
            atoms = molecule("H2O")
            atoms.rattle(0.08, seed=offset + seed)
            atoms.calc = EMT()
            atoms.info["REF_energy"] = atoms.get_potential_energy()
            atoms.arrays["REF_forces"] = atoms.get_forces()
            atoms.calc = None
            labelled.append(atoms)
        paths[name] = folder / f"{name}.xyz"
        ase.io.write(paths[name], labelled)
    return paths


@pytest.fixture
def train(tmp_path, data_files):
    """Function that runs `mace_run_train` in this process on a tiny model; returns the run's `Run`."""
    return lambda *options, **settings: run_training(tmp_path, data_files, *options, **settings)


def training_options(folder, data_files, name="run", **settings):
    """Options of a tiny training run, as on the command line; a setting of None leaves the option out."""
    chosen = {
        "name": name,
        "work_dir": folder,
        "train_file": data_files["train"],
        "valid_file": data_files["valid"],
        "energy_key": "REF_energy",
        "forces_key": "REF_forces",
        "E0s": "average",
        "num_channels": 4,
        "max_L": 1,
        "max_ell": 2,
        "correlation": 2,
        "r_max": 3.0,
        "num_radial_basis": 4,
        "radial_MLP": "[8]",
        "MLP_irreps": "4x0e",
        "batch_size": 4,
        "valid_batch_size": 4,
        "max_num_epochs": 2,
        "default_dtype": "float64",
        "plot": False,
        "seed": 1,
    }
    chosen.update(settings)
    return [f"--{key}={value}" for key, value in chosen.items() if value is not None]


class Run:
    """What a training run leaves behind."""

    def __init__(self, folder, name, seed, text):
        self.folder, self.name, self.tag, self.text = folder, name, f"{name}_run-{seed}", text

    @property
    def results(self):
        """Lines of the results file as dictionaries."""
        import json

        path = self.folder / "results" / f"{self.tag}_train.txt"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def validation(self):
        """Validation entries of the results file, the initial one first."""
        return [line for line in self.results if line["mode"] == "eval"]

    @property
    def model(self):
        """The saved model of stage one."""
        import torch

        return torch.load(self.folder / f"{self.name}.model", weights_only=False)


def run_training(folder, data_files, *flags, **settings):
    """`mace_run_train` in this process."""
    import io
    import logging

    from mace import tools
    from mace.cli import run_train

    options = [*training_options(folder, data_files, **settings), *flags]
    args = tools.build_default_arg_parser().parse_args(options)
    log, before = io.StringIO(), list(logging.getLogger().handlers)
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        run_train.run(args)
    finally:
        for added in set(logging.getLogger().handlers) - set(before):
            logging.getLogger().removeHandler(added)
    return Run(folder, args.name, args.seed, log.getvalue())


@pytest.fixture(scope="session")
def foundation(tmp_path_factory, data_files):
    """The `Run` of a training of one epoch with e²IP's readout."""
    folder = tmp_path_factory.mktemp("foundation")
    return run_training(folder, data_files, "--readout=e2ip", name="foundation", max_num_epochs=1)


@pytest.fixture
def restart(train, foundation, tmp_path):
    """Function that goes on with the training of `foundation`, to a second epoch, with the options of another one."""
    import functools
    import shutil

    shutil.copytree(foundation.folder / "checkpoints", tmp_path / "checkpoints")
    return functools.partial(train, "--restart_latest", name="foundation", max_num_epochs=2)


@pytest.fixture
def message_of(capsys):
    """Function that asserts that a call ends the process with status 2, and gives its last line on standard error."""

    def run(call, *flags, **settings):
        with pytest.raises(SystemExit) as ended:
            call(*flags, **settings)
        assert ended.value.code == 2
        # Of argparse's own errors the last line, after its usage.
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.fixture
def training_command(tmp_path, data_files):
    """Function that gives the command line of the run that ``train`` does in this process."""
    import sys

    def command(*flags, **settings):
        starter = ["-c", "from mace.cli.run_train import main; main()"]
        return [sys.executable, *starter, *training_options(tmp_path, data_files, **settings), *flags]

    return command


TWO_PROCESSES = """
import os, torch
from mace.cli import run_train
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/group", rank=rank, world_size=2)
made = []
class CPU(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids):
        super().__init__(module)
        made.append(module)
run_train.DDP = CPU
run_train.main()
torch.save(made[0].state_dict(), f"rank{rank}.pt")
"""


@pytest.fixture
def start_two_processes(tmp_path, training_command):
    """Function that starts a training on two processes, which leave their weights in ``rank0.pt`` and ``rank1.pt``, and
    gives a function that waits for their end and gives what they have printed.

    Their environment is that of torchrun. Stock MACE has no DDP on CPUs (it names a device for every rank, and starts
    process groups for GPUs only): the script makes up for that and for nothing else.
    """
    import os
    from concurrent.futures import ThreadPoolExecutor

    from forked_commands import run_command

    def start(*flags, **settings):
        python, _, _, *options = training_command(*flags, "--distributed", "--launcher=torchrun", **settings)

        def run(rank):
            torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            return run_command([python, "-c", TWO_PROCESSES, *options], env={**os.environ, **torchrun}, cwd=tmp_path)

        runs = [pool.submit(run, rank) for rank in range(2)]

        def wait():
            texts = []
            for done in (run.result() for run in runs):
                texts.append(done.stdout + done.stderr)
                assert done.returncode == 0, texts[-1][-3000:]
            return "".join(texts)

        return wait

    with ThreadPoolExecutor(2) as pool:
        yield start
