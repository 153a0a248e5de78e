"""Names of what models put out, in one place: output dictionaries, ASE results and extxyz columns."""

import re
from typing import NamedTuple

#: 1 kcal/mol/Å in eV/Å: the paper's force unit.
KCAL_PER_MOL = 0.0433641


class OutputKey(NamedTuple):
    """One per-atom output.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Trailing shape after the atom axis.
    unit : str
    meaning : str
    above : float
        Values in files must be finite and greater than this.
    """

    name: str
    shape: tuple
    unit: str
    meaning: str
    above: float = -float("inf")


#: Views that every predictive family derives from its parameters; a family may add its own.
FORCE_VIEWS = (
    OutputKey("forces_cov", (3, 3), "eV²/Å²", "covariance of the predicted force: aleatoric + epistemic"),
    OutputKey("forces_aleatoric_cov", (3, 3), "eV²/Å²", "aleatoric part"),
    OutputKey("forces_epistemic_cov", (3, 3), "eV²/Å²", "epistemic part"),
    OutputKey("forces_uncertainty", (3,), "eV/Å", "square root of the diagonal of forces_cov"),
    OutputKey("forces_epistemic_std", (), "eV/Å", "sqrt(tr forces_epistemic_cov / 3), rotation invariant"),
)

#: What every readout says about an atom's environment, whatever its family: at least 0, `UNFITTED` until it is fitted.
LEVERAGE = OutputKey("e2ip_leverage", (), "1", "distance from the training set, 1: like a training atom on average")

#: Scalars of an atom that follow from the outputs (`e2ip_plugins.scores.frame_maxima`): no columns, no results.
PRINCIPAL_STD = OutputKey("forces_principal_std", (), "eV/Å", "sqrt of the largest eigenvalue of forces_cov")
CONFORMAL_EXTENT = OutputKey(
    "forces_conformal_extent", (), "eV/Å", "longest half axis of the conformal region: radius · forces_principal_std"
)

#: Not NaN: hosts compare the outputs of models with themselves.
UNFITTED = -1.0

#: Name of a predictive family in files and results.
FAMILY_KEY = "uq_family"

#: Name of the readout that predicted, in files and results: `e2ip_plugins.readout.readout.model_name`.
MODEL_KEY = "uq_model"

#: Name of the calibration that has been applied, in files and results.
CALIBRATION_KEY = "uq_calibration"

#: What is said of a whole frame's uncertainties.
FRAME_KEYS = (FAMILY_KEY, MODEL_KEY, CALIBRATION_KEY)

#: How names of reference energies, forces and so on begin in files, beside predictions.
REFERENCE_PREFIX = re.compile(r"(ref|reference|dft|original_dataset|target|true)_", re.IGNORECASE)

#: Needed in training only, never written to files: σ_ref in eV/Å (N,); 1 where a damper is past its knee (N,); the
#: coefficients (N, C) that the family's distribution was made of, from which its loss starts.
FORCE_UNIT_KEY = "e2ip_force_unit"
PLATEAU_KEY = "e2ip_plateau"
COEFFICIENTS_KEY = "e2ip_coefficients"
