"""`e2ip compare` from files to table, JSON and figure page, and the input that it refuses (`--ood`: test_ood.py)."""

import numpy as np
import pytest
from scipy.stats import norm

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.report.compare import compare, load_models

FRAMES, ATOMS = 20, 9


@pytest.fixture
def baseline(write, make_frames):
    return write("baseline.xyz", make_frames(1, uncertain=False))


@pytest.fixture
def e2ip(write, make_frames):
    return write("e2ip.xyz", make_frames(2))


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
    known = {k for k, v in base["overall"].items() if v is not None}
    assert known == {"atoms", "force_mae", "force_rmse", "energy_mae"}
    assert base["observed_coverage"] is None and len(ours["observed_coverage"]) == 99


def test_intervals_of_coverages(baseline, e2ip, write, make_frames):
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
    moved = make_frames(2)
    for atoms in moved:
        atoms.positions[0] += 1e-3
    (twice,) = compare(load_models([write("twice.xyz", make_frames(2) + moved)]))["models"]
    width = np.diff(found["overall"]["coverage80"])
    assert np.diff(twice["interval95"]["overall"]["coverage80"]) == pytest.approx(width / np.sqrt(2), rel=0.25)


def test_copies_count_once(baseline, e2ip, write, make_frames, compared):
    """NequIP's writer appends where a test is run twice; also where the other file has no copies."""
    ours = make_frames(2)
    twice = write("twice.xyz", ours + ours[:3])
    base, found = load_models([baseline, twice])
    assert found.left_out == ["3 frames are there more than once, and count once"] and not base.left_out
    figures, once = (compare(models)["models"][1] for models in ([base, found], load_models([baseline, e2ip])))
    assert {**figures, "file": 0, "label": 0, "left_out": 0} == {**once, "file": 0, "label": 0, "left_out": 0}
    assert "twice.xyz: 3 frames are there more" in compared(baseline, twice)[0].stderr
    # Of two models: those of one structure cannot both be right.
    other = make_frames(3)
    both = [write(f"both{i}.xyz", ours + other) for i in range(2)]
    text = "frames 0 and 20 are the same structure with different predictions (20 such"
    for model in load_models(both):
        assert model.left_out[0].startswith(text) and len(model.predictions.sizes) == 2 * FRAMES
    # The number of a frame is that in the file.
    other[5].arrays["REF_forces"][0] += 1.0
    with pytest.raises(InputError, match=r"twice\.xyz: the reference forces of frame 8 "):
        load_models([e2ip, write("twice.xyz", [*ours[:3], *ours[:5], other[5], *ours[6:]])])


def test_doubts_about_files_are_told(e2ip, change):
    """References in other units, and covariances without full rank."""

    def in_kcal(atoms):
        atoms.arrays["REF_forces"] /= KCAL_PER_MOL

    def flat(atoms):
        atoms.arrays["MACE_e2ip_log_sigma0"][0, 0] = -40.0

    def doubts(path):
        (model,) = load_models([path])
        return model.left_out

    assert doubts(e2ip) == []
    (text,) = doubts(change(e2ip, in_kcal, "kcal.xyz"))
    assert text.startswith("the reference forces are 22") and "kcal/mol/Å?" in text
    (text,) = doubts(change(e2ip, flat, "flat.xyz"))
    assert text.startswith("covariances of 20 atoms have no full rank") and "--isotropic" in text


def test_energy_scores_that_are_sampled_have_their_error(baseline, e2ip, change, compared):
    """Those of family `eip`; others have none. 180 atoms: the error of the mean is 13 times less than that of one."""

    def add_family(atoms):
        atoms.info["MACE_uq_family"] = "nig"
        for name, value in {"shift": 0.0, "log_scale2": 2 * np.log(0.14), "dof": 6.0, "epistemic_share": 0.5}.items():
            atoms.arrays[f"MACE_eip_{name}"] = np.full((len(atoms), 3), value)

    path = change(baseline, add_family, "eip.xyz")
    done, result, table = compared(path, e2ip, "--unit", "kcal")
    sampled, exact = (m["overall"] for m in result["models"])
    assert exact["energy_score_error"] == 0.0
    (model, _) = load_models([path, e2ip])
    law = law_of(model.predictions.family, model.predictions.parameters)
    one = np.sqrt(np.square(law.energy_score_error(model.scores["error"])).mean())
    assert sampled["energy_score_error"] == pytest.approx(one / np.sqrt(FRAMES * ATOMS), rel=1e-9)
    assert 0 < sampled["energy_score_error"] < 0.01 * sampled["energy_score"]
    cells = f"{sampled['energy_score_kcal']:.4f} ± {sampled['energy_score_error_kcal']:.4f}"
    assert sampled["energy_score_error_kcal"] == pytest.approx(sampled["energy_score_error"] / KCAL_PER_MOL)
    assert f"| Energy score (kcal/mol/Å) | low | {cells} | {exact['energy_score_kcal']:.4f} |" in table
    assert cells in done.stdout


