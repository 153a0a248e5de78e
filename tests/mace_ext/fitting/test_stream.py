"""A fit to frames that stay in their files: what one to frames in memory finds, also stopped, and in parts."""

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.errors import ResumableError
from e2ip_plugins.fitting.records import Work
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.stored_frames import StoredFrames
from mace_ext.fitting import passes
from mace_ext.fitting.file import fit_file
from mace_ext.training.sources import open_source


@pytest.fixture(scope="module")
def files(tmp_path_factory, make_model, training_frames, validation_frames):
    """A stock model, and frames with forces and energies as extxyz and HDF5."""
    import h5py
    from mace import data

    folder = tmp_path_factory.mktemp("stream")
    torch.save(make_model(readout=None), folder / "stock.model")
    keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
    for name, frames in (("train", training_frames), ("valid", validation_frames)):
        written = []
        for i, frame in enumerate(frames):
            atoms = frame.atoms.copy()
            atoms.arrays["REF_forces"], atoms.info["REF_energy"] = frame.counted_forces, 0.1 * i
            written.append(atoms)
        ase.io.write(folder / f"{name}.xyz", written, format="extxyz")
        read = ase.io.read(folder / f"{name}.xyz", ":")
        with h5py.File(folder / f"{name}.h5", "w") as file:
            configs = [data.config_from_atoms(atoms, key_specification=keys) for atoms in read]
            data.save_configurations_as_HDF5(configs, 0, file)
    return folder


def sets(files, ending="xyz"):
    """Training and validation frames."""
    return [
        StoredFrames([files / f"{name}.{ending}"], open_source=lambda path, keys: open_source(path, keys, ""))
        if ending == "h5"
        else StoredFrames([files / f"{name}.{ending}"])
        for name in ("train", "valid")
    ]


@pytest.fixture(scope="module")
def expected(files):
    """The model that a fit to frames in memory makes; the second one in this process, which rounds as later ones do."""
    frames = [read_frames([files / f"{name}.xyz"]) for name in ("train", "valid")]
    for _ in range(2):
        fit_file(files / "stock.model", *frames, files / "memory.model")
    return load(files / "memory.model")


def load(path):
    state = torch.load(path, weights_only=False).state_dict()
    assert state["e2ip_readout.leverage.fitted"] and state["e2ip_readout.leverage.energies.lengths"].any()
    return state


def same(path, expected, **tolerance):
    found = load(path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **(tolerance or {"rtol": 0.0, "atol": 0.0}), msg=name)


@pytest.mark.parametrize("ending", ["xyz", "h5"])
def test_frames_in_files_give_the_same_bits(files, expected, tmp_path, ending):
    fit_file(files / "stock.model", *sets(files, ending), tmp_path / "out.model")
    same(tmp_path / "out.model", expected)


def test_a_batch_that_does_not_fit_into_memory_loses_nothing(files, expected, tmp_path, monkeypatch):
    """Neither in the pass over the training set nor in that over the validation set."""
    for name, after in (("run_features", 1), ("forces_of", 0)):
        calls, stock = [], getattr(passes, name)

        def too_large(*arguments, calls=calls, after=after, stock=stock):
            calls.append(1)
            if len(calls) > after:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return stock(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(passes, name, too_large)
            with pytest.raises(ResumableError, match=r"a batch of \d frames is too large .* --batch-size \d"):
                work = Work(tmp_path / "out.model", {"--train": "a"})
                fit_file(files / "stock.model", *sets(files), tmp_path / "out.model", work=work)
    lines = []
    fit_file(files / "stock.model", *sets(files), tmp_path / "out.model", work=work, on_progress=lines.append)
    assert lines[0] == "leverage: training set, goes on after 16 of 16 frames"
    same(tmp_path / "out.model", expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out.model"]


def test_two_parts_are_one(files, expected, tmp_path):
    output, settings = tmp_path / "out.model", {"--train": "a"}
    for i in (1, 2):
        report = fit_file(files / "stock.model", *sets(files), output, work=Work(output, settings, part=(i, 2)))
        assert report.lines() == [f"leverage: features of {(72, 48)[i - 1]} training atoms"] and not output.exists()
    report = fit_file(files / "stock.model", *sets(files), output, work=Work(output, settings, merge=2))
    assert sum(report.atoms.values()) == 120
    same(output, expected, rtol=1e-6, atol=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["out.model"]


def test_forces_are_those_of_the_stock_model(files, tmp_path, make_batch, frames):
    fit_file(files / "stock.model", *sets(files), tmp_path / "out.model")
    stock, found = (
        torch.load(path, weights_only=False)(make_batch(frames))
        for path in (files / "stock.model", tmp_path / "out.model")
    )
    np.testing.assert_array_equal(found["forces"].detach(), stock["forces"].detach())
