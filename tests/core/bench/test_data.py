"""Splits and rotations of `e2ip bench`."""

import ase
import ase.io
import numpy as np
import pytest

from e2ip_plugins.bench import data
from e2ip_plugins.bench.catalogue import DataSet
from e2ip_plugins.errors import InputError, UncertaintyWarning


def toy(**changes):
    tests = {"test": "test.extxyz"}
    return DataSet(**{"train": "train.extxyz", "tests": tests, "species": ("C",), "frames": (12, 4), **changes})


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("train", 20), ("test", 9), ("valid", 5)):
        frames = []
        for i in range(count):
            atoms = ase.Atoms("CCC", rng.normal(size=(3, 3)), cell=5 * np.eye(3), pbc=True)
            atoms.info["REF_energy"] = float(i)
            atoms.new_array("REF_forces", rng.normal(size=(3, 3)))
            frames.append(atoms)
        ase.io.write(tmp_path / f"{name}.extxyz", frames, format="extxyz")
    return tmp_path


def energies(path):
    return [atoms.info["REF_energy"] for atoms in ase.io.read(path, ":")]


def test_first_frames_then_those_that_follow(root):
    files = data.prepare("toy", toy(), [root], root / "out", None)
    assert energies(files["train"]) == list(range(12)) and energies(files["valid"]) == [12, 13, 14, 15]
    assert energies(files["test"]) == list(range(9))
    # As they stand there.
    assert (root / "train.extxyz").read_text().startswith(files["train"].read_text())


def test_further_frames_are_used_for_nothing_else(root):
    files = data.prepare("more", toy(further=3), [root], root / "out", None)
    assert energies(files["further"]) == [16, 17, 18]
    assert energies(files["train"]) == list(range(12)) and energies(files["valid"]) == [12, 13, 14, 15]
    with pytest.raises(InputError, match=r"has 20 frames; .* and further: 5 need 21: give smaller"):
        data.prepare("toomany", toy(further=5), [root], root / "out", None)


def test_frames_of_weight_zero_are_in_no_split(root):
    frames = ase.io.read(root / "train.extxyz", ":")
    frames[2].info["config_weight"] = 0
    frames[3].info.update(config_forces_weight=0.0, config_energy_weight=0)
    ase.io.write(root / "train.extxyz", frames, format="extxyz")
    with pytest.warns(UncertaintyWarning, match="train.extxyz: 2 frames of weight zero left out"):
        files = data.prepare("toy", toy(), [root], root / "out", None)
    assert energies(files["train"]) == [0, 1, *range(4, 14)] and energies(files["valid"]) == [14, 15, 16, 17]
    frames[2].info["config_weight"] = -1.0
    ase.io.write(root / "train.extxyz", frames, format="extxyz")
    with pytest.warns(UncertaintyWarning, match="train.extxyz: 2 frames of zero or negative weight left out"):
        assert energies(data.prepare("toy", toy(), [root], root / "more", None)["train"]) == [0, 1, *range(4, 14)]


def test_spread_and_own_validation_frames(root):
    files = data.prepare("spread", toy(spread=True), [root], root / "out", None)
    assert energies(files["valid"]) == [2, 6, 10, 14] and len(energies(files["train"])) == 12
    files = data.prepare("own", toy(valid="valid.extxyz"), [root], root / "out", None)
    assert energies(files["valid"]) == [0, 1, 2, 3] and energies(files["train"]) == list(range(12))
    files = data.prepare("all", toy(valid="valid.extxyz", frames=()), [root], root / "out", None)
    assert energies(files["valid"]) == [0, 1, 2, 3, 4] and energies(files["train"]) == list(range(20))


@pytest.mark.parametrize("names", [("energy", "forces"), ("dft-e", "dft_f"), ("REF_energy", "forces")])
def test_names_of_energies_and_forces_become_ours(root, names):
    """Whatever else the frames have keeps its values, also what had our names before."""
    files = data.prepare("ours", toy(), [root], root / "out", None)
    for path in root.glob("*.extxyz"):
        text = path.read_text().replace("REF_energy=", f"{names[0]}=").replace(":REF_forces:", f":{names[1]}:")
        path.write_text(text.replace(" pbc=", " REF_forces=old free_energy=1.0 pbc="))
    keys = dict(zip(("energy", "forces"), names, strict=True))
    renamed = data.prepare("theirs", toy(keys=keys), [root], root / "out", None)
    for one, other in zip(*(ase.io.read(f["rotated"], ":") for f in (files, renamed)), strict=True):
        assert one.info["REF_energy"] == other.info["REF_energy"] and other.info["other_REF_forces"] == "old"
        assert np.array_equal(one.arrays["REF_forces"], other.arrays["REF_forces"])
    message = r"toy\.yaml: frame 0 of train in .*train\.extxyz has no 'REF_(energy|forces)': .* keys:"
    with pytest.raises(InputError, match=message):
        data.prepare("toy", toy(), [root], root / "out", None)


