"""`e2ip compare` from files to table, JSON and figure page, and the input that it refuses (`--ood`: test_ood.py)."""

import json

import ase
import ase.io
import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.report.compare import compare, load_models

FRAMES, ATOMS = 20, 9


def make_frames(offset, uncertain, inflate=1.0):
    """CH2O3… frames with references of one seed; ν = 8, κ = 2, Σ0 = (0.1 eV/Å)² I."""
    rng = np.random.default_rng(0)
    noise = np.random.default_rng(offset)
    frames = []
    for _ in range(FRAMES):
        atoms = ase.Atoms("CH2O3CH2", rng.normal(size=(ATOMS, 3)))
        atoms.arrays["REF_forces"] = rng.normal(size=(ATOMS, 3))
        atoms.info["REF_energy"] = 10.0
        t = noise.normal(size=(ATOMS, 3)) / np.sqrt(noise.chisquare(6, (ATOMS, 1)) / 6)
        scale = 0.1 * np.sqrt(8 * 3 / (2 * 6))
        atoms.arrays["MACE_forces"] = atoms.arrays["REF_forces"] - inflate * scale * t
        atoms.info["MACE_energy"] = 10.0 + 0.09
        if uncertain:
            atoms.arrays["MACE_e2ip_log_sigma0"] = np.tile([2 * np.log(0.1)] * 3 + [0.0] * 3, (ATOMS, 1))
            atoms.arrays["MACE_e2ip_nu"] = np.full(ATOMS, 8.0)
            atoms.arrays["MACE_e2ip_kappa"] = np.full(ATOMS, 2.0)
            atoms.info["MACE_uq_family"] = "niw"
        frames.append(atoms)
    return frames


def write(path, frames):
    ase.io.write(path, frames, format="extxyz")
    return path


@pytest.fixture
def baseline(tmp_path):
    return write(tmp_path / "baseline.xyz", make_frames(1, uncertain=False))


@pytest.fixture
def e2ip(tmp_path):
    return write(tmp_path / "e2ip.xyz", make_frames(2, uncertain=True))


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_figures_of_a_known_model(baseline, e2ip):
    result = compare(load_models([baseline, e2ip], ["MACE", "e²IP"]))
    base, ours = result["models"]
    assert [m["label"] for m in result["models"]] == ["MACE", "e²IP"]
    assert set(ours["species"]) == {"C", "H", "O"}
    assert sum(s["atoms"] for s in ours["species"].values()) == ours["overall"]["atoms"] == FRAMES * ATOMS
    for m in (base, ours):
        assert m["overall"]["energy_mae"] == pytest.approx(0.01)
    # U_epi = Σ0 ν/(κ(ν-4)) = Σ0, and the covariance is (2 + 1) Σ0.
    assert ours["overall"]["epistemic_std"] == pytest.approx(0.1)
    assert ours["overall"]["total_std"] == pytest.approx(0.1 * np.sqrt(3))
    assert ours["overall"]["coverage80"] == pytest.approx(0.8, abs=0.12)
    # One uncertainty for every atom ranks nothing.
    assert ours["overall"]["spearman_total"] is None and ours["overall"]["auroc_total"] is None
    # A density per (kcal/mol/Å)³ and the score in kcal/mol/Å.
    nll, nll_kcal = ours["overall"]["nll"], ours["overall"]["nll_kcal"]
    assert nll_kcal - nll == pytest.approx(-3 * np.log(KCAL_PER_MOL))
    assert ours["overall"]["energy_score_kcal"] == pytest.approx(ours["overall"]["energy_score"] / KCAL_PER_MOL)


def test_nothing_is_invented_for_a_baseline(baseline, e2ip):
    base, ours = compare(load_models([baseline, e2ip]))["models"]
    assert set(base["overall"]) == set(ours["overall"])
    given = {k for k, v in base["overall"].items() if v is not None}
    assert given == {"atoms", "force_mae", "force_rmse", "energy_mae"}
    assert base["observed_coverage"] is None and len(ours["observed_coverage"]) == 99


