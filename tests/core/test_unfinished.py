"""A file that grows in pieces: what the journal vouches for stays, whatever happens, and nothing else does."""

import errno
import json

import pytest

from e2ip_plugins import unfinished
from e2ip_plugins.errors import InputError
from e2ip_plugins.unfinished import Unfinished

SETTINGS = {"the model": "a", "--stress": "not given"}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.xyz"


@pytest.fixture
def begun(output):
    """Two pieces are written, then the program ends."""
    with Unfinished(output, SETTINGS) as file:
        file.write(b"one\n", {"frame": 1})
        file.write(b"two\n", {"frame": 2})
    return output


def names(output):
    return sorted(path.name for path in output.parent.iterdir())


def test_the_name_comes_at_the_end(begun):
    assert names(begun) == ["out.xyz.part", "out.xyz.part.json"]
    with Unfinished(begun, SETTINGS) as file:
        assert file.state == {"frame": 2}
        file.write(b"three\n", {"frame": 3})
        file.finish()
    assert names(begun) == ["out.xyz"] and begun.read_text() == "one\ntwo\nthree\n"


def test_a_kill_after_the_name_was_given(begun):
    """The journal that it leaves is of a file that is complete: another one may take its place."""
    begun.with_name("out.xyz.part").rename(begun)
    with Unfinished(begun, {**SETTINGS, "the model": "b"}) as file:
        assert file.state is None
        file.write(b"new\n", {"frame": 1})
        file.finish()
    assert names(begun) == ["out.xyz"] and begun.read_text() == "new\n"


def test_what_the_journal_does_not_know_is_cut_off(begun):
    with open(begun.with_name("out.xyz.part"), "ab") as file:
        file.write(b"thr")
    with Unfinished(begun, SETTINGS) as file:
        file.finish()
    assert begun.read_text() == "one\ntwo\n"


def test_the_journal_is_kept_up_while_the_file_grows(output, monkeypatch):
    """Without a second between entries, so that every piece counts at once."""
    monkeypatch.setattr(unfinished, "INTERVAL", 0.0)
    with Unfinished(output, SETTINGS) as file:
        for i in range(2):
            file.write(b"x" * 10, {"frame": i})
            assert json.loads(file.journal.read_text())["bytes"] == 10 * (i + 1)


def test_a_journal_exists_before_the_first_piece(output):
    """A kill right after that piece must not leave a file that nobody knows."""
    with Unfinished(output, SETTINGS) as file:
        assert json.loads(file.journal.read_text())["bytes"] == 0


def test_nothing_is_left_of_what_never_began(output):
    with pytest.raises(KeyError), Unfinished(output, SETTINGS):
        raise KeyError
    assert names(output) == []


def test_other_settings_are_refused(begun, refused):
    with pytest.raises(InputError, match=r"out.xyz.part: was begun with the model a, now it is b: give the same"):
        Unfinished(begun, {**SETTINGS, "the model": "b"}).__enter__()
    refused("begun with --head none, now it is x", Unfinished(begun, {**SETTINGS, "--head": "x"}).__enter__)
    assert begun.with_name("out.xyz.part").read_text() == "one\ntwo\n"


def test_a_second_program_is_refused(begun):
    pytest.importorskip("fcntl")
    with Unfinished(begun, SETTINGS), pytest.raises(InputError, match="another e2ip evaluate is writing it"):
        Unfinished(begun, SETTINGS).__enter__()


class Full:
    """A disk with room for some bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, text):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(text[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk(begun):
    with pytest.raises(InputError, match=r"out.xyz.part: cannot be written \(No space left on device\).*is kept"):
        with Unfinished(begun, SETTINGS) as file:
            file._file = Full(file._file, 8)
            file.write(b"three\n", {"frame": 3})
            file.write(b"four\n", {"frame": 4})
    # Room for others, and the first piece counts.
    assert begun.with_name("out.xyz.part").read_text() == "one\ntwo\nthree\n"
    with Unfinished(begun, SETTINGS) as file:
        assert file.state == {"frame": 3}


def test_a_disk_that_is_full_for_the_journal(begun, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match="No space left on device"):
        with Unfinished(begun, SETTINGS) as file:
            monkeypatch.setattr("pathlib.Path.write_text", full)
            file.write(b"three\n", {"frame": 3})
    monkeypatch.undo()
    with Unfinished(begun, SETTINGS) as file:
        assert file.state == {"frame": 2}
        file.finish()
    assert begun.read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "{", "cannot be used"),
        (lambda text: text.replace('"e2ip evaluate"', '"e2ip fit"'), "it is of e2ip fit"),
        (lambda text: text.replace('"bytes": 8', '"bytes": 80'), "should have 80 bytes and has 8"),
    ],
)
def test_a_journal_that_cannot_be_used(begun, damage, message, refused):
    journal = begun.with_name("out.xyz.part.json")
    journal.write_text(damage(journal.read_text()))
    refused(f"out.xyz.part.json: .*{message}.*delete it", Unfinished(begun, SETTINGS).__enter__)
    journal.unlink()
    refused(r"is there without out.xyz.part.json; delete it", Unfinished(begun, SETTINGS).__enter__)


def test_folders_that_cannot_be_written(tmp_path, refused):
    refused("cannot be written", Unfinished(tmp_path / "nowhere" / "out.xyz", SETTINGS).__enter__)
