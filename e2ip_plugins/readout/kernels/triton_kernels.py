"""A prediction of the readout on the GPU: two kernels over atoms, two over pairs of atoms.

`atom_kernel` is trunk and leverage of an atom's own features, `pair_kernel` and `neighbour_kernel` sum over neighbours,
`output_kernel` is growth, SPD map and all derived keys. The formulas are those of `e2ip_plugins.readout.trunk`,
`e2ip_plugins.leverage` and `e2ip_plugins.families.niw`. Sums over neighbours are atomic: as in MACE and NequIP, whose
features the readout reads, their order and with it the last digit changes from call to call. What
`e2ip_plugins.maths.kernels.triton_kernels` says of NaN and of constants holds here, too. `triton_launch` calls these.
"""

import triton
import triton.language as tl

from e2ip_plugins.maths.kernels.triton_kernels import (
    _MIN_KAPPA,
    _PER_FACTORIAL,
    _PER_ROOT2,
    _PER_ROOT3,
    _PER_ROOT6,
    _damp,
    _log1p,
    _softplus,
    _store,
)

#: Numbers per atom that neighbours add up: Σ w (with the atom itself, 1), Σ w h, six of the edge pool, and Σ w (v/v̄)^m.
SUMS = tl.constexpr(9)
#: Terms of exp(x) - 1 for x ≤ 1.
_EXPM1_TERMS = tl.constexpr(20)


@triton.jit
def _at_most(x, bound: tl.constexpr):
    return tl.where(x > bound, bound, x)


@triton.jit
def _at_least(x, bound: tl.constexpr):
    return tl.where(x < bound, bound, x)


@triton.jit
def _expm1(x):
    """exp(x) - 1 without cancellation, for |x| ≤ 1 and beyond."""
    total = x * 0.0 + _PER_FACTORIAL[_EXPM1_TERMS]
    for k in tl.static_range(1, _EXPM1_TERMS):
        total = total * x + _PER_FACTORIAL[_EXPM1_TERMS - k]
    return tl.where(tl.abs(x) > 1.0, tl.exp(x) - 1.0, total * x)


@triton.jit
def _features(x_ptr, columns_ptr, i, inside):
    return tl.load(x_ptr + tl.load(columns_ptr + i, mask=inside, other=0), mask=inside, other=0.0)