def test_intervals_of_coverages(baseline, e2ip):
    """Of all atoms and of species; frames are what is drawn, and twice as many make them narrower by √2."""
    base, ours = compare(load_models([baseline, e2ip]))["models"]
    assert base["interval95"] is None
    found = ours["interval95"]
    assert set(found["species"]) == {"C", "H", "O"}
    names = {"calibration_error", "coverage50", "coverage80", "coverage90", "coverage95"}
    for figures, intervals in [
        (ours["overall"], found["overall"]),
        *((ours["species"][symbol], found["species"][symbol]) for symbol in "CHO"),
    ]:
        assert set(intervals) == names
        assert all(low <= figures[name] <= high for name, (low, high) in intervals.items())
    curves = found["observed_coverage"]
    assert [curves["low"][49], curves["high"][49]] == found["overall"]["coverage50"]
    assert (np.array(curves["low"]) <= ours["observed_coverage"]).all() and len(curves["high"]) == 99
    # Other frames, if not by much: copies would count once.
    moved = make_frames(2, uncertain=True)
    for atoms in moved:
        atoms.positions[0] += 1e-3
    (twice,) = compare(load_models([write(e2ip.with_name("twice.xyz"), [*make_frames(2, True), *moved])]))["models"]
    width = np.diff(found["overall"]["coverage80"])
    assert np.diff(twice["interval95"]["overall"]["coverage80"]) == pytest.approx(width / np.sqrt(2), rel=0.25)


def test_copies_count_once(baseline, e2ip, tmp_path):
    """NequIP's writer appends where a test is run twice; also where the other file has no copies."""
    ours = make_frames(2, uncertain=True)
    twice = write(tmp_path / "twice.xyz", ours + ours[:3])
    base, found = load_models([baseline, twice])
    assert found.left_out == ["3 frames are there more than once, and count once"] and not base.left_out
    figures, once = (compare(models)["models"][1] for models in ([base, found], load_models([baseline, e2ip])))
    assert {**figures, "file": 0, "label": 0, "left_out": 0} == {**once, "file": 0, "label": 0, "left_out": 0}
    assert "twice.xyz: 3 frames are there more" in run("compare", baseline, twice, "--out", tmp_path / "out").output
    # Of two models: those of one structure cannot both be right.
    other = make_frames(3, uncertain=True)
    both = [write(tmp_path / f"both{i}.xyz", ours + other) for i in range(2)]
    for model in load_models(both):
        assert model.left_out[0].startswith(
            "frames 0 and 20 are the same structure with different predictions (20 such"
        )
        assert len(model.predictions.sizes) == 2 * FRAMES
    # The number of a frame is that in the file.
    other[5].arrays["REF_forces"][0] += 1.0
    with pytest.raises(InputError, match=r"twice\.xyz: the reference forces of frame 8 "):
        write(twice, [*ours[:3], *ours[:5], other[5], *ours[6:]])
        load_models([e2ip, twice])


def test_references_in_other_units_are_told(e2ip, tmp_path):
    frames = make_frames(2, uncertain=True)
    for atoms in frames:
        atoms.arrays["REF_forces"] = atoms.arrays["REF_forces"] / KCAL_PER_MOL
    out = run("compare", write(tmp_path / "kcal.xyz", frames), "--out", tmp_path / "out").output
    assert "kcal.xyz: the reference forces are 22" in out and "kcal/mol/Å?" in out
    assert "reference forces are" not in run("compare", e2ip, "--out", tmp_path / "out").output


def test_covariances_without_full_rank_are_told(tmp_path):
    frames = make_frames(2, uncertain=True)
    for atoms in frames[:2]:
        atoms.arrays["MACE_e2ip_log_sigma0"][0, 0] = -40.0
    out = run("compare", write(tmp_path / "flat.xyz", frames), "--out", tmp_path / "out").output
    assert "flat.xyz: covariances of 2 atoms have no full rank" in out and "--isotropic" in out


