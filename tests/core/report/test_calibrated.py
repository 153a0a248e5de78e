"""`e2ip calibrate` and `e2ip compare --calibration`, from files to tables, and what they refuse."""

import numpy as np
import pytest

from e2ip_plugins.report.compare import load_models
from e2ip_plugins.scores.calibration import Calibration

FRAMES = 40


@pytest.fixture
def frames(make_frames):
    """Function that gives 40 frames by seed, whose errors are 1.5 times as large as predicted."""
    return lambda seed, **options: make_frames(noise=5, seed=seed, inflate=1.5, count=FRAMES, **options)


@pytest.fixture(autouse=True)
def files(write, frames):
    """Predictions for validation, test and further frames, and of a deterministic model."""
    for seed, name in enumerate(("valid", "test", "ood")):
        write(f"{name}.xyz", frames(seed))
    write("baseline.xyz", frames(1, uncertain=False))


@pytest.fixture
def calibrated(succeed):
    return succeed("calibrate", "valid.xyz", "--method", "scale", "--method", "conformal")


@pytest.fixture
def fitted(succeed):
    """Function that runs `e2ip calibrate` and gives its output and the calibration."""

    def fit(name, *options):
        done = succeed("calibrate", name, *options, "--overwrite", "--output", "fitted.json")
        return done, Calibration.read("fitted.json")

    return fit


WITH = ("--calibration", "calibration.json")


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


def test_what_the_user_should_know_is_told(fitted):
    done, _ = fitted("valid.xyz", "--method", "species-scale", "--method", "conformal", "--level", "0.99")
    assert "e2ip: note: species-scale fitted to every second configuration" in done.stderr
    assert "e2ip: note: no finite conformal radius for level 0.99: 20 configurations" in done.stderr
    assert "factor on the covariance, O:" in done.stdout
    done, floor = fitted("valid.xyz", "--method", "floor")
    assert f"floor: {1000.0 * np.sqrt(floor.floor.value):.2f} meV/Å (" in done.stdout


@pytest.mark.usefixtures("rendered")
def test_calibrated_beside_raw(calibrated, compared):
    done, result, table = compared("test.xyz", "test.xyz", "--calibration", "none", *WITH)
    raw, corrected = result["models"]
    assert [raw["label"], corrected["label"]] == ["test", "test calibrated"]
    factor = Calibration.read("calibration.json").factor["C"].value
    assert raw["calibration"] is None and corrected["calibration"]["factor"]["H"] == factor
    assert corrected["overall"]["calibration_error"] < 0.03 < raw["overall"]["calibration_error"]
    assert corrected["overall"]["total_std"] == pytest.approx(np.sqrt(factor) * raw["overall"]["total_std"])
    assert corrected["overall"]["force_mae"] == raw["overall"]["force_mae"]
    conformal = corrected["calibration"]["conformal"]
    assert set(conformal) == {"0.5", "0.8", "0.9", "0.95"}
    assert conformal["0.9"]["coverage"] == pytest.approx(0.9, abs=0.05)
    assert f"| Conformal coverage at 90 % | >= 0.9 |  | {conformal['0.9']['coverage']:.3f} |" in table.splitlines()
    assert "calibrated (scale, conformal): `calibration.json`" in table and "Conformal coverage: share" in table
    assert "Conformal coverage at 90 %" in done.stdout and done.stderr == ""


def test_a_calibration_that_does_not_know_its_model_is_asked_about(calibrated, compared, change):
    change("test.xyz", lambda atoms: atoms.info.update(MACE_uq_model="readout-b"), "named.xyz")
    told = compared("named.xyz", *WITH)[0].stderr
    assert "without uq_model" in told and "(readout-b): is it for this model?" in told


