"""Frames of a file as text, one by one: the same that ASE reads, and where each of them begins."""

import gzip
import lzma

import ase.io
import numpy as np
import pytest
from ase.build import bulk, molecule

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.chunks import chunks, open_frames, starts_of, to_atoms


@pytest.fixture
def path(tmp_path):
    """Three frames of different kinds and sizes, with labels."""
    frames = [molecule("CH3CH2OH"), bulk("NaCl", "rocksalt", 5.6), molecule("H2O")]
    for i, atoms in enumerate(frames):
        atoms.info["REF_energy"], atoms.arrays["REF_forces"] = float(i), np.full((len(atoms), 3), i + 0.5)
    ase.io.write(tmp_path / "in.xyz", frames, format="extxyz")
    return tmp_path / "in.xyz"


def of(path, *where):
    with open_frames(path) as file:
        return list(chunks(file, path, *where))


def test_frames_are_those_of_ase(path):
    found = of(path)
    for chunk, expected in zip(found, ase.io.read(path, ":"), strict=True):
        atoms = to_atoms(chunk, path)
        assert atoms == expected and atoms.info == expected.info
        assert np.array_equal(atoms.arrays["REF_forces"], expected.arrays["REF_forces"])
    assert b"".join(chunk.text for chunk in found) == path.read_bytes()
    assert of(path, 1, found[0].end) == found[1:]


def test_compressed_files_and_empty_lines_at_the_end(path):
    zipped = path.with_name("in.xyz.gz")
    zipped.write_bytes(gzip.compress(path.read_bytes() + b"\n  \n"))
    assert of(zipped) == of(path)
    assert of(zipped, 2, of(path)[2].start) == of(path)[2:]


def test_the_starts_of_all_frames_and_the_end(path):
    assert list(starts_of(path)) == [chunk.start for chunk in of(path)] + [path.stat().st_size]


def test_a_file_that_ends_in_the_middle_of_a_frame(path):
    """Also within its last number, which ASE would read as another one."""
    whole = path.read_bytes()
    for cut in (1, 3, 80):
        path.write_bytes(whole[:-cut])
        found = of(path)
        assert [chunk.complete for chunk in found] == [True, True, False]
        with pytest.raises(InputError, match=r"in.xyz, frame 2: is cut off"):
            to_atoms(found[2], path)


@pytest.mark.parametrize(("ending", "packed"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_compressed_files_that_are_damaged(path, ending, packed):
    text = bytearray(packed(100 * path.read_bytes()))
    text[len(text) // 2] ^= 0xFF
    zipped = path.with_name(f"in.xyz.{ending}")
    zipped.write_bytes(text)
    with pytest.raises(InputError, match=r"in\.xyz\.(gz|xz), frame \d+: (cannot be read|a line with)"):
        of(zipped)


@pytest.mark.parametrize("line", ["many", "-3", "", "O 0.0 0.0 0.0"])
def test_where_no_frame_begins(path, line):
    second = of(path)[1]
    text = path.read_bytes()
    path.write_bytes(text[: second.start] + line.encode() + b"\n" + text[second.start :])
    with pytest.raises(InputError, match=f"in.xyz, frame 1: a line with the number of atoms.*found '{line}'"):
        of(path)


@pytest.mark.parametrize("damage", [(b"C ", b"Qq "), (b"REF_forces:R:3", b"REF_forces:R:4"), (b"0.5", b"\xff")])
def test_frames_that_ase_cannot_read(path, damage):
    path.write_bytes(path.read_bytes().replace(*damage))
    with pytest.raises(InputError, match=r"in.xyz, frame 0: ASE cannot read it \(\w+: "):
        to_atoms(of(path)[0], path)


def test_files_that_do_not_exist_or_are_damaged(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.xyz: no such file"):
        open_frames(tmp_path / "nowhere.xyz")
    with pytest.raises(InputError, match=r"is a folder"):
        open_frames(tmp_path)
    (tmp_path / "text.xyz.gz").write_bytes(b"3\n")
    with pytest.raises(InputError, match=r"text.xyz.gz, frame 0: cannot be read"):
        of(tmp_path / "text.xyz.gz")
