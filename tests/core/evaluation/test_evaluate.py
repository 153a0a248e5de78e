"""`e2ip evaluate` with a model of no host: what is written, in which batches, after which interruptions, what not."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from typer.testing import CliRunner

from e2ip_plugins import cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.evaluate import evaluate
from e2ip_plugins.evaluation.options import EvaluateOptions, State
from e2ip_plugins.keys import FORCE_VIEWS
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.unfinished import part_of

SCRIPT = Path(__file__).with_name("toy_model.py")


@pytest.fixture(scope="module")
def toy(load_script):
    """tests/core/evaluation/toy_model.py as a module."""
    return load_script("tests/core/evaluation/toy_model.py")


def frames_of(count=12):
    """Molecules of 3, 6 and 9 atoms in turn, with references."""
    found = []
    for i in range(count):
        atoms = molecule(("H2O", "CH3OH", "CH3CH2OH")[i % 3])
        atoms.rattle(0.1, seed=i)
        atoms.info.update(REF_energy=float(i), config_type="test")
        atoms.arrays["REF_forces"] = np.full((len(atoms), 3), float(i))
        found.append(atoms)
    return found


@pytest.fixture
def run(toy, tmp_path):
    """Function that evaluates frames with a model, by default a new toy; returns the output's path and the state."""

    def evaluated(frames=None, name="out.xyz", model=None, source="in.xyz", **options):
        if frames is not None:
            ase.io.write(tmp_path / source, frames, format="extxyz")
        chosen = dataclasses.replace(toy.OPTIONS, **options)
        model = toy.ToyModel() if model is None else model
        return tmp_path / name, evaluate(model, tmp_path / source, tmp_path / name, chosen, {"the model": "toy"})

    return evaluated


@pytest.fixture
def calibration(write_calibration):
    return lambda species="HCO", uq_model=None: Calibration.read(
        write_calibration(factors=dict.fromkeys(species, 4.0), uq_model=uq_model)
    )


def test_predictions_beside_what_the_frame_had(run, toy):
    frames = frames_of()
    path, state = run(frames)
    assert state.written == state.frame == 12 and not path.with_name("out.xyz.part").exists()
    for i, (written, atoms) in enumerate(zip(ase.io.read(path, ":"), frames, strict=True)):
        np.testing.assert_allclose(written.positions, atoms.positions, atol=1e-8)
        assert written.info["REF_energy"] == float(i) and written.info["config_type"] == "test"
        assert written.info["uq_family"] == "niw" and written.info["input_frame"] == i
        assert written.info["uq_model"] == toy.ToyModel.uq_model
        np.testing.assert_allclose(written.get_forces(), -atoms.positions, atol=2e-8)
        assert written.get_potential_energy() == pytest.approx(atoms.positions.sum(), abs=1e-6)
        np.testing.assert_allclose(written.arrays["e2ip_kappa"], 0.5 + atoms.positions[:, 1] ** 2, atol=1e-6)
        assert {key.name for key in (*toy.E2IP.output_keys(), *FORCE_VIEWS)} <= set(written.arrays)
        assert written.arrays["forces_cov"].shape == (len(atoms), 9) and "e2ip_leverage" in written.arrays
    found = read_predictions(path)
    assert found.family is toy.E2IP and np.array_equal(found.reference_energy, np.arange(12.0))
    assert np.array_equal(found.energy.round(6), [round(a.positions.sum(), 6) for a in ase.io.read(path, ":")])


def test_batches_hold_as_many_atoms_or_edges_as_they_may(run, toy):
    by_atoms, by_edges = toy.ToyModel(), toy.ToyModel()
    run(frames_of(6), model=by_atoms, batch_atoms=10)
    assert by_atoms.batches == [[3, 6], [9], [3, 6], [9]]
    run(name="edges.xyz", model=by_edges, batch_atoms=None, batch_edges=90)
    assert by_edges.batches == [[3, 6], [9, 3], [6], [9]]


