"""Reading of frames with reference forces: which forces are found, what is left out, and what is refused."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.columns import predicted
from e2ip_plugins.predictions.labelled import Label, LabelledFrame, once, same_frames
from e2ip_plugins.predictions.labelled_files import read_frames
from e2ip_plugins.predictions.reference_names import USUAL_NAMES


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


@pytest.mark.parametrize("key", USUAL_NAMES["forces"])
def test_reference_forces_go_by_many_names(write, key):
    (frame,) = read_frames([write("a.xyz", water(REF_energies=[1, 2, 3], **{key: forces_of(0)}))])
    np.testing.assert_allclose(frame.counted_forces, forces_of(0), atol=1e-7)


def test_the_method_may_come_last(write):
    """The energy is that of the same method, and no other number of a like name; of two methods neither is guessed."""
    atoms = water(forces_pbe=forces_of(0), forces_cov=np.zeros((3, 9)), forces_uncertainty=forces_of(1))
    atoms.info |= {"energy_pbe": -3.0, "energy_per_atom": -1.0, "energy": -7.0}
    (frame,) = read_frames([write("a.xyz", atoms)])
    np.testing.assert_allclose(frame.counted_forces, forces_of(0), atol=1e-7)
    assert (frame.forces.key, frame.energy.key, frame.counted_energy) == ("forces_pbe", "energy_pbe", -3.0)
    del atoms.info["energy_pbe"], atoms.info["energy"]
    assert read_frames([write("b.xyz", atoms)])[0].energy is None
    with pytest.raises(InputError, match=r"finite reference forces.*: forces_pbe, forces_scan\. Name .* --forces-key"):
        read_frames([write("c.xyz", water(forces_pbe=forces_of(0), forces_scan=forces_of(1)))])
    (frame,) = read_frames([write("d.xyz", water(forces_pbe=forces_of(0), REF_forces=forces_of(1)))])
    assert frame.forces.key == "REF_forces"


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
        ("this is no xyz\n", ", frame 0: a line with the number of atoms should be here"),
        ("1\n\nO 0 0 0\n3\n\nO 0 0 0\nH 0 0 1\n", ", frame 1: is cut off, the file ends in the middle of it"),
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
    without = found[0]._replace(forces=None)
    assert once([without, *found]) == once([*found, without]) == once(found)


# Weights


def test_what_has_weight_zero_counts_nowhere(write):
    frames = labelled(*range(5))
    for name in ("forces", "energy"):
        frames[3].info[f"config_{name}_weight"] = 0.0
    frames[0].info["config_weight"] = 0
    frames[1].info["config_forces_weight"] = 0
    frames[2].info.update(config_weight=2.0, config_forces_weight=0.5, REF_energy=-1.0)
    frames[1].info["REF_energy"] = frames[3].info["REF_energy"] = -1.0
    notes, path = [], write("a.xyz", *frames)
    found = read_frames([path], on_note=notes.append)
    assert [frame.where[-1] for frame in found] == ["1", "2", "4"]
    forces = "forces of 1 frame have weight zero (config_forces_weight) and are left out"
    assert notes == [f"{path}: 2 frames of weight zero left out", f"{path}: {forces}"]
    finite = [np.isfinite(frame.counted_forces).all() for frame in found]
    assert finite == [False, True, True] and np.isnan(found[0].counted_forces).all()
    assert (found[1].forces.weight, found[1].energy.weight, found[1].energy.key) == (1.0, 2.0, "REF_energy")
    # Without forces that count a file is none to fit constants to, but one of training frames.
    only = write("b.xyz", frames[1])
    with pytest.raises(InputError, match=r"b\.xyz: the forces of all of its frames have weight zero"):
        read_frames([only])
    assert len(read_frames([only], need_forces=False)) == 1
    with pytest.raises(InputError, match=r"c\.xyz: all of its frames have weight zero"):
        read_frames([write("c.xyz", frames[0])], need_forces=False)


def test_a_key_of_energies_that_no_frame_has(write):
    """Training frames need no energies, others are named; a key that nobody gave is none to name."""
    path, notes = write("a.xyz", *labelled(0, 1)), []
    read_frames([path], energy_key="dft", need_forces=False, on_note=notes.append)
    read_frames([path], on_note=notes.append)
    assert not notes
    read_frames([path], energy_key="dft", on_note=notes.append)
    (note,) = notes
    assert note.startswith(
        f"{path}: no frame has a reference energy under 'dft' (--energy-key); numbers in the comment"
    )


def test_negative_weights_are_called_so(write):
    frames = labelled(*range(4))
    frames[0].info["config_weight"] = -1.0
    frames[1].info["config_forces_weight"] = -0.5
    frames[1].info["REF_energy"] = -1.0
    notes, path = [], write("a.xyz", *frames)
    assert [frame.where[-1] for frame in read_frames([path], on_note=notes.append)] == ["1", "2", "3"]
    forces = "forces of 1 frame have negative weight (config_forces_weight) and are left out"
    assert notes == [f"{path}: 1 frame of negative weight left out", f"{path}: {forces}"]
    with pytest.raises(InputError, match=r"b\.xyz: all of its frames have negative weight"):
        read_frames([write("b.xyz", frames[0])])


@pytest.mark.parametrize(
    ("value", "message"), [("none", "is 'none', which is no number"), (np.nan, "is nan; a weight")]
)
def test_weights_that_are_no_numbers(write, value, message):
    (frame,) = labelled(0)
    frame.info["config_forces_weight"] = value
    with pytest.raises(InputError, match=rf"a\.xyz, frame 0: config_forces_weight {message}"):
        read_frames([write("a.xyz", frame)])


def test_an_atom_with_a_component_that_is_not_finite_does_not_count():
    forces = forces_of(0)
    forces[1, 2] = np.inf
    counted = LabelledFrame(water(), "", Label(forces)).counted_forces
    assert np.isnan(counted[1]).all() and np.array_equal(counted[[0, 2]], forces[[0, 2]])
    for label in (None, Label(forces, weight=0.0), Label(forces, predicted=True)):
        assert np.isnan(LabelledFrame(water(), "", label).counted_forces).all()


# Predictions in place of references


@pytest.fixture
def predictions():
    """Function that gives frames of a file with predicted forces of some seeds."""
    return lambda *seeds: [
        predicted(water(seed), {"forces": forces_of(seed), "energy": -1.0, "uq_family": "niw"}) for seed in seeds
    ]


def test_predictions_are_no_references(write, predictions):
    path = write("p.xyz", *predictions(0, 1))
    for key in (None, "forces"):
        with pytest.raises(InputError, match=r"p\.xyz, frame 0: 'forces' are predictions .*\(uq_family.*REF_forces"):
            read_frames([path], key)
    # Training frames need no forces.
    notes = []
    found = read_frames([path], need_forces=False, on_note=notes.append)
    assert (
        np.isnan([frame.counted_forces for frame in found]).all() and "the forces of 2 frames are not used" in notes[0]
    )
    # Among others.
    with pytest.raises(InputError, match=r"q\.xyz, frame 1: 'forces' are predictions"):
        read_frames([write("q.xyz", *labelled(0), *predictions(1), *labelled(2))])


def test_predictions_of_both_hosts_are_no_references(write):
    """NequIP's writer keeps the reference beside them; in MACE's they have a prefix, by which a user may name them."""
    nequip = water(0, original_dataset_forces=forces_of(1))
    nequip.calc = SinglePointCalculator(nequip, forces=forces_of(0))
    mace = water(0, REF_forces=forces_of(1), MACE_forces=forces_of(0))
    nequip.info["uq_family"] = mace.info["MACE_uq_family"] = "niw"
    for name, atoms, key in (("nequip.xyz", nequip, "forces"), ("mace.xyz", mace, "MACE_forces")):
        path = write(name, atoms)
        np.testing.assert_allclose(read_frames([path])[0].counted_forces, forces_of(1), atol=1e-7)
        with pytest.raises(InputError, match=f"'{key}' are predictions of a model"):
            read_frames([path], key)


def test_frames_that_were_labelled_after_their_prediction(write, predictions):
    """By a calculator, whose results take the place of the predictions; and under a name of references."""
    first, second = ase.io.read(write("p.xyz", *predictions(0, 1)), ":")
    first.calc = SinglePointCalculator(first, forces=forces_of(5), energy=-2.0)
    second.arrays["REF_forces"] = forces_of(6)
    for seed, frame in zip((5, 6), read_frames([write("l.xyz", first, second)]), strict=True):
        np.testing.assert_allclose(frame.counted_forces, forces_of(seed), atol=1e-7)


def test_predictions_that_went_through_other_programs(write, predictions):
    """In another order of the atoms, with six decimals, in single precision."""
    (frame,) = ase.io.read(write("p.xyz", *predictions(0)), ":")
    for change in (lambda f: f[::-1], lambda f: np.round(f, 6), lambda f: f.astype(np.float32)):
        frame.calc = SinglePointCalculator(frame, forces=change(forces_of(0)))
        with pytest.raises(InputError, match="are predictions"):
            read_frames([write("q.xyz", frame)])


# Parts of files


def test_parts_of_files(write):
    path = write("a.xyz", *labelled(*range(6)))
    for part, seeds in ((":2", [0, 1]), ("::3", [0, 3]), ("-1", [5]), ("4:", [4, 5]), ("1:-1:2", [1, 3])):
        found = read_frames([f"{path}@{part}"])
        np.testing.assert_allclose([f.counted_forces for f in found], [forces_of(i) for i in seeds], atol=1e-7)
        assert found[0].where == f"{path}@{part}, frame 0"
    for part in ("a", "", "1:2:3:4"):
        with pytest.raises(InputError, match=rf"a\.xyz@{part}: no such file"):
            read_frames([f"{path}@{part}"])
    with pytest.raises(InputError, match=r"a\.xyz@9:: has no frames"):
        read_frames([f"{path}@9:"])
    # Other names with this sign are names.
    assert len(read_frames([path.rename(path.with_name("a@2.xyz"))])) == 6
