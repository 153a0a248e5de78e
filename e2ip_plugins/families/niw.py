"""Base of the Normal-Inverse-Wishart families, which differ in how coefficients become Σ0.

Per atom: the nominal covariance Σ0 and the evidence ν > 5 and κ > 0. The force is predicted to follow a Student-t with
m = ν - 2 degrees of freedom, location γ (the predicted force) and scale matrix Λ = ν(κ+1)/(κ(ν-2)) Σ0 (paper, Eq. 7).

``mse_like`` losses pull on the forces as `e2ip_plugins.families.interface.pulled` says, with β = `PULL_POWER`.
"""

import math
from typing import Any, ClassVar, Dict, Final, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import (
    INITIAL_SIGMA,
    SCALAR_DAMPER,
    Family,
    Option,
    checked_number,
    force_views,
    pulled,
)
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, OutputKey
from e2ip_plugins.leverage.form import (
    FORM,
    LeverageForm,
    Support,
    flattening,
    inflate,
    less_evidence,
    log_around,
    remoteness,
)
from e2ip_plugins.maths.spd import exp_sym6, squarings_for, sym6_to_matrix
from e2ip_plugins.maths.student import MIN_NU, aleatoric_factor, evidence, predictive_scale_factor

#: Where κ comes from. independent: the coefficient κ̂; coupled: ν - 5; leverage: 1/excess of the fitted leverage, and as
#: coupled until there is a fit.
EVIDENCE_MODES = ("independent", "coupled", "leverage")

#: β of the pull on the forces (see the module), chosen by measurement (docs/develop/method-history.md). The authors of
#: β-NLL recommend 0.5, too.
PULL_POWER = 0.5


class Preset(NamedTuple):
    """Settings of readout and loss that go together. Those of the paper's optimiser stand in ``configs/``.

    Attributes
    ----------
    evidence : str
        One of `EVIDENCE_MODES`.
    evidence_weight : float
        λ of the evidence regulariser.
    scalar_damper : tuple of float
        Knee τ and ceiling c of the damper on s = tr log(Σ0/σ_ref²)/√3, the isotropic (0e) coefficient.
    mse_like : bool
        Whether the force term has the size and sign of a mean square error, and large variances do not weaken its pull
        on the forces, so that force weights keep their meaning (see the module). ``False``: raw NLL in nats.
    initial_sigma : float
        σ of an untrained model's Σ0 in units of σ_ref.
    """

    evidence: str
    evidence_weight: float
    scalar_damper: Tuple[float, float]
    mse_like: bool
    initial_sigma: float


PRESETS = {
    "paper": Preset("independent", 0.1, (4.0, 5.0), mse_like=False, initial_sigma=1.0),
    "default": Preset("leverage", 0.0, SCALAR_DAMPER, mse_like=True, initial_sigma=INITIAL_SIGMA),
}

# Σ0 ≥ exp(-c/√3) σ_ref² isotropically, hence NLL ≥ 1.5 ln 2π - (√3/2) c in units of σ_ref. Subtracting that keeps the
# loss ≥ 0: with a relative threshold, ReduceLROnPlateau counts a flat negative loss as an improvement for ever.
_NLL_FLOOR = 1.5 * math.log(2.0 * math.pi) - 0.5 * math.sqrt(3.0) * SCALAR_DAMPER[1]


