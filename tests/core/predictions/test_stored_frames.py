"""Frames that stay in their files are those that `read_frames` gives, with the same notes and errors."""

import gzip

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import once, same_frames
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.stored_frames import StoredFrames, check_species


def frame(seed, forces=True, **info):
    rng = np.random.default_rng(seed)
    atoms = ase.Atoms("OH2" if seed % 2 else "OCH", rng.normal(size=(3, 3)), cell=[9.0] * 3, pbc=True)
    atoms.info.update(info)
    values = rng.normal(size=(3, 3))
    if forces:
        atoms.arrays["REF_forces"] = values
        atoms.info["REF_energy"] = float(seed)
    return atoms


@pytest.fixture
def write(tmp_path):
    def written(name, *frames):
        ase.io.write(tmp_path / name, list(frames), format="traj" if name.endswith("traj") else "extxyz")
        return tmp_path / name

    return written


@pytest.fixture
def path(write):
    """Frames with and without forces, one of weight zero, an isolated atom, and copies."""
    single = ase.Atoms("O")
    single.info["config_type"] = "IsolatedAtom"
    frames = [single, frame(0), frame(1, forces=False), frame(2, config_weight=0.0), frame(1), frame(3), frame(0)]
    return write("a.xyz", *frames)


def equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.where == b.where and a.atoms == b.atoms and a.mark == b.mark and a.weight == b.weight
        np.testing.assert_array_equal(a.counted_forces, b.counted_forces)
        np.testing.assert_array_equal(a.counted_energy, b.counted_energy)


def test_they_are_the_frames_that_are_read_at_once(path):
    notes, expected_notes = [], []
    found, expected = StoredFrames([path], on_note=notes.append), read_frames([path], on_note=expected_notes.append)
    equal(found, expected)
    assert notes == expected_notes and "1 frame of weight zero left out" in notes[0]
    # In any order, and from the end.
    equal([found[i] for i in (3, 0, -1)], [expected[i] for i in (3, 0, -1)])
    equal(found[1:3], expected[1:3])
    with pytest.raises(IndexError):
        found[5]


@pytest.mark.parametrize("part", [":", "2:", "-3:", "::2", "4", "-1", "1:-1:3"])
def test_slices_and_other_formats(path, write, part, tmp_path):
    frames = ase.io.read(path, ":")
    for atoms in frames:
        forces = atoms.arrays.get("REF_forces", np.full((len(atoms), 3), np.nan))
        atoms.calc = SinglePointCalculator(atoms, forces=forces)
    for file in (path, write("b.traj", *frames)):
        equal(StoredFrames([f"{file}@{part}"], need_forces=False), read_frames([f"{file}@{part}"], need_forces=False))
    (tmp_path / "c.xyz.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed, plain = StoredFrames([tmp_path / "c.xyz.gz"]), read_frames([path])
    assert packed.digest == StoredFrames([path]).digest
    np.testing.assert_array_equal(packed[3].counted_forces, plain[3].counted_forces)


def test_copies(path, write):
    found, expected = StoredFrames([path]).once(), once(read_frames([path]))
    equal(found, expected)
    other = write("b.xyz", frame(1), frame(7), frame(0))
    assert StoredFrames([path]).shared(StoredFrames([other])) == same_frames(expected, read_frames([other])) == 2


def test_missing_forces_are_counted_of_frames_that_are_there(write):
    partly = frame(0)
    partly.arrays["REF_forces"][1] = np.nan
    unweighted = frame(3, config_forces_weight=0.0)
    frames = StoredFrames([write("a.xyz", partly, frame(1), unweighted, frame(5, forces=False), partly)])
    assert frames.lacking == 5 and frames.once().lacking == 4


def test_the_digest_is_of_everything_that_counts(write):
    base = [frame(0), frame(1)]
    digests = [StoredFrames([write("a.xyz", *base)]).digest]
    moved, pushed, labelled = ([atoms.copy() for atoms in base] for _ in range(3))
    moved[1].positions[0, 0] += 1e-6
    pushed[1].arrays["REF_forces"][0, 0] += 1e-6
    labelled[1].info["REF_energy"] += 1e-6
    for frames in (moved, pushed, labelled, base[::-1], base[:1]):
        digests.append(StoredFrames([write("b.xyz", *frames)]).digest)
    assert len(set(digests)) == 6
    assert digests[0] == StoredFrames([write("c.xyz", base[0]), write("d.xyz", base[1])]).digest


def test_species_that_a_model_does_not_know(path):
    for frames in (StoredFrames([path]), read_frames([path])):
        check_species(frames, ["O", "C", "H"])
        with pytest.raises(InputError, match=r"a\.xyz, frame 1: has C, H, which the model does not know; it knows O"):
            check_species(frames, ["O"])
    with pytest.raises(InputError, match=r"a\.xyz, frame 1: has C, which"):
        check_species(StoredFrames([path]).once(), ["O", "H"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": has no frames"),
        ("this is no xyz\n", ", frame 0: a line with the number of atoms should be here"),
        ("1\n\nO 0 0 0\n3\n\nO 0 0 0\nH 0 0 1\n", ", frame 1: is cut off, the file ends in the middle of it"),
        ("2\nProperties=species:S:1:pos:R:3\nO 0 0 0\nO 0 0 0\n", ", frame 0: atoms 0 and 1 are at the same place"),
        ("1\nProperties=species:S:1:pos:R:3\nO 0 nan 0\n", ", frame 0: the position of atom 0 is not finite"),
        ("1\nProperties=species:S:1:pos:R:3\nO 0 0 0\n", ": no atom has finite reference forces under any of"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "a.xyz"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"a\.xyz{message}"):
        StoredFrames([path])


def test_frames_of_a_source_that_a_framework_reads(path, tmp_path):
    """Beside text files; whoever opens it has its keys."""
    calls = []

    def open_source(file, keys):
        from e2ip_plugins.predictions.stored_frames import TextFile

        calls.append((file.name, keys))
        return TextFile(path, keys) if file.suffix == ".h5" else None

    frames = StoredFrames(["x.h5", path], forces_key="REF_forces", open_source=open_source)
    assert calls == [("x.h5", ("REF_forces", None)), ("a.xyz", ("REF_forces", None))]
    equal(frames, [*read_frames([path]), *read_frames([path])])
