"""`e2ip compare --ood`: both sets side by side, and how well frames out of distribution are found."""

import json

import ase
import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.report.compare import compare, load_both_sets, load_models
from e2ip_plugins.report.figures import figure_page

SIZES = {"test": (9,) * 12, "ood": (4,) * 7}
MODELS = ("baseline", "e2ip")


def make_frames(kind, model):
    """Both models see the same references; ν = 8, κ and leverage at random, smaller and larger out of distribution."""
    rng = np.random.default_rng(list(SIZES).index(kind))
    noise = np.random.default_rng(10 + len(model))
    scale = 1.0 if kind == "test" else 2.0
    frames = []
    for n in SIZES[kind]:
        atoms = ase.Atoms({9: "CH2O3CH2", 4: "CH2O"}[n], rng.normal(size=(n, 3)))
        atoms.arrays["REF_forces"] = rng.normal(size=(n, 3))
        atoms.arrays["MACE_forces"] = atoms.arrays["REF_forces"] + 0.1 * scale * noise.normal(size=(n, 3))
        if model == "e2ip":
            kappa = np.exp(noise.normal(size=n)) / scale
            atoms.arrays["MACE_e2ip_log_sigma0"] = np.tile([2 * np.log(0.1)] * 3 + [0.0] * 3, (n, 1))
            atoms.arrays["MACE_e2ip_nu"] = np.full(n, 8.0)
            atoms.arrays["MACE_e2ip_kappa"] = kappa
            atoms.arrays["MACE_e2ip_leverage"] = np.sqrt(scale) * np.exp(noise.normal(size=n))
            atoms.info["MACE_uq_family"] = "niw"
        frames.append(atoms)
    return frames


@pytest.fixture
def frames():
    return {(model, kind): make_frames(kind, model) for model in MODELS for kind in SIZES}


@pytest.fixture
def write(frames, tmp_path):
    """Function that writes `frames` and returns the models' files in distribution and out of it."""

    def written():
        for (model, kind), content in frames.items():
            ase.io.write(tmp_path / f"{model}_{kind}.xyz", content, format="extxyz")
        return tuple([tmp_path / f"{model}_{kind}.xyz" for model in MODELS] for kind in SIZES)

    return written


def run(inside, outside, out, *more):
    ood = [word for path in outside for word in ("--ood", path)]
    return CliRunner().invoke(app, [str(a) for a in ("compare", *inside, *ood, "--out", out, *more)])


def remove_leverage(frames):
    for content in frames.values():
        for atoms in content:
            atoms.arrays.pop("MACE_e2ip_leverage", None)


def titles(inside, outside, unit="eV"):
    models, ood = load_both_sets(inside, outside)
    return [title for ax in figure_page(models, unit, ood).axes if (title := ax.get_title(loc="left"))]


def auroc_of_pairs(outside, inside):
    return np.mean([(x > y) + 0.5 * (x == y) for x in outside for y in inside])


def test_either_set_has_the_figures_it_has_alone(write):
    inside, outside = write()
    both = compare(*load_both_sets(inside, outside, MODELS))
    alone = [compare(load_models(files, MODELS)) for files in (inside, outside)]
    assert "ood" not in alone[0]
    assert both["models"] == alone[0]["models"] and both["ood"]["models"] == alone[1]["models"]


def test_frames_are_found_by_counting_pairs(frames, write):
    """Epistemic variance Σ0 ν / (κ (ν - 4)) = 0.01 · 2/κ, on all axes."""
    by_hand = {"mean_leverage": {}, "max_epistemic_std": {}, "mean_epistemic_std": {}}
    for kind in SIZES:
        content = frames["e2ip", kind]
        std = [0.1 * np.sqrt(2 / atoms.arrays["MACE_e2ip_kappa"]) for atoms in content]
        by_hand["mean_leverage"][kind] = [atoms.arrays["MACE_e2ip_leverage"].mean() for atoms in content]
        by_hand["max_epistemic_std"][kind] = [s.max() for s in std]
        by_hand["mean_epistemic_std"][kind] = [s.mean() for s in std]
    base, ours = compare(*load_both_sets(*write(), MODELS))["ood"]["frame_auroc"]
    assert base == {"label": "baseline"} | dict.fromkeys(by_hand)
    assert ours["label"] == "e2ip"
    for name, values in by_hand.items():
        assert 0.5 < ours[name] < 1.0
        assert ours[name] == pytest.approx(auroc_of_pairs(values["ood"], values["test"]), rel=1e-9), name


