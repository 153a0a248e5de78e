"""From prediction files to the tables of `e2ip bench`."""

import json
import shutil
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
from scipy.linalg import expm, logm
from typer.testing import CliRunner

from e2ip_plugins.bench import data, judge, plan, tables
from e2ip_plugins.bench.catalogue import dataset
from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError

#: Files of results in this repository.
RESULTS = [Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json" for name in ("bench", "calibration")]

SIZE, FRAMES = 6, {"valid": 40, "further": 50, "test": 60}
DATASET = dataset("aspirin")


def sym6(matrix):
    return matrix[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]


def matrix(x):
    return np.array([[x[0], x[5], x[4]], [x[5], x[1], x[3]], [x[4], x[3], x[2]]])


def frames(label, seed, uncertain, turning=True):
    """Predictions with Gaussian errors of the covariance that they come with; ``rotated`` are those of the test."""
    of_test = "test" if label == "rotated" else label
    fixed = np.random.default_rng(len(of_test))
    rng = np.random.default_rng([seed, len(of_test)])
    found = []
    for turn in data.rotations(FRAMES[of_test]):
        positions, reference = fixed.normal(size=(SIZE, 3)), fixed.normal(size=(SIZE, 3))
        logs = [matrix(0.3 * rng.normal(size=6)) - 5.0 * np.eye(3) for _ in range(SIZE)]
        error = np.stack([np.linalg.cholesky(expm(log)) @ rng.normal(size=3) for log in logs])
        turn = turn if label == "rotated" else np.eye(3)
        atoms = ase.Atoms("CCCOHH", positions @ turn.T)
        atoms.info |= {"REF_energy": 0.0, "MACE_energy": 0.1}
        atoms.new_array("REF_forces", reference @ turn.T)
        atoms.new_array("MACE_forces", (reference - error) @ turn.T)
        if uncertain:
            turned = [turn @ log @ turn.T if turning else log for log in logs]
            atoms.new_array("MACE_gaussian_log_cov", np.stack([sym6(log) for log in turned]))
            atoms.info["MACE_uq_family"] = "gaussian"
        found.append(atoms)
    return found


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Finished runs of a stock model, `mve` (two members each, in the smoke preset) and `mve-spd`, with their table."""
    folder = tmp_path_factory.mktemp("judged")
    for method, seeds in (("stock", (1, 2)), ("mve", (1, 2)), ("mve-spd", (1,))):
        for seed in seeds:
            run = folder / "runs" / plan.Run("aspirin", "mace", method, seed).name
            run.mkdir(parents=True)
            for label in DATASET.labels:
                found = frames(label, seed, method != "stock", turning=method != "mve")
                ase.io.write(run / f"{label}.xyz", found, format="extxyz")
            (run / "finished").touch()
    tables.write(plan.Plan.of(plan.Options("rmd17", "mace", out=folder)))
    return folder


@pytest.fixture
def out(judged, tmp_path):
    return shutil.copytree(judged, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def written(out, plan_of):
    """Writes the table; its page and rows."""

    def write():
        page, raw = tables.write(plan_of(sets="aspirin"))
        return page.read_text(), json.loads(raw.read_text())

    return write


def test_table(written):
    text, rows = written()
    # What is not finished is not there.
    assert [row["title"] for row in rows] == [
        "stock model", "DE, K = 2", "DE, isotropic", "MVE", "MVE-DE, K = 2", "MVE, equivariant covariance"
    ]  # fmt: skip
    assert "### aspirin, test" in text and "| paper | e²IP | raw |" in text and "| 0.272 |" in text
    spd = rows[-1]["cases"][0]["tests"]["test"]
    assert set(spd) == {"raw", "floor", "scale", "scale, further frames"}
    # The errors are of that covariance.
    assert spd["raw"]["calibration_error"] < 0.05 and spd["raw"]["coverage95"] == pytest.approx(0.95, abs=0.04)
    assert spd["scale"]["nll_kcal"] == pytest.approx(spd["raw"]["nll_kcal"], abs=0.05)
    stock = rows[0]["cases"][0]["tests"]["test"]
    assert set(stock) == {"raw"} and "nll_kcal" not in stock["raw"]
    one, isotropic = (rows[i]["cases"][0]["tests"]["test"]["raw"] for i in (1, 2))
    assert isotropic["force_mae"] == one["force_mae"] and isotropic["nll_kcal"] != one["nll_kcal"]
    floor, raw = ([line for line in text.splitlines() if f"| DE, K = 2 | {how} |" in line] for how in ("floor", "raw"))
    assert "|  |  |  |" not in floor[0] and "|  |  |  |" in raw[0]  # coverage, CE and NLL
    line = next(line for line in text.splitlines() if line.startswith("| mace | stock model"))
    mae = np.mean([case["tests"]["test"]["raw"]["force_mae"] for case in rows[0]["cases"]]) / 0.0433641
    assert f"| {mae:.3f} ± " in line


def test_a_call_for_a_part_leaves_the_rest_in_the_table(out):
    words = ["bench", "rmd17", "--host", "mace", "--preset", "smoke", "--tables", "--out", out]
    result = CliRunner().invoke(app, [*map(str, words), "--sets", "aspirin", "--methods", "stock"])
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "rmd17_smoke.json").read_text())
    assert "MVE" in [row["title"] for row in rows]


def test_rotated_frames_tell_who_turns_with_the_structure(written):
    text, rows = written()
    found = {row["title"]: row["cases"][0].get("rotation") for row in rows}
    spd, mve = found["MVE, equivariant covariance"], found["MVE"]
    assert "| mace | MVE, equivariant covariance | yes |" in text and "| mace | MVE | no |" in text
    assert found["stock model"] is None
    # Files have eight decimals.
    assert spd["covariance_largest"] < 1e-6 and spd["nll"] < 1e-5 and spd["spearman"] < 1e-3 and spd["forces"] < 1e-6
    assert mve["covariance"] > 0.1 and mve["nll"] > 1e-3 and mve["forces"] < 1e-6
    turn, log = data.rotations(1)[0], frames("test", 1, True)[0].arrays["MACE_gaussian_log_cov"][0]
    expected = turn @ expm(matrix(log)) @ turn.T
    assert np.allclose(logm(expected), turn @ matrix(log) @ turn.T)


def test_scores_are_kept_without_the_predictions(out, written):
    before = written()
    for path in [*out.glob("runs/*/*.xyz"), *out.glob("ensembles/*/*.xyz")]:
        path.unlink()
    assert written() == before
    # What cannot be made any more, because there was no such row when the predictions existed.
    (out / "ensembles" / "aspirin_mace_DE-isotropic" / "scores.json").unlink()
    assert "DE, isotropic" not in written()[0]


def test_damaged_and_missing_files_are_named(out, written):
    written()
    (out / "cost").mkdir()
    for kept in (*out.glob("runs/*/scores.json"), out / "cost" / "aspirin_mace.json"):
        text = kept.read_text() if kept.exists() else None
        kept.write_text("{")
        with pytest.raises(InputError, match=f"{kept}: cannot be read as JSON .*; remove it"):
            written()
        kept.write_text(text) if text else kept.unlink()
    scores = next(out.glob("runs/*/scores.json"))
    scores.unlink()
    (scores.parent / "test.xyz").unlink()
    with pytest.raises(InputError, match=f"test.xyz: is missing, .* remove the folder {scores.parent}"):
        written()


def test_a_new_prediction_is_judged_anew(out):
    case = judge.Case(out / "runs" / "aspirin_mace_mve-spd_s1", {})
    folder = case.folder
    case = case._replace(files={label: folder / f"{label}.xyz" for label in DATASET.labels})
    before = judge.judge(case)["tests"]["test"]["raw"]["nll"]
    ase.io.write(folder / "test.xyz", frames("test", 9, True), format="extxyz")
    assert judge.judge(case)["tests"]["test"]["raw"]["nll"] != before


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_tables_that_the_documentation_shows_follow_from_the_results(path):
    assert tables.markdown(tables.read_results(path), {}) == path.with_suffix(".md").read_text(encoding="utf-8")
