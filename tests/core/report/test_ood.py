"""`e2ip compare --ood`: both sets side by side, and how well frames out of distribution are found."""

import ase
import numpy as np
import pytest

from e2ip_plugins.report.compare import compare, load_both_sets, load_models
from e2ip_plugins.report.figures import figure_page

SIZES = {"test": (9,) * 12, "ood": (4,) * 7}
MODELS = ("baseline", "e2ip")
FILES = tuple([f"{model}_{kind}.xyz" for model in MODELS] for kind in SIZES)


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
def write_sets(frames, write):
    """Function that writes `frames`."""

    def written():
        for (model, kind), content in frames.items():
            write(f"{model}_{kind}.xyz", content)

    return written


@pytest.fixture
def both_sets(write_sets):
    """Function that writes `frames` and gives `load_both_sets` of them."""

    def load(labels=None):
        write_sets()
        return load_both_sets(*FILES, labels)

    return load


def arguments(inside=FILES[0], outside=FILES[1]):
    return [*inside, *(word for path in outside for word in ("--ood", path))]


@pytest.fixture
def compared_sets(write_sets, compared):
    """Function that writes `frames` and runs ``e2ip compare --ood``."""

    def run(*options):
        write_sets()
        return compared(*arguments(), *options)

    return run


def remove(frames, text):
    """Remove the columns whose names have a text, and the family with all of its columns."""
    for atoms in frames:
        for name in [name for name in atoms.arrays if text in name]:
            del atoms.arrays[name]
        if text == "e2ip":
            atoms.info.pop("MACE_uq_family", None)


def titles(models, ood, unit="eV"):
    return [title for ax in figure_page(models, unit, ood).axes if (title := ax.get_title(loc="left"))]


def test_panels_of_one_model_name_their_set(both_sets):
    inside, outside = (models[1:] for models in both_sets(MODELS))
    of_sets = {"Error against uncertainty,\nin distribution", "Error against leverage, both sets"}
    assert of_sets <= {*titles(inside, outside)}
    title = figure_page(inside, "eV", outside).legends[0].get_title().get_text()
    assert title == "out of distribution: e2ip_ood.xyz; panels that name no set are in distribution"


def auroc_of_pairs(outside, inside):
    return np.mean([(x > y) + 0.5 * (x == y) for x in outside for y in inside])


def test_either_set_has_the_figures_it_has_alone(both_sets):
    both = compare(*both_sets(MODELS))
    alone = [compare(load_models(files, MODELS)) for files in FILES]
    assert "ood" not in alone[0]
    assert both["models"] == alone[0]["models"] and both["ood"]["models"] == alone[1]["models"]


def test_frames_are_found_by_counting_pairs(frames, both_sets):
    """Epistemic variance Σ0 ν / (κ (ν - 4)) = 0.01 · 2/κ, on all axes."""
    by_hand = {"mean_leverage": {}, "max_epistemic_std": {}, "mean_epistemic_std": {}}
    for kind in SIZES:
        content = frames["e2ip", kind]
        std = [0.1 * np.sqrt(2 / atoms.arrays["MACE_e2ip_kappa"]) for atoms in content]
        by_hand["mean_leverage"][kind] = [atoms.arrays["MACE_e2ip_leverage"].mean() for atoms in content]
        by_hand["max_epistemic_std"][kind] = [s.max() for s in std]
        by_hand["mean_epistemic_std"][kind] = [s.mean() for s in std]
    base, ours = compare(*both_sets(MODELS))["ood"]["frame_auroc"]
    assert base == {"label": "baseline"} | dict.fromkeys(by_hand)
    assert ours["label"] == "e2ip"
    for name, values in by_hand.items():
        assert 0.5 < ours[name] < 1.0
        assert ours[name] == pytest.approx(auroc_of_pairs(values["ood"], values["test"]), rel=1e-9), name


def test_families_without_an_epistemic_part_find_nothing_by_it(frames, both_sets):
    for kind in SIZES:
        remove(frames["e2ip", kind], "e2ip")
        for atoms in frames["e2ip", kind]:
            atoms.arrays["MACE_gaussian_log_cov"] = np.tile([-4.0] * 3 + [0.0] * 3, (len(atoms), 1))
            atoms.info["MACE_uq_family"] = "gaussian"
    found = compare(*both_sets())["ood"]["frame_auroc"][MODELS.index("e2ip")]
    assert {value for name, value in found.items() if "epistemic" in name} <= {None}


def test_frames_need_no_reference_to_be_found(frames, both_sets):
    expected = compare(*both_sets())["ood"]["frame_auroc"]
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            atoms.arrays["REF_forces"][: len(atoms) - 1] = np.nan
    found = compare(*both_sets())["ood"]
    assert found["frame_auroc"] == expected and found["models"][1]["overall"]["atoms"] == len(SIZES["ood"])