def test_conformal_coverage_counts_configurations_alike(calibrated, compared, write, frames):
    """Not atoms: a test file of one configuration with all errors outside and one, larger, with all inside."""
    outside, inside = frames(5)[:2]
    outside.arrays["MACE_forces"] = outside.arrays["REF_forces"] + 10.0
    inside += inside.copy()
    inside.arrays["MACE_forces"] = inside.arrays["REF_forces"] + 0.001
    _, result, _ = compared(write("two.xyz", [outside, inside]), *WITH)
    assert result["models"][0]["calibration"]["conformal"]["0.9"]["coverage"] == 0.5


def test_both_sets_are_calibrated(calibrated, compared):
    _, result, _ = compared("test.xyz", "--ood", "ood.xyz", *WITH)
    for report in (result["models"][0], result["ood"]["models"][0]):
        assert report["calibration"]["file"] == "calibration.json"
        assert report["overall"]["calibration_error"] < 0.03


def test_atoms_without_reference_are_left_out(fitted, write, frames):
    holes = frames(0)
    holes[3].arrays["REF_forces"][4, 1] = np.nan
    holes[5].arrays["REF_forces"][:] = np.inf
    _, found = fitted(write("holes.xyz", holes), "--method", "conformal")
    # Frames that were looked at are known all the same.
    assert (found.configurations, found.atoms, len(found.frames)) == (39, 350, 40)


# What is refused


def test_a_calibration_is_not_judged_on_its_own_frames(calibrated, refuse, write, frames):
    text = "valid.xyz: 40 of its 40 frames are among those that calibration.json was fitted to"
    assert text in refuse("compare", "valid.xyz", *WITH)
    assert text in refuse("compare", "test.xyz", "--ood", "valid.xyz", *WITH)
    write("mixed.xyz", frames(3) + frames(0)[:1])
    assert "1 of its 41 frames" in refuse("compare", "mixed.xyz", *WITH)


def test_a_calibration_of_something_else_is_refused(calibrated, refuse, change):
    line = refuse("compare", "baseline.xyz", "test.xyz", *WITH, "--calibration", "none")
    assert "baseline.xyz: has no predicted distribution" in line

    def other_species(atoms):
        atoms.symbols[0] = "Si"

    def other_family(atoms):
        for name in ("log_sigma0", "nu", "kappa"):
            del atoms.arrays[f"MACE_e2ip_{name}"]
        atoms.arrays["MACE_gaussian_log_cov"] = np.tile([-4.0] * 3 + [0.0] * 3, (9, 1))
        atoms.info["MACE_uq_family"] = "gaussian"

    change("test.xyz", other_species, "silicon.xyz")
    assert "was fitted to C, H, O and knows nothing of Si, which silicon.xyz has" in refuse(
        "compare", "silicon.xyz", *WITH
    )
    change("test.xyz", other_family, "gaussian.xyz")
    line = refuse("compare", "gaussian.xyz", *WITH)
    assert "is for predictions of family 'niw', but gaussian.xyz has family 'gaussian'" in line


def test_a_calibration_of_another_model_is_refused(fitted, refuse, change):
    for source, name, uq_model in (("valid", "valid_1", "1"), ("test", "test_1", "1"), ("test", "test_2", "2")):
        model = f"readout-{uq_model}"
        change(f"{source}.xyz", lambda atoms, model=model: atoms.info.update(MACE_uq_model=model), f"{name}.xyz")
    _, named = fitted("valid_1.xyz")
    line = refuse("compare", "test_2.xyz", "--calibration", "fitted.json")
    assert "fitted.json: was fitted to predictions of another model (readout-1) than test_2.xyz has (" in line
    # Predictions of stock models' ensembles have no name.
    _, nameless = fitted("valid.xyz")
    assert nameless.uq_model is None
    for name, calibration in (("test_1.xyz", named), ("test.xyz", named), ("test_2.xyz", nameless)):
        load_models([name], calibrations=[calibration])


def test_every_model_needs_its_own_word(calibrated, refuse):
    line = refuse("compare", "test.xyz", "baseline.xyz", *WITH)
    assert "--calibration: 1 for 2 models; give one for each, in the same order, or none" in line


