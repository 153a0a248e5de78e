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
    """Function that builds an untrained model; ``readout=None`` leaves it stock."""
    import mace  # noqa: F401  (before e3nn: e3nn 0.4.4 cannot load its constants otherwise)
    import numpy as np
    import torch
    from e3nn import o3
    from mace import modules

    from mace_ext.model import add_readout, readout_config

    def make(
        hidden_irreps="8x0e+8x1o",
        heads=("Default",),
        readout=("default", "coupled", 0.05),
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
            add_readout(model, readout_config(*readout), seed=seed)
        return model

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Function that turns ASE frames into the dictionary a model takes."""
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric

    def make(frames, heads=None, head="Default"):
        table = AtomicNumberTable(list(SPECIES))
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