def test_energy_scores_that_are_sampled_have_their_error(e2ip, tmp_path):
    """Those of family `eip`; others have none. 180 atoms: the error of the mean is 13 times less than that of one."""
    frames = make_frames(2, uncertain=False)
    for atoms in frames:
        atoms.info["MACE_uq_family"] = "nig"
        columns = {"shift": 0.0, "log_scale2": 2 * np.log(0.14), "dof": 6.0, "epistemic_share": 0.5}
        for name, value in columns.items():
            atoms.arrays[f"MACE_eip_{name}"] = np.full((len(atoms), 3), value)
    path = write(tmp_path / "eip.xyz", frames)
    done = run("compare", path, e2ip, "--out", tmp_path / "out", "--unit", "kcal")
    assert done.exit_code == 0, done.output
    sampled, exact = (m["overall"] for m in json.loads((tmp_path / "out" / "compare.json").read_text())["models"])
    assert exact["energy_score_error"] == 0.0
    (model, _) = load_models([path, e2ip])
    law = law_of(model.predictions.family, model.predictions.parameters)
    one = np.sqrt(np.square(law.energy_score_error(model.scores["error"])).mean())
    assert sampled["energy_score_error"] == pytest.approx(one / np.sqrt(FRAMES * ATOMS), rel=1e-9)
    assert 0 < sampled["energy_score_error"] < 0.01 * sampled["energy_score"]
    cells = f"{sampled['energy_score_kcal']:.4f} ± {sampled['energy_score_error_kcal']:.4f}"
    assert sampled["energy_score_error_kcal"] == pytest.approx(sampled["energy_score_error"] / KCAL_PER_MOL)
    row = f"| Energy score (kcal/mol/Å) | low | {cells} | {exact['energy_score_kcal']:.4f} |"
    assert row in (tmp_path / "out" / "compare.md").read_text()
    assert cells in done.stdout


def test_command_writes_everything(baseline, e2ip, tmp_path):
    out = tmp_path / "new" / "folder"
    done = run("compare", baseline, e2ip, "--out", out, "--labels", "MACE, e2IP")
    assert done.exit_code == 0, done.output
    for text in ("Force MAE (meV/Å)", "Calibration error", "MACE", "e2IP"):
        assert text in done.stdout
    result = json.loads((out / "compare.json").read_text())
    assert result == compare(load_models([baseline, e2ip], ["MACE", "e2IP"]))
    table = (out / "compare.md").read_text()
    nll = next(line for line in table.splitlines() if line.startswith("| NLL"))
    assert nll == f"| NLL (nats) | low |  | {result['models'][1]['overall']['nll']:.3f} |"
    mae = next(line for line in table.splitlines() if line.startswith("| Force MAE"))
    assert mae.split("|")[3].strip() == f"{1e3 * result['models'][0]['overall']['force_mae']:.2f}"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "compare.pdf").read_bytes().startswith(b"%PDF")


def test_units_of_the_paper(baseline, e2ip, tmp_path):
    done = run("compare", e2ip, "--out", tmp_path / "out", "--unit", "kcal")
    assert done.exit_code == 0, done.output
    overall = json.loads((tmp_path / "out" / "compare.json").read_text())["models"][0]["overall"]
    table = (tmp_path / "out" / "compare.md").read_text()
    assert f"| NLL (nats) | low | {overall['nll_kcal']:.3f} |" in table
    assert f"| Force MAE (kcal/mol/Å) | low | {overall['force_mae'] / KCAL_PER_MOL:.4f} |" in table


