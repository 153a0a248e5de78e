"""What a preset fixes, and the checks on the options that users write.

A preset sets readout and loss. The paper's optimiser settings are host configuration and live in
``configs/``.
"""

import math
from dataclasses import dataclass
from typing import Optional, Union

from e2ip_plugins.errors import InputError

#: 1 kcal/mol/Å in eV/Å, the paper's force unit and the default σ_ref.
KCAL_PER_MOL = 0.0433641

#: ``force_unit: auto`` is this fraction of the training forces' component RMS.
AUTO_FORCE_UNIT_FRACTION = 0.03

EVIDENCE_MODES = ("independent", "coupled")

#: Knee τ and ceiling c of the damper on the traceless (2e) coefficients; conditioning of Σ0
#: depends on these alone, so both presets share them (paper, appendix on damping functions).
TENSOR_DAMPER = (4.0, 5.0)


@dataclass(frozen=True)
class Preset:
    """Settings of readout and loss that go together.

    Attributes
    ----------
    evidence : str
        ``independent`` or ``coupled``.
    evidence_weight : float
        λ of the evidence regulariser.
    scalar_damper : tuple of float
        Knee τ and ceiling c of the damper on the isotropic (0e) coefficient.
    mse_like : bool
        Give the force block the size and sign of a mean square error and keep large variances from weakening
        its pull on the forces, so that the host's force weights keep their meaning (see `e2ip_plugins.readout.loss`).
        ``False``: raw NLL in nats.
    initial_sigma : float
        σ of an untrained model's Σ0 in units of σ_ref. Starting far below the first errors costs epochs.
    """

    name: str
    evidence: str
    evidence_weight: float
    scalar_damper: tuple
    mse_like: bool
    initial_sigma: float


PRESETS = {
    "paper": Preset("paper", "independent", 0.1, (4.0, 5.0), mse_like=False, initial_sigma=1.0),
    "default": Preset("default", "coupled", 0.0, (14.0, 15.0), mse_like=True, initial_sigma=10.0),
}


def get_preset(name: str) -> Preset:
    """Preset by name; unknown names raise `InputError`."""
    if name not in PRESETS:
        raise InputError(f"unknown e2ip preset '{name}'; choose from: {', '.join(PRESETS)}")
    return PRESETS[name]


def resolve_evidence(preset: Preset, evidence: Optional[str] = None) -> str:
    """Evidence mode: the explicit one, else the preset's; unknown modes raise `InputError`."""
    if evidence is None:
        return preset.evidence
    if evidence not in EVIDENCE_MODES:
        raise InputError(f"unknown evidence mode '{evidence}'; choose from: {', '.join(EVIDENCE_MODES)}")
    return evidence


def resolve_evidence_weight(preset: Preset, evidence: str, weight: Optional[float] = None) -> float:
    """λ ≥ 0 of the regulariser for an evidence mode.

    In ``coupled`` mode there is no regulariser: an explicit weight is an error. When a preset is
    made ``independent`` by hand, λ is 0.01.
    """
    if evidence == "coupled":
        if weight is not None:
            raise InputError(
                f"evidence_weight is {weight}, but evidence mode 'coupled' has no regulariser; "
                "leave evidence_weight out or choose evidence mode 'independent'"
            )
        return 0.0
    if weight is None:
        return preset.evidence_weight if preset.evidence == "independent" else 0.01
    if not (math.isfinite(weight) and weight >= 0):
        raise InputError(f"evidence_weight must be a finite number >= 0, got {weight}")
    return float(weight)


def resolve_force_unit(force_unit: Union[float, str, None], forces_rms: Optional[float] = None) -> float:
    """σ_ref in eV/Å from a number, ``None`` (1 kcal/mol/Å) or ``auto``.

    Parameters
    ----------
    force_unit
        Number > 0 in eV/Å, a string holding one, ``auto`` or ``None``.
    forces_rms
        Root mean square of the training forces' components in eV/Å; needed by ``auto``.
    """
    if force_unit is None:
        return KCAL_PER_MOL
    if isinstance(force_unit, str) and force_unit.strip().lower() == "auto":
        if forces_rms is None or not (math.isfinite(forces_rms) and forces_rms > 0):
            raise InputError(
                "force_unit 'auto' needs the training forces' component RMS (a finite number > 0), "
                f"got {forces_rms}; give force_unit as a number in eV/Å instead"
            )
        return AUTO_FORCE_UNIT_FRACTION * float(forces_rms)
    try:
        value = float(force_unit)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"force_unit must be 'auto' or a finite number > 0 in eV/Å, got {force_unit!r}")
    return value
