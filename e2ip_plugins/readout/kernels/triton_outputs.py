"""The last kernel of a prediction: from coefficients and sums over neighbours to every output of an atom."""

import triton
import triton.language as tl

from e2ip_plugins.maths.kernels.triton_kernels import (
    _MIN_NU,
    _PER_ROOT2,
    _PER_ROOT6,
    _atom,
    _load3,
    _log1p,
    _spread,
    _store,
)
from e2ip_plugins.readout.kernels.triton_kernels import SUMS, _among_others, _at_least, _at_most, _expm1


@triton.jit
def _pooled(sums_ptr, mask, DTYPE: tl.constexpr):
    """The traceless part of the edge pool's matrix."""
    xx, yy, zz = _load3(sums_ptr + 2, 1, mask)
    yz, xz, xy = _load3(sums_ptr + 5, 1, mask)
    t3 = (yy * 2.0 - xx - zz).to(DTYPE) * _PER_ROOT6
    scale: tl.constexpr = 2.0 * _PER_ROOT2
    return xz.to(DTYPE) * scale, xy.to(DTYPE) * scale, t3, yz.to(DTYPE) * scale, (zz - xx).to(DTYPE) * _PER_ROOT2


@triton.jit
def _inflate(distance, growth, surplus, log_typical, log_scale, far, log_own, log_u, NEAR_WEIGHT: tl.constexpr,
             REMOTE: tl.constexpr, LINEAR: tl.constexpr, REACH_OF_TRAINING: tl.constexpr,
             MAX_RATIO: tl.constexpr):  # fmt: skip
    """As `e2ip_plugins.leverage.form.inflate`."""
    square = distance * distance
    more = square * (1.0 / (REMOTE * REMOTE)) + 1.0
    farther = square * (1.0 / (LINEAR * LINEAR)) + 1.0
    relative = tl.exp(log_typical - log_own + log_u * (1.0 - NEAR_WEIGHT) / more)
    grown = _at_most(growth * distance * tl.sqrt(tl.sqrt(farther / more)), MAX_RATIO**0.5)
    excess = grown * (grown + 2.0) * relative
    excess += (excess + 1.0) * _expm1(surplus * far)
    log_base = log_scale - 2.0 * _log1p(growth * REACH_OF_TRAINING)
    log_base += tl.log(_at_most(_at_least(excess * (1.0 / MAX_RATIO), 1.0), 1e30))
    return log_base, _at_most(_at_least(excess, 1.0 / MAX_RATIO), MAX_RATIO)


@triton.jit
def _store_matrix(pointer, matrix, factor, mask):
    xx, yy, zz, yz, xz, xy = matrix
    xx, yy, zz, yz, xz, xy = factor * xx, factor * yy, factor * zz, factor * yz, factor * xz, factor * xy
    _store(pointer, (xx, xy, xz, xy, yy, yz, xz, yz, zz), mask, 9)


