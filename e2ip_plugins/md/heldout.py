"""Quantiles of uncertainties on held-out frames: a file of ``e2ip calibrate``, or predictions for such frames."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional, Union

from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.families.ensemble import Ensemble
from e2ip_plugins.keys import CALIBRATION_KEY, CONFORMAL_EXTENT, FAMILY_KEY, LEVERAGE, MODEL_KEY, PRINCIPAL_STD
from e2ip_plugins.predictions.copies import distinct
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.conformal import configurations_for
from e2ip_plugins.scores.frame_maxima import ALL_ATOMS, QUANTILE_LEVELS, Tables, of_predictions


@dataclass(frozen=True)
class HeldOut:
    """Quantiles and conformal radii from frames that the model was not trained on.

    Attributes
    ----------
    path : str
        File that they were read from.
    uq_family : str
        Family of the model.
    maxima : dict
        Quantiles, as in `e2ip_plugins.scores.frame_maxima.Tables`.
    radii : dict
        Conformal radius by level; empty unless the file has radii.
    calibration : str or None
        Name of the calibration that the covariances have had.
    changes : bool
        Whether that calibration changes uncertainties at all.
    uq_model : str or None
        Name of the model, where it is known.
    frames : int
        Number of held-out frames.
    """

    path: str
    uq_family: str
    maxima: Tables
    radii: Dict[float, float]
    calibration: Optional[str]
    changes: bool
    uq_model: Optional[str] = None
    frames: int = 0

    @classmethod
    def read(cls, path: Union[str, Path], levels: Iterable[float] = ()) -> "HeldOut":
        """Read a ``.json`` file of ``e2ip calibrate``, or an extxyz file that ``e2ip compare`` reads.

        Parameters
        ----------
        path : str or Path
        levels : iterable of float
            Levels of quantiles that are needed beside `QUANTILE_LEVELS`; a calibration has `QUANTILE_LEVELS` alone.

        Raises
        ------
        InputError
            Files that cannot be read, and predictions without a distribution.
        """
        if Path(path).suffix == ".json":
            c, name = Calibration.read(path), Path(path).name
            return cls(str(path), c.uq_family, c.frame_maxima, c.radii, name, c.changes, c.uq_model, len(c.frames))
        predictions = distinct(read_predictions(path, required=False))
        for text in predictions.remarks:
            warnings.warn(f"{path}: {text}", UncertaintyWarning, stacklevel=2)
        if predictions.family is None:
            raise InputError(f"{path}: has no predicted distribution, forces only")
        p, maxima = predictions, of_predictions(predictions, levels={*QUANTILE_LEVELS, *levels})
        family = predictions.family.uq_family
        return cls(str(path), family, maxima, {}, p.calibration, True, p.uq_model, int(p.counted.sum()))

    def check(self, results: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raise `InputError` unless a calculator's results are of the same family, model and calibration.

        Parameters
        ----------
        results : dict
            Results of the calculator.
        names : iterable of str
            Uncertainties that are watched. No calibration changes a leverage.
        """
        family, applied = results.get(FAMILY_KEY), results.get(CALIBRATION_KEY)
        if family is None and self.uq_family != Ensemble.uq_family:
            problem = f"is of one model of family '{self.uq_family}', the calculator is a committee"
            raise InputError(f"{self.path}: {problem}: give the file that e2ip ensemble makes of its members")
        if family not in (None, self.uq_family):
            raise InputError(f"{self.path}: is of family '{self.uq_family}', the calculator's model of '{family}'")
        model = results.get(MODEL_KEY)
        if None not in (model, self.uq_model) and model != self.uq_model:
            problem = f"holds uncertainties of another model ({self.uq_model}) than the calculator's ({model})"
            raise InputError(f"{self.path}: {problem}; take predictions of the calculator's model")
        if set(names) == {LEVERAGE.name} or applied == self.calibration or (applied is None and not self.changes):
            return
        problem = f"has the calibration {self.calibration or 'none'}, the calculator's {applied or 'none'}"
        raise InputError(f"{self.path}: {problem}; give the calculator the same one (calibration=… or --calibration)")

    def quantile(self, name: str, group: str, level: float) -> float:
        """Return a quantile of the largest uncertainty in a frame; of the conformal extent without its radius.

        Parameters
        ----------
        name : str
            Name of the uncertainty.
        group : str
            Chemical symbol, or `ALL_ATOMS`.
        level : float

        Raises
        ------
        InputError
            Quantiles that the file lacks, and those that are no threshold: infinite or 0.
        """
        values = self.table(name, group)
        if values is None and group != ALL_ATOMS and self.table(name, ALL_ATOMS) is not None:
            raise InputError(f"{self.path}: its frames hold no {group}, of which a quantile is wanted")
        if values is None:
            raise InputError(f"{self.path}: its frames have no {name}")
        if level not in values:
            problem = f"has the quantiles {', '.join(f'{p:g}' for p in values)}, not {level:g}"
            raise InputError(f"{self.path}: {problem}; for others give the predictions that it was fitted to")
        if not math.isfinite(values[level]):
            needed = configurations_for(level) if level < 1.0 else 1
            raise InputError(
                f"{self.path}: its {self.frames} frames are too few for the quantile {level:g} of {name} ({group}), "
                f"which needs {needed} of them, or it is infinite; take a lower one, or 1 for the largest value"
            )
        if not values[level] > 0.0:
            raise InputError(f"{self.path}: the quantile {level:g} of {name} ({group}) is 0, which is no threshold")
        return values[level]

    def table(self, name: str, group: str) -> Optional[Dict[float, float]]:
        """Return the quantiles by level, None where there are none."""
        return self.maxima.get(PRINCIPAL_STD.name if name == CONFORMAL_EXTENT.name else name, {}).get(group)

    def radius(self, level: float) -> float:
        """Return the conformal radius of a level; `InputError` where there is no finite one."""
        radii = {p: radius for p, radius in self.radii.items() if math.isfinite(radius)}
        if level not in radii:
            problem = f"has no conformal radius for level {level:g}; it has radii for: "
            problem += ", ".join(f"{p:g}" for p in radii) or "none"
            raise InputError(f"{self.path}: {problem}; e2ip calibrate --method conformal fits radii")
        return radii[level]

    def check_species(self, symbols: Iterable[str]) -> None:
        """Raise `InputError` for elements that no held-out frame has: quantiles say nothing of them."""
        missing = sorted(set(symbols).difference(*self.maxima.values()))
        if self.maxima and missing:
            problem = f"its frames hold no {', '.join(missing)}, which the structure has"
            raise InputError(f"{self.path}: {problem}: quantiles must come from frames of its kind")
