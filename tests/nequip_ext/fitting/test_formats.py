"""The same frames in every format that NequIP trains from: one fit, alone and on the two processes of a training."""

from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from nequip.data import AtomicDataDict, from_ase
from nequip.data.dataset import NequIPLMDBDataset
from two_processes import run_in_two_processes

from e2ip_plugins.predictions.stored_frames import StoredFrames
from nequip_ext.fitting.file import fit_file
from nequip_ext.training.sources import open_source

ASE_DATA = """
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 1
  train_file_path: {folder}/train.xyz
  val_file_path: {folder}/val.xyz
  ase_args: {{format: extxyz}}
  key_mapping: {{REF_energy: total_energy, REF_forces: forces}}
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: [H, C, N, O]
    - _target_: nequip.data.transforms.NeighborListTransform
      r_max: {cutoff}
  train_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
  val_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
"""

OTHER_DATA = """
data:
  _target_: nequip.data.datamodule.NequIPDataModule
  seed: 1
  train_dataset:
    _target_: nequip.data.dataset.{kind}
    {argument}: {folder}/train.{ending}
    transforms: &transforms
      - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
        model_type_names: [H, C, N, O]
      - _target_: nequip.data.transforms.NeighborListTransform
        r_max: {cutoff}
  val_dataset:
    _target_: nequip.data.dataset.{kind}
    {argument}: {folder}/val.{ending}
    transforms: *transforms
  train_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
  val_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 1}}
"""

#: Class and name of the argument for the file, by ending.
KINDS = {
    "h5": ("HDF5Dataset", "file_name"),
    "lmdb": ("NequIPLMDBDataset", "file_path"),
    "npz": ("NPZDataset", "file_path"),
}
FORMATS = ("xyz", *KINDS)

#: What `nequip_ext.fitting.after_training` does with the data module of a Trainer.
AFTER_TRAINING = """
from hydra.utils import instantiate
from nequip.utils.global_state import set_global_state
from omegaconf import OmegaConf

from e2ip_plugins.fitting.batches import fit_loaders
from nequip_ext.fitting.passes import batching, fit_model
from nequip_ext.inference.batches import open_model
from nequip_ext.model.readout import find_readout

set_global_state()
for ending in ("xyz", "h5", "lmdb", "npz"):
    module = instantiate(OmegaConf.load(folder / f"{ending}.yaml").data, _recursive_=False)
    module.prepare_data()
    module.setup("fit")
    model = open_model(folder / "fitted.ckpt").model
    leverage = find_readout(model).leverage
    leverage.reset()
    fit_model(model, *fit_loaders(module.train_dataset[0], module.val_dataset, batching(3), batching(3)))
    torch.save(leverage.state_dict(), folder / f"{ending}-{rank}.pt")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Frames of the demo in every format."""
    h5py = pytest.importorskip("h5py")
    folder, data = tmp_path_factory.mktemp("formats"), Path(__file__).parents[3] / "demo" / "data"
    mapping = {"REF_energy": AtomicDataDict.TOTAL_ENERGY_KEY, "REF_forces": AtomicDataDict.FORCE_KEY}
    for name, source, count in (("train", "train", 9), ("val", "valid", 6)):
        frames = ase.io.read(data / f"{source}.extxyz", f":{count}")
        ase.io.write(folder / f"{name}.xyz", frames, format="extxyz")
        arrays = {"R": [a.positions for a in frames], "F": [a.arrays["REF_forces"] for a in frames]}
        arrays |= {"E": [a.info["REF_energy"] for a in frames], "z": frames[0].numbers}
        np.savez(folder / f"{name}.npz", **arrays)
        with h5py.File(folder / f"{name}.h5", "w") as file:
            group = file.create_group("molecule")
            group["pos"], group["forces"], group["energy"] = arrays["R"], arrays["F"], arrays["E"]
            group["atomic_numbers"] = np.tile(arrays["z"], (len(frames), 1))
        as_data = [from_ase(atoms, key_mapping=mapping, include_keys=list(mapping)) for atoms in frames]
        NequIPLMDBDataset.save_from_iterator(str(folder / f"{name}.lmdb"), as_data, map_size=2**22)
    return folder


def constants(checkpoint):
    """What a fit makes: moments and axes of the leverage, growth, factors, and the energies' lengths."""
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    prefix = next(name for name in state if name.endswith("readout.leverage.fitted")).removesuffix("fitted")
    return {name.removeprefix(prefix): values for name, values in state.items() if name.startswith(prefix)}


def same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_every_format_alone_and_in_two_processes(files, unpack, default_dtype):
    checkpoint = unpack("nequip", "best.ckpt")
    cutoff = torch.load(checkpoint, weights_only=False)["hyper_parameters"]["model"]["model"]["r_max"]
    (files / "xyz.yaml").write_text(ASE_DATA.format(folder=files, cutoff=cutoff))
    for ending, (kind, argument) in KINDS.items():
        text = OTHER_DATA.format(kind=kind, argument=argument, folder=files, ending=ending, cutoff=cutoff)
        (files / f"{ending}.yaml").write_text(text)
    fits = []
    # The text file, the data module of a training with it, and the other files.
    for source in ("{}.xyz", "xyz.yaml", *(f"{{}}.{ending}" for ending in KINDS)):
        sets = [
            StoredFrames(
                [files / source.format(name)],
                open_source=lambda path, keys, name=name: open_source(path, keys, name),
            )
            for name in ("train", "val")
        ]
        fit_file(checkpoint, *sets, files / "fitted.ckpt", on_progress=lambda text: None)
        fits.append(constants(files / "fitted.ckpt"))
    expected = fits[0]
    assert expected["fitted"] and expected["energies.lengths"].any()
    for found in fits[1:]:
        same(found, expected, rtol=1e-9, atol=1e-12)
    run_in_two_processes(AFTER_TRAINING, files)
    for ending in FORMATS:
        # Each process has half of the frames; sums over both are in another order.
        for rank in range(2):
            same(torch.load(files / f"{ending}-{rank}.pt"), expected, rtol=1e-6, atol=1e-9)
