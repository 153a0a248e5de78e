"""``--e2ip_forces fixed``: the readout of a model that is there is trained, and nothing else."""

import ase.io
import numpy as np
import torch

from mace_ext.export.strip import strip_file


def assert_same(one, two, batch, names=("energy", "forces")):
    for _ in range(3):  # TorchScript inside e3nn compiles itself during the first calls, which changes rounding
        expected, found = one(dict(batch)), two(dict(batch))
    for name in names:
        assert torch.equal(found[name], expected[name]), name


def test_energies_and_forces_stay_and_the_readout_learns(train, make_batch, frames, tmp_path, message_of):
    stock = train(name="stock", max_num_epochs=2)
    given = stock.folder / "stock.model"
    run = train("--readout=e2ip", "--e2ip_forces=fixed", f"--foundation_model={given}", name="fixed", max_num_epochs=3)
    batch = make_batch([atoms for atoms in frames if set(atoms.numbers) <= {1, 8}], species=(1, 8))
    assert_same(stock.model, run.model, batch)
    upgraded = run.model.state_dict()
    assert all(torch.equal(upgraded[name], value) for name, value in stock.model.state_dict().items())
    nll = [line["e2ip_nll"] for line in run.results if line.get("mode") == "eval"]
    assert nll[-1] < nll[0]
    assert run.model.e2ip_readout.leverage.fitted
    # And back.
    torch.save(run.model, tmp_path / "fixed.model")
    strip_file(tmp_path / "fixed.model", tmp_path / "back.model")
    assert_same(stock.model, torch.load(tmp_path / "back.model", weights_only=False), batch)

    # What it does not know, what is nothing, and too few.
    ours = ("--readout=e2ip", "--e2ip_forces=fixed")
    options = (*ours, f"--foundation_model={given}")
    known = next(atoms for atoms in frames if set(atoms.numbers) <= {1, 8}).copy()
    known.info["REF_energy"], known.arrays["REF_forces"] = 0.0, np.zeros((len(known), 3))
    sulphur = known.copy()
    sulphur.symbols[0] = "S"
    path = tmp_path / "wrong.xyz"
    for atoms, text in (
        (sulphur, "has S, which the model does not know; it knows H, O"),
        (ase.Atoms(), "has no atoms"),
    ):
        ase.io.write(path, [known, atoms], format="extxyz")
        for option in ("train_file", "valid_file"):
            assert f"--{option} {path}, frame 1: {text}" in message_of(train, *options, name="wrong", **{option: path})
    ase.io.write(path, [known, known], format="extxyz")
    text = message_of(train, *options, name="few", train_file=path, batch_size=3)
    assert "--train_file: 2 frames fill no batch of --batch_size 3" in text

    two = torch.load(given, weights_only=False)
    two.heads = ["dft", "pt_head", "emt"]
    path = tmp_path / "two.model"
    torch.save(two, path)
    options = (*ours, f"--foundation_model={path}")
    assert "has the heads dft, emt: give --foundation_head" in message_of(train, *options, name="two")
    text = message_of(train, *options, "--foundation_head=pbe", name="two")
    assert f"--foundation_head pbe: --foundation_model {path} has the heads dft, emt" in text

    # A model with a readout keeps what that has learned.
    foundation = f"--foundation_model={run.folder / 'fixed.model'}"
    again = train(*ours, foundation, name="again", max_num_epochs=1, lr=1e-30)
    assert_same(run.model, again.model, batch, ("energy", "forces"))
    for name, value in run.model.e2ip_readout.trunks.state_dict().items():
        torch.testing.assert_close(again.model.e2ip_readout.trunks.state_dict()[name], value)
