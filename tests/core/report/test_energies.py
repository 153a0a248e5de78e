"""`e2ip compare` of energies with uncertainties and of their differences, and `e2ip ensemble` of members with them."""

import numpy as np
import pytest
from scipy.stats import norm

from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import load_models
from e2ip_plugins.report.figures import figure_page
from e2ip_plugins.scores.calibration import Calibration

FRAMES = 20


@pytest.mark.usefixtures("rendered")
def test_table_of_energies(write, with_energies, make_frames, compared):
    write("baseline.xyz", make_frames(1, uncertain=False))
    path = write("e2ip.xyz", with_energies(2))
    done, result, table = compared("baseline.xyz", "e2ip.xyz", "--labels", "MACE,e²IP")
    base, ours = result["models"]
    assert "energies" not in base and "energies" in result["units"]
    frames, pairs = ours["energies"]["frames"], ours["energies"]["pairs"]
    p = read_predictions(path)
    error = p.reference_energy - p.energy
    assert frames["number"] == FRAMES and pairs["number"] == pairs["possible"] == FRAMES * (FRAMES - 1) // 2
    assert frames["mae"] == pytest.approx(np.abs(error / p.sizes).mean()) == ours["overall"]["energy_mae"]
    assert frames["nll"] == pytest.approx(-norm.logpdf(error, scale=p.energy_uncertainty).mean())
    assert frames["nll_kcal"] == pytest.approx(frames["nll"] - np.log(KCAL_PER_MOL))
    i, j = np.triu_indices(FRAMES, 1)
    assert pairs["mae"] == pytest.approx(np.abs(error[i] - error[j]).mean())
    assert 0.8 < frames["coverage95"] <= 1.0
    for figures in (frames, pairs):
        for name, (low, high) in figures["interval95"].items():
            assert low <= figures[name] <= high
    lines = table.splitlines()
    assert "## Energies" in lines and "- Energies: of total energies (Frames)" in table and "1/eV" not in table
    low, high = (1e3 * end for end in frames["interval95"]["mae"])
    assert f"| Frames: MAE (meV/atom) | low |  | {1e3 * frames['mae']:.2f} ({low:.2f} to {high:.2f}) |" in lines
    assert "| Pairs: number |  |  | 190 |" in lines
    assert any(line.startswith("| Pairs: MAE (meV) | low |  |") for line in lines)
    for words in ("Energies", "Frames: Coverage at 95 %", "Pairs: CRPS (meV)"):
        assert words in done.stdout
    # Nothing is cut off, however narrow the terminal is.
    printed = done.stdout.split("Energies")[1]
    assert all(text in printed for text in (f"{FRAMES}", "190", f"{1e3 * pairs['crps']:.2f}"))
    _, _, table = compared("e2ip.xyz", "--unit", "kcal")
    low, high = frames["interval95"]["nll_kcal"]
    assert f"| Frames: NLL (nats) | low | {frames['nll_kcal']:.3f} ({low:.3f} to {high:.3f}) |" in table.splitlines()
    assert "Pairs: MAE (kcal/mol)" in table and "(kcal/mol)⁻¹" in table


def test_files_without_energy_uncertainties_have_no_table(write, make_frames, compared):
    write("e2ip.xyz", make_frames(2))
    done, result, table = compared("e2ip.xyz")
    assert "energies" not in result["models"][0] and "energies" not in result["units"]
    assert "Energies" not in table and "Energies" not in done.stdout


def test_references_are_needed(write, with_energies, compared):
    frames = with_energies(2)
    for atoms in frames:
        del atoms.info["REF_energy"]
    write("e2ip.xyz", frames)
    _, result, _ = compared("e2ip.xyz")
    assert "energies" not in result["models"][0]


def test_frames_alone_without_vectors(write, with_energies, compared):
    write("e2ip.xyz", with_energies(2, vectors=False))
    _, result, table = compared("e2ip.xyz")
    assert set(result["models"][0]["energies"]) == {"frames"} and "| Pairs" not in table


def test_out_of_distribution(write, with_energies, compared):
    write("test.xyz", with_energies(2))
    write("hot.xyz", with_energies(3, size=10.0, seed=1))
    _, result, table = compared("test.xyz", "--ood", "hot.xyz")
    inside, outside = (m["energies"]["frames"] for m in (result["models"][0], result["ood"]["models"][0]))
    assert outside["coverage95"] < inside["coverage95"] and outside["mae"] > inside["mae"]
    assert "| Frames: number |  | 20 | 20 |" in table.splitlines()


