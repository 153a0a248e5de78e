"""Restarts: killed runs go on as stock MACE's do; checkpoints of another readout end the run."""

import signal
import subprocess
import time

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.calculators.emt import EMT

E2IP = "--readout=e2ip"
FIGURES = {f"e2ip_{name}" for name in ("nll", "coverage95", "spearman", "condition", "condition_max", "plateau")}
#: One batch per epoch: stock MACE starts the order of the batches anew after a restart.
FULL_BATCH = {"batch_size": 12, "max_num_epochs": 6, "lr": 0.002}


def figures(run):
    return [
        {key: value for key, value in line.items() if key not in ("time", "epoch", "head", "mode")}
        for line in run.validation
    ]


def assert_continues(restarted, whole, epoch, first):
    """What stock MACE achieves, without EMA and with one batch per epoch.

    The checkpoint's epoch is trained once more, so the restarted run is one step ahead of the uninterrupted
    one in every epoch; otherwise the figures are the same. ``first`` is the restarted run's first entry.
    """
    resumed, expected = figures(restarted)[first:], figures(whole)
    assert resumed[0] == pytest.approx(expected[epoch + 1], rel=1e-7)
    for found, reference in zip(resumed[1:], expected[epoch + 2 :], strict=False):
        assert found == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("readout", [pytest.param("stock", marks=pytest.mark.nightly), "e2ip"])
def test_an_interrupted_run_goes_on(train, readout):
    whole = train(f"--readout={readout}", name="whole", **FULL_BATCH)
    train(f"--readout={readout}", name="parts", **{**FULL_BATCH, "max_num_epochs": 3})
    restarted = train(f"--readout={readout}", "--restart_latest", name="parts", **FULL_BATCH)
    assert "Loading checkpoint" in restarted.text
    assert_continues(restarted, whole, epoch=2, first=4)


def test_a_killed_run_goes_on(train, tmp_path, training_command):
    """SIGKILL while it trains, then ``--restart_latest``.

    Killed while it writes a checkpoint, stock MACE has none: it removes the old one first, and a torn file
    makes it start over without a word. Hence one checkpoint, in epoch 0.
    """
    whole = train(E2IP, name="whole", **FULL_BATCH)
    command = training_command(E2IP, name="killed", eval_interval=10**6, **{**FULL_BATCH, "max_num_epochs": 10**6})
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "checkpoints" / "killed_run-1_epoch-0.pt"
    deadline = time.monotonic() + 120
    while not is_whole(checkpoint):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The results file of a killed process may end within a line.
    (tmp_path / "results" / "killed_run-1_train.txt").unlink()
    restarted = train(E2IP, "--restart_latest", name="killed", **FULL_BATCH)
    assert_continues(restarted, whole, epoch=0, first=0)


def is_whole(checkpoint):
    try:
        torch.load(checkpoint, weights_only=False)
    except Exception:
        return False
    return True


def test_restart_with_ema_and_stage_two(train):
    options = (E2IP, "--ema", "--swa", "--start_swa=2")
    first = train(*options, name="run", max_num_epochs=3)
    last = first.validation[-1]
    restarted = train(*options, "--restart_latest", name="run", max_num_epochs=4)
    # It begins with the averaged weights of the last epoch, the readout's included, and goes on in stage two.
    begins = restarted.validation[4]
    assert begins["epoch"] is None
    assert {name: begins[name] for name in FIGURES} == pytest.approx({name: last[name] for name in FIGURES}, rel=1e-7)
    assert restarted.validation[-1]["epoch"] == 3 and "e2ip_nll" in restarted.validation[-1]
    assert (restarted.folder / "run_stagetwo.model").exists()


