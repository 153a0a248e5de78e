r"""The form of the leverage: its formulas, and every constant of them that was tuned.

Symbols and their names in the code::

    h, d    leverage and distance of `Support`     a        growth
    g       `remoteness`, ``far``                  r(d)     in `inflate`, with `LeverageForm.linear`, d_l
    v, v̄    ``log_own`` and ``log_typical``        o, ε     optimism, relative error: see the surplus
    u/v̄     `log_around`                           κ        1/excess: `inflate` in `NIW.forward`
    b_n, c, n, q, ζ, ν_c, ρ, τ, φ, ω               fields of `LeverageForm`

Leverage of an atom. μ and C = U Λ Uᵀ are mean and covariance of the D invariant features of the training atoms of the
same kind (head and species); C of kinds with few atoms is shrunk towards that of all kinds (`fitting.moments`)::

    z = (Λ + ρ)^(-1/2) Uᵀ (x - μ),   h = Σ_k ψ(z_k²) / ⟨Σ_k ψ(z_k²)⟩,   ψ(t) = 2τ (√(1 + t/τ) - 1).

⟨…⟩ is the mean over training atoms, so that h is 1 for them on average. With ψ(t) = t, h would be the leverage of
statistics, a squared Mahalanobis distance. ψ(t) is t for small deviations and linear in z beyond √τ standard
deviations: nonlinear features run away from a narrow training set much faster than errors do.

Regions. A kind that lives in several regions s (phases, sites) has a mean and standard deviations of its own in each,
along the axes U of the kind. h is the mean of the regions' h_s with weights h_s^(-q): the near regions count.

Growth. A force is a derivative of the energies of an atom and its neighbours. h̄ is the mean of h over these, with the
cutoff envelope w_ij as weights. Everything below depends on the distance d, which is 2 on average over training atoms;
g says how far out an atom is::

    h̄_i = (h_i + Σ_j w_ij h_j) / (1 + Σ_j w_ij),   d = h + h̄,   g(d) = (d/d_g)^4 / (1 + (d/d_g)^4).

The predicted standard deviation grows with G = 1 + a r(d). Near the training set r(d) is d, far from it a third of d::

    r(d) = d ((1 + (d/d_l)²) / (1 + (d/d_g)²))^(1/4).

v is the atom's own variance, as the network predicts it without support (`Family.log_variance`), and v̄ the geometric
mean of v over training atoms of the kind. A force is in error where the energies around it are, whatever the network
says of the atom itself. u, the variance around the atom, is therefore v, or, in units of v̄, 0.4 times that of its
neighbours where this is more::

    u = v̄ (p + ω (p̄ - p))^(1/n),   p = (v/v̄)^n,   p̄_i = (p_i + Σ_j w_ij p_j) / (1 + Σ_j w_ij).

The excess (below) starts from the variance that grows, over v::

    (G² - 1) u^(1-b) v̄^b / v,   b = (b_n + (d/d_g)²) / (1 + (d/d_g)²).

Near the training set b is about 1/2 (0.4 at d = 0), the geometric mean of u and v̄: a variance that has grown by itself
need not grow twice. Far from it nothing was trained on u, and v̄ counts.

Shape. Far out the ratios of a covariance's axes are extrapolated, too, and errors follow them less and less. How large
errors are is known there only to within a factor of two, so that their distribution has heavy tails. With T the
traceless part of the logarithm of the covariance, and ν that of the normal-inverse-Wishart distribution::

    T' = T / √(1 + g ‖T‖²/c²),   1/(ν' - 5) = 1/(ν - 5) + g/ν_c.

So far out ‖T‖ is below c, and ν - 5 below ν_c. The determinant of the covariance's scale stays.

Surplus. Two things that the leverage of training atoms cannot show multiply the covariance of atoms unlike them by
exp(g S)::

    S = tanh(ζ o) + ln(φ/ε), the second at least 0 and at most `relative_most`.

An overfitted network errs less on its training set than anywhere else: the optimism o is ln(validation
variance / training variance) of the errors, each in units of what the model predicts. And a network that fits its
training set well errs far from it hardly less than one that fits it badly. Errors follow the size of forces there: ε is
the root mean square of validation errors over that of their reference forces. Where ε is below φ, the variance far out
is multiplied by φ/ε: it is that of the geometric mean of the network's own error and φ of the forces.

Evidence for the mean, κ. The excess is the epistemic part of the covariance in units of the aleatoric part. `inflate`
returns it, and in mode ``leverage`` κ = 1/excess::

    excess = (1 + (G² - 1) u^(1-b) v̄^b / v) exp(g S) - 1,   within 1e-6 … 1e6.

With d = 2, a = 2.5, u = v = v̄ and S = 0 the excess is 33 and κ is 0.03: nearly all of the covariance counts as
epistemic.

Total. In place of v the variance is the following; log_scale is fitted, as a and o are. The divisor is G² at d = 2, so
that v is about kept on training atoms; it acts on the whole covariance and not on κ::

    v exp(log_scale) (1 + excess) / (1 + a r(2))².

The growth mimics Bayesian linear regression with a matrix-normal-inverse-Wishart prior, where the predictive variance
is (1 + leverage) times the noise; κ would be 1/leverage there.

`LeverageForm` holds the constants, `FORM` their values; module, fit and selection take them from here alone. Numerical
safeguards, and where k-means and the fit start, are constants of the files that use them.
"""

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class LeverageForm(NamedTuple):
    """Constants of the leverage. Kernels and packaged models read them by name: the names are frozen.

    Alternatives, such as `FORM._replace(linear=30.0)`, are for studies: models always predict with `FORM`. To change
    it, edit the default here and fit again.

    A named tuple, because TorchScript takes it as an argument. Unless something else is said, a constant was chosen on
    the tables in benchmarks/results/leverage.json and far_out.json (docs/develop/method-history.md), which
    ``benchmarks/leverage.py`` computes (``atoms`` and ``judge``) and prints (``table``); their rows are named here.
    """

    #: ρ in units of the mean variance of a feature; rows "ridge …".
    ridge: float = 1e-5
    #: τ of ψ; rows "tau …" and "psi(t) = t".
    soft: float = 6.0
    #: A kind has a region for every so many times D atoms, D the number of features; rows "a region for every …" and
    #: "one region".
    atoms_per_feature: int = 8
    #: Regions of a kind, and of a head's kinds together, at most: more cost time, at little use.
    max_regions_of_kind: int = 16
    max_regions: int = 64
    #: Share of the kind's covariance in that of a region: between two regions is not outside; rows "regions share …".
    shared: float = 0.1
    #: q of the weights of regions; rows "regions by the power …". A larger power bends more sharply where regions meet,
    #: and biased dynamics conserves its energy less well.
    region_power: int = 4
    #: Bounds of h_s in these weights: the sums of powers of `max_regions_of_kind` regions fit into float32.
    nearest: float = 5e-10
    farthest: float = 1e9
    #: h of kinds without training atoms, and upper bound of h in d.
    max_leverage: float = 1e6

    #: d_g: where everything changes that is different far out; rows "remote from …".
    remote: float = 5.0
    #: d_l: from here on r(d) is linear again; rows "linear from …".
    linear: float = 40.0
    #: b_n of b; rows "relative …", of a former form.
    near_weight: float = 0.4
    #: n and ω of u; rows "around …".
    around_power: int = 4
    around_share: float = 0.02
    #: c and ν_c of the shape: ν_c is what ν - 5, not κ, is below far out; rows "anisotropy …" and "evidence …".
    anisotropy: float = 0.8
    evidence: float = 2.0
    #: Bound of the excess, of its inverse, and of (a r)²: κ is within 1e-6 … 1e6.
    max_ratio: float = 1e6
    #: ζ of the surplus; rows "optimism …" and the section "Overfitted networks".
    surplus_slope: float = 1.5
    #: φ, and upper bound of ln(φ/ε); rows "relative error …" and the section "Far out". Networks with errors below a
    #: hundredth of the forces were not tried.
    relative_error: float = 0.05
    relative_most: float = 2.0

    #: Prior of the growth a, in the fit: its middle, and its width in e-folds; rows "prior …" and the section "How much
    #: validation frames say of the growth".
    prior_growth: float = 2.5
    prior_width: float = 0.6
    #: Width of the prior of the optimism around 0, in the fit; the section "Overfitted networks".
    prior_optimism: float = 0.3