def test_panel_of_the_figure_page(write, with_energies, make_frames):
    models = load_models([write("e2ip.xyz", with_energies(2)), write("none.xyz", make_frames(1))])
    panels = {ax.get_title(loc="left"): ax for ax in figure_page(models).axes}
    p, (points, diagonal) = models[0].predictions, panels["Errors of energies"].lines
    np.testing.assert_allclose(points.get_xdata(), 1e3 * p.energy_uncertainty / 9)
    np.testing.assert_allclose(points.get_ydata(), 1e3 * np.abs(p.reference_energy - p.energy) / 9)
    np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    assert panels["Errors of energies"].get_xlabel() == "predicted standard deviation (meV/atom)"
    assert "Errors of energies" not in {ax.get_title(loc="left") for ax in figure_page(models[1:]).axes}


def test_energies_of_another_reference_are_doubted(write, with_energies, succeed):
    frames = with_energies(2)
    for atoms in frames:
        atoms.info["REF_energy"] -= 100.0 * len(atoms)
    write("e2ip.xyz", frames)
    assert "the reference energies differ from the predicted ones by -100 eV" in succeed("compare", "e2ip.xyz").stderr


def test_ensemble_has_the_variance_of_the_mixture(write, with_energies, succeed):
    members = [write(f"{k}.xyz", with_energies(k, vectors=k > 0)) for k in range(3)]
    succeed("ensemble", *members, "--output", "all.xyz")
    found, of_members = read_predictions("all.xyz"), [read_predictions(path) for path in members]
    means, stds = (np.stack([getattr(p, name) for p in of_members]) for name in ("energy", "energy_uncertainty"))
    np.testing.assert_allclose(found.energy_uncertainty**2, np.var(means, axis=0, ddof=1) + np.mean(stds**2, axis=0))
    assert found.energy_error_vector is None


def test_ensemble_has_none_where_a_member_has_none(write, with_energies, make_frames, succeed):
    members = [write("0.xyz", with_energies(0)), write("1.xyz", make_frames(1))]
    succeed("ensemble", *members, "--output", "all.xyz")
    assert not read_predictions("all.xyz").has_energy_uncertainties


WITH = ("--calibration", "none", "--calibration", "calibration.json")


def test_calibrated_energies(write, with_energies, succeed, compared):
    write("valid.xyz", with_energies(2, size=3.0, count=40))
    path = write("test.xyz", with_energies(2, size=3.0, seed=1, count=40))
    done = succeed("calibrate", "valid.xyz", "--method", "scale", "--method", "conformal")
    calibration = Calibration.read("calibration.json")
    factor = calibration.energy_factor
    assert (
        factor == pytest.approx(3.0, rel=0.35) and f"factor on their standard deviations: {factor:.4g} (" in done.stdout
    )
    assert "energies of 40 frames" in done.stdout
    done, result, table = compared("test.xyz", "test.xyz", *WITH)
    raw, calibrated = result["models"]
    p = read_predictions(path)
    error, std = p.reference_energy - p.energy, p.energy_uncertainty
    assert calibrated["energies"]["frames"]["nll"] == pytest.approx(-norm.logpdf(error, scale=factor * std).mean())
    for kind in ("frames", "pairs"):
        before, after = (m["energies"][kind] for m in (raw, calibrated))
        assert after["calibration_error"] < before["calibration_error"] and after["mae"] == before["mae"]
        assert before["coverage95"] < after["coverage95"]
    of_energies = calibrated["calibration"]["energies"]
    share = np.mean(np.abs(error) <= calibration.energies.radii[0.9] * factor * std)
    assert of_energies["factor"] == factor and of_energies["conformal"]["0.9"]["coverage"] == share
    assert f"| Frames: Conformal coverage at 90 % | >= 0.9 |  | {share:.3f} |" in table.splitlines()


def test_energies_of_another_name_and_frames_without_forces(write, with_energies, succeed, refuse):
    """Their frames belong to the calibration's, too."""
    frames = with_energies(2, size=3.0)
    for atoms in frames:
        atoms.info["e_dft"] = atoms.info.pop("REF_energy")
    frames[0].arrays["REF_forces"][:] = np.nan
    write("valid.xyz", frames)
    done = succeed("calibrate", "valid.xyz")
    assert "note: energies: 0 frames of two atoms or more" in done.stderr and "energies of" not in done.stdout
    succeed("calibrate", "valid.xyz", "--ref-energy", "e_dft", "--overwrite")
    found = Calibration.read("calibration.json")
    assert found.energies.frames == 20 and found.configurations == 19 and len(found.frames) == 20
    write("one.xyz", [frames[0], *with_energies(3, seed=3)])
    assert "1 of its 21 frames" in refuse("compare", "one.xyz", "--calibration", "calibration.json")
