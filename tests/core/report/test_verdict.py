"""The verdict of `e2ip compare` in words."""

import numpy as np
import pytest

from e2ip_plugins.report.verdict import judge, verdicts


def figures(coverage95, half_width, error=0.01, coverage50=0.5, error_width=0.005):
    values = {"coverage95": coverage95, "coverage50": coverage50, "calibration_error": error}
    return values, {
        "coverage95": (coverage95 - half_width, coverage95 + half_width),
        "calibration_error": (error - error_width, error + error_width),
    }


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (figures(0.94, 0.02), "coverage 0.94 of 0.95 (0.92 to 0.96): well calibrated"),
        (figures(0.91, 0.02), "coverage 0.91 of 0.95 (0.89 to 0.93): too narrow, try e2ip calibrate"),
        (figures(0.98, 0.01), "coverage 0.98 of 0.95 (0.97 to 0.99): too wide, try e2ip calibrate"),
        # What is printed as 0.97 is not too large.
        (figures(0.9744, 0.01), "coverage 0.97 of 0.95 (0.96 to 0.98): well calibrated"),
        # A figure counts only with its interval.
        (figures(0.9, 0.06), "coverage 0.90 of 0.95 (0.84 to 0.96): well calibrated, as far as 12 frames can tell"),
        (
            figures(0.95, 0.02, 0.07, error_width=0.05),
            "coverage 0.95 of 0.95 (0.93 to 0.97): well calibrated, as far as 12 frames can tell",
        ),
    ],
)
def test_rules(numbers, message):
    assert judge(*numbers, 12) == message


def test_other_tails():
    line = judge(*figures(0.95, 0.02, 0.08, 0.39), 12)
    assert "right at 95 %, but too narrow at 50 % (coverage 0.39, CE 0.08)" in line
    assert "too wide at 50 %" in judge(*figures(0.95, 0.02, 0.08, 0.62), 12)
    line = judge(*figures(0.98, 0.01, coverage50=0.43), 12)
    assert "0.99): too wide at 95 %, too narrow at 50 % (coverage 0.43): the errors have other tails" in line
    assert "too narrow at 95 %, too wide at 50 %" in judge(*figures(0.91, 0.02, coverage50=0.57), 12)


def test_few_frames_whose_middle_is_off_the_same_way():
    """The coverage at 95 % of 20 frames is 1, with an interval from 0.83, and says nothing alone."""
    assert ": too wide, try" in judge(*figures(1.0, 0.17, 0.31, 1.0), 20)
    assert ": too narrow, try" in judge(*figures(0.92, 0.1, 0.26, 0.1), 13)
    assert "right at 95 %, but too wide at 50 %" in judge(*figures(0.97, 0.1, 0.14, 0.69), 20)


def test_a_calibration_is_not_advised_twice(write, make_frames, compared, succeed):
    write("narrow.xyz", make_frames(3, inflate=2.0, seed=1))
    write("good.xyz", make_frames(2))
    succeed("calibrate", "good.xyz")
    done, _, _ = compared("narrow.xyz", "--calibration", "calibration.json")
    assert "too narrow, which this calibration did not mend: give it more validation frames, or take" in words(done)


def report_of(species_figures, **energies):
    """Return a report whose atoms together are calibrated, with some species and energies of 100 frames."""
    values, intervals = figures(0.95, 0.01)
    energies = {**values, "number": 100, "interval95": {**intervals, "z_mean": (0.1, 1.2)}, **energies}
    species = {symbol: numbers[0] for symbol, numbers in species_figures.items()}
    of_species = {symbol: numbers[1] for symbol, numbers in species_figures.items()}
    return {
        **{"uq_family": "niw", "file": "a.xyz", "frames": 100, "calibration": None},
        **{
            "overall": {**values, "leverage": 1.0},
            "species": species,
            "interval95": {"overall": intervals, "species": of_species},
        },
        "energies": {"frames": energies},
    }


