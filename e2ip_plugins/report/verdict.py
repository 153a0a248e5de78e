"""Judge in words whether error bars are as large as the errors, from the figures of `e2ip_plugins.report.summary`."""

from typing import List, Optional

from e2ip_plugins import families
from e2ip_plugins.keys import FORCE_VIEWS

#: Coverages at 95 % that are right.
RIGHT_COVERAGE = (0.93, 0.97)

#: Largest calibration error CE that is right: Gaussian deviations that are off by 8 % have it.
LARGEST_ERROR = 0.05

#: Distance of the coverage at 50 % from 0.5 from which the middle contradicts the coverage at 95 %.
LEANING = 0.05

_LEVEL = 0.95


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
    remedy = "try e2ip calibrate on validation frames; if its factor is near 1, its conformal radii"
    if out_of_distribution:
        remedy = "label frames like these for e2ip update or a training"
    elif report["calibration"]:
        remedy = "which this calibration did not mend: take conformal radii"
    intervals = (report["interval95"] or {}).get("overall")
    lines = [f"forces: {judge(report['overall'], intervals, report['frames'], remedy)}"]
    if energies := report.get("energies", {}).get("frames"):
        lines.append(f"energies: {judge(energies, energies['interval95'], energies['number'], remedy)}")
    return lines


def judge(figures: dict, intervals: Optional[dict], frames: int, remedy: str = "try e2ip calibrate") -> str:
    """Return a verdict on a coverage at 95 % and a calibration error.

    A figure outside `RIGHT_COVERAGE` or above `LARGEST_ERROR` counts only if its 95 % interval agrees: that of the
    coverage must leave out 0.95, and that of the calibration error must lie above `LARGEST_ERROR`.

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
    middle = figures["coverage50"]
    tails = "the errors have other tails than the predicted distribution"
    if coverage < RIGHT_COVERAGE[0] and high < _LEVEL:
        if middle > 0.5 + LEANING:
            return f"{start}too narrow at 95 %, too wide at 50 % (coverage {middle:.2f}): {tails}"
        return f"{start}too narrow, {remedy}"
    if coverage > RIGHT_COVERAGE[1] and low > _LEVEL:
        if middle < 0.5 - LEANING:
            return f"{start}too wide at 95 %, too narrow at 50 % (coverage {middle:.2f}): {tails}"
        return f"{start}too wide, {remedy}"
    if error > LARGEST_ERROR and intervals["calibration_error"][0] > LARGEST_ERROR:
        way = "narrow" if middle < 0.5 else "wide"
        return f"{start}right at 95 %, but too {way} at 50 % (coverage {middle:.2f}, CE {error:.2f}): {tails}"
    certain = RIGHT_COVERAGE[0] <= coverage <= RIGHT_COVERAGE[1] and error <= LARGEST_ERROR
    return f"{start}well calibrated" + ("" if certain else f", as far as {frames} frames can tell")


def _no_uncertainties(file: str) -> str:
    family = families.get(families.DEFAULT)
    columns = ", ".join([FORCE_VIEWS[0].name, *(key.name for key in family.parameter_keys)])
    return (
        f"no error bars: {file} has no uncertainty columns. Looked for {columns} and those of other readouts, with the "
        "prefix of the predicted forces. To get them: e2ip fit MODEL --train … --valid …, then e2ip evaluate"
    )