@triton.jit(do_not_specialize=["n"])
def output_kernel(
    leverage_ptr, powers_ptr, sums_ptr, species_ptr, heads_ptr, growth_ptr, surplus_ptr, log_typical_ptr, log_scale_ptr,
    fitted_ptr, unit_ptr, floors_ptr, lengths_ptr, coefficients_ptr, log_ptr, sigma_ptr, nu_ptr, kappa_ptr,
    plateau_ptr, cov_ptr, aleatoric_ptr, epistemic_ptr, std_ptr, epistemic_std_ptr, h_ptr, weights_ptr,
    n, species_per_head,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, T_KNEE: tl.constexpr, T_CEILING: tl.constexpr, COUPLED: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, HEADS: tl.constexpr, POOLED: tl.constexpr,
    LOCAL: tl.constexpr, GROWS: tl.constexpr, BLOCKS: tl.constexpr, MOST: tl.constexpr, TOUCHING: tl.constexpr,
    UNFITTED: tl.constexpr, REMOTE: tl.constexpr, LINEAR: tl.constexpr, REACH_OF_TRAINING: tl.constexpr,
    NEAR_WEIGHT: tl.constexpr, AROUND_POWER: tl.constexpr, AROUND_SHARE: tl.constexpr,
    ANISOTROPY: tl.constexpr, EVIDENCE: tl.constexpr, MAX_RATIO: tl.constexpr, ENERGY_FACTOR: tl.constexpr,
    PER_COMPONENT: tl.constexpr, ENERGY_POWER: tl.constexpr,
):  # fmt: skip
    """One atom per thread; see `e2ip_plugins.families.niw.NIW.forward`.

    GROWS: whether the family takes the leverage; LOCAL: h̄ is h; BLOCKS: of error vectors of energies, or 0.
    """
    atom = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = atom < n
    head = atom * 0
    if HEADS > 1:
        head = tl.load(heads_ptr + atom, mask=mask, other=0)
    kind = head * species_per_head + tl.load(species_ptr + atom, mask=mask, other=0)
    fitted = tl.load(fitted_ptr) != 0
    h, total = _among_others(leverage_ptr, sums_ptr, atom, mask, MOST, TOUCHING)
    tl.store(h_ptr + atom, tl.where(fitted, h, UNFITTED), mask=mask)
    h = _at_most(h, MOST)
    mean = h
    own_power = tl.load(powers_ptr + atom, mask=mask, other=1.0)
    power_around = own_power
    if not LOCAL:
        mean = (h + tl.load(sums_ptr + atom * SUMS + 1, mask=mask, other=1.0)) / total
        power_around = (own_power + tl.load(sums_ptr + atom * SUMS + 8, mask=mask, other=1.0)) / total
    power_around = own_power + (power_around - own_power) * AROUND_SHARE
    distance = (h + mean).to(DTYPE)

    coefficients_ptr += atom * 8
    s, raw_nu, raw_kappa = _load3(coefficients_ptr, 1, mask)
    t1, t2, t3 = _load3(coefficients_ptr + 3, 1, mask)
    t4 = tl.load(coefficients_ptr + 6, mask=mask, other=0.0)
    t5 = tl.load(coefficients_ptr + 7, mask=mask, other=0.0)
    if POOLED > 0:
        p1, p2, p3, p4, p5 = _pooled(sums_ptr + atom * SUMS, mask, DTYPE)
        t1, t2, t3, t4, t5 = t1 + p1, t2 + p2, t3 + p3, t4 + p4, t5 + p5
        _store(coefficients_ptr + 3, (t1, t2, t3, t4, t5), mask, 5)
    s, t, nu, kappa, past, _, _, _ = _atom(
        s, raw_nu, raw_kappa, (t1, t2, t3, t4, t5), S_KNEE, S_CEILING, T_KNEE, T_CEILING, COUPLED
    )
    far = s * 0.0
    unit = tl.load(unit_ptr).to(DTYPE)
    if GROWS:
        power = distance * distance * (1.0 / (REMOTE * REMOTE))
        power = power * power
        # Not times zero: s may be NaN, and what is far must not be.
        far = tl.where(fitted, power / (power + 1.0), 0.0)
    log_sigma0, sigma0 = _spread(s, t, unit + distance * 0.0, far * (1.0 / (ANISOTROPY * ANISOTROPY)), DOUBLE)
    xx, yy, zz, yz, xz, xy = log_sigma0
    scale = s * 0.0 + 1.0
    if GROWS:
        evidence = nu - _MIN_NU
        nu = evidence / (far * evidence * (1.0 / EVIDENCE) + 1.0) + _MIN_NU
        log1p_inverse_kappa = _log1p(1.0 / kappa)
        log_base, excess = _inflate(
            distance, tl.load(growth_ptr + head, mask=mask, other=1.0).to(DTYPE),
            tl.load(surplus_ptr + head, mask=mask, other=0.0).to(DTYPE),
            tl.load(log_typical_ptr + kind, mask=mask, other=0.0).to(DTYPE),
            tl.load(log_scale_ptr + kind, mask=mask, other=0.0).to(DTYPE),
            far, (xx + yy + zz) * (1.0 / 3.0) + log1p_inverse_kappa,
            tl.log(power_around.to(DTYPE)) * (1.0 / AROUND_POWER),
            NEAR_WEIGHT, REMOTE, LINEAR, REACH_OF_TRAINING, MAX_RATIO,
        )  # fmt: skip
        shift = tl.where(fitted, log1p_inverse_kappa + log_base, 0.0)
        kappa = tl.where(fitted, 1.0 / excess, kappa)
        xx, yy, zz = xx + shift, yy + shift, zz + shift
        scale = tl.exp(shift)
    _store(log_ptr + atom * 6, (xx, yy, zz, yz, xz, xy), mask, 6)
    tl.store(nu_ptr + atom, nu, mask=mask)
    tl.store(kappa_ptr + atom, kappa, mask=mask)
    tl.store(plateau_ptr + atom, tl.where(past, 1.0, 0.0), mask=mask)
    aleatoric = scale * (nu / (nu - 4.0))
    epistemic = aleatoric / kappa
    covariance = aleatoric + epistemic
    _store_matrix(sigma_ptr + atom * 9, sigma0, scale, mask)
    _store_matrix(aleatoric_ptr + atom * 9, sigma0, aleatoric, mask)
    _store_matrix(epistemic_ptr + atom * 9, sigma0, epistemic, mask)
    _store_matrix(cov_ptr + atom * 9, sigma0, covariance, mask)
    x0, x1, x2, _, _, _ = sigma0
    variances = (covariance * x0, covariance * x1, covariance * x2)
    _store(std_ptr + atom * 3, (tl.sqrt(variances[0]), tl.sqrt(variances[1]), tl.sqrt(variances[2])), mask, 3)
    trace = x0 + x1 + x2
    tl.store(epistemic_std_ptr + atom, tl.sqrt(epistemic * trace * (1.0 / 3.0)), mask=mask)
    if BLOCKS > 0:
        floor = tl.load(floors_ptr + head, mask=mask, other=0.0).to(DTYPE)
        amplitude = floor + tl.sqrt(covariance * trace) * PER_COMPONENT
        if GROWS:
            amplitude = tl.exp(tl.log(distance) * ENERGY_POWER) * tl.sqrt(covariance * trace) * ENERGY_FACTOR + floor
        for block in tl.static_range(BLOCKS):
            length = tl.load(lengths_ptr + block * (HEADS * species_per_head) + kind, mask=mask, other=0.0).to(DTYPE)
            tl.store(weights_ptr + block * n + atom, length * amplitude, mask=mask)