def test_baselines_alone(baseline, tmp_path):
    """Also under one species, and without energies."""
    frames = make_frames(3, uncertain=False)
    for atoms in frames:
        del atoms.info["MACE_energy"]
        atoms.symbols[:] = "H"
    path = write(tmp_path / "hydrogen.xyz", frames)
    done = run("compare", path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["models"][0]["overall"]["energy_mae"] is None


def test_atoms_without_reference_are_left_out_with_a_warning(tmp_path):
    frames, whole = make_frames(2, uncertain=True), make_frames(2, uncertain=True)
    frames[3].arrays["REF_forces"][4, 1] = np.nan
    frames[5].arrays["REF_forces"][0] = np.inf
    frames[7].info["REF_energy"] = np.nan
    for name in ("REF_forces", "MACE_forces"):  # an isolated atom's, which every model knows
        frames[9].arrays[name][2] = whole[9].arrays[name][2] = 0.0
    done = run("compare", write(tmp_path / "holes.xyz", frames), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "2 atoms without finite reference forces left out" in done.stderr
    assert "1 frames without a finite reference energy" in done.stderr
    assert "1 atoms whose force vanishes by symmetry" in done.stderr
    model = json.loads((tmp_path / "out" / "compare.json").read_text())["models"][0]
    assert model["masked_atoms"] == 2 and model["overall"]["atoms"] == FRAMES * ATOMS - 2
    error = np.concatenate([a.arrays["REF_forces"] - a.arrays["MACE_forces"] for a in whole])
    keep = np.ones(FRAMES * ATOMS, dtype=bool)
    keep[[3 * ATOMS + 4, 5 * ATOMS]] = False
    assert model["overall"]["force_mae"] == pytest.approx(np.abs(error[keep]).mean(), rel=1e-6)


def fewer(frames):
    del frames[-1]


def species(frames):
    frames[4].symbols[2] = "N"


def other_size(frames):
    frames[6] = frames[6][:-1]


def references(frames):
    frames[5].arrays["REF_forces"][3, 0] += 0.01


@pytest.mark.parametrize(
    "change, message",
    [
        (fewer, "has 19 frames, but"),
        (species, "species of frame 4 differ"),
        (other_size, "species of frame 6 differ"),
        (references, "reference forces of frame 5 differ"),
    ],
)
def test_different_frames_are_refused(baseline, tmp_path, change, message):
    frames = make_frames(2, uncertain=True)
    change(frames)
    other = write(tmp_path / "other.xyz", frames)
    done = run("compare", baseline, other, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and message in done.stderr
    assert "other.xyz" in done.stderr and "baseline.xyz" in done.stderr
    assert not (tmp_path / "out").exists()


def test_digits_lost_on_the_way_are_forgiven(baseline, tmp_path):
    frames = make_frames(2, uncertain=True)
    for atoms in frames:
        atoms.arrays["REF_forces"] = atoms.arrays["REF_forces"].astype(np.float32).round(6).astype(float)
    load_models([baseline, write(tmp_path / "other.xyz", frames)])


def test_other_bad_input(baseline, e2ip, tmp_path):
    for arguments, message in [
        ((tmp_path / "none.xyz",), "none.xyz: no such file"),
        ((baseline, e2ip, "--labels", "one"), "1 labels for 2 files"),
        ((baseline, e2ip, "--labels", "a,a"), "'a' stands for 2 files"),
        ((baseline, "--ref-forces", "x_forces"), "no forces named 'x_forces'"),
        ((baseline, "--out", e2ip), "cannot make this folder"),
    ]:
        done = run("compare", *arguments)
        assert done.exit_code == 2, arguments
        assert done.stderr.startswith("e2ip: error: ") and message in done.stderr
    assert run("compare", baseline, "--unit", "furlong").exit_code == 2
    with pytest.raises(InputError, match="nothing to compare"):
        load_models([])
    frames = make_frames(1, uncertain=False)
    for atoms in frames:
        atoms.arrays["REF_forces"][:] = np.nan
    with pytest.raises(InputError, match="no atom has a finite reference force"):
        load_models([write(tmp_path / "nan.xyz", frames)])


def test_equal_file_names_are_told_apart_by_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write(tmp_path / n / "test.xyz", make_frames(1, uncertain=False)) for n in ("a", "b")]
    assert [m.label for m in load_models(paths)] == ["a", "b"]


def test_version():
    from e2ip_plugins import __version__

    done = run("--version")
    assert done.exit_code == 0 and done.stdout.strip() == __version__


def test_a_family_that_nobody_else_knows(tmp_path, toy_family):
    """Density and coverage of a file whose family is one file more: against SciPy, here a Gaussian."""
    frames = make_frames(1, uncertain=False)
    expected = []
    for i, atoms in enumerate(frames):
        log_std = np.log(0.1) + 0.1 * np.random.default_rng(i).normal(size=len(atoms))
        atoms.info["MACE_uq_family"] = toy_family.uq_family
        atoms.arrays["MACE_isotropic_log_std"] = log_std
        error = atoms.arrays["REF_forces"] - atoms.arrays["MACE_forces"]
        expected.append(-norm(scale=np.exp(log_std)[:, None]).logpdf(error).sum(-1))
    ase.io.write(tmp_path / "toy.xyz", frames, format="extxyz")
    (model,) = compare(load_models([tmp_path / "toy.xyz"]))["models"]
    assert model["uq_family"] == "isotropic"
    assert model["overall"]["nll"] == pytest.approx(np.concatenate(expected).mean(), rel=1e-6)
    assert model["overall"]["coverage95"] is not None and model["overall"]["energy_score"] > 0
