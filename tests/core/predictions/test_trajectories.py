"""Trajectories as killed programs leave them."""

import ase.io
import numpy as np
import pytest
from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.trajectories import read_trajectory, whole_bytes


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.extxyz"
    ase.io.write(path, [Atoms("OH2", np.eye(3) + i, info={"number": i}) for i in range(3)], format="extxyz")
    return path


@pytest.mark.parametrize("cut", [1, 4, 60, 120])
def test_a_frame_that_was_cut_off_is_left_out(file, cut):
    text = file.read_bytes()
    size = whole_bytes(file)
    assert size == len(text)
    file.write_bytes(text[:-cut])
    frames, note = read_trajectory(file)
    assert [frame.info["number"] for frame in frames] == [0, 1] and note.endswith("frame 2 is cut off and left out")
    assert whole_bytes(file) == size // 3 * 2
    file.write_bytes(text)
    assert len(read_trajectory(file)[0]) == 3 and read_trajectory(file)[1] == ""


def test_broken_elsewhere(file, tmp_path):
    text = file.read_text()
    for content, message in (
        (text.replace("H ", "H x", 1), "frame 0: ASE cannot read it"),
        (text + "\n" + text, "frame 3: a line with the number of atoms should be here"),
        (text + "nonsense\n", "frame 3: a line with the number of atoms should be here, found 'nonsense"),
        ("", "has no whole frame"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=rf"run\.extxyz.*{message}"):
            read_trajectory(file)
    assert read_trajectory(file, may_be_empty=True) == ([], "")
    (tmp_path / "a.traj").write_bytes(b"half")
    for name, message in (("nothing.xyz", "no such file"), ("a.traj", "ASE cannot read it")):
        with pytest.raises(InputError, match=f"{name}: {message}"):
            read_trajectory(tmp_path / name)


def test_frames_without_atoms_and_numbers_are_read(file):
    file.write_text(f"0\nProperties=species:S:1:pos:R:3\n{file.read_text().replace('1.00000000', 'nan', 1)}")
    frames, _ = read_trajectory(file)
    assert len(frames[0]) == 0 and np.isnan(frames[1].positions).sum() == 1 and len(frames) == 4


def test_trajectories_of_ase(file):
    ase.io.write(file.with_suffix(".traj"), read_trajectory(file)[0])
    assert len(read_trajectory(file.with_suffix(".traj"))[0]) == 3