def test_the_labels_of_the_input_become_references(run):
    from ase.calculators.singlepoint import SinglePointCalculator

    frames = frames_of(3)
    for atoms in frames:
        del atoms.info["REF_energy"], atoms.arrays["REF_forces"]
        # As many atoms as components, in one of them.
        atoms.calc = SinglePointCalculator(atoms, energy=7.0, forces=atoms.positions + 1.0, stress=np.arange(6.0))
    path, _ = run(frames)
    for written, atoms in zip(ase.io.read(path, ":"), frames, strict=True):
        assert written.info["REF_energy"] == 7.0 and np.array_equal(written.info["REF_stress"], np.arange(6.0))
        np.testing.assert_allclose(written.arrays["REF_forces"], atoms.positions + 1.0, atol=1e-8)
    # What was evaluated may be evaluated again, and other references stay alone.
    again, _ = run(name="again.xyz", source="out.xyz", overwrite=True)
    for first, second in zip(ase.io.read(path, ":"), ase.io.read(again, ":"), strict=True):
        assert set(second.info) == set(first.info) and set(second.arrays) == set(first.arrays)
        assert second.info["REF_energy"] == 7.0
        assert np.array_equal(second.arrays["REF_forces"], first.arrays["REF_forces"])
    frames[0].arrays["dft_forces"] = np.zeros((3, 3))
    path, _ = run(frames[:1], name="dft.xyz")
    assert "input_forces" in ase.io.read(path).arrays and not read_predictions(path).reference_forces.any()


def test_labels_of_frames_that_were_evaluated_before(run):
    """A calculator's results in the place of the predictions are new references, which compare finds."""
    from ase.calculators.singlepoint import SinglePointCalculator

    frames = frames_of(3)
    for atoms in frames:
        del atoms.info["REF_energy"], atoms.arrays["REF_forces"]
    path, _ = run(frames)
    labelled = ase.io.read(path, ":")
    for atoms in labelled[:2]:
        atoms.calc = SinglePointCalculator(atoms, energy=7.0, forces=atoms.positions + 1.0)
    again, _ = run(labelled, name="again.xyz", source="labelled.xyz")
    for i, (written, atoms) in enumerate(zip(ase.io.read(again, ":"), labelled, strict=True)):
        assert ("REF_forces" in written.arrays) == ("REF_energy" in written.info) == (i < 2)
        if i < 2:
            np.testing.assert_allclose(written.arrays["REF_forces"], atoms.positions + 1.0, atol=1e-8)
    np.testing.assert_allclose(read_predictions(again).forces, read_predictions(path, required=False).forces, atol=1e-8)
    # Evaluated once more, with the same references.
    third, _ = run(name="third.xyz", source="again.xyz")
    p, expected = read_predictions(third), read_predictions(again)
    np.testing.assert_array_equal(p.reference_forces, expected.reference_forces)


def test_columns(run, toy):
    path, _ = run(frames_of(2))
    small, _ = run(name="small.xyz", covariances=False)
    with_, without = (set(ase.io.read(p).arrays) for p in (path, small))
    assert with_ - without == {key.name for key in toy.E2IP.output_keys() if key.shape == (3, 3)}
    assert 2 * small.stat().st_size < path.stat().st_size
    read_predictions(small)
    periodic, slab = bulk("C", cubic=True), bulk("C", cubic=True)
    slab.pbc = (True, True, False)
    path, state = run([periodic, slab], name="stress.xyz", stress=True)
    assert state.without_stress == 1
    periodic, slab = ase.io.read(path, ":")
    assert np.array_equal(periodic.get_stress(), [1, 1, 1, 0, 0, 0]) and "stress" not in slab.calc.results


def test_calibrated(run, calibration):
    raw, _ = run(frames_of(3))
    path, _ = run(name="calibrated.xyz", calibration=calibration())
    for before, after in zip(ase.io.read(raw, ":"), ase.io.read(path, ":"), strict=True):
        assert after.info["uq_calibration"] == "calibration.json"
        for name, power in (("forces_cov", 2), ("forces_uncertainty", 1), ("e2ip_nu", 0), ("e2ip_leverage", 0)):
            np.testing.assert_allclose(after.arrays[name], 2.0**power * before.arrays[name], rtol=1e-5, atol=1e-7)


def test_a_calibration_of_something_else(run, toy, calibration, refused):
    refused(r"knows nothing of C, which .*in.xyz, frame 1 has", run, frames_of(3), calibration=calibration("HO"))
    other = toy.ToyModel()
    other.family = toy.families.get("mve")
    refused("the model has family 'gaussian", run, model=other, calibration=calibration())
    other = toy.ToyModel()
    with pytest.raises(InputError, match=r"another model \(readout-5\) than the model has \(readout-0123456789ab\)"):
        run(model=other, calibration=calibration(uq_model="readout-5"))
    other.uq_model = None  # compiled by an earlier version, for example
    path, _ = run(model=other, calibration=calibration(uq_model="readout-5"))
    assert "uq_model" not in ase.io.read(path).info


