"""Names of the outputs of models in dictionaries, ASE results and extxyz columns, with shapes and units."""

import re
from typing import NamedTuple

#: 1 kcal/mol/Å in eV/Å: the paper's force unit.
KCAL_PER_MOL = 0.0433641


class OutputKey(NamedTuple):
    """One output of an atom or a frame.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Trailing shape after the atom axis.
    unit : str
        ``"1"``: the output has no unit, and the `convert` and `widen` of its family must not change it.
    meaning : str
    above : float
        Lower bound: values in files must be finite and greater.
    """

    name: str
    shape: tuple
    unit: str
    meaning: str
    above: float = -float("inf")


#: Outputs that every predictive family derives from its parameters; a family may add others.
FORCE_VIEWS = (
    OutputKey("forces_cov", (3, 3), "eV²/Å²", "covariance of the predicted force: aleatoric + epistemic"),
    OutputKey("forces_aleatoric_cov", (3, 3), "eV²/Å²", "aleatoric part"),
    OutputKey("forces_epistemic_cov", (3, 3), "eV²/Å²", "epistemic part"),
    OutputKey("forces_uncertainty", (3,), "eV/Å", "square root of the diagonal of forces_cov"),
    OutputKey("forces_epistemic_std", (), "eV/Å", "sqrt(tr forces_epistemic_cov / 3), rotation invariant"),
)

#: Outputs of a whole frame: M numbers, one, and those of frames that are periodic in all directions.
ENERGY_ERROR_VECTOR = OutputKey("energy_error_vector", (-1,), "eV", "its norm is the standard deviation of the energy")
ENERGY_UNCERTAINTY = OutputKey("energy_uncertainty", (), "eV", "standard deviation of the total energy")
STRESS_COV = OutputKey("stress_cov", (6, 6), "eV²/Å⁶", "covariance of the stress, xx yy zz yz xz xy")
STRESS_UNCERTAINTY = OutputKey("stress_uncertainty", (6,), "eV/Å³", "square root of the diagonal of stress_cov")
ENERGY_OUTPUTS = (ENERGY_UNCERTAINTY, ENERGY_ERROR_VECTOR)
FRAME_OUTPUTS = (*ENERGY_OUTPUTS, STRESS_UNCERTAINTY, STRESS_COV)

#: Output of every readout on an atom's environment, whatever its family: at least 0, `UNFITTED` until it is fitted.
LEVERAGE = OutputKey("e2ip_leverage", (), "1", "distance from the training set, 1: like a training atom on average")

#: Scalars of an atom that follow from the outputs (`e2ip_plugins.scores.frame_maxima`), and one of the frame; they are
#: never written to files.
PRINCIPAL_STD = OutputKey("forces_principal_std", (), "eV/Å", "sqrt of the largest eigenvalue of forces_cov")
ENERGY_PER_ATOM = OutputKey(
    "energy_uncertainty_per_atom", (), "eV/atom", "energy_uncertainty / number of atoms of the frame"
)
CONFORMAL_EXTENT = OutputKey(
    "forces_conformal_extent", (), "eV/Å", "longest half axis of the conformal region: radius · forces_principal_std"
)

#: Leverage of a model that was never fitted. It is not NaN, because MACE and NequIP test outputs for equality.
UNFITTED = -1.0

#: Key of the predictive family in files and results.
FAMILY_KEY = "uq_family"

#: Key of the name of the readout that predicted: `e2ip_plugins.readout.readout.model_name`.
MODEL_KEY = "uq_model"

#: Key of the name of the calibration that has been applied.
CALIBRATION_KEY = "uq_calibration"

#: Key of `e2ip_plugins.predictions.fingerprints.force_sizes` of the predicted forces, in files alone. Forces of another
#: size in the same frame were put there later, and are a reference.
PREDICTED_KEY = "uq_force_sizes"

#: Keys that belong to a whole frame.
FRAME_KEYS = (FAMILY_KEY, MODEL_KEY, CALIBRATION_KEY, PREDICTED_KEY)

#: Weights in a training of MACE: of a frame, of its forces and of its energy. What has weight 0 counts nowhere.
WEIGHT_KEYS = ("config_weight", "config_forces_weight", "config_energy_weight")

#: Beginning of the names of reference energies, forces and so on in files with predictions.
REFERENCE_PREFIX = re.compile(r"(ref|reference|dft|original_dataset|target|true)_", re.IGNORECASE)

#: Outputs that the loss and the metrics read, never written to files: σ_ref in eV/Å (N,); 1 where a damper is past its
#: knee (N,); the coefficients (N, C) from which the family makes its parameters and its loss.
FORCE_UNIT_KEY = "e2ip_force_unit"
PLATEAU_KEY = "e2ip_plateau"
COEFFICIENTS_KEY = "e2ip_coefficients"