@pytest.mark.usefixtures("rendered")
def test_command_writes_everything(baseline, e2ip, folder, compared):
    done, result, table = compared(baseline, e2ip, "--labels", "MACE, e2IP")
    for text in ("Force MAE (meV/Å)", "Calibration error", "MACE", "e2IP"):
        assert text in done.stdout
    assert result == compare(load_models([baseline, e2ip], ["MACE", "e2IP"]))
    base, ours = (m["overall"] for m in result["models"])
    assert f"| NLL (nats) | low |  | {ours['nll']:.3f} |" in table.splitlines()
    mae = f"| Force MAE (meV/Å) | low | {1e3 * base['force_mae']:.2f} | {1e3 * ours['force_mae']:.2f} |"
    assert mae in table.splitlines() and "{" not in table
    assert (folder / "e2ip_compare/compare.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "e2ip_compare/compare.pdf").read_bytes().startswith(b"%PDF")


def test_calibration_error_is_printed_with_its_interval(baseline, e2ip, write, make_frames, compared):
    """Every model with error bars has one, unless it has a single frame. No other figure of the table has brackets."""
    done, result, table = compared(baseline, e2ip)
    ours = result["models"][1]
    low, high = ours["interval95"]["overall"]["calibration_error"]
    figure = f"{ours['overall']['calibration_error']:.4f} ({low:.4f} to {high:.4f})"
    assert f"| Calibration error CE | 0 |  | {figure} |" in table.splitlines()
    assert table.split("## Per species")[0].count(" to ") == table.split("## Over all atoms")[0].count(" to ") + 1
    assert f"({low:.4f} to {high:.4f})" in " ".join(done.stdout.split())
    _, result, table = compared(write("one.xyz", make_frames(2, count=1)))
    figure = f"{result['models'][0]['overall']['calibration_error']:.4f}"
    assert f"| Calibration error CE | 0 | {figure} |" in table.splitlines()


def test_units_of_the_paper(e2ip, compared):
    _, result, table = compared(e2ip, "--unit", "kcal")
    overall = result["models"][0]["overall"]
    assert f"| NLL (nats) | low | {overall['nll_kcal']:.3f} |" in table
    assert f"| Force MAE (kcal/mol/Å) | low | {overall['force_mae'] / KCAL_PER_MOL:.4f} |" in table


def test_baselines_alone(baseline, folder, change, succeed):
    """Also under one species, without energies, and in a folder that is not there yet."""

    def bare(atoms):
        del atoms.info["MACE_energy"]
        atoms.symbols[:] = "H"

    succeed("compare", change(baseline, bare), "--out", folder / "new" / "folder")
    assert '"energy_mae": null' in (folder / "new" / "folder" / "compare.json").read_text()


def test_atoms_without_reference_are_left_out_with_a_warning(write, make_frames, compared):
    frames, whole = make_frames(2), make_frames(2)
    frames[3].arrays["REF_forces"][4, 1] = np.nan
    frames[5].arrays["REF_forces"][0] = np.inf
    frames[7].info["REF_energy"] = np.nan
    for name in ("REF_forces", "MACE_forces"):  # an isolated atom's, which every model knows
        frames[9].arrays[name][2] = whole[9].arrays[name][2] = 0.0
    done, result, _ = compared(write("holes.xyz", frames))
    for text in (
        "2 atoms without finite reference forces left out",
        "1 frames without a finite reference energy",
        "1 atoms whose force vanishes by symmetry",
    ):
        assert text in done.stderr
    model = result["models"][0]
    assert model["masked_atoms"] == 2 and model["overall"]["atoms"] == FRAMES * ATOMS - 2
    error = np.concatenate([a.arrays["REF_forces"] - a.arrays["MACE_forces"] for a in whole])
    error = np.delete(error, [3 * ATOMS + 4, 5 * ATOMS], axis=0)
    assert model["overall"]["force_mae"] == pytest.approx(np.abs(error).mean(), rel=1e-6)


def fewer(frames):
    del frames[-1]


def other_species(frames):
    frames[4].symbols[2] = "N"


def other_size(frames):
    frames[6] = frames[6][:-1]


def other_references(frames):
    frames[5].arrays["REF_forces"][3, 0] += 0.01


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (fewer, "has 19 frames, but"),
        (other_species, "species of frame 4 differ"),
        (other_size, "species of frame 6 differ"),
        (other_references, "reference forces of frame 5 differ"),
    ],
)
def test_different_frames_are_refused(baseline, folder, write, make_frames, refuse, spoil, message):
    frames = make_frames(2)
    spoil(frames)
    line = refuse("compare", baseline, write("other.xyz", frames))
    assert message in line and "other.xyz" in line and "baseline.xyz" in line
    assert not (folder / "e2ip_compare").exists()