def test_frames_need_no_reference_to_be_found(frames, write):
    expected = compare(*load_both_sets(*write()))["ood"]["frame_auroc"]
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            atoms.arrays["REF_forces"][: len(atoms) - 1] = np.nan
    result = compare(*load_both_sets(*write()))
    assert result["ood"]["frame_auroc"] == expected
    assert result["ood"]["models"][1]["overall"]["atoms"] == len(SIZES["ood"])


def test_families_without_an_epistemic_part_find_nothing_by_it(frames, write):
    for kind in SIZES:
        for atoms in frames["e2ip", kind]:
            for name in [name for name in atoms.arrays if "e2ip" in name]:
                del atoms.arrays[name]
            atoms.arrays["MACE_gaussian_log_cov"] = np.tile([-4.0] * 3 + [0.0] * 3, (len(atoms), 1))
            atoms.info["MACE_uq_family"] = "gaussian"
    found = compare(*load_both_sets(*write()))["ood"]["frame_auroc"][MODELS.index("e2ip")]
    assert {value for name, value in found.items() if "epistemic" in name} <= {None}


@pytest.mark.parametrize("missing", ["column", "numbers"])
def test_frames_without_any_reference(frames, write, tmp_path, missing):
    """Found as before; what needs an error stays empty, and everything is written."""
    expected = compare(*load_both_sets(*write(), MODELS))["ood"]
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            if missing == "column":
                del atoms.arrays["REF_forces"]
            else:
                atoms.arrays["REF_forces"][:] = np.nan
    inside, outside = write()
    done = run(inside, outside, tmp_path / "out", "--labels", ",".join(MODELS))
    assert done.exit_code == 0, done.output
    assert done.stderr.count("no reference forces") == 2
    found = json.loads((tmp_path / "out" / "compare.json").read_text())["ood"]
    assert found["frame_auroc"] == expected["frame_auroc"]
    needless = {"baseline": {"atoms"}, "e2ip": {"atoms", "leverage", "epistemic_std", "total_std"}}
    for before, after in zip(expected["models"], found["models"], strict=True):
        kept = needless[after["label"]]
        for figures, known in ((before["overall"], after["overall"]), (before["species"]["O"], after["species"]["O"])):
            assert {name: value for name, value in known.items() if value is not None} == {n: figures[n] for n in kept}
    shown = titles(inside, outside)
    assert "Uncertainty against leverage, e2ip_test" in shown and "Force MAE" in shown
    assert "Reliability, out of distribution" not in shown


def test_the_same_frames_without_references_are_no_others(frames, write, tmp_path):
    inside, _ = write()
    bare = []
    for model in MODELS:
        for atoms in frames[model, "test"]:
            del atoms.arrays["REF_forces"]
        bare.append(tmp_path / f"{model}_bare.xyz")
        ase.io.write(bare[-1], frames[model, "test"], format="extxyz")
    done = run(inside, bare, tmp_path / "out")
    assert done.exit_code == 2 and "holds the same frames as" in " ".join(done.stderr.split())


def test_references_in_one_file_alone(frames, write, tmp_path):
    for atoms in frames["e2ip", "ood"]:
        del atoms.arrays["REF_forces"]
    done = run(*write(), tmp_path / "out")
    assert done.exit_code == 2 and "e2ip_ood.xyz: has no reference forces, but" in done.stderr.replace("\n", " ")


def test_references_are_wanted_in_distribution(frames, write, tmp_path):
    for atoms in frames["e2ip", "test"]:
        del atoms.arrays["REF_forces"]
    done = run(*write(), tmp_path / "out")
    assert done.exit_code == 2 and "e2ip_test.xyz: no reference forces" in done.stderr