FORM = LeverageForm()


class Around(NamedTuple):
    """Weights of means over an atom and its neighbours.

    Attributes
    ----------
    sender, receiver : (E,) int
    weight : (E,)
        w_ij.
    total : (N,)
        1 + Σ_j w_ij.
    """

    sender: Tensor
    receiver: Tensor
    weight: Tensor
    total: Tensor


class Support(NamedTuple):
    """How well the training set supports every atom, as `e2ip_plugins.leverage.module.Leverage` finds it.

    A family that takes it multiplies its covariance by the factor of `inflate`. Without ``fitted`` the family leaves
    its parameters as they were trained.

    Attributes
    ----------
    leverage : (N,)
        h, dimensionless; `e2ip_plugins.keys.UNFITTED` unless fitted.
    distance : (N,)
        d = h + h̄, finite; 2 on average over training atoms.
    growth : (N,) or (1,)
        a.
    surplus : (N,) or (1,)
        S, at least 0.
    log_typical : (N,)
        ln v̄, the mean of `Family.log_variance` over training atoms of the same kind.
    log_scale : (N,)
        Logarithm of the factor that makes the variances of supported atoms right.
    fitted : () bool
    whitened : (N, D)
        z/√τ.
    around : Around, optional
        None where an atom must not depend on its neighbours' features, or is evaluated without them.
    """

    leverage: Tensor
    distance: Tensor
    growth: Tensor
    surplus: Tensor
    log_typical: Tensor
    log_scale: Tensor
    fitted: Tensor
    whitened: Tensor
    around: Optional[Around] = None


def softened(deviations: Tensor) -> Tensor:
    """Return ψ(z²)/2τ of deviations z/√τ, in a tensor of their shape."""
    return deviations.square().add_(1.0).sqrt_() - 1.0


