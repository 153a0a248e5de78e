"""Two processes train what one does."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule

from nequip_ext import E2IPCalculator


@pytest.fixture(scope="module")
def unequal_files(tmp_path_factory):
    """Frames of different sizes, some atoms without reference: a mean of the processes' means is not the mean."""
    folder = tmp_path_factory.mktemp("data")
    paths = {}
    for name, count, offset in (("train", 8, 0), ("val", 4, 100), ("test", 5, 200)):
        frames = []
        for seed in range(count):
            atoms = molecule(("H2O", "CH3OH", "CH3CH2OH", "CH4")[seed % 4])
            rest = atoms.get_positions()
            atoms.rattle(0.1, seed=offset + seed)
            stretch = atoms.get_positions() - rest
            atoms.info["REF_energy"] = float(-3.0 * len(atoms) + 5.0 * np.sum(stretch**2))
            atoms.arrays["REF_forces"] = -10.0 * stretch
            if seed == 0:
                atoms.arrays["REF_forces"][0] = np.nan
            frames.append(atoms)
        paths[name] = folder / f"{name}.xyz"
        ase.io.write(paths[name], frames, format="extxyz")
    return paths


def test_two_processes_train_what_one_does(tmp_path, train, unequal_files, logged):
    """All of the training set in one batch, so that its split and order over the processes do not matter."""
    common = (
        "data.val_dataloader.batch_size=2",
        "max_epochs=4",
        "training_module.model.model.model_dtype=float64",
        "evidence=leverage",
    )
    one = train("nequip_e2ip", tmp_path / "one", unequal_files, *common, "batch_size=8")
    gloo = ("++trainer.accelerator=cpu", "++trainer.devices=2", "++trainer.strategy=ddp", "batch_size=4")
    two = train("nequip_e2ip", tmp_path / "two", unequal_files, *common, *gloo)
    assert (tmp_path / "two" / "train_ddp_process_1.log").exists(), "there was no second process"
    for prefix in ("train_loss_epoch", "val0_epoch"):
        expected, got = logged(one, prefix), logged(two, prefix)
        assert expected.keys() == got.keys() == {0, 1, 2, 3}
        for epoch, figures in expected.items():
            assert got[epoch] == pytest.approx(figures, rel=1e-9, abs=1e-12)
    expected, got = (torch.load(folder / "last.ckpt", weights_only=False)["state_dict"] for folder in (one, two))
    weights = [name for name in expected if name.startswith("model.") and expected[name].is_floating_point()]
    assert any("e2ip_readout" in name for name in weights)
    for name in weights:
        assert torch.allclose(got[name], expected[name], rtol=1e-9, atol=1e-12), name
    models = [E2IPCalculator.from_saved_model(folder / "best.ckpt") for folder in (one, two)]
    for frame in ase.io.read(unequal_files["test"], ":"):
        for model in models:
            model.calculate(frame)
        for name in ("e2ip_leverage", "e2ip_kappa", "e2ip_log_sigma0"):
            np.testing.assert_allclose(models[1].results[name], models[0].results[name], rtol=1e-6, err_msg=name)
    # The sampler gives one of five frames to both processes.
    files = [ase.io.read(folder / "test_dataset0.xyz", ":") for folder in (one, two)]
    assert [len(atoms) for atoms in files[0]] == [len(atoms) for atoms in ase.io.read(unequal_files["test"], ":")]
    for expected, got in zip(*files, strict=True):
        assert np.array_equal(got.positions, expected.positions) and got.info["uq_model"]
        np.testing.assert_allclose(got.arrays["forces_cov"], expected.arrays["forces_cov"], rtol=1e-4, atol=1e-7)