@pytest.mark.parametrize("missing", ["column", "numbers"])
@pytest.mark.usefixtures("rendered")
def test_frames_without_any_reference(frames, both_sets, compared_sets, missing):
    """Found as before; what needs an error stays empty, and everything is written."""
    expected = compare(*both_sets(MODELS))["ood"]
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            if missing == "column":
                del atoms.arrays["REF_forces"]
            else:
                atoms.arrays["REF_forces"][:] = np.nan
    done, result, _ = compared_sets("--labels", ",".join(MODELS))
    assert result["ood"]["frame_auroc"] == expected["frame_auroc"]
    assert done.stderr.count("no reference forces") == 2
    without = {"baseline": {"atoms"}, "e2ip": {"atoms", "leverage", "epistemic_std", "total_std"}}
    for before, after in zip(expected["models"], result["ood"]["models"], strict=True):
        for figures, known in ((before["overall"], after["overall"]), (before["species"]["O"], after["species"]["O"])):
            expected_figures = {name: figures[name] for name in without[after["label"]]}
            assert {name: value for name, value in known.items() if value is not None} == expected_figures
    shown = titles(*both_sets())
    assert "Uncertainty against leverage, e2ip_test" in shown and "Force MAE" in shown
    assert "Reliability, out of distribution" not in shown


def test_leverage_without_a_number(frames, compared_sets):
    """Infinite: the frame is the farthest, the mean leaves the atom out. NaN: as if it were not there."""
    test, ood = (frames["e2ip", kind] for kind in SIZES)
    ood[0].arrays["MACE_e2ip_leverage"][1] = np.inf
    ood[1].arrays["MACE_e2ip_leverage"][:] = np.nan
    ood[2].arrays["MACE_e2ip_leverage"][0] = np.nan
    done, result, _ = compared_sets()
    assert "6 atoms with NaN or Inf leverage left out of its mean" in done.stderr
    values = np.concatenate([atoms.arrays["MACE_e2ip_leverage"] for atoms in ood])
    overall = result["ood"]["models"][1]["overall"]
    assert overall["leverage"] == pytest.approx(values[np.isfinite(values)].mean(), rel=1e-6)
    outside = [np.inf, *(np.nanmean(atoms.arrays["MACE_e2ip_leverage"]) for atoms in ood[2:])]
    inside = [atoms.arrays["MACE_e2ip_leverage"].mean() for atoms in test]
    assert result["ood"]["frame_auroc"][1]["mean_leverage"] == pytest.approx(auroc_of_pairs(outside, inside))


def test_a_model_that_was_never_fitted_has_no_leverage(frames, compared_sets):
    for kind in SIZES:
        for atoms in frames["e2ip", kind]:
            atoms.arrays["MACE_e2ip_leverage"][:] = np.nan
    done, result, table = compared_sets()
    ours = result["ood"]["frame_auroc"][1]
    assert not done.stderr and ours["mean_leverage"] is None and ours["max_epistemic_std"] is not None
    assert "Mean leverage" not in table


@pytest.mark.usefixtures("rendered")
def test_command_writes_both_sets(both_sets, compared_sets, folder):
    done, result, text = compared_sets("--labels", "MACE,e2IP")
    for part in ("12 frames, 108 atoms; OOD: 7 frames, 28 atoms", "Finding out-of-distribution frames", "e2IP OOD"):
        assert part in done.stdout
    assert result == compare(*both_sets(["MACE", "e2IP"]))
    table = text.splitlines()
    assert "|  | ideal | MACE | MACE OOD | e2IP | e2IP OOD |" in table
    overall = [m["overall"] for pair in zip(result["models"], result["ood"]["models"], strict=True) for m in pair]
    mae = " | ".join(f"{1e3 * m['force_mae']:.2f}" for m in overall)
    assert f"| Force MAE (meV/Å) | low | {mae} |" in table
    leverage = " | ".join("" if m["leverage"] is None else f"{m['leverage']:.3f}" for m in overall)
    assert f"| Mean leverage |  | {leverage} |" in table
    found = result["ood"]["frame_auroc"][1]
    cells = " | ".join(f"{found[k]:.3f}" for k in ("mean_leverage", "max_epistemic_std", "mean_epistemic_std"))
    rows = table[table.index("## Finding out-of-distribution frames") + 4 :][:2]
    assert rows == ["| MACE |  |  |  |", f"| e2IP | {cells} |"]
    assert (folder / "e2ip_compare/compare.png").read_bytes().startswith(b"\x89PNG")


