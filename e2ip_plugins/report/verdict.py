"""Judge in words whether error bars are as large as the errors, from the figures of `e2ip_plugins.report.summary`."""

from typing import List, Optional

from scipy.stats import binomtest

from e2ip_plugins import families
from e2ip_plugins.errors import plural
from e2ip_plugins.keys import FORCE_VIEWS

#: Coverages at 95 % that are right.
RIGHT_COVERAGE = (0.93, 0.97)

#: Largest calibration error CE that is right: Gaussian deviations that are off by 8 % have it.
LARGEST_ERROR = 0.05

#: Mean leverage from which frames count as unlike the validation frames.
UNLIKE = 1.5

#: Distance of the coverage at 50 % from 0.5 from which the middle contradicts the coverage at 95 %.
LEANING = 0.05

#: Calibration error of a species from which it is named: Gaussian deviations that are off by 17 % have it.
LARGEST_OF_SPECIES = 0.1

#: Mean z of energies from which their errors are mostly of one sign.
ONE_SIDED = 0.3

#: Mean z of energies from which the reference must be another one than that of the training.
OTHER_REFERENCE = 10.0

#: Share of a Gaussian beyond 3 standard deviations, and the probability below which more errors are no chance.
BEYOND_3, CHANCE = 0.0027, 0.01

_LEVEL = 0.95
_TAILS = "the errors have other tails than the predicted distribution"


def verdicts(report: dict, out_of_distribution: bool = False) -> List[str]:
    """Return one line on the error bars of forces, and one on those of energies where a model has them.

    Parameters
    ----------
    report : dict
        Of one model and set, as `e2ip_plugins.report.summary.summary` returns it.
    out_of_distribution : bool
        Whether the frames are unlike the validation frames, so that a calibration to these is no remedy.
    """
    if report["uq_family"] is None:
        return [_no_uncertainties(report["file"])]
    remedy = "try e2ip calibrate; if its factor is near 1, give it more validation frames"
    if out_of_distribution or (report["overall"]["leverage"] or 0.0) > UNLIKE:
        remedy = "label some frames like these, for e2ip update (readout e2ip) or a training"
    elif report["calibration"]:
        remedy = "which this calibration did not mend: give it more validation frames, or take conformal radii"
    intervals = report["interval95"] or {}
    line = judge(report["overall"], intervals.get("overall"), report["frames"], remedy)
    lines = [f"forces: {line}{_of_species(report)}"]
    if energies := report.get("energies", {}).get("frames"):
        if abs(energies["z_mean"]) > OTHER_REFERENCE:
            remedy = "are they of the reference (atoms, functional) that the model was trained on?"
        line = judge(energies, energies["interval95"], energies["number"], remedy)
        lines.append(f"energies: {line}{_of_large_errors(energies)}")
    return lines


def judge(figures: dict, intervals: Optional[dict], frames: int, remedy: str = "try e2ip calibrate") -> str:
    """Return a verdict on a coverage at 95 % and a calibration error.

    Parameters
    ----------
    figures, intervals : dict
        Values of ``coverage50``, ``coverage95`` and ``calibration_error``, and their intervals; None without.
    frames : int
        Number of frames.
    remedy : str
        What to do about error bars of the wrong size.

    Examples
    --------
    >>> judge({"coverage95": 0.71, "coverage50": 0.3, "calibration_error": 0.2}, {
    ...     "coverage95": (0.68, 0.75), "calibration_error": (0.18, 0.22)}, 150)
    'coverage 0.71 of 0.95 (0.68 to 0.75): too narrow, try e2ip calibrate'
    """
    coverage, error = figures["coverage95"], figures["calibration_error"]
    if coverage is None:
        return "no reference forces to judge the error bars by"
    start = f"coverage {coverage:.2f} of {_LEVEL}"
    if intervals is None:
        return f"{start}; one frame is too few for a verdict"
    low, high = intervals["coverage95"]
    start += f" ({low:.2f} to {high:.2f}): "
    if text := fault(figures, intervals):
        return f"{start}{text}, {remedy}" if text in ("too narrow", "too wide") else f"{start}{text}: {_TAILS}"
    certain = RIGHT_COVERAGE[0] <= round(coverage, 2) <= RIGHT_COVERAGE[1] and error <= LARGEST_ERROR
    return f"{start}well calibrated" + ("" if certain else f", as far as {frames} frames can tell")