# Interruptions


def test_a_kill_in_the_middle_loses_and_doubles_nothing(run, tmp_path):
    whole, _ = run(frames_of(30), name="whole.xyz")
    output, part = tmp_path / "out.xyz", tmp_path / "out.xyz.part"
    killed = subprocess.run([sys.executable, SCRIPT, tmp_path / "in.xyz", output], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # The journal is older than the last pieces, as after any kill.
    noted = json.loads((tmp_path / "out.xyz.part.json").read_text())
    assert 0 < noted["bytes"] < part.stat().st_size and not output.exists()
    assert 0 < noted["state"]["written"] < len(ase.io.read(part, ":", format="extxyz")) == 4
    path, state = run()
    assert state.written == 30 and path.read_bytes() == whole.read_bytes()


def test_it_goes_on_after_the_last_finished_batch(run, toy, tmp_path):
    whole, _ = run(frames_of(), name="whole.xyz")

    def interrupt():
        raise KeyboardInterrupt

    first, second = toy.ToyModel(3, interrupt), toy.ToyModel()
    with pytest.raises(KeyboardInterrupt):
        run(model=first)
    part = (tmp_path / "out.xyz.part").read_bytes()
    assert part and whole.read_bytes().startswith(part)
    path, _ = run(model=second)
    all_batches = toy.ToyModel()
    run(name="again.xyz", model=all_batches)
    assert first.batches + second.batches == all_batches.batches and path.read_bytes() == whole.read_bytes()


def test_a_bad_frame_is_mended_and_the_rest_goes_on(run, toy, tmp_path, refused):
    frames = frames_of()
    whole, _ = run(frames, name="whole.xyz")
    bad = [atoms.copy() for atoms in frames]
    bad[7].positions[2, 1] = np.nan
    refused(r"in.xyz, frame 7: the position of atom 2 is not finite \(1 such atoms\)", run, bad)
    assert len(ase.io.read(tmp_path / "out.xyz.part", ":", format="extxyz")) == 6
    model = toy.ToyModel()
    path, _ = run(frames, model=model)
    assert path.read_bytes() == whole.read_bytes() and sum(map(len, model.batches)) == 6


def test_another_input_or_other_settings_are_refused(run, calibration, tmp_path, refused):
    frames = frames_of()
    frames[9].positions[0] = np.nan
    with pytest.raises(InputError):
        run(frames)
    before = (tmp_path / "out.xyz.part").read_bytes()
    refused("begun with --stress not given, now it is given", run, stress=True)
    refused(r"begun with --calibration none, now it is calibration.json \(sha256", run, calibration=calibration())
    frames[0].positions += 0.1
    refused(r"in.xyz: differs, before frame \d, from the input that .*out.xyz.part was", run, frames)
    refused(r"in.xyz: differs, before frame \d, from", run, frames[1:3])
    assert (tmp_path / "out.xyz.part").read_bytes() == before
    # What changes nothing but the batches may change.
    with pytest.raises(InputError, match="frame 8: the position"):
        frames[0].positions -= 0.1
        frames[8].positions[0] = np.inf
        run(frames, batch_atoms=20)


def test_a_finished_output_is_safe(run, refused):
    path, _ = run(frames_of(2))
    before = path.read_bytes()
    refused(r"out.xyz: is there already; choose another name, or --overwrite", run)
    bad = frames_of(4)
    bad[3].positions[0] = np.nan
    refused("frame 3", run, bad, overwrite=True)
    assert path.read_bytes() == before
    run(frames_of(4), overwrite=True)
    assert len(ase.io.read(path, ":")) == 4


# Parts


@pytest.mark.parametrize("count", [1, 12, 13])
def test_parts_one_after_another_are_the_whole(run, tmp_path, count):
    run(frames_of(count), name="whole.xyz", batch_atoms=1)
    parts = [run(name=f"part{i}.xyz", part=(i, 3), batch_atoms=1)[0].read_bytes() for i in (1, 2, 3)]
    assert b"".join(parts) == (tmp_path / "whole.xyz").read_bytes()


def test_a_part_goes_on_too(run, refused):
    frames = frames_of(24)
    whole, _ = run(frames, name="whole.xyz", part=(2, 3))
    frames[13].positions[0] = np.nan
    refused(r"in.xyz, frame 13", run, frames, part=(2, 3))
    refused("begun with --part 2/3, now it is 1/3", run, part=(1, 3))
    refused("begun with an input of frames 24, now it is 23", run, frames[1:], part=(2, 3))
    path, _ = run(frames_of(24), part=(2, 3))
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("text", ["3", "0/3", "4/3", "a/b", "1/2/3"])
def test_parts_that_mean_nothing(text, refused):
    refused(f"--part {text}: give I/N", part_of, text)


# Bad input


def nan_cell():
    atoms = bulk("C")
    atoms.cell[0, 0] = np.nan
    return atoms


BAD = [
    (ase.Atoms(), "has no atoms"),
    (ase.Atoms("H2", [[0, 0, 0], [0, np.inf, 0]]), "the position of atom 1 is not finite"),
    (molecule("SH2"), "has S, which the model does not know; it knows H, C, O"),
    (ase.Atoms("H", pbc=True), "is periodic in 3 directions, and its cell is not"),
    (ase.Atoms("H", cell=[5, 1e-3, 1e-3], pbc=(True, False, True)), "its cell repeats after 5.0e-03"),
    (ase.Atoms("H", cell=[5, 5, 0], pbc=(True, False, True)), "is periodic in 2 directions, and its cell is not"),
    (nan_cell(), "is periodic in 3 directions"),
    (ase.Atoms("H", [[1e200, 0, 0]]), "the model's prediction is not finite"),
]


@pytest.mark.parametrize(("atoms", "message"), BAD)
def test_bad_frames_are_named_or_left_out(run, tmp_path, atoms, message, refused):
    frames = frames_of(4)
    frames.insert(2, atoms)
    refused(f"in.xyz, frame 2: {message}", run, frames)
    path, state = run(skip_bad=True)
    assert [atoms.info["input_frame"] for atoms in ase.io.read(path, ":")] == [0, 1, 3, 4]
    (number, reason), line = state.skipped[0], (tmp_path / "out.xyz.skipped").read_text()
    assert number == 2 and message in reason and line == f"2\t{reason}\n"
    # The next output of this name has a list of its own, or none.
    run(frames_of(2), overwrite=True)
    assert not (tmp_path / "out.xyz.skipped").exists()


def test_what_was_left_out_is_known_after_an_interruption(run, toy):
    frames = frames_of(12)
    frames[1].positions[0] = frames[10].positions[0] = np.nan

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(frames, model=toy.ToyModel(3, interrupt), skip_bad=True)
    _, state = run(skip_bad=True)
    assert [number for number, _ in state.skipped] == [1, 10] and state.written == 10


def test_a_half_written_input(run, tmp_path, refused):
    run(frames_of(5), name="whole.xyz")
    source = tmp_path / "in.xyz"
    whole = source.read_bytes()
    source.write_bytes(whole[:-30])
    refused(r"in.xyz, frame 4: is cut off", run)
    source.write_bytes(whole)
    path, _ = run()
    assert path.read_bytes() == (tmp_path / "whole.xyz").read_bytes()


def test_files_that_cannot_be_used(run, toy, tmp_path, refused):
    refused(r"in.xyz: no such file", run)
    (tmp_path / "in.xyz").write_bytes(b"\n")
    refused(r"in.xyz: has no frames", run)
    for name in ("out.xyz.gz", "out.traj"):
        refused(rf"{name}: frames go into an extxyz file, .xyz or .extxyz", run, frames_of(1), name=name)
    refused(r"in.xyz: is a file that this command reads", run, name="in.xyz", overwrite=True)
    refused(r"there is no folder .*nowhere", run, name="nowhere/out.xyz")
    model = toy.ToyModel()
    model.family = None
    refused(r"has no readout.*e2ip fit gives a trained model one", run, model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.xyz"]


def test_a_batch_that_does_not_fit(run, toy):
    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InputError, match=r"in.xyz, frame 2: the batch of 1 frames.*smaller --batch-atoms"):
        run(frames_of(6), model=toy.ToyModel(2, too_much))
    assert run(batch_atoms=1)[1].written == 6


# The command


@pytest.fixture
def command(toy, tmp_path, monkeypatch):
    opened = []

    def open_model(path, **options):
        opened.append((path.name, options))
        return toy.ToyModel()

    monkeypatch.setattr(cli.checks, "entry_point", lambda group, host, why: open_model)
    (tmp_path / "my.model").write_bytes(b"weights")
    ase.io.write(tmp_path / "in.xyz", frames_of(3), format="extxyz")

    def invoke(*options, model="my.model", source="in.xyz"):
        paths = [str(tmp_path / name) for name in (model, source, "out.xyz")]
        return CliRunner().invoke(cli.app, ["evaluate", *paths, *map(str, options)])

    invoke.opened = opened
    return invoke


def test_the_command(command, tmp_path):
    result = command("--device", "cpu:0", "--dtype", "float32", "--head", "pbe", "--part", "2/3", "--batch-edges", 9)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Written: {tmp_path}/out.xyz, 1 frame\n" and result.stderr == ""
    assert command.opened == [("my.model", {"device": "cpu:0", "dtype": "float32", "head": "pbe"})]
    assert ase.io.read(tmp_path / "out.xyz").info["input_frame"] == 1


def test_the_command_says_what_was_left_out(command, tmp_path):
    ase.io.write(tmp_path / "in.xyz", [*frames_of(1), ase.Atoms()], format="extxyz")
    result = command("--skip-bad")
    assert result.exit_code == 0 and "1 bad frame left out, listed in" in result.stderr
    assert "in.xyz, frame 1: has no atoms" in result.stderr and "1 frame\n" in result.stdout
    (tmp_path / "in.xyz").write_text("0\n\n" * 2)
    result = command("--skip-bad", "--overwrite")
    assert result.exit_code == 1 and "2 bad frames left out" in result.stderr and "0 frames" in result.stdout


def test_the_command_says_which_frames_are_unlike_the_training_set(command, tmp_path):
    frames = frames_of(3)
    frames[1].positions[:, 2] += 4.0  # the toy's leverage is 1 + z²
    ase.io.write(tmp_path / "in.xyz", frames, format="extxyz")
    result = command("--batch-atoms", 3)
    assert "1 of 3 frames have atoms with a leverage above 10: they are unlike the training set" in result.stderr


@pytest.mark.parametrize(
    ("options", "names", "message"),
    [
        (("--dtype", "half"), {}, "--dtype half: choose float32 or float64"),
        (("--part", "3"), {}, "--part 3: give I/N"),
        (("--device", "gpu"), {}, "--device gpu: torch cannot compute there"),
        (("--calibration", "no.json"), {}, "(No such file or directory); see e2ip calibrate"),
        ((), {"model": "no.modle"}, "no.modle: no such file"),
        ((), {"model": "in.xyz"}, "in.xyz: is none of .model, .ckpt, .zip, .pt2"),
        ((), {"source": "no.xyz"}, "no.xyz: no such file"),
        ((), {"source": "in.xyz@:2"}, "write the part into a file first: ase convert -n :2 "),
    ],
)
def test_the_command_refuses_before_it_opens_a_model(command, options, names, message):
    result = command(*options, **names)
    assert result.exit_code == 2 and command.opened == []
    (line,) = result.stderr.splitlines()
    assert line.startswith("e2ip: error: ") and message in line


def test_a_model_that_has_changed(command, tmp_path):
    bad = frames_of(3)
    bad[2].positions[0] = np.nan
    ase.io.write(tmp_path / "in.xyz", bad, format="extxyz")
    assert command("--batch-atoms", 3).exit_code == 2
    (tmp_path / "my.model").write_bytes(b"other weights")
    result = command("--batch-atoms", 3)
    assert result.exit_code == 2 and "begun with the model my.model (sha256 " in result.stderr


def test_defaults_are_those_of_the_options(command, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "e2ip_plugins.evaluation.evaluate.evaluate", lambda *arguments: seen.append(arguments[3]) or State(0)
    )
    assert command().exit_code == 0 and command("--batch-edges", 9).exit_code == 0
    assert seen == [EvaluateOptions(), EvaluateOptions(batch_atoms=None, batch_edges=9)]
