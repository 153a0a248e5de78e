"""`e2ip calibrate` and `e2ip compare --calibration`, from files to tables, and what they refuse."""

import json

import ase
import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.report.compare import load_models
from e2ip_plugins.scores.calibration import Calibration

FRAMES, ATOMS = 40, 9


def make_frames(seed, uncertain=True, inflate=1.5):
    """Σ0 = (0.1 eV/Å)² I, ν = 8, κ = 2, errors 1.5 times as large as that."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(FRAMES):
        atoms = ase.Atoms("CH2O3CH2", rng.normal(size=(ATOMS, 3)))
        atoms.arrays["REF_forces"] = rng.normal(size=(ATOMS, 3))
        t = rng.normal(size=(ATOMS, 3)) / np.sqrt(rng.chisquare(6, (ATOMS, 1)) / 6)
        error = inflate * 0.1 * np.sqrt(8 * 3 / (2 * 6)) * t
        atoms.arrays["MACE_forces"] = atoms.arrays["REF_forces"] - error
        if uncertain:
            atoms.arrays["MACE_e2ip_log_sigma0"] = np.tile([2 * np.log(0.1)] * 3 + [0.0] * 3, (ATOMS, 1))
            atoms.arrays["MACE_e2ip_nu"] = np.full(ATOMS, 8.0)
            atoms.arrays["MACE_e2ip_kappa"] = np.full(ATOMS, 2.0)
            atoms.info["MACE_uq_family"] = "niw"
        frames.append(atoms)
    return frames


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line(result):
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("e2ip: error: ")
    return line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Predictions for validation, test and further frames, and of a deterministic model."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("valid", "test", "ood")):
        ase.io.write(f"{name}.xyz", make_frames(seed), format="extxyz")
    ase.io.write("baseline.xyz", make_frames(1, uncertain=False), format="extxyz")
    return tmp_path


@pytest.fixture
def calibrated(folder):
    result = run("calibrate", "valid.xyz", "--method", "scale", "--method", "conformal")
    assert result.exit_code == 0, result.output
    return result


def test_command_says_what_was_fitted(calibrated):
    found = Calibration.read("calibration.json")
    assert found.methods == ("scale", "conformal") and found.file == "valid.xyz" and len(found.frames) == FRAMES
    assert found.factor["C"].value == pytest.approx(1.5**2, rel=0.2)
    lines = calibrated.stdout.splitlines()
    assert lines[0] == "valid.xyz: 40 configurations, 360 atoms, family niw"
    assert lines[1].startswith(f"factor on the covariance: {found.factor['C'].value:.3f} (")
    assert f"conformal radius for 0.9: {found.radii[0.9]:.3f}" in lines
    before, after = (found.scores[when]["calibration_error"] for when in ("before", "after"))
    assert f"CE of these frames: {before:.4f} -> {after:.4f}" in lines and after < 0.02 < before
    assert lines[-1] == "Written: calibration.json" and calibrated.stderr == ""


def test_what_the_user_should_know_is_told(folder):
    result = run("calibrate", "valid.xyz", "--method", "species-scale", "--method", "conformal", "--level", "0.99")
    assert result.exit_code == 0, result.output
    assert "e2ip: note: species-scale fitted to every second configuration" in result.stderr
    assert "e2ip: note: no finite conformal radius for level 0.99: 20 configurations" in result.stderr
    assert "factor on the covariance, O:" in result.stdout
    result = run("calibrate", "valid.xyz", "--method", "floor", "--output", "floor.json")
    sigma = 1000.0 * np.sqrt(Calibration.read("floor.json").floor.value)
    assert f"floor: {sigma:.2f} meV/Å (" in result.stdout


def test_calibrated_beside_raw(calibrated):
    done = run("compare", "test.xyz", "test.xyz", "--calibration", "none", "--calibration", "calibration.json")
    assert done.exit_code == 0, done.output
    result = json.loads(open("e2ip_compare/compare.json").read())
    raw, calibrated = result["models"]
    assert [raw["label"], calibrated["label"]] == ["test", "test calibrated"]
    factor = Calibration.read("calibration.json").factor["C"].value
    assert raw["calibration"] is None and calibrated["calibration"]["factor"]["H"] == factor
    assert calibrated["overall"]["calibration_error"] < 0.03 < raw["overall"]["calibration_error"]
    assert calibrated["overall"]["total_std"] == pytest.approx(np.sqrt(factor) * raw["overall"]["total_std"])
    assert calibrated["overall"]["force_mae"] == raw["overall"]["force_mae"]
    conformal = calibrated["calibration"]["conformal"]
    assert set(conformal) == {"0.5", "0.8", "0.9", "0.95"}
    assert conformal["0.9"]["coverage"] == pytest.approx(0.9, abs=0.05)
    table = open("e2ip_compare/compare.md").read()
    row = next(line for line in table.splitlines() if line.startswith("| Conformal coverage at 90 %"))
    assert row == f"| Conformal coverage at 90 % | >= 0.9 |  | {conformal['0.9']['coverage']:.3f} |"
    assert "calibrated (scale, conformal): `calibration.json`" in table and "Conformal coverage: share" in table
    assert "Conformal coverage at 90 %" in done.stdout


def test_a_calibration_that_does_not_know_its_model_is_asked_about(calibrated):
    frames = ase.io.read("test.xyz", ":")
    for atoms in frames:
        atoms.info["MACE_uq_model"] = "readout-b"
    ase.io.write("named.xyz", frames, format="extxyz")
    done = run("compare", "named.xyz", "--calibration", "calibration.json")
    assert (
        done.exit_code == 0
        and "without uq_model" in done.stderr
        and "(readout-b): is it for this model?" in done.stderr
    )
    assert "is it for this model?" not in run("compare", "test.xyz", "--calibration", "calibration.json").stderr


def test_conformal_coverage_counts_configurations_alike(calibrated):
    """Not atoms: a test file of one configuration with all errors outside and one, larger, with all inside."""
    frames = make_frames(5)[:2]
    frames[0].arrays["MACE_forces"] = frames[0].arrays["REF_forces"] + 10.0
    frames[1] += frames[1].copy()
    frames[1].arrays["MACE_forces"] = frames[1].arrays["REF_forces"] + 0.001
    ase.io.write("two.xyz", frames, format="extxyz")
    assert run("compare", "two.xyz", "--calibration", "calibration.json").exit_code == 0
    (model,) = json.loads(open("e2ip_compare/compare.json").read())["models"]
    assert model["calibration"]["conformal"]["0.9"]["coverage"] == 0.5


def test_both_sets_are_calibrated(calibrated):
    both = ("--ood", "ood.xyz", "--calibration", "calibration.json")
    assert run("compare", "test.xyz", *both).exit_code == 0
    result = json.loads(open("e2ip_compare/compare.json").read())
    for report in (result["models"][0], result["ood"]["models"][0]):
        assert report["calibration"]["file"] == "calibration.json"
        assert report["overall"]["calibration_error"] < 0.03


def test_atoms_without_reference_are_left_out(folder):
    frames = make_frames(0)
    frames[3].arrays["REF_forces"][4, 1] = np.nan
    frames[5].arrays["REF_forces"][:] = np.inf
    ase.io.write("holes.xyz", frames, format="extxyz")
    result = run("calibrate", "holes.xyz", "--method", "conformal")
    assert result.exit_code == 0, result.output
    found = Calibration.read("calibration.json")
    # Frames that were looked at are known all the same.
    assert (found.configurations, found.atoms, len(found.frames)) == (39, 350, 40)


# What is refused


def test_a_calibration_is_not_judged_on_its_own_frames(calibrated):
    line = one_line(run("compare", "valid.xyz", "--calibration", "calibration.json"))
    assert "valid.xyz: 40 of its 40 frames are among those that calibration.json was fitted to" in line
    ase.io.write("mixed.xyz", make_frames(3) + make_frames(0)[:1], format="extxyz")
    assert "1 of its 41 frames" in one_line(run("compare", "mixed.xyz", "--calibration", "calibration.json"))
    both = ("--ood", "valid.xyz", "--calibration", "calibration.json")
    assert "valid.xyz: 40 of its 40" in one_line(run("compare", "test.xyz", *both))


def test_a_calibration_of_something_else_is_refused(calibrated):
    files = ("baseline.xyz", "test.xyz")
    options = ("--calibration", "calibration.json", "--calibration", "none")
    assert "baseline.xyz: has no predicted distribution" in one_line(run("compare", *files, *options))
    frames = make_frames(1)
    for atoms in frames:
        atoms.symbols[0] = "Si"
    ase.io.write("silicon.xyz", frames, format="extxyz")
    line = one_line(run("compare", "silicon.xyz", "--calibration", "calibration.json"))
    assert "was fitted to C, H, O and knows nothing of Si, which silicon.xyz has" in line
    for atoms in frames:
        for name in ("log_sigma0", "nu", "kappa"):
            del atoms.arrays[f"MACE_e2ip_{name}"]
        atoms.arrays["MACE_gaussian_log_cov"] = np.tile([-4.0] * 3 + [0.0] * 3, (ATOMS, 1))
        atoms.info["MACE_uq_family"] = "gaussian"
    ase.io.write("gaussian.xyz", frames, format="extxyz")
    line = one_line(run("compare", "gaussian.xyz", "--calibration", "calibration.json"))
    assert "is for predictions of family 'niw', but gaussian.xyz has family 'gaussian'" in line


def test_a_calibration_of_another_model_is_refused(folder):
    def write(name, seed, uq_model):
        frames = make_frames(seed)
        for atoms in frames:
            atoms.info["MACE_uq_model"] = uq_model
        ase.io.write(name, frames, format="extxyz")

    for name, seed, uq_model in (("valid_1", 0, "1"), ("test_1", 1, "1"), ("test_2", 1, "2")):
        write(f"{name}.xyz", seed, f"readout-{uq_model}")
    assert run("calibrate", "valid_1.xyz").exit_code == 0
    assert run("compare", "test_1.xyz", "--calibration", "calibration.json").exit_code == 0
    line = one_line(run("compare", "test_2.xyz", "--calibration", "calibration.json"))
    assert "calibration.json: was fitted to predictions of another model (readout-1) than test_2.xyz has (" in line
    # Files of earlier versions do not say whose they are.
    assert run("compare", "test.xyz", "--calibration", "calibration.json").exit_code == 0
    assert run("calibrate", "valid.xyz", "--overwrite").exit_code == 0
    assert json.loads(open("calibration.json").read())["uq_model"] is None
    assert run("compare", "test_2.xyz", "--calibration", "calibration.json").exit_code == 0


def test_every_model_needs_its_own_word(calibrated):
    line = one_line(run("compare", "test.xyz", "baseline.xyz", "--calibration", "calibration.json"))
    assert "--calibration: 1 for 2 models; give one for each, in the same order, or none" in line


def test_predictions_are_not_calibrated_twice(calibrated):
    frames = make_frames(1)
    for atoms in frames:
        atoms.info["MACE_uq_calibration"] = "other.json"
    ase.io.write("done.xyz", frames, format="extxyz")
    line = one_line(run("compare", "done.xyz", "--calibration", "calibration.json"))
    assert "done.xyz: was calibrated already, with other.json" in line
    assert "done.xyz: was calibrated already" in one_line(run("calibrate", "done.xyz", "--overwrite"))
    (model,) = load_models(["done.xyz"])
    assert model.calibration is None and model.predictions.calibration == "other.json"


def test_predictions_that_were_calibrated_are_shown_as_such(folder):
    frames = make_frames(1)
    for atoms in frames:
        atoms.info["MACE_uq_calibration"] = "other.json"
    ase.io.write("done.xyz", frames, format="extxyz")
    done = run("compare", "done.xyz", "test.xyz", "--ood", "ood.xyz", "--ood", "ood.xyz")
    assert done.exit_code == 0, done.output
    assert done.stderr == "e2ip: note: done.xyz: was calibrated already, with other.json\n"
    result = json.loads(open("e2ip_compare/compare.json").read())
    assert [m["file_calibration"] for m in result["models"]] == ["other.json", None]
    assert [m["calibration"] for m in result["models"]] == [None, None]
    table = open("e2ip_compare/compare.md").read()
    assert table.count("was calibrated already, with `other.json`") == 1


def test_radii_that_are_all_infinite_are_refused(folder):
    """40 configurations allow levels up to 40/41; beside a factor the note is enough."""
    line = one_line(run("calibrate", "valid.xyz", "--method", "conformal", "--level", "0.99", "--level", "0.98"))
    assert "valid.xyz: 40 configurations allow conformal radii for levels up to 0.976" in line
    assert "for --level 0.98 give at least 49 of them" in line
    assert not (folder / "calibration.json").exists()
    for more in (("--level", "0.9"), ("--method", "scale")):
        done = run("calibrate", "valid.xyz", "--method", "conformal", "--level", "0.99", *more, "--overwrite")
        assert done.exit_code == 0 and "no finite conformal radius for level 0.99" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.xyz"], "nothing.xyz: no such file"),
        (["."], ".: is a folder"),
        (["baseline.xyz"], "baseline.xyz: has no predicted distribution to calibrate"),
        (["valid.xyz", "--method", "platt"], "--method platt: choose from floor, scale, species-scale, conformal"),
        (["valid.xyz", "--method", "scale", "--method", "floor"], "scale and floor both set the size"),
        (["valid.xyz", "--level", "0.9"], "--level: only --method conformal has levels"),
        (["valid.xyz", "--method", "conformal", "--level", "95"], "--level 95: a level lies between 0 and 1"),
        (["valid.xyz", "--output", "test.xyz"], "--output test.xyz: is there already"),
        (
            ["valid.xyz", "--output", "valid.xyz", "--overwrite"],
            "--output valid.xyz: is a file that this command reads",
        ),
        (["valid.xyz", "--output", "no/where.json"], "--output no/where.json: there is no folder no"),
        (["valid.xyz", "--ref-forces", "mine"], "no forces named 'mine'"),
    ],
)
def test_input_that_cannot_be_fitted_to(folder, arguments, message):
    assert message in one_line(run("calibrate", *arguments))
    assert not (folder / "calibration.json").exists()


def test_forces_that_vanish_by_symmetry_say_nothing(folder):
    """Isolated atoms, often among training frames: no error bar is too large for them."""
    frames = ase.io.read("valid.xyz", ":")
    alone = frames[0][:1]
    for name in list(alone.arrays):
        if name.endswith("forces"):
            alone.arrays[name][:] = 0.0
    copies = []
    for i in range(8):
        copies.append(alone.copy())
        copies[-1].positions += i
    ase.io.write("mixed.xyz", [*frames, *copies], format="extxyz")
    ase.io.write("alone.xyz", copies, format="extxyz")
    assert run("calibrate", "valid.xyz", "--output", "without.json").exit_code == 0
    done = run("calibrate", "mixed.xyz", "--output", "with.json")
    assert done.exit_code == 0 and "8 atoms left out whose force vanishes by symmetry" in done.stderr
    without, with_them = (Calibration.read(name) for name in ("without.json", "with.json"))
    assert without.factor == with_them.factor and with_them.configurations == FRAMES
    assert "all forces vanish by symmetry" in one_line(run("calibrate", "alone.xyz", "--output", "alone.json"))


def test_isolated_atoms_may_be_in_both_files(folder):
    alone = make_frames(0)[0][:1]
    for name in ("REF_forces", "MACE_forces"):
        alone.arrays[name][:] = 0.0
    for name in ("valid", "test"):
        ase.io.write(f"{name}1.xyz", [alone, *ase.io.read(f"{name}.xyz", ":")], format="extxyz")
    assert run("calibrate", "valid1.xyz").exit_code == 0
    result = run("compare", "test1.xyz", "--calibration", "calibration.json")
    assert result.exit_code == 0, result.output


def test_predictions_of_which_some_are_calibrated_are_refused(folder):
    frames = ase.io.read("test.xyz", ":")
    for atoms in frames[20:]:
        atoms.info["MACE_uq_calibration"] = "other.json"
    ase.io.write("half.xyz", frames, format="extxyz")
    assert "uq_calibration is 'None' in frame 0 and 'other.json' in frame 20" in one_line(run("compare", "half.xyz"))


def test_predictions_without_any_error(folder):
    frames = ase.io.read("test.xyz", ":")
    for atoms in frames:
        atoms.arrays["REF_forces"] = atoms.arrays["MACE_forces"].copy()
    ase.io.write("perfect.xyz", frames, format="extxyz")
    result = run("compare", "perfect.xyz")
    assert result.exit_code == 0 and (folder / "e2ip_compare" / "compare.md").exists(), result.output


def test_the_order_of_the_frames_does_not_matter(folder):
    """What is drawn and what is halved are frames, not places in a file."""
    frames = ase.io.read("valid.xyz", ":")
    ase.io.write("shuffled.xyz", [frames[i] for i in np.random.default_rng(0).permutation(FRAMES)], format="extxyz")
    for method in ("scale", "species-scale", "floor"):
        found = []
        for name in ("valid", "shuffled"):
            options = ("--method", method, "--method", "conformal", "--overwrite", "--output", f"{name}.json")
            assert run("calibrate", f"{name}.xyz", *options).exit_code == 0
            found.append(Calibration.read(f"{name}.json"))
        one, other = found
        assert one.radii == pytest.approx(other.radii, rel=1e-12)
        for symbol, constant in one.factor.items():
            assert constant.value == pytest.approx(other.factor[symbol].value, rel=1e-9)
            assert constant.interval == pytest.approx(other.factor[symbol].interval, rel=1e-9)
        assert one.floor.interval == pytest.approx(other.floor.interval, rel=1e-9)


def test_references_in_other_units_are_told(folder):
    frames = ase.io.read("valid.xyz", ":")
    for atoms in frames:
        atoms.arrays["REF_forces"] *= 1e3
    ase.io.write("other.xyz", frames, format="extxyz")
    done = run("calibrate", "other.xyz", "--output", "other.json")
    assert done.exit_code == 0 and "times the predicted ones, which are in eV/Å: are they in meV/Å?" in done.stderr


def test_one_file_with_several_calibrations(calibrated):
    """Are told apart by the calibrations' names."""
    assert run("calibrate", "valid.xyz", "--method", "floor", "--output", "floor.json").exit_code == 0
    found = [None if name is None else Calibration.read(name) for name in (None, "calibration.json", "floor.json")]
    labels = [model.label for model in load_models(["test.xyz"] * 3, calibrations=found)]
    assert labels == ["test", "test, calibration", "test, floor"]