class NIW(Family):
    """Base class; options ``preset``, ``evidence`` and ``evidence_weight``.

    Coefficients 1 and 2 are ν̂ and κ̂. Only mode ``independent`` reads κ̂; the weights have the same shapes in all modes.
    """

    uq_family = "niw"
    log_matrix = "e2ip_log_sigma0"
    options: ClassVar[Tuple[Option, ...]] = (
        Option(
            "preset", "settings of readout and loss: default (the default) or paper", "default", choices=(*PRESETS,)
        ),
        Option("evidence", "leverage, coupled or independent (default: the preset's)"),
        Option(
            "evidence_weight",
            "weight of the evidence regulariser, independent mode (default: 0.01; preset paper: 0.1)",
            type=float,
            loss_only=True,
        ),
    )
    parameter_keys = (
        OutputKey("e2ip_log_sigma0", (6,), "log(eV²/Å²)", "matrix logarithm of Σ0, order xx, yy, zz, yz, xz, xy"),
        # A covariance exists from ν > 4 on; models keep ν > 5 (paper, Eq. 9).
        OutputKey("e2ip_nu", (), "1", "covariance evidence ν > 5", above=4.0),
        OutputKey("e2ip_kappa", (), "1", "evidence for the mean, κ > 0: aleatoric over epistemic part", above=0.0),
    )
    own_views = (OutputKey("e2ip_sigma0", (3, 3), "eV²/Å²", "nominal covariance Σ0"),)

    coupled: Final[bool]
    min_nu: Final[float] = MIN_NU  # TorchScript reads no globals

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        preset = PRESETS[options["preset"]]
        # Mode `leverage` is trained like `coupled`; once there is a fit, `_grown_with_support` computes κ anew.
        self.coupled = options["evidence"] != "independent"
        self.takes_support = options["evidence"] == "leverage"
        self.evidence_weight = float(options["evidence_weight"])
        self.mse_like = preset.mse_like
        self.scalar_damper: Tuple[float, float] = preset.scalar_damper
        self.initial_scalars = self.start(preset.initial_sigma)

    def start(self, sigma: float) -> Tuple[float, ...]:
        """Return the 0e coefficients of an isotropic Σ0 with that σ in units of σ_ref, raw evidence 0."""
        raise NotImplementedError

    def distribution(
        self, coefficients: Tensor, force_unit: Tensor, flattening: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return log Σ0 and Σ0 (N, 6), ν, κ and plateau (N,), as `e2ip_plugins.maths.kernels.distribution`."""
        raise NotImplementedError

    def nll_terms(self, coefficients: Tensor, residual: Tensor, force_unit: Tensor) -> Tuple[Tensor, Tensor]:
        """Return NLL and evidence regulariser (N,), as `e2ip_plugins.maths.kernels.nll_terms`."""
        raise NotImplementedError

    def log_sigma2(self, coefficients: Tensor) -> Tensor:
        """Return ln det(Σ0/σ_ref²)^(1/3) (N,)."""
        raise NotImplementedError

    @classmethod
    def resolve(cls, user_options: Mapping[str, Any]) -> Dict[str, Any]:
        """See `Family`; only mode ``independent`` has a regulariser: with another, an explicit weight is an error.

        >>> NIW.resolve({"evidence": "independent"})
        {'preset': 'default', 'evidence': 'independent', 'evidence_weight': 0.01}
        """
        options = super().resolve(user_options)
        preset = PRESETS[options["preset"]]
        evidence, weight = options["evidence"] or preset.evidence, options["evidence_weight"]
        if evidence not in EVIDENCE_MODES:
            raise InputError(f"unknown evidence mode '{evidence}'; choose from: {', '.join(EVIDENCE_MODES)}")
        if weight is not None and evidence != "independent":
            raise InputError(
                f"evidence_weight is {weight}, but evidence mode '{evidence}' has no regulariser; "
                "leave evidence_weight out or choose evidence mode 'independent'"
            )
        if weight is None:
            # A preset whose evidence mode is overridden has no weight for this mode.
            default = preset.evidence_weight if preset.evidence == "independent" else 0.01
            weight = default if evidence == "independent" else 0.0
        options |= {"evidence": evidence, "evidence_weight": weight}
        return {**options, "evidence_weight": checked_number(options, "evidence_weight")}

    @classmethod
    def of_weights(cls, options: Mapping[str, Any]) -> Dict[str, Any]:
        """See `Family`."""
        coupled = {"evidence": "coupled"} if options["evidence"] == "leverage" else {}
        return {**super().of_weights(options), **coupled}

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        """See `Family`."""
        if not self.takes_support or support is None:
            log_sigma0, sigma0, nu, kappa, plateau = self.distribution(coefficients, force_unit)
        else:
            far = torch.where(support.fitted, remoteness(support.distance), 0.0).to(coefficients.dtype)
            log_sigma0, sigma0, nu, kappa, plateau = self.distribution(coefficients, force_unit, flattening(far))
            # κ is still that of training, ν - 5 with the ν before `less_evidence`; `_grown_with_support` replaces it.
            nu = less_evidence(nu, far, self.min_nu)
            shift, kappa = _grown_with_support(log_sigma0, kappa, support, far)
            log_sigma0 = log_sigma0.clone()
            log_sigma0[:, :3] += shift.unsqueeze(-1)
            sigma0 = sigma0 * torch.exp(shift).unsqueeze(-1)
        outputs = _views(sigma0, nu, kappa)
        outputs["e2ip_log_sigma0"] = log_sigma0
        outputs["e2ip_nu"] = nu
        outputs["e2ip_kappa"] = kappa
        outputs["e2ip_plateau"] = plateau
        return outputs

    def constant_scalars(self) -> Tuple[Tuple[float, ...], ...]:
        """See `Family`; ν from 5.1 to 37."""
        first, _, *rest = self.initial_scalars
        return tuple((first, nu, *rest) for nu in (-2.0, 0.0, 2.0, 4.0, 8.0, 16.0, 32.0))

    @classmethod
    def log_variance(cls, parameters: Dict[str, Tensor]) -> Tensor:
        """See `Family`; of (1 + 1/κ) Σ0, which is what the likelihood sees."""
        return super().log_variance(parameters) + torch.log1p(1.0 / parameters["e2ip_kappa"])

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """Return NLL + λ (ν + κ)‖residual‖/σ_ref per atom (N,) (paper, Eq. 14, 25).

        ``mse_like`` presets: 2σ_ref²/3 · (NLL + λ·reg + constant) ≥ 0, NLL of forces in units of σ_ref, in (eV/Å)²; at
        errors of about σ_ref its gradient in the forces is that of the mean square error over components; for others
        see `PULL_POWER`. Presets that are not ``mse_like``: density in eV/Å, nats.
        """
        coefficients, force_unit = outputs[COEFFICIENTS_KEY], outputs[FORCE_UNIT_KEY]
        if self.mse_like:
            residual = self._pulled(residual, coefficients.detach())
        loss, regulariser = self.nll_terms(coefficients, residual, force_unit)
        if self.evidence_weight > 0:
            loss = loss + self.evidence_weight * regulariser
        if self.mse_like:
            in_force_units = loss - 3.0 * torch.log(force_unit) - _NLL_FLOOR
            loss = (2.0 / 3.0) * force_unit.square() * in_force_units
        return loss

    def _pulled(self, residual: Tensor, coefficients: Tensor) -> Tensor:
        """Return the residual, its gradient times (σ/σ_ref)^(2 `PULL_POWER`), σ² = det(Λ)^(1/3)."""
        nu, kappa = evidence(coefficients[:, 1], None if self.coupled else coefficients[:, 2])
        log_variance = self.log_sigma2(coefficients) + torch.log(predictive_scale_factor(nu, kappa))
        return pulled(residual, log_variance, PULL_POWER)

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """See `Family`; U_ale = ν/(ν-4) Σ0 and U_epi = U_ale/κ (paper, Eq. 8)."""
        log_sigma0 = parameters["e2ip_log_sigma0"]
        sigma0 = exp_sym6(log_sigma0, squarings_for(log_sigma0))
        return _views(sigma0, parameters["e2ip_nu"], parameters["e2ip_kappa"])

    @classmethod
    def widen(cls, parameters: Dict[str, Tensor], factor: Tensor, floor: Tensor) -> Dict[str, Tensor]:
        """See `Family`; the evidence stays, so that a floor is divided into its parts as the covariance is."""
        nu, kappa = parameters["e2ip_nu"], parameters["e2ip_kappa"]
        return super().widen(parameters, factor, floor / (aleatoric_factor(nu) * (1.0 + 1.0 / kappa)))

    @classmethod
    def far_out(cls, parameters: Dict[str, Tensor], far: Tensor, form: LeverageForm = FORM) -> Dict[str, Tensor]:
        """See `Family`, for the fit: `forward` does the same. The evidence ν runs out, too."""
        nu = less_evidence(parameters["e2ip_nu"], far, MIN_NU, form)
        return {**super().far_out(parameters, far, form), "e2ip_nu": nu}

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """See `Family`; Student-t with m = ν - 2 degrees of freedom and scale matrix Λ (paper, Eq. 7)."""
        nu, kappa = (torch.as_tensor(parameters[name], dtype=torch.float64) for name in ("e2ip_nu", "e2ip_kappa"))
        return {
            "log_matrix": parameters["e2ip_log_sigma0"],
            "log_factor": torch.log(predictive_scale_factor(nu, kappa)).numpy(),
            "dof": nu.numpy() - 2.0,
            "epistemic_share": 1.0 / (1.0 + kappa.numpy()),
        }


def _grown_with_support(log_sigma0: Tensor, kappa: Tensor, support: Support, far: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the isotropic shift of log Σ0 (N,) and κ = 1/excess (N,), with the excess of `inflate`.

    Training determines (1 + 1/κ) Σ0 alone, not how it is divided. With the pair of `inflate`

        Σ0' = (1 + 1/κ) Σ0 exp(log_base),   κ' = 1/excess,   so that (1 + 1/κ') Σ0' = (1 + excess) Σ0'.

    ``kappa`` is the κ of training, ν - 5 in mode ``leverage``. Without a fit nothing changes: the shift is 0, κ stays.
    """
    log1p_inverse_kappa = torch.log1p(kappa.reciprocal())
    log_own = log_sigma0[..., :3].sum(-1) / 3.0 + log1p_inverse_kappa
    log_base, excess = inflate(support, log_own, log_around(support, log_own), far=far)
    shift = log1p_inverse_kappa + log_base
    return torch.where(support.fitted, shift, 0.0), torch.where(support.fitted, excess.reciprocal(), kappa)


def _views(sigma0: Tensor, nu: Tensor, kappa: Tensor) -> Dict[str, Tensor]:
    """Return the derived keys from Σ0 as sym6 (…, 6), ν and κ (…,)."""
    matrix = sym6_to_matrix(sigma0)
    aleatoric = aleatoric_factor(nu)[..., None, None] * matrix
    epistemic = aleatoric / kappa[..., None, None]
    views = force_views(aleatoric, epistemic)
    views["e2ip_sigma0"] = matrix
    return views
