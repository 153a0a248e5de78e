"""Members: distributed as the error vectors say, the same in all files; the command and i-PI's own tool."""

import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.units import Hartree, kB

from e2ip_plugins.energies import difference, members, random_directions, reweight
from e2ip_plugins.errors import InputError


def test_members_have_the_predicted_spread(random_frames):
    frames = random_frames(4)
    energies = members(frames, 20_000)
    assert energies.shape == (4, 20_000)
    mean, std = difference(frames, np.eye(4) - np.eye(4)[0])
    np.testing.assert_allclose((energies - energies[0]).std(1)[1:], std[1:], rtol=0.02)
    np.testing.assert_allclose((energies - energies[0]).mean(1), mean, atol=5.0 * std.max() / 20_000**0.5)


def test_a_member_is_one_model(random_frames):
    """In parts of the frames, with other numbers of members, and with a difference of energies."""
    frames = random_frames(4)
    energies = members(frames, 8)
    np.testing.assert_allclose(members(frames[2:], 3), energies[2:, :3], rtol=1e-14)
    assert not np.allclose(members(frames, 8, seed=1), energies)


def test_directions_stay_what_they_are():
    """Members of files that were written by different versions belong together."""
    np.testing.assert_allclose(random_directions(2, 3)[:, 0], [0.12573022, 0.10490012], atol=1e-8)
    for number, seed in ((0, 0), (1, -1)):
        with pytest.raises(InputError, match="at least one member"):
            random_directions(number, 3, seed)


def test_command(write, random_frames, succeed):
    frames = random_frames(prefix="MACE_")
    for atoms in frames:
        atoms.arrays["MACE_forces"] = atoms.positions / 7
    write("a.xyz", frames)
    assert succeed("members", "a.xyz", "--number", 5, "--seed", 3).stdout == "Written: members.xyz\n"
    for before, after, energies in zip(
        ase.io.read("a.xyz", ":"), ase.io.read("members.xyz", ":"), members(frames, 5, 3), strict=True
    ):
        np.testing.assert_array_equal(after.info.pop("energy_members"), energies)
        assert after == before and after.info.keys() == before.info.keys()
        np.testing.assert_array_equal(after.arrays["MACE_forces"], before.arrays["MACE_forces"])


def test_command_refuses(write, random_frames, refuse):
    write("a.xyz", random_frames())
    assert "is a file that this command reads" in refuse("members", "a.xyz", "--output", "a.xyz", "--overwrite")
    assert "frames go into an extxyz file" in refuse("members", "a.xyz", "--output", "a.dat")
    assert "at least two members" in refuse("members", "a.xyz", "--format", "ipi", "--number", 1)
    assert not Path("members.xyz").exists()


def test_ipi_file(write, random_frames, succeed):
    frames = random_frames()
    write("a.xyz", frames)
    succeed("members", "a.xyz", "--number", 5, "--format", "ipi", "--output", "members.dat")
    energies = np.loadtxt("members.dat") * Hartree
    exact = np.array([atoms.info["energy"] for atoms in frames])
    np.testing.assert_allclose(energies.mean(1), exact, rtol=1e-13)
    differences, centred = members(frames, 5), np.sqrt(5 / 4)
    expected = exact[:, None] + centred * (differences - differences.mean(1, keepdims=True))
    np.testing.assert_allclose(energies, expected, rtol=1e-12)


@pytest.mark.parametrize("method", ["cumulant", "direct"])
def test_tool_of_ipi(write, random_frames, succeed, method):
    """``i-pi-committee-reweight`` finds in the file what `reweight` finds."""
    pytest.importorskip("ipi")
    tool = Path(sys.executable).parent / "i-pi-committee-reweight"
    frames = random_frames(50)
    write("a.xyz", frames)
    succeed("members", "a.xyz", "--number", 5, "--format", "ipi", "--output", "members.dat")
    observable = np.random.default_rng(0).normal(2.0, 1.0, size=50)
    np.savetxt("observable.dat", observable)
    temperature = 10_000.0
    command = [sys.executable, tool, "members.dat", "observable.dat", "--kt", str(kB * temperature / Hartree)]
    done = subprocess.run(command + ["--direct"] * (method == "direct"), capture_output=True, text=True, check=True)
    mean, std, *of_members = map(float, done.stdout.splitlines()[1].split())
    energies = np.loadtxt("members.dat") * Hartree
    ours = getattr(reweight(observable, energies, energies.mean(1), temperature), method)
    np.testing.assert_allclose(of_members, ours.members, rtol=1e-6)
    assert mean == pytest.approx(ours.mean, rel=1e-6)
    assert std == pytest.approx(ours.members.std(), rel=1e-5)