def fault(figures: dict, intervals: dict) -> str:
    """Return what is wrong with error bars; empty if nothing is. Parameters as those of `judge`.

    A figure outside `RIGHT_COVERAGE` or above `LARGEST_ERROR` counts only if its 95 % interval agrees: that of the
    coverage must leave out 0.95, and that of the calibration error must lie above `LARGEST_ERROR`. Of few frames the
    interval of the coverage is wide; there that of the calibration error suffices where the middle is off the same way.
    """
    middle, error = figures["coverage50"], figures["calibration_error"]
    # As it is printed: 0.97 must not be called too large.
    coverage, (low, high) = round(figures["coverage95"], 2), intervals["coverage95"]
    if coverage < RIGHT_COVERAGE[0] and high < _LEVEL:
        if middle > 0.5 + LEANING:
            return f"too narrow at 95 %, too wide at 50 % (coverage {middle:.2f})"
        return "too narrow"
    if coverage > RIGHT_COVERAGE[1] and low > _LEVEL:
        if middle < 0.5 - LEANING:
            return f"too wide at 95 %, too narrow at 50 % (coverage {middle:.2f})"
        return "too wide"
    if error > LARGEST_ERROR and intervals["calibration_error"][0] > LARGEST_ERROR:
        way = "narrow" if middle < 0.5 else "wide"
        if (coverage < RIGHT_COVERAGE[0]) if way == "narrow" else (coverage > RIGHT_COVERAGE[1]):
            return f"too {way}"
        return f"right at 95 %, but too {way} at 50 % (coverage {middle:.2f}, CE {error:.2f})"
    return ""


def _of_species(report: dict) -> str:
    """Return the species that alone are far from calibrated, where all atoms together are; empty if none is."""
    intervals = report["interval95"]
    if intervals is None or not intervals["overall"] or fault(report["overall"], intervals["overall"]):
        return ""
    texts = []
    for symbol, figures in report["species"].items():
        of_species = intervals["species"].get(symbol)
        error = figures["calibration_error"]
        if of_species and error > LARGEST_OF_SPECIES and (text := fault(figures, of_species)):
            texts.append(
                f"{symbol} alone {text.partition(' (')[0]}, coverage {figures['coverage95']:.2f}, CE {error:.2f}"
            )
    return f"; but {'; '.join(texts)}" if texts else ""


def _of_large_errors(energies: dict) -> str:
    """Return that energies have more large errors than a Gaussian, or errors mostly of one sign; empty if neither."""
    number, texts = energies["number"], []
    large = round(energies["beyond3"] * number)
    if binomtest(large, number, BEYOND_3, alternative="greater").pvalue < CHANCE:
        few = f"{BEYOND_3 * number:.2g}"
        texts.append(f"{plural(large, 'error')} above 3 standard deviations, where {few} would be expected")
    low, high = (energies["interval95"] or {}).get("z_mean", (0.0, 0.0))
    if abs(energies["z_mean"]) > ONE_SIDED and low * high > 0.0:
        sign = "positive" if low > 0.0 else "negative"
        texts.append(f"errors mostly {sign} (mean z {energies['z_mean']:.2f})")
    return f"; but {', and '.join(texts)}" if texts else ""


def _no_uncertainties(file: str) -> str:
    family = families.get(families.DEFAULT)
    columns = ", ".join([FORCE_VIEWS[0].name, *(key.name for key in family.parameter_keys)])
    return (
        f"no error bars: {file} has no uncertainty columns. Looked for {columns} and those of other readouts, with the "
        "prefix of the predicted forces. To get them: e2ip fit MODEL --train … --valid …, then e2ip evaluate"
    )