def test_predictions_that_were_calibrated(calibrated, refuse, compared, change):
    """They are shown as such, and not calibrated once more."""
    change("test.xyz", lambda atoms: atoms.info.update(MACE_uq_calibration="other.json"), "done.xyz")
    text = "done.xyz: was calibrated already, with other.json"
    assert text in refuse("compare", "done.xyz", *WITH)
    assert text in refuse("calibrate", "done.xyz", "--overwrite")
    done, result, table = compared("done.xyz", "test.xyz", "--ood", "ood.xyz", "--ood", "ood.xyz")
    assert done.stderr == f"e2ip: note: {text}\n"
    assert [m["file_calibration"] for m in result["models"]] == ["other.json", None]
    assert [m["calibration"] for m in result["models"]] == [None, None]
    assert table.count("was calibrated already, with `other.json`") == 1


def test_predictions_of_which_some_are_calibrated_are_refused(refuse, write, frames):
    half = frames(1)
    for atoms in half[20:]:
        atoms.info["MACE_uq_calibration"] = "other.json"
    line = refuse("compare", write("half.xyz", half))
    assert "uq_calibration is 'None' in frame 0 and 'other.json' in frame 20" in line


def test_radii_that_are_all_infinite_are_refused(folder, refuse, fitted):
    """40 configurations allow levels up to 40/41; beside a factor the note is enough."""
    line = refuse("calibrate", "valid.xyz", "--method", "conformal", "--level", "0.99", "--level", "0.98")
    assert "valid.xyz: 40 configurations allow conformal radii for levels up to 0.976" in line
    assert "for --level 0.98 give at least 49 of them" in line
    assert not (folder / "calibration.json").exists()
    for more in (("--level", "0.9"), ("--method", "scale")):
        done, _ = fitted("valid.xyz", "--method", "conformal", "--level", "0.99", *more)
        assert "no finite conformal radius for level 0.99" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing.xyz", "nothing.xyz: no such file"),
        (".", ".: is a folder"),
        ("baseline.xyz", "baseline.xyz: has no predicted distribution to calibrate"),
        ("valid.xyz --method platt", "--method platt: choose from floor, scale, species-scale, conformal"),
        ("valid.xyz --method scale --method floor", "scale and floor both set the size"),
        ("valid.xyz --level 0.9", "--level: only --method conformal has levels"),
        ("valid.xyz --method conformal --level 95", "--level 95: a level lies between 0 and 1"),
        ("valid.xyz --output test.xyz", "--output test.xyz: is there already"),
        ("valid.xyz --output valid.xyz --overwrite", "--output valid.xyz: is a file that this command reads"),
        ("valid.xyz --output no/where.json", "--output no/where.json: there is no folder no"),
        ("valid.xyz --ref-forces mine", "no forces named 'mine'"),
    ],
)
def test_input_that_cannot_be_fitted_to(folder, refuse, arguments, message):
    assert message in refuse("calibrate", *arguments.split())
    assert not (folder / "calibration.json").exists()


def test_forces_that_vanish_by_symmetry_say_nothing(fitted, refuse, compared, write, frames):
    """Isolated atoms, often among training frames: no error bar is too large for them; both files may have them."""
    copies = []
    for i in range(8):
        alone = frames(0)[0][:1]
        alone.positions += i
        for name in ("REF_forces", "MACE_forces"):
            alone.arrays[name][:] = 0.0
        copies.append(alone)
    _, without = fitted("valid.xyz")
    done, found = fitted(write("mixed.xyz", [*frames(0), *copies]))
    assert "8 atoms left out whose force vanishes by symmetry" in done.stderr
    assert without.factor == found.factor and found.configurations == FRAMES
    compared(write("test1.xyz", [copies[0], *frames(1)]), "--calibration", "fitted.json")
    assert "all forces vanish by symmetry" in refuse("calibrate", write("alone.xyz", copies))


