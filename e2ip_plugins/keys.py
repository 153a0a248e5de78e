"""Names, shapes and units of every output, for both hosts, ASE results and extxyz columns."""

from typing import NamedTuple

#: Value of the ``uq_family`` info entry for the Normal-Inverse-Wishart readout.
NIW = "niw"


class OutputKey(NamedTuple):
    """One per-atom output.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Trailing shape after the atom axis.
    unit : str
    force_power : int
        Power of the force unit: a calculator's unit factor f multiplies the value by f**force_power.
    meaning : str
    """

    name: str
    shape: tuple
    unit: str
    force_power: int
    meaning: str


#: Distribution parameters: the interchange. Everything else is derived from these.
PARAMETER_KEYS = (
    OutputKey("e2ip_log_sigma0", (6,), "log(eV²/Å²)", 0, "matrix logarithm of Σ0, order xx, yy, zz, yz, xz, xy"),
    OutputKey("e2ip_nu", (), "1", 0, "covariance evidence ν > 5"),
    OutputKey("e2ip_kappa", (), "1", 0, "mean evidence κ > 0"),
)

#: Views derived from the parameters by `e2ip_plugins.families.e2ip.derive`.
DERIVED_KEYS = (
    OutputKey("forces_cov", (3, 3), "eV²/Å²", 2, "covariance of the predictive Student-t: aleatoric + epistemic"),
    OutputKey("forces_aleatoric_cov", (3, 3), "eV²/Å²", 2, "aleatoric part U_ale"),
    OutputKey("forces_epistemic_cov", (3, 3), "eV²/Å²", 2, "epistemic part U_epi"),
    OutputKey("forces_uncertainty", (3,), "eV/Å", 1, "square root of the diagonal of forces_cov"),
    OutputKey("forces_epistemic_std", (), "eV/Å", 1, "sqrt(tr U_epi / 3), rotation invariant"),
    OutputKey("e2ip_sigma0", (3, 3), "eV²/Å²", 2, "nominal covariance Σ0"),
)

OUTPUT_KEYS = PARAMETER_KEYS + DERIVED_KEYS

#: Needed in training only, never written to files: σ_ref in eV/Å; 1.0 where a damper is past its knee; the raw
#: coefficients s, t1 … t5, ν̂, κ̂ (N, 8) that the loss starts from.
FORCE_UNIT_KEY = "e2ip_force_unit"
PLATEAU_KEY = "e2ip_plateau"
COEFFICIENTS_KEY = "e2ip_coefficients"

#: Σ0 as sym6 (N, 6) on its way from head to `e2ip_plugins.families.e2ip.derive_niw`; never an output.
SIGMA0_KEY = "e2ip_sigma0_sym6"
