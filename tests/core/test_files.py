"""Files that are whole or not there."""

import resource
import signal
import stat
from contextlib import contextmanager

import pytest
import torch

from e2ip_plugins.files import append, replacing, save


def test_takes_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "model.extxyz"
    path.write_text("before")
    with replacing(path) as unfinished:
        unfinished.write_text("after")
        assert unfinished.name == path.name
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_text("aft")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_pickled_leaves_no_file(tmp_path):
    with pytest.raises(AttributeError, match="lambda"):
        save({"weight": torch.ones(2), "wrong": lambda: None}, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


def test_links_and_permissions_stay(tmp_path):
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    target.touch(0o600)
    link.symlink_to(target)
    save(torch.ones(2), link)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert torch.equal(torch.load(target), torch.ones(2))


@contextmanager
def full_disk(size):
    """Inside, no file may have more bytes; not in all of the test, whose progress pytest may write to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "model.pt"
    with full_disk(100), pytest.raises(OSError) as caught:
        save(torch.ones(1000), path)
    assert caught.value.filename == str(path) and list(tmp_path.iterdir()) == []


def test_text_is_added_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.xyz"
    append(path, "one\n")
    append(path, "two\n")
    for file in (path, tmp_path / "new.xyz"):
        with full_disk(10), pytest.raises(OSError) as caught:
            append(file, "three and more\n")
        assert caught.value.filename == str(file)
    assert path.read_text() == "one\ntwo\n" and list(tmp_path.iterdir()) == [path]
