r"""Coefficients of the series that the fast paths share, as plain numbers.

For a traceless symmetric B with p = tr(B²)/2 and q = det B, B³ = pB + qI, hence
exp(B) = a0 I + a1 B + a2 B² with a_k entire in p and q.
"""

import math

#: Highest power of B: rounding level for ‖B‖_F ≤ 2.5, half the damper's ceiling.
SINGLE_TERMS, DOUBLE_TERMS = 14, 24

# R(u) = lnΓ(m/2+3/2) - lnΓ(m/2) - 1.5 ln w with u = 1/w², w = (2m+1)/4, m ≥ 3, from u¹ on: the same
# polynomials as in `e2ip_plugins.maths.student`, where TorchScript needs them inside the function.
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
    0.00659897835717241076,
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
    """a0, a1, a2, their ∂/∂p, their ∂/∂q as polynomials {(i, j): coefficient of p^i q^j}, up to B^terms.

    B^k = q h_{k-3} I + h_{k-1} B + h_{k-2} B² with h_n = Σ_{2i+3j=n} C(i+j, i) p^i q^j, the complete
    homogeneous polynomials of B's eigenvalues.
    """
    values: list[dict[tuple[int, int], float]] = [{(0, 0): 1.0}, {}, {}]
    for k in range(1, terms + 1):
        for value, shift, extra_q in zip(values, (3, 1, 2), (1, 0, 0), strict=True):
            for j in range(max(0, k - shift + 3) // 3):
                i, odd = divmod(k - shift - 3 * j, 2)
                if not odd:
                    key = (i, j + extra_q)
                    value[key] = value.get(key, 0.0) + math.comb(i + j, i) / math.factorial(k)
    by_p = [{(i - 1, j): i * c for (i, j), c in poly.items() if i} for poly in values]
    by_q = [{(i, j - 1): j * c for (i, j), c in poly.items() if j} for poly in values]
    return values + by_p + by_q