def test_no_column_is_lost_on_a_narrow_terminal(compared_sets, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done, result, _ = compared_sets("--labels", "a,b")
    line = next(line for line in done.stdout.splitlines() if "Force RMSE" in line)
    models = [m for pair in zip(result["models"], result["ood"]["models"], strict=True) for m in pair]
    assert line.split()[-4:] == [f"{1e3 * m['overall']['force_rmse']:.2f}" for m in models]


def test_panels(frames, both_sets):
    with_leverage = titles(*both_sets())
    of_sets = [f"{name}, {of} distribution" for name in ("Reliability", "PIT deviation") for of in ("in", "out of")]
    assert with_leverage[:4] == of_sets
    assert with_leverage[-5:-3] == [
        "Error against uncertainty, e2ip_test",
        "Error against uncertainty,\nout of distribution",
    ]
    panels = ["Error against leverage, e2ip_test", "Uncertainty against leverage, e2ip_test"]
    assert with_leverage[-3:] == [*panels, "Force MAE, both sets"]
    for kind in SIZES:
        remove(frames["e2ip", kind], "leverage")
    models, ood = both_sets()
    assert titles(models, ood, "kcal") == [t for t in with_leverage if t not in panels]
    assert titles(models[:1], ood[:1]) == ["Force MAE, both sets"]


def test_leverage_of_one_set_alone(frames, compared_sets):
    """Zero, as a logarithmic axis cannot show it, and too few atoms for the usual bins are no trouble either."""
    remove(frames["e2ip", "test"], "leverage")
    for atoms in frames["e2ip", "ood"]:
        atoms.arrays["MACE_e2ip_leverage"][1:] = 0.0
    _, result, _ = compared_sets("--unit", "kcal")
    assert result["models"][1]["overall"]["leverage"] is None and result["ood"]["models"][1]["overall"]["leverage"] > 0
    assert result["ood"]["frame_auroc"][1]["mean_leverage"] is None


def test_other_species_out_of_distribution(frames, compared_sets):
    for model in MODELS:
        for atoms in frames[model, "ood"]:
            atoms.symbols[0] = "Pt"
    _, _, table = compared_sets("--labels", "base,ours")
    rows = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| Pt |")]
    assert rows == ["base OOD", "ours OOD"]


def test_leverage_without_ood(both_sets, compared):
    """A row more in the table, nothing else."""
    both_sets()
    _, result, table = compared(*FILES[0])
    assert f"| Mean leverage |  |  | {result['models'][1]['overall']['leverage']:.3f} |" in table
    assert "ood" not in result and "OOD" not in table
    assert not any("leverage" in title for title in titles(load_models(FILES[0]), ()))


def fewer_frames(frames):
    del frames["e2ip", "ood"][-1]


def other_references(frames):
    frames["e2ip", "ood"][2].arrays["REF_forces"][0, 0] += 0.1


def the_test_set_again(frames):
    for model in MODELS:
        frames[model, "ood"] = frames[model, "test"]


def the_test_set_without_references(frames):
    for model in MODELS:
        frames[model, "ood"] = [atoms.copy() for atoms in frames[model, "test"]]
        remove(frames[model, "ood"], "REF_forces")


def no_distribution(frames):
    remove(frames["e2ip", "ood"], "e2ip")


def another_model(frames):
    for kind in SIZES:
        for atoms in frames["e2ip", kind]:
            atoms.info["MACE_uq_model"] = f"readout-{kind}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_model, "e2ip_ood.xyz: is of readout-ood, but"),
        (fewer_frames, "e2ip_ood.xyz: has 6 frames, but"),
        (other_references, "e2ip_ood.xyz: the reference forces of frame 2 differ from those in"),
        (the_test_set_again, "baseline_ood.xyz: holds the same frames as"),
        (the_test_set_without_references, "baseline_ood.xyz: holds the same frames as"),
        (no_distribution, "e2ip_ood.xyz: has no uncertainties, but"),
        (lambda frames: remove(frames["e2ip", "ood"], "REF_forces"), "e2ip_ood.xyz: has no reference forces, but"),
        (lambda frames: remove(frames["e2ip", "test"], "REF_forces"), "e2ip_test.xyz: no reference forces"),
    ],
)
def test_sets_that_do_not_fit_are_refused(frames, write_sets, refuse, folder, change, message):
    change(frames)
    write_sets()
    assert message in refuse("compare", *arguments())
    assert not (folder / "e2ip_compare").exists()


@pytest.mark.parametrize(
    ("ood", "message"),
    [
        (FILES[1][:1], "--ood: 1 files for 2 models"),
        ([*FILES[1], FILES[1][0]], "--ood: 3 files for 2 models"),
        ([FILES[1][0], "none.xyz"], "none.xyz: no such file"),
        ([FILES[1][0], "."], "is a folder"),
        (FILES[1][::-1], "has uncertainties of family 'niw', but"),
        (FILES[0], "holds the same frames as"),
    ],
)
def test_files_that_do_not_fit_are_refused(write_sets, refuse, folder, ood, message):
    write_sets()
    assert message in refuse("compare", *arguments(outside=ood))
    assert not (folder / "e2ip_compare").exists()
