"""Reading of frames with reference forces: which forces are found, what is left out, and what is refused."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import FORCES_KEYS, LabelledFrame, once, read_frames, same_frames


@pytest.fixture
def write(tmp_path):
    """Function that writes frames to a file and gives its path."""

    def written(name, *frames):
        ase.io.write(tmp_path / name, list(frames), format="extxyz")
        return tmp_path / name

    return written


def forces_of(seed):
    return np.random.default_rng(100 + seed).normal(size=(3, 3))


def water(seed=0, **arrays):
    atoms = ase.Atoms("OH2", np.random.default_rng(seed).normal(size=(3, 3)), cell=[9.0, 9.0, 9.0], pbc=True)
    atoms.arrays.update({name: np.asarray(values, dtype=float) for name, values in arrays.items()})
    return atoms


def labelled(*seeds):
    return [water(seed, REF_forces=forces_of(seed)) for seed in seeds]


def test_frames_of_several_files_in_order(write):
    files = [write("a.xyz", *labelled(0, 1)), write("b.xyz", *labelled(2))]
    frames = read_frames(files)
    assert [frame.where for frame in frames] == [f"{files[0]}, frame 0", f"{files[0]}, frame 1", f"{files[1]}, frame 0"]
    for seed, frame in enumerate(frames):
        np.testing.assert_allclose(frame.counted_forces, forces_of(seed), atol=1e-7)
        np.testing.assert_allclose(frame.atoms.positions, water(seed).positions, atol=1e-7)
        assert frame.atoms.calc is None and frame.atoms.pbc.all() and frame.atoms.cell[0, 0] == 9.0


@pytest.mark.parametrize("key", FORCES_KEYS)
def test_reference_forces_go_by_many_names(write, key):
    (frame,) = read_frames([write("a.xyz", water(REF_energies=[1, 2, 3], **{key: forces_of(0)}))])
    np.testing.assert_allclose(frame.counted_forces, forces_of(0), atol=1e-7)


def test_the_most_wanted_name_wins_unless_another_is_asked_for(write):
    atoms = water(REF_forces=forces_of(1), mine=forces_of(2))
    atoms.calc = SinglePointCalculator(atoms, forces=forces_of(0))
    path = write("a.xyz", atoms)
    for key, seed in ((None, 1), ("forces", 0), ("mine", 2)):
        np.testing.assert_allclose(read_frames([path], key)[0].counted_forces, forces_of(seed), atol=1e-7)


def test_forces_of_a_calculator_and_of_other_formats(write, tmp_path):
    """ASE takes a column called forces for results; trajectories have nothing else."""
    atoms = water()
    atoms.calc = SinglePointCalculator(atoms, forces=forces_of(0), energy=-1.0)
    ase.io.write(tmp_path / "a.traj", atoms)
    for path in (write("a.xyz", atoms), tmp_path / "a.traj"):
        (frame,) = read_frames([str(path)])
        np.testing.assert_allclose(frame.counted_forces, forces_of(0), atol=1e-7)
        assert frame.atoms.calc is None


def test_frames_without_forces_have_nan(write):
    first, second = read_frames([write("a.xyz", water(0), *labelled(1))])
    assert first.forces is None and first.counted_forces.shape == (3, 3) and np.isnan(first.counted_forces).all()
    assert np.isfinite(second.counted_forces).all()


def test_isolated_atoms_are_left_out(write):
    single = [ase.Atoms("O") for _ in range(3)]
    pair = water()
    single[0].info["config_type"] = pair.info["config_type"] = "IsolatedAtom"
    frames = read_frames([write("a.xyz", *single, pair)], need_forces=False)
    # Numbers are those of the file.
    assert [frame.where[-7:] for frame in frames] == ["frame 1", "frame 2", "frame 3"]
    with pytest.raises(InputError, match=r"b\.xyz: has no frames"):
        read_frames([write("b.xyz", single[0])], need_forces=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": no such file"),
        ("", ": has no frames"),
        ("this is no xyz\n", ", frame 0: ASE cannot read it"),
        ("1\n\nO 0 0 0\n3\n\nO 0 0 0\nH 0 0 1\n", ", frame 1: ASE cannot read it .*; its last frame is cut off"),
        ("2\nProperties=species:S:1:pos:R:3\nO 0 0 0\nO 0 0 0\n", ", frame 0: atoms 0 and 1 are at the same place"),
        ("1\nProperties=species:S:1:pos:R:3\nO 0 nan 0\n", ", frame 0: the position of atom 0 is not finite"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "a.xyz"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"a\.xyz{message}"):
        read_frames([path])
    with pytest.raises(InputError, match="is a folder"):
        read_frames([tmp_path])


def test_files_without_forces(write):
    good = write("good.xyz", *labelled(0))
    bad = write("bad.xyz", water(1), water(2, REF_forces=np.full((3, 3), np.nan)))
    with pytest.raises(InputError, match=r"bad\.xyz: no atom has finite .* any of REF_forces, forces.*--forces-key"):
        read_frames([good, bad])
    with pytest.raises(InputError, match=r"good\.xyz: no atom has finite reference forces under 'mine'"):
        read_frames([good], "mine")
    assert len(read_frames([good, bad], need_forces=False)) == 3


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((3, 9)), np.array(["a", "b", "c"])])
def test_arrays_that_are_no_forces(write, values):
    atoms = water()
    atoms.arrays["charges_of_mine"] = values
    with pytest.raises(InputError, match=r"a\.xyz, frame 0: 'charges_of_mine' .* three numbers per atom.*--forces-key"):
        read_frames([write("a.xyz", atoms)], "charges_of_mine")


def frame(positions, symbols="OH2", **more):
    return LabelledFrame(ase.Atoms(symbols, positions, **more), "")


def test_same_frames():
    a, b, c = (np.random.default_rng(seed).normal(size=(3, 3)) for seed in range(3))
    assert same_frames([frame(a), frame(b)], [frame(c), frame(b), frame(b)]) == 2
    assert same_frames([frame(a)], [frame(a, "H2O"), frame(a + 1e-3)]) == 0
    assert same_frames([], [frame(a)]) == same_frames([frame(a)], []) == 0
    # As far as files keep digits.
    zero = np.zeros((3, 3))
    assert same_frames([frame(zero)], [frame(zero - 1e-9), frame(-zero)]) == 2
    # The perfect crystal, strained: positions of one atom at the origin say nothing.
    one, other = (frame(np.zeros((1, 3)), "Cu", cell=[size] * 3, pbc=True) for size in (3.9, 4.0))
    assert same_frames([one], [other]) == 0 and same_frames([one, other], [one, other]) == 2


def test_copies_count_once(write):
    found = read_frames([write("a.xyz", *labelled(0, 1, 0, 2, 1))])
    assert [frame.where for frame in once(found)] == [found[i].where for i in (0, 1, 3)]
