"""A fit that is killed and goes on, and one in parts, find what a single one does."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from e2ip_plugins import unfinished
from e2ip_plugins.errors import InputError, ResumableError

SCRIPT = Path(__file__).with_name("toy_fit.py")
SETTINGS = {"the model": "a", "--train": "60 frames"}


@pytest.fixture(scope="module")
def toy(load_script):
    """tests/core/fitting/toy_fit.py as a module."""
    return load_script("tests/core/fitting/toy_fit.py")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.model"


def names(output):
    return sorted(path.name for path in output.parent.iterdir())


def same(model, expected, rtol=0.0):
    """Whether two readouts are equal, to the last bit by default."""
    model, expected = model.state_dict(), expected.state_dict()
    assert model.keys() == expected.keys() and expected["leverage.energies.lengths"].any()
    for name, values in expected.items():
        torch.testing.assert_close(model[name], values, rtol=rtol, atol=0.01 * rtol, msg=name)


def test_records_change_nothing_and_leave_nothing_behind(toy, output):
    expected, _ = toy.fit(output, records=False)
    model, report = toy.fit(output)
    same(model, expected)
    assert names(output) == [] and report.part is None


@pytest.mark.parametrize("batches", [0, 4, 10, 17, 20])
def test_a_killed_fit_goes_on_to_the_last_bit(toy, output, batches):
    """The passes have 9, 3, 9 and 3 batches: training atoms, validation frames, errors of training frames, energies."""
    if batches == 17:
        command = [sys.executable, str(SCRIPT), str(output), str(batches)]
        path = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3])}
        assert subprocess.run(command, env=path, timeout=100).returncode == -signal.SIGKILL
    else:
        with pytest.raises(KeyboardInterrupt):
            toy.fit(output, stop_after=batches, stop=lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert names(output) == ["out.model.fit.part", "out.model.fit.part.json"]
    lines = []
    model, _ = toy.fit(output, on_progress=lines.append)
    expected, _ = toy.fit(output, records=False)
    same(model, expected)
    assert names(output) == []
    done = {0: [], 4: ["training set, goes on after 28 of 60"], 10: ["validation set, goes on after 7 of 20"]}
    assert all(any(text in line for line in lines) for text in done.get(batches, []))


def test_a_batch_that_is_too_large_loses_nothing(toy, output):
    def too_large():
        raise MemoryError

    with pytest.raises(ResumableError, match="--batch-size 3"):
        toy.fit(output, stop_after=5, stop=too_large)
    lines = []
    model, _ = toy.fit(output, batch_size=3, on_progress=lines.append)
    expected, _ = toy.fit(output, records=False)
    same(model, expected, 1e-6)
    assert lines[0] == "leverage: training set, goes on after 35 of 60 frames"


def test_a_full_disk_loses_nothing(toy, output, monkeypatch):
    count = 0

    def write(self, piece, state, stock=unfinished.Unfinished.write):
        nonlocal count
        count += 1
        if count == 5:
            with self._errors():
                raise OSError(errno.ENOSPC, "No space left on device")
        stock(self, piece, state)

    with monkeypatch.context() as patch:
        patch.setattr(unfinished.Unfinished, "write", write)
        with pytest.raises(ResumableError, match=r"No space left on device.*what is finished is kept"):
            toy.fit(output)
    lines = []
    toy.fit(output, on_progress=lines.append)
    assert lines[0] == "leverage: training set, goes on after 21 of 60 frames"


def test_bad_data_leave_nothing_to_go_on_with(toy, output):
    def bad():
        raise InputError("frames that cannot be used")

    with pytest.raises(InputError, match="cannot be used"):
        toy.fit(output, stop_after=5, stop=bad)
    assert names(output) == []


def test_other_data_are_refused_when_a_fit_goes_on(toy, output):
    with pytest.raises(KeyboardInterrupt):
        toy.fit(output, SETTINGS, stop_after=4, stop=lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(InputError, match=r"out.model.fit.part: was begun with --train 60 frames, now it is 61"):
        toy.fit(output, {**SETTINGS, "--train": "61 frames"})


def test_parts_make_what_one_process_does(toy, output):
    expected, _ = toy.fit(output, records=False)
    counts = [toy.fit(output, part=(i, 3))[1].part for i in (2, 1, 3)]
    assert counts == [100, 100, 100]
    assert names(output) == [f"out.model.{i}-of-3" for i in (1, 2, 3)]
    model, _ = toy.fit(output, merge=3)
    same(model, expected, 1e-6)
    assert names(output) == []


def test_many_atoms_in_parts_are_the_same_sample(toy, output, monkeypatch):
    monkeypatch.setattr("e2ip_plugins.fitting.training_atoms.MAX_ATOMS", 50)
    expected, report = toy.fit(output, records=False)
    for i in (1, 2):
        toy.fit(output, part=(i, 2), batch_size=4)
    model, _ = toy.fit(output, merge=2)
    same(model, expected, 1e-6)
    assert report.atoms == {(0, 0): 180, (0, 1): 120}


def test_parts_of_other_data_are_refused(toy, output):
    toy.fit(output, SETTINGS, part=(1, 2))
    with pytest.raises(InputError, match=r"out.model.2-of-2: is missing: run the same command with --part 2/2"):
        toy.fit(output, SETTINGS, merge=2)
    toy.fit(output, {**SETTINGS, "--train": "61 frames"}, part=(2, 2))
    with pytest.raises(InputError, match=r"2-of-2: was made with --train 61 frames, now it is 60 frames: all parts"):
        toy.fit(output, SETTINGS, merge=2)
    output.with_name("out.model.2-of-2").write_text("no part")
    with pytest.raises(InputError, match=r"2-of-2: is no part of e2ip fit"):
        toy.fit(output, SETTINGS, merge=2)
    toy.fit(output, SETTINGS, part=(2, 2))
    # What only a merge has, such as the validation set, is no matter of parts.
    toy.fit(output, {**SETTINGS, "--valid": "b"}, merge=2)
