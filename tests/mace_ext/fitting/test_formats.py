"""The same frames in every format that MACE trains from: one fit, alone and after a training on two processes."""

import ase
import ase.io
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from two_processes import run_in_two_processes

from e2ip_plugins.predictions.stored_frames import StoredFrames
from mace_ext.fitting.file import fit_file
from mace_ext.training.sources import open_source

FORMATS = ("xyz", "h5", "aselmdb")

AFTER_TRAINING = """
import ase.io
from mace import data
from mace.data.lmdb_dataset import LMDBDataset
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric.dataloader import DataLoader

from mace_ext.fitting.after_training import Training, fit_trained

torch.set_default_dtype(torch.float64)
KEYS = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})


def loader(net, path):
    common = {"r_max": float(net.r_max), "z_table": AtomicNumberTable(net.atomic_numbers.tolist())}
    heads = {"heads": ["Default"], "head": "Default"}
    if path.suffix == ".h5":
        dataset = data.HDF5Dataset(str(path), **common, **heads)
    elif path.suffix == ".aselmdb":
        dataset = LMDBDataset(str(path), **common, **heads)
    else:
        configs = [data.config_from_atoms(atoms, key_specification=KEYS) for atoms in ase.io.read(path, ":")]
        graph = {"z_table": common["z_table"], "cutoff": common["r_max"], "heads": heads["heads"]}
        dataset = [data.AtomicData.from_config(config, **graph) for config in configs]
    return DataLoader(dataset, batch_size=3)


for ending in ("xyz", "h5", "aselmdb"):
    net = torch.load(folder / "before.model", weights_only=False)
    train, valid = (loader(net, folder / f"{name}.{ending}") for name in ("train", "valid"))
    fit_trained(net, Training(train, {"Default": valid}))
    torch.save(net, folder / f"{ending}-{rank}.model")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory, make_model, training_frames, validation_frames):
    """A model that is not fitted, and frames with forces and energies in every format."""
    import h5py
    from mace import data
    from mace.tools.fairchem_dataset.lmdb_dataset_tools import LMDBDatabase

    folder = tmp_path_factory.mktemp("formats")
    torch.save(make_model(options=(("evidence", "leverage"),)), folder / "before.model")
    keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
    for name, frames in (("train", training_frames), ("valid", validation_frames)):
        written = []
        for i, frame in enumerate(frames):
            atoms = frame.atoms.copy()
            atoms.arrays["REF_forces"], atoms.info["REF_energy"] = frame.counted_forces, 0.1 * i
            written.append(atoms)
        ase.io.write(folder / f"{name}.xyz", written, format="extxyz")
        # With the digits of the text file.
        written = ase.io.read(folder / f"{name}.xyz", ":")
        with h5py.File(folder / f"{name}.h5", "w") as file:
            configs = [data.config_from_atoms(atoms, key_specification=keys) for atoms in written]
            data.save_configurations_as_HDF5(configs, 0, file)
        with LMDBDatabase(folder / f"{name}.aselmdb") as base:
            for atoms in written:
                bare = ase.Atoms(atoms.numbers, atoms.positions)
                labels = {"energy": atoms.info["REF_energy"], "forces": atoms.arrays["REF_forces"]}
                bare.calc = SinglePointCalculator(bare, **labels)
                base.write(bare)
    return folder


def constants(path):
    """What a fit makes: moments and axes of the leverage, growth, factors, and the energies' lengths."""
    leverage = torch.load(path, weights_only=False).e2ip_readout.leverage
    assert leverage.fitted and leverage.energies.lengths.any()
    return leverage.state_dict()


def same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_every_format_alone_and_in_two_processes(files):
    fits = {}
    for ending in FORMATS:
        sets = [
            StoredFrames([files / f"{name}.{ending}"], open_source=lambda path, keys: open_source(path, keys, ""))
            for name in ("train", "valid")
        ]
        fit_file(files / "before.model", *sets, files / f"{ending}-alone.model")
        fits[ending] = constants(files / f"{ending}-alone.model")
    for ending in FORMATS[1:]:
        same(fits[ending], fits["xyz"], rtol=1e-9, atol=1e-12)
    run_in_two_processes(AFTER_TRAINING, files)
    for ending in FORMATS:
        # Each process has half of the frames; sums over both are in another order.
        for rank in range(2):
            same(constants(files / f"{ending}-{rank}.model"), fits["xyz"], rtol=1e-6, atol=1e-9)
