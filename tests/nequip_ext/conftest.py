"""NequIP's own test fixtures and a tiny model; without NequIP nothing in this folder is collected."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from forked_commands import run_command

if importlib.util.find_spec("nequip") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from nequip.utils.unittests.conftest import *  # noqa: F403


def _forget_fields_of_writers():
    if registry := sys.modules.get("nequip.data._key_registry"):
        fields = (*registry._NODE_FIELDS, *registry._EDGE_FIELDS, *registry._GRAPH_FIELDS, *registry._LONG_FIELDS)
        registry.deregister_fields(*(name for name in fields if name.startswith("original_dataset_")))


@pytest.fixture(autouse=True)
def forget_fields_of_writers():
    """Function that takes fields with the prefix of NequIP's xyz writers off again, as the end of every test does: each
    writer registers every field anew, those of the writers before it, too: with each there are twice as many."""
    yield _forget_fields_of_writers
    _forget_fields_of_writers()


def _gnn_config(**changes):
    return {
        "_target_": "nequip.model.NequIPGNNModel",
        "seed": 1,
        "model_dtype": "float64",
        "type_names": ["H", "C", "O"],
        "r_max": 4.0,
        "num_layers": 2,
        "l_max": 2,
        "num_features": 4,
        "radial_mlp_width": 8,
        "avg_num_neighbors": 8.0,
        "per_type_energy_scales": 1.3,
        "per_type_energy_shifts": {"H": -1.0, "C": -2.0, "O": -3.0},
        **changes,
    }


@pytest.fixture(scope="session")
def gnn_config():
    """Function that gives the config of a tiny NequIP model over H, C, O; keywords replace its values."""
    return _gnn_config


@pytest.fixture(scope="session")
def make_model(default_dtype):
    """Function that builds (baseline, e2ip model) from the same config; options go to E2IPModel."""
    from hydra.utils import get_method

    from nequip_ext import E2IPModel

    def make(inner=None, **options):
        inner = _gnn_config() if inner is None else inner
        arguments = {k: v for k, v in inner.items() if k != "_target_"}
        return get_method(inner["_target_"])(**arguments), E2IPModel(model=inner, seed=3, **options)

    return make


@pytest.fixture(scope="session")
def frames():
    """Off-symmetry: a molecule, a periodic cell, a smaller molecule."""
    from ase.build import molecule

    built = [molecule("CH3CH2OH"), molecule("CH3OH", cell=[4.5, 5.0, 5.5], pbc=True), molecule("H2O")]
    for seed, atoms in enumerate(built):
        atoms.rattle(0.1, seed=seed)
    return built


@pytest.fixture(scope="session")
def to_data(default_dtype):
    """Function that turns an ASE frame into NequIP's dictionary, with neighbours within 4 Å."""
    from nequip.data import from_ase
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform

    types = ChemicalSpeciesToAtomTypeMapper(["H", "C", "O"], {s: s for s in "HCO"})
    neighbours = NeighborListTransform(r_max=4.0)
    return lambda atoms: neighbours(types(from_ase(atoms)))


@pytest.fixture(scope="session")
def as_calculator():
    """Function that puts a model of `gnn_config` behind ASE, as loaded from a checkpoint."""
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform

    from nequip_ext import E2IPCalculator

    types = ChemicalSpeciesToAtomTypeMapper(["H", "C", "O"], {s: s for s in "HCO"})
    transforms = [types, NeighborListTransform(r_max=4.0)]
    return lambda model, **options: E2IPCalculator(model.eval(), "cpu", transforms=transforms, **options)


@pytest.fixture(scope="session")
def anisotropy():
    """Function that gives the largest relative deviation of covariances (N, 3, 3) from isotropic ones."""
    import torch

    def measure(covariance):
        mean = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(3)
        return float(((covariance - mean).abs().max() / covariance.abs().max()).detach())

    return measure


@pytest.fixture(scope="session")
def turning_error(default_dtype):
    """Function that turns a frame by random rotations, half of them with a reflection, and gives the largest relative
    deviation of its outputs from the turned outputs: vectors (N, 3) together, or every tensor (N, 3, 3) alone."""
    import torch
    from nequip.data import AtomicDataDict

    def measure(model, data, keys=("forces_cov",), count=20):
        moves = torch.linalg.qr(torch.randn(count, 3, 3, generator=torch.Generator().manual_seed(0)))[0]
        moves *= torch.linalg.det(moves)[:, None, None]
        moves[1::2] *= -1.0
        copies = [{**data, **{name: data[name] @ move.T for name in ("pos", "cell") if name in data}} for move in moves]
        reference, output = model(dict(data)), model(AtomicDataDict.batched_from_list(copies))
        errors = []
        for key in keys:
            expected = torch.einsum("rij,nj...->rni...", moves, reference[key].detach())
            tensors = reference[key].dim() == 3
            expected = torch.einsum("rnij,rkj->rnik", expected, moves) if tensors else expected
            difference = (output[key].detach().reshape(expected.shape) - expected).abs()
            of_atoms = [value.amax((-1, -2)) if tensors else value.max() for value in (difference, expected.abs())]
            errors.append(float((of_atoms[0] / of_atoms[1]).max()))
        return max(errors)

    return measure


