"""Intervals of observed coverages, from a bootstrap that draws whole configurations with replacement.

The atoms of a configuration are not independent: intervals from drawing atoms would be too narrow.
"""

from typing import NamedTuple, Optional, Tuple

import numpy as np

from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, calibration_error

#: Number of resamples, and seed, of every bootstrap.
RESAMPLES, RESAMPLING_SEED = 400, 0


def per_entry(index: np.ndarray, pit: np.ndarray) -> np.ndarray:
    """Return the configuration of every entry of a PIT, which some distributions have per component (N, 3)."""
    return np.repeat(index, pit.size // len(index))


def inside_regions(pit: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Count the atoms or components of every configuration inside the regions of all levels.

    Parameters
    ----------
    pit : (N,) or (N, 3)
    index : (N,) int
        Configuration of every atom, 0 … count - 1.
    count : int

    Returns
    -------
    (count, levels)
    """
    levels = len(CALIBRATION_LEVELS)
    first = np.searchsorted(CALIBRATION_LEVELS, pit.ravel(), side="left")
    table = np.bincount(per_entry(index, pit) * (levels + 1) + first, minlength=count * (levels + 1))
    return table.reshape(count, -1).cumsum(axis=1)[:, :levels].astype(np.float32)


class CoverageBand(NamedTuple):
    """95 % intervals of observed coverages, level by level, and of the calibration error.

    Attributes
    ----------
    low, high : (levels,)
        Percentiles over the resamples at the levels 0.01 … 0.99.
    calibration_error : tuple of float
        A mean of absolute deviations grows with noise, and resampling adds noise to that of the atoms. The lower
        percentile would therefore be too high, for a calibrated model always above 0: the lower end is the upper
        percentile reflected at the value itself (the basic bootstrap) and cut at 0. A reflected upper end would be too
        low wherever the value is low by chance: the upper end is the percentile.
    """

    low: np.ndarray
    high: np.ndarray
    calibration_error: Tuple[float, float]

    def coverage(self, level: float) -> Tuple[float, float]:
        """Return the interval of the coverage at one of the levels 0.01 … 0.99."""
        at = int(np.argmin(np.abs(CALIBRATION_LEVELS - level)))
        return float(self.low[at]), float(self.high[at])


def coverage_band(pit: np.ndarray, frame: np.ndarray) -> Optional[CoverageBand]:
    """Return intervals of the coverages; None with fewer than two configurations.

    Parameters
    ----------
    pit : (N,) or (N, 3)
    frame : (N,) int
        Configuration of every atom.

    Examples
    --------
    Two configurations, one always inside and one never: coverage lies anywhere between 0 and 1.

    >>> coverage_band(np.array([0.0, 1.0]), np.array([0, 1])).coverage(0.5)
    (0.0, 1.0)
    """
    frames, index = np.unique(frame, return_inverse=True)
    count = len(frames)
    if count < 2:
        return None
    inside, sizes = inside_regions(pit, index, count), np.bincount(per_entry(index, pit))
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    drawn = drawn.astype(inside.dtype)
    observed = (drawn @ inside) / (drawn @ sizes)[:, None]
    low, high = np.quantile(observed, [0.025, 0.975], axis=0)
    return CoverageBand(
        low, high, error_interval(calibration_error(pit), np.abs(observed - CALIBRATION_LEVELS).mean(axis=1))
    )


def error_interval(error: float, resampled: np.ndarray) -> Tuple[float, float]:
    """Return the 95 % interval of a calibration error from those of resamples (R,), as `CoverageBand` describes it."""
    upper = float(np.quantile(resampled, 0.975))
    return max(0.0, 2.0 * error - upper), max(error, upper)
