"""Data sets of NequIP: the same frames as from extxyz."""

import ase
import ase.io
import numpy as np
import pytest
from nequip.data import AtomicDataDict, from_ase
from nequip.data.dataset import NequIPLMDBDataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.stored_frames import StoredFrames
from nequip_ext.training.sources import open_source

DATA = """
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 1
  train_file_path: {path}
  val_file_path: {path}
  ase_args: {{format: extxyz}}
  key_mapping: {{REF_energy: total_energy, REF_forces: forces}}
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: [O, H]
    - _target_: nequip.data.transforms.NeighborListTransform
      r_max: 4.0
  train_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
  val_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
"""


def stored(path, split="train"):
    return StoredFrames([path], open_source=lambda file, keys: open_source(file, keys, split))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Frames as extxyz, npz, LMDB, and in the YAML of a training, and the arrays."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    frames = []
    for i in range(6):
        atoms = ase.Atoms("OH2", rng.normal(size=(3, 3)), info={"REF_energy": float(i)})
        atoms.arrays["REF_forces"] = rng.normal(size=(3, 3))
        frames.append(atoms)
    ase.io.write(folder / "a.xyz", frames, format="extxyz")
    arrays = {"R": [a.positions for a in frames], "F": [a.arrays["REF_forces"] for a in frames]}
    arrays |= {"E": [a.info["REF_energy"] for a in frames], "z": frames[0].numbers}
    np.savez(folder / "a.npz", **arrays)
    mapping = {"REF_energy": AtomicDataDict.TOTAL_ENERGY_KEY, "REF_forces": AtomicDataDict.FORCE_KEY}
    as_data = [from_ase(atoms, key_mapping=mapping, include_keys=list(mapping)) for atoms in frames]
    NequIPLMDBDataset.save_from_iterator(str(folder / "a.lmdb"), as_data, map_size=2**22)
    (folder / "a.yaml").write_text(DATA.format(path=folder / "a.xyz"))
    return folder, arrays


def same(found, expected):
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert one.atoms.numbers.tolist() == other.atoms.numbers.tolist() and not one.atoms.pbc.any()
        np.testing.assert_allclose(one.atoms.positions, other.atoms.positions, atol=1e-6)
        np.testing.assert_allclose(one.counted_forces, other.counted_forces, atol=1e-6)
        np.testing.assert_allclose(one.counted_energy, other.counted_energy, atol=1e-6)


@pytest.mark.parametrize("name", ["a.npz", "a.lmdb", "a.yaml"])
def test_frames_are_those_of_the_text_file(files, name):
    folder, _ = files
    same(stored(folder / name, "val"), read_frames([folder / "a.xyz"]))


def test_hdf5(files, tmp_path):
    h5py = pytest.importorskip("h5py")
    folder, arrays = files
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("three")
        group["pos"], group["forces"], group["energy"] = arrays["R"], arrays["F"], arrays["E"]
        group["atomic_numbers"] = np.tile(arrays["z"], (6, 1))
    same(stored(tmp_path / "a.h5"), read_frames([folder / "a.xyz"]))


def test_files_that_are_cut_off_or_of_another_kind(files, tmp_path):
    folder, _ = files
    whole = (folder / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.npz: NequIP cannot open it .*give a YAML with the data section"):
        stored(tmp_path / "cut.npz")
    (tmp_path / "a.yaml").write_text("trainer: {}\n")
    with pytest.raises(InputError, match=r"a\.yaml: has no section 'data'"):
        stored(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(DATA.format(path=tmp_path / "none.xyz"))
    with pytest.raises(InputError, match=r"b\.yaml: NequIP cannot open it \(.*none\.xyz"):
        stored(tmp_path / "b.yaml")
    with pytest.raises(InputError, match=r"none\.npz: no such file"):
        stored(tmp_path / "none.npz")
