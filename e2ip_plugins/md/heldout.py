"""What frames say that the model was not trained on: a file of ``e2ip calibrate``, or predictions for such frames."""

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
    """Quantiles and conformal radii.

    Attributes
    ----------
    path : str
    uq_family : str
    maxima : dict
        See `e2ip_plugins.scores.frame_maxima.Tables`.
    radii : dict
        Conformal radius by level; empty unless the file has some.
    calibration : str or None
        Name of the calibration that the covariances have seen.
    changes : bool
        Whether that calibration changes covariances at all.
    uq_model : str or None
        Whose uncertainties they are, where it is known.
    frames : int
        How many there are.
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
        """Of a ``.json`` file of ``e2ip calibrate``, or of an extxyz file that ``e2ip compare`` reads.

        Parameters
        ----------
        path
        levels
            Of quantiles that are wanted beside `QUANTILE_LEVELS`, which are all that a calibration has.

        Raises
        ------
        InputError
            What cannot be read, and predictions without a distribution.
        """
        if Path(path).suffix == ".json":
            found = Calibration.read(path)
            changes = found.floor.value > 0.0 or any(constant.value != 1.0 for constant in found.factor.values())
            name, maxima = Path(path).name, found.frame_maxima
            number = len(found.frames)
            return cls(str(path), found.uq_family, maxima, found.radii, name, changes, found.uq_model, number)
        predictions = distinct(read_predictions(path, required=False))
        for text in predictions.repeats:
            warnings.warn(f"{path}: {text}", UncertaintyWarning, stacklevel=2)
        if predictions.family is None:
            raise InputError(f"{path}: has no predicted distribution, forces only")
        maxima = of_predictions(predictions, levels={*QUANTILE_LEVELS, *levels})
        family, applied = predictions.family.uq_family, predictions.calibration
        return cls(str(path), family, maxima, {}, applied, True, predictions.uq_model, len(predictions.frames))

    def check(self, results: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raise `InputError` unless a calculator's results are of the same family, model and calibration.

        Parameters
        ----------
        results
            Of the calculator.
        names
            What is watched; no calibration changes a leverage.
        """
        family, applied = results.get(FAMILY_KEY), results.get(CALIBRATION_KEY)
        if family is None and self.uq_family != Ensemble.uq_family:
            raise InputError(
                f"{self.path}: is of one model of family '{self.uq_family}', the calculator is a committee: give the "
                "file that e2ip ensemble makes of its members' predictions"
            )
        if family not in (None, self.uq_family):
            raise InputError(f"{self.path}: is of family '{self.uq_family}', the calculator's model of '{family}'")
        model = results.get(MODEL_KEY)
        if None not in (model, self.uq_model) and model != self.uq_model:
            raise InputError(
                f"{self.path}: holds uncertainties of another model ({self.uq_model}) than the calculator's ({model}); "
                "what is usual for one model is not for another: take predictions of this one for held-out frames"
            )
        if set(names) == {LEVERAGE.name} or applied == self.calibration or (applied is None and not self.changes):
            return
        raise InputError(
            f"{self.path}: its uncertainties have the calibration {self.calibration or 'none'}, the calculator's "
            f"{applied or 'none'}; give the calculator the same one (calibration=…; as a command --calibration)"
        )

    def quantile(self, name: str, group: str, level: float) -> float:
        """Of the largest uncertainty in a frame; of the conformal extent without its radius.

        Parameters
        ----------
        name : str
            Of the uncertainty.
        group : str
            Chemical symbol, or `ALL_ATOMS`.
        level : float
        """
        values = self.table(name, group)
        if values is None:
            raise InputError(f"{self.path}: {self._why_missing(name, group)}")
        if level not in values:
            raise InputError(
                f"{self.path}: has the quantiles {', '.join(f'{p:g}' for p in values)}, not {level:g}; for others give "
                "the predictions that it was fitted to (extxyz)"
            )
        if not math.isfinite(values[level]):
            wanted = configurations_for(level) if level < 1.0 else 1
            raise InputError(
                f"{self.path}: its {self.frames} frames are too few for the quantile {level:g} of {name} ({group}), "
                f"which wants {wanted} of them, or it is infinite; take a lower one, or 1 for the largest value"
            )
        if not values[level] > 0.0:
            raise InputError(f"{self.path}: the quantile {level:g} of {name} ({group}) is 0, which is no threshold")
        return values[level]

    def table(self, name: str, group: str) -> Optional[Dict[float, float]]:
        """`quantile` by level; None where there are none."""
        return self.maxima.get(PRINCIPAL_STD.name if name == CONFORMAL_EXTENT.name else name, {}).get(group)

    def radius(self, level: float) -> float:
        """Conformal radius of a level; `InputError` where there is no finite one."""
        found = {p: q for p, q in self.radii.items() if math.isfinite(q)}
        if level not in found:
            there = ", ".join(f"{p:g}" for p in found) or "none"
            raise InputError(
                f"{self.path}: has no conformal radius for level {level:g}, but for: {there}; e2ip calibrate --method "
                "conformal writes a file with radii"
            )
        return found[level]

    def check_species(self, symbols: Iterable[str]) -> None:
        """Raise `InputError` where held-out frames have none of an element: their quantiles are not its."""
        known = {group for table in self.maxima.values() for group in table}
        missing = sorted(set(symbols) - known)
        if known and missing:
            raise InputError(
                f"{self.path}: its frames hold no {', '.join(missing)}, which the structure has: quantiles must come "
                "from frames of its kind"
            )

    def _why_missing(self, name: str, group: str) -> str:
        if not self.maxima:
            return "has no quantiles, which earlier versions did not write; fit it anew with e2ip calibrate"
        if group != ALL_ATOMS and self.table(name, ALL_ATOMS) is not None:
            return f"its frames hold no {group}, of which a quantile is wanted"
        return f"its frames have no {name}"