@pytest.fixture(scope="session")
def make_anisotropic(make_model):
    """Function that builds a tiny float64 model with an anisotropic readout from the config of its inner model."""
    import torch

    def make(inner):
        _, model = make_model(inner)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.model.func.e2ip_readout.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        return model.eval()

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Function that makes two frames of three atoms: references and model outputs in NequIP's shapes."""
    import torch

    def make(dtype):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=dtype)

        references = {
            "pos": random(6, 3),
            "atom_types": torch.tensor([0, 1, 2, 0, 0, 2]),
            "batch": torch.tensor([0, 0, 0, 1, 1, 1]),
            "num_atoms": torch.tensor([3, 3]),
            "total_energy": random(2, 1),
            "forces": random(6, 3),
        }
        outputs = {
            **references,
            "total_energy": references["total_energy"] + 0.3,
            "forces": references["forces"] + 0.1 * random(6, 3),
            "e2ip_log_sigma0": random(6, 6) - 5.0,
            "e2ip_nu": 5.0 + random(6, 1).square(),
            "e2ip_kappa": 0.1 + random(6, 1).square(),
            "forces_epistemic_std": random(6, 1).square(),
        }
        return references, outputs

    return make


@pytest.fixture(scope="session")
def train_files(tmp_path_factory):
    """Paths of ``train`` (12 frames), ``val`` and ``test`` (4 each): methanol in a harmonic well."""
    import ase.io
    import numpy as np
    from ase.build import molecule

    folder = tmp_path_factory.mktemp("data")
    paths = {}
    for name, count, offset in (("train", 12, 0), ("val", 4, 100), ("test", 4, 200)):
        labelled = []
        for seed in range(count):
            atoms = molecule("CH3OH")
            rest = atoms.get_positions()
            atoms.rattle(0.1, seed=offset + seed)
            stretch = atoms.get_positions() - rest
            atoms.info["REF_energy"] = float(-20.0 + 5.0 * np.sum(stretch**2))
            atoms.arrays["REF_forces"] = -10.0 * stretch
            labelled.append(atoms)
        paths[name] = folder / f"{name}.xyz"
        ase.io.write(paths[name], labelled, format="extxyz")
    return paths


#: Settings of the inner model that train in seconds.
SMALL = ("num_features=4", "l_max=1", "++radial_mlp_width=8")
SMALL_BACKBONES = {
    "nequip_painn": ("num_features=8", "num_layers=2", "num_radial=4"),
    "nequip_alphanet": ("num_features=16", "num_layers=2", "num_radial=4", "+num_phase_channels=16", "+num_states=4"),
}


@pytest.fixture(scope="session")
def command():
    """Function that gives the ``nequip-train`` command of a ready config, by name, or of a config's path: run folder,
    data files, overrides."""

    def build(config, folder, files, *overrides):
        inner = "training_module.model" if config == "nequip_baseline" else "training_module.model.model"
        ready, path = isinstance(config, str), Path(__file__).parents[2] / "configs" / config
        sizes = SMALL_BACKBONES.get(config, SMALL) if ready else ()
        small = [s.replace(s.lstrip("+"), f"{inner}.{s.lstrip('+')}") for s in sizes]
        data = [f"{name}_file={file}" for name, file in files.items()]
        tool = Path(sys.executable).with_name("nequip-train")
        run = [tool, "-cp", path.parent, "-cn", path.stem, f"hydra.run.dir={folder}"]
        return [str(part) for part in (*run, *data, *small, "max_epochs=3", "cutoff_radius=3.0", *overrides)]

    return build


@pytest.fixture(scope="session")
def environment():
    """Environment variables of commands."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def train(command, run_tool, environment):
    """Function that runs what `command` gives, asserts that it went well and gives the run folder."""

    def run(config, folder, files, *overrides, env=environment):
        run_tool(*command(config, folder, files, *overrides), env=env, cwd=folder.parent)
        return folder

    return run


@pytest.fixture
def allegro_config():
    """Config of a tiny Allegro model over H, C, O."""
    parts = ("scalar_embed", "allegro", "readout")
    return {
        "_target_": "allegro.model.AllegroModel",
        "seed": 1,
        "model_dtype": "float64",
        "type_names": ["H", "C", "O"],
        "r_max": 4.0,
        "l_max": 1,
        "num_layers": 2,
        "num_scalar_features": 8,
        "num_tensor_features": 2,
        "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4},
        "avg_num_neighbors": 8.0,
        **{f"{part}_mlp_hidden_layers_width": 8 for part in parts},
    }


@pytest.fixture
def allegro_training(allegro_config, tmp_path):
    """Path of the ready config with that model, in float32, in the place of NequIP's."""
    import yaml

    config = yaml.safe_load((Path(__file__).parents[2] / "configs" / "nequip_e2ip.yaml").read_text())
    model = config["training_module"]["model"]
    names = ("avg_num_neighbors", "per_type_energy_shifts", "per_type_energy_scales", "type_names", "r_max")
    statistics = {name: model["model"][name] for name in names}
    model["model"] = {**allegro_config, "model_dtype": "float32", **statistics}
    path = tmp_path / "allegro.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def leverage_run(tmp_path_factory, train, train_files):
    """Folder of a short training in mode ``leverage`` and its tests."""
    folder = tmp_path_factory.mktemp("run") / "leverage"
    return train("nequip_e2ip", folder, train_files, "max_epochs=2", "evidence=leverage")


