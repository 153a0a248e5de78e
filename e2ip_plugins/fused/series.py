r"""Coefficients of the series that every fast path shares, as plain numbers.

For a traceless symmetric B with p = tr(B²)/2 and q = det B, B³ = pB + qI, hence
exp(B) = a0 I + a1 B + a2 B² with

    a0 = 1 + q H3,  a1 = H1,  a2 = H2,  H_j = Σ_k h_{k-j}/k!,

where h_j(p, q) are the complete homogeneous polynomials of B's eigenvalues: h_0 = 1, h_1 = 0,
h_2 = p, h_j = p h_{j-2} + q h_{j-3}. Their derivatives obey the same recurrence,
D_j = ∂h_j/∂p = p D_{j-2} + q D_{j-3} + h_{j-2}, and ∂h_j/∂q = D_{j-1}, so that with G_j = Σ_k D_{k-j}/k!

    ∂(a0, a1, a2)/∂p = (q G3, G1, G2),  ∂(a0, a1, a2)/∂q = (H3 + q G4, G2, G3).
"""

import math

#: Highest power of B: rounding level for ‖B‖_F ≤ 2.5, half the damper's ceiling.
SINGLE_TERMS, DOUBLE_TERMS = 14, 24

# R(u) = lnΓ(m/2+3/2) - lnΓ(m/2) - 1.5 ln w with u = 1/w², w = (2m+1)/4, m ≥ 3, from u¹ on: the same
# polynomials as in `e2ip_plugins.niw`, where TorchScript needs them inside the function.
SINGLE_GAMMA_REST = (
    -0.07812499889,
    4.88034184e-4,
    -1.312958192e-3,
    1.173398046e-3,
    -1.265340346e-3,
    8.032483939e-4,
)
DOUBLE_GAMMA_REST = (
    -0.0781249999999978241,
    0.000488281246982994041,
    -0.00132242767431675366,
    0.00131695634069072885,
    -0.00240571746140381532,
    0.00659899835717241076,
    -0.0239821600648960473,
    0.0983837623358096548,
    -0.389347451175356542,
    1.32193446370477011,
    -3.55257736455648384,
    7.07860841477950589,
    -9.70835827501525845,
    8.12697743647297244,
    -3.11781379139744176,
)

#: log1p(x) - z = Σ_{k≥2} z^k/k with z = x/(1+x); used below `SMALL_Z`, where the difference loses digits.
SMALL_Z = 0.1
SINGLE_LOG_TERMS, DOUBLE_LOG_TERMS = 8, 17


def exp_polynomials(terms: int) -> list[dict[tuple[int, int], float]]:
    """a0, a1, a2, their ∂/∂p, their ∂/∂q as polynomials {(i, j): coefficient of p^i q^j}, up to B^terms."""
    values: list[dict[tuple[int, int], float]] = [{(0, 0): 1.0}, {}, {}]
    for k in range(1, terms + 1):
        for shift, q_factor, target in ((3, 1, values[0]), (1, 0, values[1]), (2, 0, values[2])):
            order = k - shift
            for j in range(order // 3 + 1) if order >= 0 else ():
                i, odd = divmod(order - 3 * j, 2)
                if not odd:
                    key = (i, j + q_factor)
                    target[key] = target.get(key, 0.0) + math.comb(i + j, i) / math.factorial(k)
    by_p = [{(i - 1, j): i * c for (i, j), c in poly.items() if i} for poly in values]
    by_q = [{(i, j - 1): j * c for (i, j), c in poly.items() if j} for poly in values]
    return values + by_p + by_q