def test_species_that_a_description_lacks(root):
    with pytest.raises(InputError, match=r"toy\.yaml: species: lacks C, which frame 0 of train in .*: give \[H, C\]"):
        data.prepare("toy", toy(species=("H",)), [root], root / "out", None)


def test_frames_that_models_know_are_no_tests(root):
    frames = ase.io.read(root / "train.extxyz", ":")
    leaked = [frames[i] for i in (3, 14, 17, 19)]  # trained on, validated on, further, in no split
    ase.io.write(root / "test.extxyz", leaked, format="extxyz")
    message = r"toy\.yaml: tests: test: 3 of 4 frames are also training, validation or further .*: take them out of one"
    with pytest.raises(InputError, match=message):
        data.prepare("toy", toy(further=3), [root], root / "out", None)
    assert not list((root / "out").glob("*.extxyz"))


def test_a_script_makes_the_files_once(root):
    (root / "make.py").write_text(
        "import pathlib, shutil, sys\n"
        "out, here = pathlib.Path(sys.argv[sys.argv.index('--out') + 1]), pathlib.Path(__file__).parent\n"
        "out.mkdir(); assert sys.argv[1] == '--ok'\n"
        "for name in ('train', 'test'): shutil.copy(here / f'{name}.extxyz', out)\n"
    )
    for name in ("one", "two"):
        files = data.prepare(name, toy(script="make.py --ok"), [root], root / "out", None)
        (root / "train.extxyz").write_text("")  # what the script made is used
        assert energies(files["train"]) == list(range(12))
    with pytest.raises(InputError, match=r"bad\.yaml: script: .*make\.py --no failed with status 1"):
        data.prepare("bad", toy(script="make.py --no"), [root], root / "out", None)


def test_at_most_so_many_frames(root):
    files = data.prepare("few", toy(), [root], root / "out", 3)
    assert [len(energies(path)) for path in files.values()] == [3, 3, 3, 3]
    with pytest.raises(InputError, match=r"has 20 frames; .* need 104: give smaller numbers"):  # all are checked
        data.prepare("toy", toy(frames=(100, 4)), [root], root / "out", 3)


def test_rotated_frames(root):
    files = data.prepare("toy", toy(), [root], root / "out", None)
    turns = data.rotations(9)
    assert np.allclose(turns @ turns.swapaxes(1, 2), np.eye(3)) and np.allclose(np.linalg.det(turns), 1.0)
    for before, after, turn in zip(
        ase.io.read(files["test"], ":"), ase.io.read(files["rotated"], ":"), turns, strict=True
    ):
        assert np.allclose(after.positions, before.positions @ turn.T, atol=1e-7)
        assert np.allclose(after.cell.array, before.cell.array @ turn.T, atol=1e-7) and after.pbc.all()
        assert np.allclose(after.arrays["REF_forces"], before.arrays["REF_forces"] @ turn.T, atol=1e-7)
        assert after.info["REF_energy"] == before.info["REF_energy"]
        assert np.allclose(after.get_all_distances(mic=True), before.get_all_distances(mic=True), atol=1e-6)


def test_files_of_other_data_are_made_anew(root):
    files = data.prepare("toy", toy(), [root], root / "out", None)
    before = files["train"].stat().st_mtime_ns
    assert data.prepare("toy", toy(), [root], root / "out", None) == files
    assert files["train"].stat().st_mtime_ns == before
    source = root / "train.extxyz"
    source.write_text(source.read_text().replace("REF_energy=0.0", "REF_energy=7.0"))
    data.prepare("toy", toy(), [root], root / "out", None)
    assert energies(files["train"])[0] == 7.0


def test_missing_data(root):
    with pytest.raises(InputError, match=r"toy\.yaml: train: no file none.extxyz in .* --data or E2IP_DATA"):
        data.prepare("toy", toy(train="none.extxyz"), [root], root / "out", None)
    with pytest.raises(InputError, match="`e2ip fetch buckyball --to FOLDER` downloads it"):
        data.find("buckyball/buckyball_train.extxyz", [root])
    with pytest.raises(InputError, match="in a clone of e2ip-plugins"):
        data.find("demo/data/train.extxyz", [root])
    with pytest.raises(InputError, match=r"has 20 frames; .* need 104: give smaller numbers"):
        data.prepare("toy", toy(frames=(100, 4)), [root], root / "out", None)


def test_data_that_are_cut_off_or_no_extxyz(root):
    source = root / toy().train
    text = source.read_text()
    source.write_text(text[:-5])
    with pytest.raises(InputError, match=r"frame 19: is cut off, .* end its last line"):
        data.read_verbatim(source)
    source.write_text(text + "\n")
    assert "".join(data.read_verbatim(source)) == text
    source.write_text("<html>")
    with pytest.raises(InputError, match="a line with the number of atoms should be here, found '<html>'"):
        data.read_verbatim(source)


def test_a_damaged_note_of_what_files_are_made_of(root):
    data.prepare("toy", toy(), [root], root / "out", None)
    (root / "out" / "toy.json").write_text("{")
    with pytest.raises(InputError, match=r"toy\.json: cannot be read as JSON"):
        data.prepare("toy", toy(), [root], root / "out", None)