def test_copies_of_frames_count_once(folder):
    """NequIP's writer appends: twice the file would promise radii that forty configurations do not bear."""
    frames = ase.io.read("valid.xyz", ":")
    ase.io.write("twice.xyz", [*frames, *frames], format="extxyz")
    assert run("calibrate", "valid.xyz", "--output", "once.json").exit_code == 0
    done = run("calibrate", "twice.xyz", "--output", "twice.json")
    assert done.exit_code == 0 and "twice.xyz: 40 frames are there more than once" in done.stderr
    once, twice = (json.loads((folder / name).read_text()) for name in ("once.json", "twice.json"))
    assert {**once, "file": ""} == {**twice, "file": ""}
    done = run("calibrate", "twice.xyz", "--method", "conformal", "--level", "0.98", "--output", "radii.json")
    assert done.exit_code == 2 and "twice.xyz: 40 configurations allow" in done.stderr
    forces = next(name for name in frames[3].arrays if name.endswith("forces") and not name.startswith("REF"))
    frames[3].arrays[forces] += 0.01
    ase.io.write("another.xyz", [*ase.io.read("valid.xyz", ":"), frames[3]], format="extxyz")
    twin = "frames 3 and 40 are the same structure with different predictions"
    assert twin in one_line(run("calibrate", "another.xyz"))
    wider = ase.io.read("valid.xyz", 3)
    wider.arrays["MACE_e2ip_nu"] *= 2.0
    ase.io.write("another.xyz", [*ase.io.read("valid.xyz", ":"), wider], format="extxyz")
    assert twin in one_line(run("calibrate", "another.xyz"))
    other = ase.io.read("valid.xyz", 3)
    other.arrays["REF_forces"] += 0.01
    ase.io.write("another.xyz", [*ase.io.read("valid.xyz", ":"), other], format="extxyz")
    text = "frames 3 and 40 are the same structure with different reference forces: of two methods?"
    assert text in one_line(run("calibrate", "another.xyz"))
    # Of copies without references, wherever they stand, nothing is said but that.
    unlabelled = ase.io.read("valid.xyz", ":20")
    for atoms in unlabelled:
        del atoms.arrays["REF_forces"]
    ase.io.write("first.xyz", [*unlabelled, *ase.io.read("valid.xyz", ":")], format="extxyz")
    done = run("calibrate", "first.xyz", "--output", "first.json")
    assert done.exit_code == 0 and "first.xyz: 20 frames are there more than once" in done.stderr
    assert {**json.loads((folder / "first.json").read_text()), "file": ""} == {**once, "file": ""}


@pytest.mark.parametrize("text", ["", "{}", '{"format": "e2ip calibration", "version": 7}'])
def test_broken_calibrations_end_before_predictions_are_read(folder, text):
    (folder / "broken.json").write_text(text)
    assert "broken.json: " in one_line(run("compare", "test.xyz", "--calibration", "broken.json"))
    assert "missing.json: cannot be read" in one_line(run("compare", "test.xyz", "--calibration", "missing.json"))
