"""Data that MACE alone reads: the same frames as from extxyz."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from mace import data

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.stored_frames import StoredFrames
from mace_ext.training.sources import open_source


def stored(path):
    return StoredFrames([path], open_source=lambda file, keys: open_source(file, keys, "train"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Frames with an isolated atom before them, as extxyz, HDF5, a folder of two HDF5 files, and LMDB."""
    import h5py
    from mace.tools.fairchem_dataset.lmdb_dataset_tools import LMDBDatabase

    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    single = ase.Atoms("O", info={"config_type": "IsolatedAtom", "REF_energy": -1.0})
    frames = [single]
    for i in range(6):
        atoms = ase.Atoms("OH2", rng.normal(size=(3, 3)), cell=[9.0] * 3, pbc=True, info={"REF_energy": float(i)})
        atoms.arrays["REF_forces"] = rng.normal(size=(3, 3))
        frames.append(atoms)
    ase.io.write(folder / "a.xyz", frames, format="extxyz")
    keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
    configs = [data.config_from_atoms(atoms, key_specification=keys) for atoms in ase.io.read(folder / "a.xyz", ":")]
    (folder / "shards").mkdir()
    for name, part in (("a", configs), ("shards/0", configs[:4]), ("shards/1", configs[4:])):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            data.save_configurations_as_HDF5(part, 0, file)
    with LMDBDatabase(folder / "a.aselmdb") as base:
        for atoms in frames[1:]:
            labels = {"energy": atoms.info["REF_energy"], "forces": atoms.arrays["REF_forces"]}
            bare = ase.Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
            bare.calc = SinglePointCalculator(bare, **labels)
            base.write(bare)
    return folder


@pytest.mark.parametrize("name", ["a.h5", "shards", "a.aselmdb"])
def test_frames_are_those_of_the_text_file(files, name):
    found, expected = stored(files / name), read_frames([files / "a.xyz"])
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert one.atoms.numbers.tolist() == other.atoms.numbers.tolist() and one.atoms.pbc.all()
        np.testing.assert_allclose(one.atoms.positions, other.atoms.positions, atol=1e-7)
        np.testing.assert_allclose(one.atoms.cell, other.atoms.cell)
        np.testing.assert_allclose(one.counted_forces, other.counted_forces, atol=1e-7)
        np.testing.assert_allclose(one.counted_energy, other.counted_energy)
    assert found[5].where.startswith(str(files / name))


def test_files_that_are_cut_off_or_of_another_kind(files, tmp_path):
    whole = (files / "a.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.h5: cannot be opened as HDF5 of MACE .*was it cut off\?"):
        stored(tmp_path / "cut.h5")
    (tmp_path / "cut.aselmdb").write_bytes(b"no LMDB")
    with pytest.raises(InputError, match=r"cut\.aselmdb: cannot be opened as LMDB of MACE"):
        stored(tmp_path / "cut.aselmdb")
    with pytest.raises(InputError, match=r"none\.h5: no such file"):
        stored(tmp_path / "none.h5")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: is a folder without HDF5 or LMDB files"):
        stored(tmp_path / "empty")


def test_a_frame_that_cannot_be_read_is_named(files, tmp_path):
    import h5py

    (tmp_path / "a.h5").write_bytes((files / "a.h5").read_bytes())
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["config_batch_0"]["config_3"]["positions"]
    with pytest.raises(InputError, match=r"a\.h5, frame 3: cannot be read .*; was the file cut off\?"):
        stored(tmp_path / "a.h5")