def test_a_species_that_is_far_off_is_named():
    species = {"H": figures(0.95, 0.02), "O": figures(1.0, 0.0, 0.12), "C": figures(0.98, 0.005, 0.08)}
    forces, _ = verdicts(report_of(species, beyond3=0.0, z_mean=0.0))
    assert forces.endswith("well calibrated; but O alone too wide, coverage 1.00, CE 0.12")


def test_large_and_one_sided_errors_of_energies_are_named():
    """One of 100 errors above 3 deviations may be chance, three are not: a Gaussian has 0.27."""

    def verdict(beyond3, z_mean):
        return verdicts(report_of({}, beyond3=beyond3, z_mean=z_mean))[1].partition("well calibrated")[2]

    assert verdict(0.01, 0.2) == ""
    assert verdict(0.03, 0.2) == "; but 3 errors above 3 standard deviations, where 0.27 would be expected"
    assert verdict(0.0, 0.7) == "; but errors mostly positive (mean z 0.70)"
    assert ", and errors mostly positive" in verdict(0.03, 0.7)


def test_energies_of_another_reference_are_no_reason_to_label_frames():
    report = report_of({}, **figures(0.0, 0.0)[0], beyond3=1.0, z_mean=20000.0)
    report["energies"]["frames"]["interval95"] = {**figures(0.0, 0.0)[1], "z_mean": (1e4, 3e4)}
    assert "too narrow, are they of the reference (atoms, functional) that" in verdicts(report, True)[1]


def test_one_frame():
    assert judge(figures(0.95, 0.02)[0], None, 1) == "coverage 0.95 of 0.95; one frame is too few for a verdict"


def words(done):
    """Return what a command printed with single blanks: long lines are wrapped."""
    return " ".join(done.stdout.split())


def test_every_model_has_one(write, make_frames, compared):
    write("plain.xyz", make_frames(1, uncertain=False))
    write("good.xyz", make_frames(2))
    write("narrow.xyz", make_frames(3, inflate=2.0))
    done, _, text = compared("plain.xyz", "good.xyz", "narrow.xyz")
    printed = words(done)
    assert "plain: no error bars: plain.xyz has no uncertainty columns. Looked for forces_cov, e2ip_log" in printed
    assert "good: forces: coverage 0.9" in printed and "well calibrated" in printed
    assert "narrow: forces: coverage 0.6" in printed and "too narrow, try e2ip calibrate" in printed
    assert "in brackets: 95 % interval; those of coverages: interval95 in compare.json" in printed
    assert "## Verdict" in text and "- narrow: forces: coverage" in text


def test_out_of_distribution(write, make_frames, succeed):
    write("in.xyz", make_frames(2))
    write("hot.xyz", make_frames(3, inflate=2.0, seed=1))
    printed = words(succeed("compare", "in.xyz", "--ood", "hot.xyz"))
    assert (
        "hot OOD: forces: coverage 0.6" in printed
        and "narrow, label some frames like these, for e2ip update" in printed
    )
    named = words(succeed("compare", "in.xyz", "--ood", "hot.xyz", "--labels", "mine"))
    assert "mine OOD: forces: coverage 0.6" in named


def test_without_references(write, make_frames, succeed):
    hot = make_frames(3, seed=1)
    for atoms in hot:
        del atoms.arrays["REF_forces"]
    write("in.xyz", make_frames(2))
    write("hot.xyz", hot)
    printed = words(succeed("compare", "in.xyz", "--ood", "hot.xyz"))
    assert "hot OOD: forces: no reference forces to judge the error bars by" in printed


def test_energies(write, with_energies, succeed):
    write("good.xyz", with_energies(count=60))
    printed = words(succeed("compare", "good.xyz"))
    assert "good: energies: coverage" in printed
    assert np.isfinite(float(printed.split("good: energies: coverage ")[1][:4]))
