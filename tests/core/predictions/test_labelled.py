"""Reading of frames for a fit: which forces are found, what is left out, and what is refused."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import (
    FORCES_KEYS,
    Configuration,
    Frame,
    check_apart,
    doubts,
    once,
    read_frames,
    same_frames,
)


def water(seed=0, **arrays):
    rng = np.random.default_rng(seed)
    atoms = ase.Atoms("OH2", rng.normal(size=(3, 3)), cell=[9.0, 9.0, 9.0], pbc=True)
    for name, values in arrays.items():
        atoms.arrays[name] = np.asarray(values, dtype=float)
    return atoms


def write(path, *frames):
    ase.io.write(path, list(frames), format="extxyz")
    return path


def forces_of(seed):
    return np.random.default_rng(100 + seed).normal(size=(3, 3))


def test_frames_of_several_files_in_order(tmp_path):
    files = [
        write(tmp_path / "a.xyz", water(0, REF_forces=forces_of(0)), water(1, REF_forces=forces_of(1))),
        write(tmp_path / "b.xyz", water(2, REF_forces=forces_of(2))),
    ]
    frames = read_frames(files)
    assert [frame.where for frame in frames] == [f"{files[0]}, frame 0", f"{files[0]}, frame 1", f"{files[1]}, frame 0"]
    for seed, frame in enumerate(frames):
        np.testing.assert_allclose(frame.forces, forces_of(seed), atol=1e-7)
        np.testing.assert_allclose(frame.atoms.positions, water(seed).positions, atol=1e-7)
        assert frame.atoms.calc is None and frame.atoms.pbc.all() and frame.atoms.cell[0, 0] == 9.0


@pytest.mark.parametrize("key", FORCES_KEYS)
def test_reference_forces_go_by_many_names(tmp_path, key):
    (frame,) = read_frames([write(tmp_path / "a.xyz", water(REF_energies=[1, 2, 3], **{key: forces_of(0)}))])
    np.testing.assert_allclose(frame.forces, forces_of(0), atol=1e-7)


def test_the_most_wanted_name_wins_unless_another_is_asked_for(tmp_path):
    atoms = water(REF_forces=forces_of(1), mine=forces_of(2))
    atoms.calc = SinglePointCalculator(atoms, forces=forces_of(0))
    path = write(tmp_path / "a.xyz", atoms)
    for key, seed in ((None, 1), ("forces", 0), ("mine", 2)):
        np.testing.assert_allclose(read_frames([path], key)[0].forces, forces_of(seed), atol=1e-7)


def test_forces_of_a_calculator_and_of_other_formats(tmp_path):
    """ASE takes a column called forces for results; trajectories have nothing else."""
    atoms = water()
    atoms.calc = SinglePointCalculator(atoms, forces=forces_of(0), energy=-1.0)
    ase.io.write(tmp_path / "a.traj", atoms)
    for path in (write(tmp_path / "a.xyz", atoms), tmp_path / "a.traj"):
        (frame,) = read_frames([str(path)])
        np.testing.assert_allclose(frame.forces, forces_of(0), atol=1e-7)
        assert frame.atoms.calc is None


def test_frames_without_forces_have_nan(tmp_path):
    path = write(tmp_path / "a.xyz", water(0), water(1, REF_forces=forces_of(1)))
    first, second = read_frames([path])
    assert first.forces.shape == (3, 3) and np.isnan(first.forces).all() and np.isfinite(second.forces).all()


def test_isolated_atoms_are_left_out(tmp_path):
    lonely = [ase.Atoms("O") for _ in range(3)]
    lonely[0].info["config_type"] = "IsolatedAtom"
    pair = water()
    pair.info["config_type"] = "IsolatedAtom"
    path = write(tmp_path / "a.xyz", *lonely, pair)
    frames = read_frames([path], need_forces=False)
    # Numbers are those of the file.
    assert [frame.where[-7:] for frame in frames] == ["frame 1", "frame 2", "frame 3"]
    with pytest.raises(InputError, match=r"b\.xyz: has no frames"):
        read_frames([write(tmp_path / "b.xyz", lonely[0])], need_forces=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": no such file"),
        ("", ": has no frames"),
        ("this is no xyz\n", ", frame 0: ASE cannot read it"),
        ("1\n\nO 0 0 0\n3\n\nO 0 0 0\nH 0 0 1\n", ", frame 1: ASE cannot read it .*; its last frame is cut off"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "a.xyz"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"a\.xyz{message}"):
        read_frames([path])


def test_folders(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_frames([tmp_path])


def test_files_without_forces(tmp_path):
    good = write(tmp_path / "good.xyz", water(0, REF_forces=forces_of(0)))
    bad = write(tmp_path / "bad.xyz", water(1), water(2, REF_forces=np.full((3, 3), np.nan)))
    with pytest.raises(InputError, match=r"bad\.xyz: no atom has finite .* any of REF_forces, forces.*--forces-key"):
        read_frames([good, bad])
    with pytest.raises(InputError, match=r"good\.xyz: no atom has finite reference forces under 'mine'"):
        read_frames([good], "mine")
    assert len(read_frames([good, bad], need_forces=False)) == 3


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((3, 9)), np.array(["a", "b", "c"])])
def test_arrays_that_are_no_forces(tmp_path, values):
    atoms = water()
    atoms.arrays["charges_of_mine"] = values
    path = write(tmp_path / "a.xyz", atoms)
    with pytest.raises(InputError, match=r"a\.xyz, frame 0: 'charges_of_mine' .* three numbers per atom.*--forces-key"):
        read_frames([path], "charges_of_mine")


def frame(positions, symbols="OH2"):
    return Frame(ase.Atoms(symbols, positions), np.zeros((3, 3)), "")


def test_same_frames():
    a, b, c = (np.random.default_rng(seed).normal(size=(3, 3)) for seed in range(3))
    assert same_frames([frame(a), frame(b)], [frame(c), frame(b), frame(b)]) == 2
    assert same_frames([frame(a)], [frame(a, "H2O"), frame(a + 1e-3)]) == 0
    assert same_frames([], [frame(a)]) == same_frames([frame(a)], []) == 0


def test_same_frames_as_far_as_files_keep_digits():
    zero = np.zeros((3, 3))
    assert same_frames([frame(zero)], [frame(zero - 1e-9), frame(-zero)]) == 2


def test_periodic_frames_of_another_cell_are_others():
    """The perfect crystal, strained: positions of one atom at the origin say nothing."""
    cells = [3.9, 4.0]
    frames = [Frame(ase.Atoms("Cu", cell=[a, a, a], pbc=True), np.zeros((1, 3)), "") for a in cells]
    assert same_frames(frames[:1], frames[1:]) == 0 and same_frames(frames, frames) == 2


def without_atoms(atoms):
    del atoms[:]


def without_position(atoms):
    atoms.positions[1, 0] = np.nan


def without_cell(atoms):
    atoms.cell = None


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_atoms, "has no atoms"),
        (without_position, r"the position of atom 1 is not finite \(1 such atoms\)"),
        (without_cell, "is periodic in 3 directions, and its cell is not"),
    ],
)
def test_structures_that_no_host_takes(tmp_path, spoil, message):
    bad = water(1, REF_forces=forces_of(1))
    spoil(bad)
    path = write(tmp_path / "a.xyz", water(0, REF_forces=forces_of(0)), bad)
    with pytest.raises(InputError, match=rf"a\.xyz, frame 1: {message}"):
        read_frames([path], need_forces=False)


@pytest.mark.parametrize("periodic", [False, True, (True, False, True)])
def test_atoms_at_the_same_place(tmp_path, periodic):
    """Across the faces of a skewed cell, too; the message names the frame and the atoms."""
    cell = np.array([[9.0, 0.0, 0.0], [4.0, 8.0, 0.0], [-3.0, 2.0, 7.0]])
    good = ase.Atoms("OH2", np.random.default_rng(0).normal(size=(3, 3)), cell=cell, pbc=periodic)
    bad = good.copy()
    bad.positions[2] = bad.positions[0] + [1e-3, -1e-4, 0.0]
    with pytest.raises(InputError, match=r"a\.xyz, frame 1: atoms 0 and 2 are at the same place"):
        read_frames([write(tmp_path / "a.xyz", good, bad)], need_forces=False)
    bad.positions[2] += cell[2] - 2 * cell[0]
    path = write(tmp_path / "b.xyz", good, bad)
    if periodic:
        with pytest.raises(InputError, match="frame 1: atoms 0 and 2"):
            read_frames([path], need_forces=False)
    else:
        assert len(read_frames([path], need_forces=False)) == 2


def test_no_crystal_has_atoms_at_the_same_place():
    """Nor any whose atoms lie on the faces of the cell, or between its two, but for rounding."""
    positions = np.array([[0.0, 0.0, 0.0], [-1e-17, 1.8, 1.8], [1.8, 3.6 - 1e-12, 1.8], [1.8, 1.8, 0.0]])
    for cell, periodic in ((np.eye(3) * 3.6, (True,) * 3), (None, None), (np.zeros((3, 3)), (False,) * 3)):
        check_apart(positions, cell, periodic, "x")
    # MACE takes a cell of one ångström where there is none.
    with pytest.raises(InputError, match="x: is periodic in 3 directions, and its cell is not"):
        check_apart(positions, np.zeros((3, 3)), (True,) * 3, "x")
    with pytest.raises(InputError, match="x: atoms 0 and 1"):
        check_apart(np.array([[-1e-17, 0.0, 0.0], [3.6, 0.0, 3.6]]), np.eye(3) * 3.6, (True,) * 3, "x")


def test_doubts_about_the_sets_of_a_training():
    def configuration(seed, species=(8, 1, 1), cell=0.0, state=None):
        positions = np.random.default_rng(seed).normal(size=(len(species), 3))
        return Configuration(np.array(species), positions, cell * np.eye(3), state)

    training = [configuration(seed) for seed in range(4)]
    assert not doubts(training, [configuration(4), configuration(5), configuration(6, (8, 9, 1))])
    (text,) = doubts(training, [configuration(1), configuration(5), configuration(3)])
    assert text.startswith("2 of 3 validation frames are training frames")
    assert not doubts(training, [configuration(1, cell=5.0)]), "another cell, another frame"
    assert not doubts(training, [configuration(1, state="-1")]), "another charge, another frame"
    alone = configuration(0, (1,))
    assert not doubts([*training, alone], [alone, configuration(7)]), "isolated atoms are of no account"
    (text,) = doubts(training, [configuration(4, (9, 1)), configuration(5, (6, 8, 1))])
    assert "every validation frame has species that the training set lacks" in text

    def with_forces(size):
        forces = np.full((3, 3), size)
        forces[0, 0] = np.nan
        return [frame._replace(forces=forces) for frame in training]

    (text,) = doubts(with_forces(27.0), [configuration(4)])
    assert "root mean square of 27 per component" in text and "kcal/mol/Å?" in text
    assert not doubts(with_forces(3.0), [configuration(4)])


def test_copies_count_once(tmp_path):
    path = write(tmp_path / "a.xyz", *[water(seed, REF_forces=forces_of(seed)) for seed in (0, 1, 0, 2, 1)])
    found = read_frames([path])
    assert [frame.where for frame in once(found)] == [found[i].where for i in (0, 1, 3)]