def test_leverage_without_a_number(frames, write, tmp_path):
    """Infinite: the frame is the farthest, the mean leaves the atom out. NaN: as if it were not there."""
    test, ood = (frames["e2ip", kind] for kind in SIZES)
    ood[0].arrays["MACE_e2ip_leverage"][1] = np.inf
    ood[1].arrays["MACE_e2ip_leverage"][:] = np.nan
    ood[2].arrays["MACE_e2ip_leverage"][0] = np.nan
    done = run(*write(), tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "6 atoms with NaN or Inf leverage left out of its mean" in done.stderr
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    values = np.concatenate([atoms.arrays["MACE_e2ip_leverage"] for atoms in ood])
    overall = result["ood"]["models"][1]["overall"]
    assert overall["leverage"] == pytest.approx(values[np.isfinite(values)].mean(), rel=1e-6)
    outside = [np.inf, *(np.nanmean(atoms.arrays["MACE_e2ip_leverage"]) for atoms in ood[2:])]
    inside = [atoms.arrays["MACE_e2ip_leverage"].mean() for atoms in test]
    assert result["ood"]["frame_auroc"][1]["mean_leverage"] == pytest.approx(auroc_of_pairs(outside, inside))


def test_a_model_that_was_never_fitted_has_no_leverage(frames, write, tmp_path):
    for kind in SIZES:
        for atoms in frames["e2ip", kind]:
            atoms.arrays["MACE_e2ip_leverage"][:] = np.nan
    done = run(*write(), tmp_path / "out")
    assert done.exit_code == 0 and not done.stderr
    ours = json.loads((tmp_path / "out" / "compare.json").read_text())["ood"]["frame_auroc"][1]
    assert ours["mean_leverage"] is None and ours["max_epistemic_std"] is not None
    assert "Mean leverage" not in (tmp_path / "out" / "compare.md").read_text()


def test_command_writes_both_sets(write, tmp_path):
    inside, outside = write()
    done = run(inside, outside, tmp_path / "out", "--labels", "MACE,e2IP")
    assert done.exit_code == 0, done.output
    for text in ("12 frames, 108 atoms; OOD: 7 frames, 28 atoms", "Finding out-of-distribution frames", "e2IP OOD"):
        assert text in done.stdout
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result == compare(*load_both_sets(inside, outside, ["MACE", "e2IP"]))
    table = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert "|  | ideal | MACE | MACE OOD | e2IP | e2IP OOD |" in table
    overall = [m["overall"] for pair in zip(result["models"], result["ood"]["models"], strict=True) for m in pair]
    mae = " | ".join(f"{1e3 * m['force_mae']:.2f}" for m in overall)
    assert f"| Force MAE (meV/Å) | low | {mae} |" in table
    leverage = " | ".join("" if m["leverage"] is None else f"{m['leverage']:.3f}" for m in overall)
    assert f"| Mean leverage |  | {leverage} |" in table
    found = result["ood"]["frame_auroc"][1]
    cells = " | ".join(f"{found[k]:.3f}" for k in ("mean_leverage", "max_epistemic_std", "mean_epistemic_std"))
    assert table[table.index("## Finding out-of-distribution frames") + 4 :][:2] == [
        "| MACE |  |  |  |",
        f"| e2IP | {cells} |",
    ]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_no_column_is_lost_on_a_narrow_terminal(write, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "40")
    done = run(*write(), tmp_path / "out", "--labels", "a,b")
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    line = next(line for line in done.stdout.splitlines() if "Force RMSE" in line)
    models = [m for pair in zip(result["models"], result["ood"]["models"], strict=True) for m in pair]
    assert line.split()[-4:] == [f"{1e3 * m['overall']['force_rmse']:.2f}" for m in models]


def test_panels(frames, write):
    with_leverage = titles(*write())
    of_sets = [f"{name}, {of} distribution" for name in ("Reliability", "PIT deviation") for of in ("in", "out of")]
    assert with_leverage[:4] == of_sets
    panels = ["Error against leverage, e2ip_test", "Uncertainty against leverage, e2ip_test"]
    assert with_leverage[-3:] == [*panels, "Force MAE, both sets"]
    remove_leverage(frames)
    assert titles(*write(), unit="kcal") == [t for t in with_leverage if t not in panels]
    inside, outside = write()
    assert titles(inside[:1], outside[:1]) == ["Force MAE, both sets"]


def test_leverage_of_one_set_alone(frames, write, tmp_path):
    """Zero, as a logarithmic axis cannot show it, and too few atoms for the usual bins are no trouble either."""
    remove_leverage({0: frames["e2ip", "test"]})
    for atoms in frames["e2ip", "ood"]:
        atoms.arrays["MACE_e2ip_leverage"][1:] = 0.0
    done = run(*write(), tmp_path / "out", "--unit", "kcal")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["models"][1]["overall"]["leverage"] is None and result["ood"]["models"][1]["overall"]["leverage"] > 0
    assert result["ood"]["frame_auroc"][1]["mean_leverage"] is None


def test_other_species_out_of_distribution(frames, write, tmp_path):
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            atoms.symbols[0] = "Pt"
    done = run(*write(), tmp_path / "out", "--labels", "base,ours")
    assert done.exit_code == 0, done.output
    rows = [line.split("|")[1:3] for line in (tmp_path / "out" / "compare.md").read_text().splitlines()]
    assert [name.strip() for symbol, name in (r for r in rows if len(r) == 2) if symbol == " Pt "] == [
        "base OOD",
        "ours OOD",
    ]


def test_leverage_without_ood(write, tmp_path):
    """A row more in the table, nothing else."""
    inside, _ = write()
    done = run(inside, [], tmp_path / "out")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    table = (tmp_path / "out" / "compare.md").read_text()
    assert f"| Mean leverage |  |  | {result['models'][1]['overall']['leverage']:.3f} |" in table
    assert "ood" not in result and "OOD" not in table
    assert not any("leverage" in ax.get_title(loc="left") for ax in figure_page(load_models(inside)).axes)


def fewer_frames(frames):
    del frames["e2ip", "ood"][-1]


def other_references(frames):
    frames["e2ip", "ood"][2].arrays["REF_forces"][0, 0] += 0.1


def the_test_set_again(frames):
    for model in MODELS:
        frames[model, "ood"] = frames[model, "test"]


def no_distribution(frames):
    for atoms in frames["e2ip", "ood"]:
        for name in [n for n in atoms.arrays if "e2ip" in n]:
            del atoms.arrays[name]
        del atoms.info["MACE_uq_family"]


def another_model(frames):
    for kind in SIZES:
        for atoms in frames["e2ip", kind]:
            atoms.info["MACE_uq_model"] = f"readout-{kind}"


@pytest.mark.parametrize(
    "change, message",
    [
        (another_model, "e2ip_ood.xyz: is of readout-ood, but"),
        (fewer_frames, "e2ip_ood.xyz: has 6 frames, but"),
        (other_references, "e2ip_ood.xyz: the reference forces of frame 2 differ from those in"),
        (the_test_set_again, "baseline_ood.xyz: holds the same frames as"),
        (no_distribution, "e2ip_ood.xyz: has no uncertainties, but"),
    ],
)
def test_sets_that_do_not_fit_are_refused(frames, write, tmp_path, change, message):
    change(frames)
    done = run(*write(), tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_refused(write, tmp_path):
    inside, outside = write()
    for ood, message in [
        (outside[:1], "--ood: 1 files for 2 models"),
        ([*outside, outside[0]], "--ood: 3 files for 2 models"),
        ([outside[0], tmp_path / "none.xyz"], "none.xyz: no such file"),
        ([outside[0], tmp_path], "is a folder"),
        (outside[::-1], "has uncertainties of family 'niw', but"),
        (inside, "holds the same frames as"),
    ]:
        done = run(inside, ood, tmp_path / "out")
        assert done.exit_code == 2, ood
        assert done.stderr.startswith("e2ip: error: ") and message in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