def test_predictions_without_any_error(compared, change):
    change("test.xyz", lambda atoms: atoms.arrays.update(REF_forces=atoms.arrays["MACE_forces"].copy()), "perfect.xyz")
    _, result, _ = compared("perfect.xyz")
    assert result["models"][0]["overall"]["force_mae"] == 0.0


@pytest.mark.parametrize("method", ["scale", "species-scale", "floor"])
def test_the_order_of_the_frames_does_not_matter(fitted, write, frames, method):
    """What is drawn and what is halved are frames, not places in a file."""
    valid = frames(0)
    write("shuffled.xyz", [valid[i] for i in np.random.default_rng(0).permutation(FRAMES)])
    names = ("valid.xyz", "shuffled.xyz")
    one, other = (fitted(name, "--method", method, "--method", "conformal")[1] for name in names)
    assert one.radii == pytest.approx(other.radii, rel=1e-12)
    for symbol, constant in one.factor.items():
        assert constant.value == pytest.approx(other.factor[symbol].value, rel=1e-9)
        assert constant.interval == pytest.approx(other.factor[symbol].interval, rel=1e-9)
    assert one.floor.interval == pytest.approx(other.floor.interval, rel=1e-9)


def test_references_in_other_units_are_told(fitted, change):
    change("valid.xyz", lambda atoms: atoms.arrays.update(REF_forces=1e3 * atoms.arrays["REF_forces"]), "other.xyz")
    done, _ = fitted("other.xyz")
    told = "times the predicted ones, which are in eV/Å: is the model barely trained, or are they in meV/Å?"
    assert told in done.stderr


def test_one_file_with_several_calibrations(calibrated, fitted):
    """They are told apart by their names."""
    fitted("valid.xyz", "--method", "floor")
    found = [None, *(Calibration.read(name) for name in ("calibration.json", "fitted.json"))]
    labels = [model.label for model in load_models(["test.xyz"] * 3, calibrations=found)]
    assert labels == ["test", "test, calibration", "test, fitted"]


def test_copies_of_frames_count_once(fitted, run, write, frames):
    """NequIP's writer appends: twice the file would promise radii that forty configurations do not bear."""
    _, once = fitted("valid.xyz")
    done, twice = fitted(write("twice.xyz", 2 * frames(0)))
    assert "twice.xyz: 40 frames are there more than once" in done.stderr
    assert {**vars(once), "file": ""} == {**vars(twice), "file": ""}
    done = run("calibrate", "twice.xyz", "--method", "conformal", "--level", "0.98")
    assert done.exit_code == 2 and "twice.xyz: 40 configurations allow" in done.stderr
    # Of copies without references, wherever they stand, nothing is said but that.
    unlabelled = frames(0)[:20]
    for atoms in unlabelled:
        del atoms.arrays["REF_forces"]
    done, first = fitted(write("first.xyz", [*unlabelled, *frames(0)]))
    assert "first.xyz: 20 frames are there more than once" in done.stderr
    assert {**vars(once), "file": ""} == {**vars(first), "file": ""}


@pytest.mark.parametrize(
    ("column", "factor", "message"),
    [
        ("MACE_forces", 1.1, "different predictions"),
        ("MACE_e2ip_nu", 2.0, "different predictions"),
        ("REF_forces", 1.1, "different reference forces: of two methods?"),
    ],
)
def test_copies_that_differ_are_refused(refuse, write, frames, column, factor, message):
    other = frames(0)[3]
    other.arrays[column] *= factor
    line = refuse("calibrate", write("another.xyz", [*frames(0), other]))
    assert f"frames 3 and 40 are the same structure with {message}" in line


@pytest.mark.parametrize("text", ["", "{}", '{"format": "e2ip calibration", "version": 7}'])
def test_broken_calibrations_end_before_predictions_are_read(folder, refuse, text):
    (folder / "broken.json").write_text(text)
    assert "broken.json: " in refuse("compare", "test.xyz", "--calibration", "broken.json")
    assert "missing.json: cannot be read" in refuse("compare", "test.xyz", "--calibration", "missing.json")