@pytest.fixture(scope="session")
def package(run_tool):
    """Function that packages a checkpoint with NequIP's own command."""

    def build(checkpoint, target):
        run_tool("nequip-package", "build", checkpoint, target)
        return target

    return build


@pytest.fixture(scope="session")
def leverage_package(leverage_run, package):
    """Path of the package of that training's best checkpoint."""
    return package(leverage_run / "best.ckpt", leverage_run.with_name("leverage.nequip.zip"))


@pytest.fixture(scope="session")
def failure(command, environment):
    """Function that gives the last line printed by a command which must fail before it trains."""

    def run(*arguments):
        done = run_command(command(*arguments), env=environment)
        assert done.returncode != 0
        assert "TRAIN RUN END" not in done.stdout and "Epoch 0" not in done.stdout
        return done.stderr.strip().splitlines()[-1]

    return run


@pytest.fixture(scope="session")
def logged():
    """Function that gives the figures whose names start with ``prefix`` by epoch, from one log of a run folder: the
    first, or after a restart there the next."""
    import csv

    def read(folder, prefix="val0_epoch", version=0):
        rows = {}
        with (folder / f"logs/version_{version}/metrics.csv").open() as log:
            for row in csv.DictReader(log):
                found = {k: float(v) for k, v in row.items() if k.startswith(prefix) and v}
                if found:
                    rows[int(row["epoch"])] = found
        return rows

    return read


@pytest.fixture(scope="session")
def fast_compiler(tmp_path_factory):
    """Environment whose C++ compiler does not optimise: correctness does not need it."""
    script = tmp_path_factory.mktemp("bin") / "g++-O0"
    script.write_text('#!/bin/bash\nexec g++ "${@/-O3/-O0}"\n')
    script.chmod(0o755)
    return {**os.environ, "CXX": str(script), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.fixture(scope="session")
def compile_for(run_tool, fast_compiler):
    """Function behind ``nequip-compile``; gives the path of the file for a checkpoint and a target."""

    def compile_file(checkpoint, target):
        path = checkpoint.with_name(f"{target}.nequip.pt2")
        options = ("--mode", "aotinductor", "--device", "cpu", "--target", target)
        run_tool("nequip-compile", checkpoint, path, *options, env=fast_compiler)
        return path

    return compile_file


@pytest.fixture(scope="session")
def check_results():
    """Function that compares results of two calculators by name for every frame."""
    import numpy as np

    def check(calculator, reference, frames, names, rtol=1e-4, atol=1e-5):
        for atoms in frames:
            reference.calculate(atoms)
            calculator.calculate(atoms)
            for name in names:
                expected = reference.results[name]
                np.testing.assert_allclose(calculator.results[name], expected, rtol=rtol, atol=atol, err_msg=name)

    return check


RUN_COMPILED = """
    import torch
    path, inputs, target = sys.argv[1:]
    model = torch._inductor.aoti_load_package(path)
    metadata = model.get_metadata()
    names, wanted = metadata["nequip_aoti_inputs"].split(), metadata["nequip_aoti_outputs"].split()
    found = [model([data[name] for name in names]) for data in torch.load(inputs)]
    torch.save([dict(zip(wanted, outputs)) for outputs in found], target)
    assert not [name for name in sys.modules if name.split(".")[0] in ("nequip", "e3nn", "allegro")]
"""


@pytest.fixture
def run_compiled(without_plugin, tmp_path):
    """Function that runs a compiled file in a Python that has torch alone, as C++ code of LAMMPS does: inputs and
    outputs are in the order of its metadata. Gives a dictionary of arrays for every dictionary of inputs."""
    import torch

    def run(path, inputs):
        torch.save(list(inputs), tmp_path / "inputs.pt")
        done = without_plugin(RUN_COMPILED, path, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
        assert done.returncode == 0, done.stderr[-3000:]
        found = torch.load(tmp_path / "outputs.pt")
        return [{name: value.detach().numpy() for name, value in outputs.items()} for outputs in found]

    return run