@triton.jit
def _rows_times(
    x_ptr, columns_ptr, weights_ptr, bias_ptr, num_features,
    ROWS: tl.constexpr, ROWS_2: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """W x + b (ROWS_2,) of the features of one atom; rows from ROWS on are 0."""
    row, column = tl.arange(0, ROWS_2), tl.arange(0, CHUNK)
    products = tl.zeros([ROWS_2, CHUNK], DTYPE)
    for start in range(0, num_features, CHUNK):
        i = start + column
        x = _features(x_ptr, columns_ptr, i, i < num_features)
        wanted = (row < ROWS)[:, None] & (i < num_features)[None, :]
        products += tl.load(weights_ptr + row[:, None] * num_features + i[None, :], mask=wanted, other=0.0) * x[None, :]
    return tl.sum(products, 1) + tl.load(bias_ptr + row, mask=row < ROWS, other=0.0)


@triton.jit
def _of_hidden(activations, weights_ptr, bias_ptr, first, ROWS: tl.constexpr, ROWS_2: tl.constexpr,
               HIDDEN: tl.constexpr, HIDDEN_2: tl.constexpr):  # fmt: skip
    """Rows ``first`` … of the trunk's second layer (ROWS_2,)."""
    row, k = tl.arange(0, ROWS_2), tl.arange(0, HIDDEN_2)
    wanted = (row < ROWS)[:, None] & (k < HIDDEN)[None, :]
    weights = tl.load(weights_ptr + (first + row)[:, None] * HIDDEN + k[None, :], mask=wanted, other=0.0)
    return tl.sum(weights * activations[None, :], 1) + tl.load(bias_ptr + first + row, mask=row < ROWS, other=0.0)


@triton.jit
def _whitened(x_ptr, columns_ptr, centre_ptr, whitening_ptr, num_features, num_axes,
              ROWS: tl.constexpr, FEATURES_2: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """z/√τ (FEATURES_2,) of one atom."""
    row, j = tl.arange(0, ROWS), tl.arange(0, FEATURES_2)
    products = tl.zeros([ROWS, FEATURES_2], DTYPE)
    for start in range(0, num_features, ROWS):
        i = start + row
        inside = i < num_features
        offsets = _features(x_ptr, columns_ptr, i, inside) - tl.load(centre_ptr + i, mask=inside, other=0.0)
        wanted = inside[:, None] & (j < num_features)[None, :]
        matrix = tl.load(whitening_ptr + (i * (num_axes * num_features))[:, None] + j[None, :], mask=wanted, other=0.0)
        products += offsets[:, None] * matrix
    return tl.sum(products, 0)


@triton.jit
def _leverage(z, stretch_ptr, offsets_ptr, norms_ptr, num_features, num_regions, NEAREST: tl.constexpr,
              FARTHEST: tl.constexpr, REGION_POWER: tl.constexpr, MOST: tl.constexpr, FEATURES_2: tl.constexpr,
              DTYPE: tl.constexpr):  # fmt: skip
    """h of one atom, infinite where its features are not finite."""
    j = tl.arange(0, FEATURES_2)
    inside = j < num_features
    above = tl.sum(tl.zeros([FEATURES_2], DTYPE), 0)
    below = above
    for region in range(0, num_regions):
        at = region * num_features + j
        offsets = tl.load(offsets_ptr + at, mask=inside, other=0.0)
        deviations = offsets - z * tl.load(stretch_ptr + at, mask=inside, other=0.0)
        squares = deviations * deviations
        root = tl.sqrt(squares + 1.0)
        # Without cancellation where it matters, without infinity over infinity where it does not.
        softened = tl.where(squares < 1e6, squares / (root + 1.0), root - 1.0)
        h = tl.sum(softened, 0) * tl.load(norms_ptr + region)
        nearness = 1.0 / _at_most(_at_least(h, NEAREST), FARTHEST)
        power = nearness
        for _ in tl.static_range(REGION_POWER - 2):
            power = power * nearness
        above += power
        below += power * nearness
    h = _at_most(above / below, MOST)
    return tl.where(h == h, h, float("inf"))


@triton.jit
def _relative_power(wanted, unit_ptr, log_typical_ptr, S_KNEE: tl.constexpr, S_CEILING: tl.constexpr,
                    COUPLED: tl.constexpr, AROUND_POWER: tl.constexpr, MAX_RATIO: tl.constexpr):  # fmt: skip
    """(v/v̄)^m of one atom from its 0e coefficients, 1 where they are not finite."""
    row = tl.arange(0, 4)
    s = tl.sum(tl.where(row == 0, wanted, 0.0), 0)
    raw_nu = tl.sum(tl.where(row == 1, wanted, 0.0), 0)
    raw_kappa = raw_nu
    if not COUPLED:
        raw_kappa = tl.sum(tl.where(row == 2, wanted, 0.0), 0)
    s = s + ((s - s) + (raw_nu - raw_nu) + (raw_kappa - raw_kappa))
    kappa, _ = _softplus(raw_kappa)
    log_own = _damp(s, S_KNEE, S_CEILING)[0] * _PER_ROOT3 + _log1p(1.0 / (kappa + _MIN_KAPPA))
    log_own += 2.0 * tl.log(tl.load(unit_ptr))
    ratio = _at_most(_at_least(tl.exp(log_own - tl.load(log_typical_ptr)), MAX_RATIO**-0.5), MAX_RATIO**0.5)
    power = ratio
    for _ in tl.static_range(AROUND_POWER - 1):
        power = power * ratio
    return tl.where(power == power, power, 1.0)


@triton.jit
def atom_kernel(
    x_ptr, columns_ptr, equivariant_ptr, vector_columns_ptr, tensor_columns_ptr, species_ptr, heads_ptr,
    hidden_ptr, hidden_bias_ptr, out_ptr, out_bias_ptr, mix_vectors_ptr, mix_tensors_ptr, from_sender_ptr,
    from_sender_bias_ptr, centres_ptr, axes_ptr, whitening_ptr, stretch_ptr, offsets_ptr, norms_ptr,
    unit_ptr, log_typical_ptr, coefficients_ptr, whitened_ptr, leverage_ptr, powers_ptr, sums_ptr, senders_ptr,
    receivers_ptr,
    x_row, equivariant_row, num_features, num_vectors, num_tensors, num_axes, num_regions, species_per_head,
    HEADS: tl.constexpr, HIDDEN: tl.constexpr, WANTED: tl.constexpr, CHANNELS: tl.constexpr, TENSORS: tl.constexpr,
    POOLED: tl.constexpr, SENDERS: tl.constexpr, NEAREST: tl.constexpr, FARTHEST: tl.constexpr,
    REGION_POWER: tl.constexpr, MOST: tl.constexpr, HIDDEN_2: tl.constexpr, CHANNELS_2: tl.constexpr,
    POOLED_2: tl.constexpr, VECTORS_2: tl.constexpr, TENSORS_2: tl.constexpr, FEATURES_2: tl.constexpr,
    S_KNEE: tl.constexpr, S_CEILING: tl.constexpr, COUPLED: tl.constexpr,
    AROUND_POWER: tl.constexpr, MAX_RATIO: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One atom per program: coefficients without the edge pool, z/√τ, h, (v/v̄)^m, and zeros for sums over neighbours.

    VECTORS_2, TENSORS_2 and POOLED are 0 where there are no such channels; TENSORS: whether some of the gates are for
    2e channels, of features or pooled.
    """
    atom = tl.program_id(0).to(tl.int64)
    head = 0
    if HEADS > 1:
        head = tl.load(heads_ptr + atom)
    x_ptr += atom * x_row
    hidden = _rows_times(
        x_ptr, columns_ptr, hidden_ptr + head * HIDDEN * num_features, hidden_bias_ptr + head * HIDDEN, num_features,
        HIDDEN, HIDDEN_2, CHUNK, DTYPE,
    )  # fmt: skip
    k = tl.arange(0, HIDDEN_2)
    activations = tl.where(k < HIDDEN, hidden / (1.0 + tl.exp(-hidden)), 0.0)
    gates: tl.constexpr = (CHANNELS if VECTORS_2 > 0 else 0) + (CHANNELS if TENSORS else 0)
    out_ptr += head * ((WANTED + gates) * HIDDEN)
    out_bias_ptr += head * (WANTED + gates)
    wanted = _of_hidden(activations, out_ptr, out_bias_ptr, 0, WANTED, 4, HIDDEN, HIDDEN_2)
    c = tl.arange(0, CHANNELS_2)
    t1 = tl.sum(tl.zeros([CHANNELS_2], DTYPE), 0)
    t2, t3, t4, t5 = t1, t1, t1, t1
    if TENSORS:
        gate = _of_hidden(activations, out_ptr, out_bias_ptr, WANTED, CHANNELS, CHANNELS_2, HIDDEN, HIDDEN_2)
        count: tl.constexpr = POOLED_2 if POOLED > 0 else TENSORS_2
        channel = tl.arange(0, count)
        channels = num_tensors
        if POOLED > 0:
            channels = POOLED
        inside = (channel < channels)[:, None] & (c < CHANNELS)[None, :]
        mix_tensors_ptr += head * (channels * CHANNELS)
        mix = tl.load(mix_tensors_ptr + channel[:, None] * CHANNELS + c[None, :], mask=inside, other=0.0)
        weights = tl.sum(mix * gate[None, :], 1)
        if POOLED > 0:
            tl.store(receivers_ptr + atom * POOLED + channel, weights, mask=channel < POOLED)
        else:
            row_ptr = equivariant_ptr + atom * equivariant_row
            here = channel < num_tensors
            t1 += tl.sum(weights * _features(row_ptr, tensor_columns_ptr, 5 * channel, here), 0)
            t2 += tl.sum(weights * _features(row_ptr, tensor_columns_ptr, 5 * channel + 1, here), 0)
            t3 += tl.sum(weights * _features(row_ptr, tensor_columns_ptr, 5 * channel + 2, here), 0)
            t4 += tl.sum(weights * _features(row_ptr, tensor_columns_ptr, 5 * channel + 3, here), 0)
            t5 += tl.sum(weights * _features(row_ptr, tensor_columns_ptr, 5 * channel + 4, here), 0)
    if VECTORS_2 > 0:
        first: tl.constexpr = WANTED + gates - CHANNELS
        gate = _of_hidden(activations, out_ptr, out_bias_ptr, first, CHANNELS, CHANNELS_2, HIDDEN, HIDDEN_2)
        v = tl.arange(0, VECTORS_2)
        here = v < num_vectors
        row_ptr = equivariant_ptr + atom * equivariant_row
        inside = here[:, None] & (c < CHANNELS)[None, :]
        mix_ptr = mix_vectors_ptr + head * (num_vectors * 2 * CHANNELS) + v[:, None] * (2 * CHANNELS) + c[None, :]
        left, right = tl.load(mix_ptr, mask=inside, other=0.0), tl.load(mix_ptr + CHANNELS, mask=inside, other=0.0)
        x = _features(row_ptr, vector_columns_ptr, 3 * v, here)[:, None]
        y = _features(row_ptr, vector_columns_ptr, 3 * v + 1, here)[:, None]
        z = _features(row_ptr, vector_columns_ptr, 3 * v + 2, here)[:, None]
        ax, ay, az = tl.sum(left * x, 0) * gate, tl.sum(left * y, 0) * gate, tl.sum(left * z, 0) * gate
        bx, by, bz = tl.sum(right * x, 0), tl.sum(right * y, 0), tl.sum(right * z, 0)
        t1 += tl.sum(ax * bz + az * bx, 0) * _PER_ROOT2
        t2 += tl.sum(ax * by + ay * bx, 0) * _PER_ROOT2
        t3 += tl.sum(ay * by * 2.0 - ax * bx - az * bz, 0) * _PER_ROOT6
        t4 += tl.sum(ay * bz + az * by, 0) * _PER_ROOT2
        t5 += tl.sum(az * bz - ax * bx, 0) * _PER_ROOT2
    coefficients_ptr += atom * (WANTED + 5)
    row = tl.arange(0, 4)
    tl.store(coefficients_ptr + row, wanted, mask=row < WANTED)
    _store(coefficients_ptr + WANTED, (t1, t2, t3, t4, t5), None, 5)
    if SENDERS:
        sent = _rows_times(
            x_ptr, columns_ptr, from_sender_ptr, from_sender_bias_ptr, num_features, POOLED, POOLED_2, CHUNK, DTYPE
        )
        p = tl.arange(0, POOLED_2)
        tl.store(senders_ptr + atom * POOLED + p, sent, mask=p < POOLED)

    kind = head * species_per_head + tl.load(species_ptr + atom)
    whitening_ptr += tl.load(axes_ptr + kind) * num_features
    centres_ptr += kind * num_features
    z = _whitened(x_ptr, columns_ptr, centres_ptr, whitening_ptr, num_features, num_axes, ROWS, FEATURES_2, DTYPE)
    j = tl.arange(0, FEATURES_2)
    tl.store(whitened_ptr + atom * num_features + j, z, mask=j < num_features)
    regions = kind * num_regions
    h = _leverage(
        z, stretch_ptr + regions * num_features, offsets_ptr + regions * num_features, norms_ptr + regions,
        num_features, num_regions, NEAREST, FARTHEST, REGION_POWER, MOST, FEATURES_2, DTYPE,
    )  # fmt: skip
    tl.store(leverage_ptr + atom, h)
    power = _relative_power(
        wanted, unit_ptr, log_typical_ptr + kind, S_KNEE, S_CEILING, COUPLED, AROUND_POWER, MAX_RATIO
    )
    tl.store(powers_ptr + atom, power)
    # The atom itself is in the mean over neighbours.
    tl.store(sums_ptr + atom * SUMS, 1.0)
    for entry in tl.static_range(1, SUMS):
        tl.store(sums_ptr + atom * SUMS + entry, 0.0)


@triton.jit
def _weight(lengths_ptr, envelope_ptr, pair, inside, TOUCHING: tl.constexpr, DTYPE: tl.constexpr):
    weight = _at_least(tl.load(envelope_ptr + pair, mask=inside, other=0.0).to(DTYPE), 0.0)
    return tl.where(tl.load(lengths_ptr + pair, mask=inside, other=1.0) == 0.0, TOUCHING, weight)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["sender_ptr", "receiver_ptr"])
def pair_kernel(
    lengths_ptr, envelope_ptr, sender_ptr, receiver_ptr, vectors_ptr, radial_ptr, from_radial_ptr, senders_ptr,
    receivers_ptr, sums_ptr, num_pairs, num_radial, vector_row, radial_row,
    POOLED: tl.constexpr, POOLED_2: tl.constexpr, TOUCHING: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add every pair's weight, and where there is an edge pool its Y2, to the sums of the receiver."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    receiver = tl.load(receiver_ptr + pair, mask=inside, other=0)
    sums_ptr += receiver * SUMS
    tl.atomic_add(sums_ptr, _weight(lengths_ptr, envelope_ptr, pair, inside, TOUCHING, DTYPE), mask=inside)
    if POOLED > 0:
        p = tl.arange(0, POOLED_2)
        weights = tl.zeros([BLOCK, POOLED_2], DTYPE)
        for k in range(0, num_radial):
            radial = tl.load(radial_ptr + pair * radial_row + k, mask=inside, other=0.0)
            weights += radial[:, None] * tl.load(from_radial_ptr + p * num_radial + k, mask=p < POOLED, other=0.0)[None]
        wanted = inside[:, None] & (p < POOLED)[None, :]
        sender = tl.load(sender_ptr + pair, mask=inside, other=0)
        weights *= tl.load(senders_ptr + (sender * POOLED)[:, None] + p[None, :], mask=wanted, other=0.0)
        weights *= tl.load(receivers_ptr + (receiver * POOLED)[:, None] + p[None, :], mask=wanted, other=0.0)
        vectors_ptr += pair * vector_row
        x = tl.load(vectors_ptr, mask=inside, other=1.0)
        y = tl.load(vectors_ptr + 1, mask=inside, other=1.0)
        z = tl.load(vectors_ptr + 2, mask=inside, other=1.0)
        weight = tl.sum(weights, 1) / (x * x + y * y + z * z)
        tl.atomic_add(sums_ptr + 2, weight * x * x, mask=inside)
        tl.atomic_add(sums_ptr + 3, weight * y * y, mask=inside)
        tl.atomic_add(sums_ptr + 4, weight * z * z, mask=inside)
        tl.atomic_add(sums_ptr + 5, weight * y * z, mask=inside)
        tl.atomic_add(sums_ptr + 6, weight * x * z, mask=inside)
        tl.atomic_add(sums_ptr + 7, weight * x * y, mask=inside)


@triton.jit
def _among_others(leverage_ptr, sums_ptr, atom, inside, MOST: tl.constexpr, TOUCHING: tl.constexpr):
    """h, infinite for an atom at the place of another one, and Σ w."""
    total = tl.load(sums_ptr + atom * SUMS, mask=inside, other=1.0)
    h = tl.load(leverage_ptr + atom, mask=inside, other=1.0)
    return tl.where(total > 0.1 * TOUCHING, float("inf"), h), total


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["sender_ptr", "receiver_ptr"])
def neighbour_kernel(
    lengths_ptr, envelope_ptr, sender_ptr, receiver_ptr, leverage_ptr, powers_ptr, sums_ptr, num_pairs,
    MOST: tl.constexpr, TOUCHING: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add w h and w (v/v̄)^m of every sender to the sums of the receiver."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    receiver = tl.load(receiver_ptr + pair, mask=inside, other=0)
    sender = tl.load(sender_ptr + pair, mask=inside, other=0)
    h, _ = _among_others(leverage_ptr, sums_ptr, sender, inside, MOST, TOUCHING)
    weight = _weight(lengths_ptr, envelope_ptr, pair, inside, TOUCHING, DTYPE)
    sums_ptr += receiver * SUMS
    tl.atomic_add(sums_ptr + 1, weight * _at_most(h, MOST), mask=inside)
    tl.atomic_add(sums_ptr + 8, weight * tl.load(powers_ptr + sender, mask=inside, other=1.0), mask=inside)


@triton.jit(do_not_specialize=["n"])
def envelope_kernel(lengths_ptr, cutoff_ptr, power_ptr, envelope_ptr, n, BLOCK: tl.constexpr):
    """1 - (p+1)(p+2)/2 x^p + p(p+2) x^(p+1) - p(p+1)/2 x^(p+2) of x = length/cutoff, 0 from the cutoff on."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < n
    length = tl.load(lengths_ptr + pair, mask=inside, other=0.0)
    cutoff, p = tl.load(cutoff_ptr), tl.load(power_ptr)
    x = length / cutoff
    power = x * 0.0 + 1.0
    for _ in range(0, p):
        power = power * x
    p = p.to(x.dtype)
    half = (p + 1.0) * 0.5
    envelope = power * (x * (p * (p + 2.0) - x * (p * half)) - half * (p + 2.0)) + 1.0
    tl.store(envelope_ptr + pair, tl.where(length < cutoff, envelope, envelope * 0.0), mask=inside)