def mean_over_regions(h: Tensor, form: LeverageForm = FORM) -> Tensor:
    """Return h (N,) of atoms from the h_s (N, R) of the regions, `LeverageForm.max_leverage` at most."""
    nearness = h.clamp(form.nearest, form.farthest).reciprocal()
    powers = nearness.pow(form.region_power - 1)
    return (powers.sum(1) / (powers * nearness).sum(1)).clamp(max=form.max_leverage)


def remoteness(distance: Tensor, form: LeverageForm = FORM) -> Tensor:
    """Return g (N,) of distances d (N,), from 0 near the training set to 1 far from it."""
    # The exponent 4, how sharply g rises, is no field: the tables have no rows for others.
    power = distance.pow(4) * form.remote**-4
    return power / (1.0 + power)


def reach_of_training(form: LeverageForm = FORM) -> float:
    """Return r(2)."""
    return 2.0 * ((1.0 + (2.0 / form.linear) ** 2) / (1.0 + (2.0 / form.remote) ** 2)) ** 0.25


def mean_around(values: Tensor, around: Around) -> Tensor:
    """Return (v_i + Σ_j w_ij v_j) / (1 + Σ_j w_ij) of values v (N,), the mean over an atom and its neighbours."""
    of_senders = around.weight * values.index_select(0, around.sender)
    return values.index_add(0, around.receiver, of_senders) / around.total


def log_around(support: Support, log_own: Tensor, form: LeverageForm = FORM) -> Tensor:
    """Return ln u/v̄ (N,) from ln v (N,); v/v̄ counts within 1e-3 … 1e3.

    A variance that is not a number must not spread to the neighbours: v̄ stands for it.
    """
    most, around = 0.5 * math.log(form.max_ratio), support.around
    log_ratio = torch.nan_to_num(log_own - support.log_typical, nan=0.0).clamp(-most, most)
    if around is None:
        return log_ratio
    powers = (form.around_power * log_ratio).exp()
    return torch.lerp(powers, mean_around(powers, around), form.around_share).log() / form.around_power


def inflate(
    support: Support, log_own: Tensor, log_u: Tensor, form: LeverageForm = FORM, far: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """Return ``log_base`` and ``excess`` of a fitted support: a covariance grows by exp(log_base) · (1 + excess).

    Parameters
    ----------
    support : Support
    log_own : (N,)
        ln v, `Family.log_variance` without support.
    log_u : (N,)
        ln u/v̄, `log_around`.
    form : LeverageForm
    far : (N,), optional
        g, where it is known.

    Returns
    -------
    log_base, excess : (N,)
        exp(log_base) is exp(log_scale) / (1 + a r(2))², and more where the excess is at its upper bound.
    """
    # The formulas are written with few operations: on a small molecule each costs what a thousand atoms would.
    if far is None:
        far = remoteness(support.distance, form)
    # 1 + (d/d_g)² and 1 + (d/d_l)²
    square = support.distance.square()
    more, farther = square * form.remote**-2 + 1.0, square * form.linear**-2 + 1.0
    # u^(1-b) v̄^b / v
    relative_variance = torch.exp(support.log_typical - log_own + (1.0 - form.near_weight) * log_u / more)
    grown = (support.growth * support.distance * (farther / more).pow(0.25)).clamp(max=form.max_ratio**0.5)
    # (G² - 1) u^(1-b) v̄^b / v
    excess = grown * (grown + 2.0) * relative_variance
    # (1 + excess) exp(g surplus) - 1
    excess = torch.addcmul(excess, excess + 1.0, torch.expm1(support.surplus * far))
    # ln(scale / (1 + a r(2))²)
    log_base = torch.sub(support.log_scale, torch.log1p(reach_of_training(form) * support.growth), alpha=2.0)
    # Far out a network may take a variance for next to nothing: the bound is on the ratio, not on what has grown.
    log_base = log_base + (excess / form.max_ratio).clamp(1.0, 1e30).log()
    return log_base, excess.clamp(min=1.0 / form.max_ratio, max=form.max_ratio)


def flattening(far: Tensor, form: LeverageForm = FORM) -> Tensor:
    """Return g/c² (N,), for `e2ip_plugins.maths.spd.flattened`, from g (N,)."""
    return far / form.anisotropy**2


def less_evidence(nu: Tensor, far: Tensor, least: float, form: LeverageForm = FORM) -> Tensor:
    """Return ν' (N,) from ν and g (N,); ``least`` is the ν of no evidence, 5."""
    evidence = nu - least
    return evidence / (far * evidence * (1.0 / form.evidence) + 1.0) + least


def surplus(optimism: float, relative_error: Optional[float], form: LeverageForm = FORM) -> float:
    """Return S; its first part alone where ``relative_error``, ε, is None.

    The tanh bounds that part's factor on the variance by e: networks that err three times as much as where they were
    trained need no more than those that err 1.5 times as much.
    """
    total = math.tanh(form.surplus_slope * optimism)
    if relative_error is not None:
        total += min(max(math.log(form.relative_error / relative_error), 0.0), form.relative_most)
    return total
