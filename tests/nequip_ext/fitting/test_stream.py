"""A fit to frames that stay in their files: what one to frames in memory finds, also in parts, and of other formats."""

import ase.io
import pytest
import torch
from nequip.data import AtomicDataDict, from_ase
from nequip.data.dataset import NequIPLMDBDataset

from e2ip_plugins.fitting.records import Work
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.stored_frames import StoredFrames
from nequip_ext.fitting.file import fit_file
from nequip_ext.training.sources import open_source


@pytest.fixture(scope="module")
def stock(tmp_path_factory, train, train_files):
    folder = tmp_path_factory.mktemp("run") / "stock"
    return train("nequip_baseline", folder, train_files, "max_epochs=1", "run=[train]") / "best.ckpt"


@pytest.fixture(scope="module")
def expected(stock, train_files):
    """The model that a fit to frames in memory makes; the second one in this process, which rounds as later ones do."""
    frames = [read_frames([train_files[name]]) for name in ("train", "val")]
    for _ in range(2):
        fit_file(stock, *frames, stock.with_name("memory.ckpt"))
    return load(stock.with_name("memory.ckpt"))


def load(path):
    state = torch.load(path, weights_only=False)["state_dict"]
    return {name: values for name, values in state.items() if "e2ip_readout" in name}


def same(path, expected, **tolerance):
    found = load(path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **(tolerance or {"rtol": 0.0, "atol": 0.0}), msg=name)


def sets(paths):
    return [StoredFrames([path], open_source=lambda file, keys: open_source(file, keys, "train")) for path in paths]


def test_frames_in_files_give_the_same_bits(stock, expected, train_files, tmp_path):
    fit_file(stock, *[StoredFrames([train_files[name]]) for name in ("train", "val")], tmp_path / "out.ckpt")
    same(tmp_path / "out.ckpt", expected)


def test_frames_of_lmdb(stock, expected, train_files, tmp_path):
    mapping = {"REF_energy": AtomicDataDict.TOTAL_ENERGY_KEY, "REF_forces": AtomicDataDict.FORCE_KEY}
    for name in ("train", "val"):
        frames = ase.io.read(train_files[name], ":")
        as_data = [from_ase(atoms, key_mapping=mapping, include_keys=list(mapping)) for atoms in frames]
        NequIPLMDBDataset.save_from_iterator(str(tmp_path / f"{name}.lmdb"), as_data, map_size=2**22)
    fit_file(stock, *sets([tmp_path / "train.lmdb", tmp_path / "val.lmdb"]), tmp_path / "out.ckpt")
    same(tmp_path / "out.ckpt", expected, rtol=1e-4, atol=1e-6)


def test_two_parts_are_one(stock, expected, train_files, tmp_path):
    output, settings = tmp_path / "out.ckpt", {"--train": "a"}
    frames = [StoredFrames([train_files[name]]) for name in ("train", "val")]
    for i in (1, 2):
        report = fit_file(stock, *frames, output, work=Work(output, settings, part=(i, 2)))
        assert report.part and not output.exists()
    fit_file(stock, *frames, output, work=Work(output, settings, merge=2))
    same(output, expected, rtol=1e-4, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["out.ckpt"]