def test_digits_lost_on_the_way_are_forgiven(baseline, e2ip, change):
    def shorten(atoms):
        atoms.arrays["REF_forces"] = atoms.arrays["REF_forces"].astype(np.float32).round(6).astype(float)

    load_models([baseline, change(e2ip, shorten)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("none.xyz", "none.xyz: no such file"),
        ("baseline.xyz e2ip.xyz --labels one", "1 labels for 2 files"),
        ("baseline.xyz e2ip.xyz --labels a,a", "'a' stands for 2 files"),
        ("baseline.xyz --ref-forces x_forces", "no forces named 'x_forces'"),
        ("baseline.xyz --out e2ip.xyz", "--output e2ip.xyz: is a file; give a folder"),
        ("baseline.xyz --out e2ip.xyz/new", "cannot make this folder"),
        ("baseline.xyz@first", "baseline.xyz@first: no such file (and 'first' is no slice, such as :100 or ::10)"),
        ("nan.xyz", "no atom has a finite reference force"),
    ],
)
def test_other_bad_input(baseline, e2ip, change, refuse, arguments, message):
    change("baseline.xyz", lambda atoms: atoms.arrays["REF_forces"].fill(np.nan), "nan.xyz")
    assert message in refuse("compare", *arguments.split())


def test_nothing_to_compare(baseline, run):
    assert run("compare", baseline, "--unit", "furlong").exit_code == 2
    with pytest.raises(InputError, match="nothing to compare"):
        load_models([])


def test_equal_file_names_are_told_apart_by_folder(folder, write, make_frames):
    paths = []
    for name in ("a/one.xyz", "b/one.xyz", "b/two.xyz"):
        (folder / name).parent.mkdir(exist_ok=True)
        paths.append(write(name, make_frames(uncertain=False, count=1)))
    assert [m.label for m in load_models(paths[:2])] == ["a", "b"]
    assert [m.label for m in load_models(paths)] == ["a/one", "b/one", "b/two"]


def test_version(succeed):
    assert succeed("--version").stdout.strip() == __version__


def test_a_family_that_nobody_else_knows(write, make_frames, toy_family):
    """Density and coverage of a file whose family is one file more: against SciPy, here a Gaussian."""
    frames = make_frames(1, uncertain=False)
    expected = []
    for i, atoms in enumerate(frames):
        log_std = np.log(0.1) + 0.1 * np.random.default_rng(i).normal(size=len(atoms))
        atoms.info["MACE_uq_family"] = toy_family.uq_family
        atoms.arrays["MACE_isotropic_log_std"] = log_std
        error = atoms.arrays["REF_forces"] - atoms.arrays["MACE_forces"]
        expected.append(-norm(scale=np.exp(log_std)[:, None]).logpdf(error).sum(-1))
    (model,) = compare(load_models([write("toy.xyz", frames)]))["models"]
    assert model["uq_family"] == "isotropic"
    assert model["overall"]["nll"] == pytest.approx(np.concatenate(expected).mean(), rel=1e-6)
    assert model["overall"]["coverage95"] is not None and model["overall"]["energy_score"] > 0
