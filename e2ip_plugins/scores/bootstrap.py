"""How sure coverages are: what they become when whole configurations are drawn with replacement.

The atoms of a configuration are no independent witnesses, so a bootstrap that draws atoms would be too sure.
"""

from typing import NamedTuple, Optional, Tuple

import numpy as np

from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, calibration_error

#: Of every bootstrap.
RESAMPLES, SEED = 400, 0


def of_all(index: np.ndarray, pit: np.ndarray) -> np.ndarray:
    """Configuration (N,) of every entry of a PIT, which some distributions have per component (N, 3)."""
    return np.repeat(index, pit.size // len(index))


def inside_regions(pit: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Atoms (or components) of every configuration inside the regions of all levels (configurations, levels).

    Parameters
    ----------
    pit : (N,) or (N, 3)
    index : (N,) int
        Configuration of every atom, 0 … count - 1.
    count : int
    """
    levels = len(CALIBRATION_LEVELS)
    first = np.searchsorted(CALIBRATION_LEVELS, pit.ravel(), side="left")
    table = np.bincount(of_all(index, pit) * (levels + 1) + first, minlength=count * (levels + 1)).reshape(
        count, levels + 1
    )
    return table.cumsum(axis=1)[:, :levels].astype(np.float32)


class CoverageBand(NamedTuple):
    """95 % intervals of observed coverages, level by level, and of the calibration error.

    Attributes
    ----------
    low, high : (levels,)
        Percentiles over the resamples at the levels 0.01 … 0.99.
    calibration_error : tuple of float
        The noise of resampling comes on top of that of the atoms that there are, and a mean of absolute deviations
        only grows with noise: the lower percentile would lie too high, for a calibrated model always above its 0.
        Reflected at the value itself (the basic bootstrap) and cut at 0 it does not. The upper one would be too low if
        it were reflected as well, wherever the value came out low by chance; it is the percentile.
    """

    low: np.ndarray
    high: np.ndarray
    calibration_error: Tuple[float, float]

    def coverage(self, level: float) -> Tuple[float, float]:
        """Interval of the coverage at one of the levels 0.01 … 0.99."""
        at = int(np.argmin(np.abs(CALIBRATION_LEVELS - level)))
        return float(self.low[at]), float(self.high[at])


def coverage_band(pit: np.ndarray, frame: np.ndarray) -> Optional[CoverageBand]:
    """Intervals of the coverages of atoms in their configurations; None with fewer than two configurations.

    Parameters
    ----------
    pit : (N,) or (N, 3)
    frame : (N,) int
        Configuration of every atom.

    Examples
    --------
    Two configurations, one always inside and one never: whatever is drawn, coverage lies between 0 and 1.

    >>> coverage_band(np.array([0.0, 1.0]), np.array([0, 1])).coverage(0.5)
    (0.0, 1.0)
    """
    frames, index = np.unique(frame, return_inverse=True)
    count = len(frames)
    if count < 2:
        return None
    inside, sizes = inside_regions(pit, index, count), np.bincount(of_all(index, pit))
    drawn = np.random.default_rng(SEED).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    drawn = drawn.astype(inside.dtype)
    observed = (drawn @ inside) / (drawn @ sizes)[:, None]
    low, high = np.quantile(observed, [0.025, 0.975], axis=0)
    found = calibration_error(pit)
    more = float(np.quantile(np.abs(observed - CALIBRATION_LEVELS).mean(axis=1), 0.975))
    return CoverageBand(low, high, (max(0.0, 2.0 * found - more), max(found, more)))
