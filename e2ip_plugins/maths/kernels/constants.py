r"""What the kernels treat as constants: the options of a call, numbers of terms, coefficients.

For a traceless symmetric B with p = tr(B²)/2 and q = det B, B³ = pB + qI, hence
exp(B) = a0 I + a1 B + a2 B² with a_k entire in p and q.
"""

import math
from typing import NamedTuple, Tuple

from e2ip_plugins.maths.spd import exp_terms
from e2ip_plugins.maths.student import log_gamma_rest_coefficients


class Constants(NamedTuple):
    """What is the same for all atoms of a call; dampers are knee τ and ceiling c (see `kernels.nll_terms`)."""

    coupled: bool
    scalar_damper: Tuple[float, float]
    tensor_damper: Tuple[float, float]


ROOT3 = math.sqrt(3.0)
LOG_2PI = math.log(2.0 * math.pi)

# For float32 and float64: highest power of B, coefficients of `log_gamma_rest_coefficients`, terms of the series below.
EXP_TERMS = (exp_terms(False), exp_terms(True))
GAMMA_REST = (tuple(log_gamma_rest_coefficients(False)), tuple(log_gamma_rest_coefficients(True)))
LOG_TERMS = (8, 17)

#: log1p(x) - z = Σ_{k≥2} z^k/k with z = x/(1+x); used below `SMALL_Z`, where the difference loses digits.
SMALL_Z = 0.1


def exp_polynomials(terms: int) -> list[dict[tuple[int, int], float]]:
    """Return a0, a1, a2 as polynomials {(i, j): coefficient of p^i q^j}, up to B^terms.

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
    return values