def test_a_checkpoint_without_a_readout_ends_the_run(train, message_of):
    train(name="run", max_num_epochs=1)
    message = message_of(train, E2IP, "--restart_latest", name="run", max_num_epochs=2)
    assert message.startswith("mace_run_train: error: the checkpoint") and "was trained without --readout;" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "was trained with --readout e2ip;"),
        ((E2IP, "--e2ip_evidence=independent"), "there, independent here"),
        ((E2IP, "--e2ip_force_unit=0.2"), "force_unit 0.0433641 there, 0.2 here"),
        ((E2IP, "--e2ip_preset=paper"), "preset default there, paper here"),
        ((E2IP, "--e2ip_forces=host"), "forces likelihood there, host here"),
    ],
    ids=["stock", "evidence", "force unit", "preset", "forces"],
)
def test_a_checkpoint_of_another_readout_ends_the_run(restart, message_of, flags, words):
    message = message_of(restart, *flags)
    assert message.startswith("mace_run_train: error: the checkpoint") and words in message


def test_a_checkpoint_of_another_format_is_refused(restart, message_of, tmp_path):
    (path,) = (tmp_path / "checkpoints").glob("*.pt")
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "e2ip_settings": {**checkpoint["e2ip_settings"], "version": 2}}, path)
    message = message_of(restart, E2IP)
    assert message.startswith("mace_run_train: error: the checkpoint to restart from was written before e2ip-plugins")


@pytest.fixture
def uneven_files(tmp_path):
    """Training and validation frames of two, three and four atoms, so that ranks hold different numbers of atoms.

    No two atoms are alike by symmetry, and none has its neighbour's error: rounding would rank them.
    """
    paths, noise = {}, np.random.default_rng(0)
    for name, count, offset in (("train", 12, 0), ("valid", 4, 100)):
        labelled = []
        for i in range(count):
            atoms = molecule(("H2O", "OH", "H2O2")[i % 3])
            atoms.rattle(0.08, seed=offset + i)
            atoms.calc = EMT()
            atoms.info["REF_energy"], atoms.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
            atoms.arrays["REF_forces"] += noise.normal(scale=0.1, size=(len(atoms), 3))
            atoms.calc = None
            labelled.append(atoms)
        paths[f"{name}_file"] = tmp_path / f"uneven_{name}.xyz"
        ase.io.write(paths[f"{name}_file"], labelled)
    return paths


def test_two_processes_do_what_one_does(train, tmp_path, start_two_processes, uneven_files):
    """Gloo DDP: loss, figures and final weights are those of one process with the same batches, on both ranks.

    All frames are one batch, since ranks draw theirs in an order of their own; MACE's force scale, of which every rank
    computes its own, is left out.
    """
    flags = (E2IP, "--e2ip_force_unit=auto", "--scaling=no_scaling", "--compute_avg_num_neighbors=False")
    shared = {**uneven_files, "max_num_epochs": 3, "avg_num_neighbors": 2.0}
    wait = start_two_processes(*flags, name="two", batch_size=6, valid_batch_size=2, **shared)
    one = train(*flags, name="one", batch_size=12, valid_batch_size=4, **shared)
    text = wait()
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    expected = one.model.state_dict()
    assert any(key.startswith("e2ip_readout.") for key in first)
    for key, value in expected.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-7, atol=1e-10)
    two = type(one)(tmp_path, "two", 1, text)
    epochs = [[line for line in run.validation if line["epoch"] is not None] for run in (one, two)]
    assert len(epochs[0]) == len(epochs[1]) == 3
    for whole, found in zip(*epochs, strict=True):
        names = set(whole) - {"time", "loss", "mode", "head", "epoch"}
        assert {name for name in names if name.startswith("e2ip_")} == FIGURES
        assert {name: found[name] for name in names} == pytest.approx({name: whole[name] for name in names}, rel=1e-7)
        # MACE adds up the losses of the batches, each of which is the mean over all ranks, and divides by the frames.
        assert found["loss"] == pytest.approx(2 * whole["loss"], rel=1e-7)
    assert "Epoch 2: head: Default, e2ip_nll=" in text
