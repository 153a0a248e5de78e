"""The calls of `triton_kernels`: grids, strides and results for tensors of any layout."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.kernels.triton_kernels import backward_kernel, distribution_kernel, forward_kernel

#: Of the functions here and in `triton_operators`: a packaged model may bring their callers from another version.
SIGNATURES = 3

#: Atoms per program. 256 would need twice the registers per thread in the backward kernel.
BLOCK = 128

FUSION = {"enable_fp_fusion": True}


def _unit_stride(force_unit: Tensor) -> int:
    return force_unit.stride(0) if force_unit.dim() else 0


def grid(n: int) -> Tuple[int]:
    return ((n + BLOCK - 1) // BLOCK,)


def _launch(kernel, n: int, device: torch.device, *args, **constants) -> None:
    if n == 0:
        return
    if device.type != "cuda":
        kernel[grid(n)](*args, **constants)
        return
    # Triton launches on the current device, not on that of its arguments.
    with torch.cuda.device(device):
        kernel[grid(n)](*args, **constants, **FUSION)


def dampers(constants: Constants) -> dict:
    return dict(zip(("S_KNEE", "S_CEILING", "T_KNEE", "T_CEILING"), constants[:4], strict=True))


def forward(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    constants: Constants,
) -> Tuple[Tensor, Tensor]:
    """NLL and regulariser (N,); as `e2ip_plugins.maths.kernels.nll_terms`, tensors of one dtype and device."""
    n = s.shape[0]
    nll, regulariser = torch.empty_like(s, memory_format=torch.contiguous_format), s.new_empty(n)
    kappa = raw_nu if raw_kappa is None else raw_kappa
    _launch(
        forward_kernel, n, s.device,
        s, t, raw_nu, kappa, residual, force_unit, nll, regulariser, n,
        s.stride(0), *t.stride(), raw_nu.stride(0), kappa.stride(0), *residual.stride(), _unit_stride(force_unit),
        **dampers(constants), COUPLED=raw_kappa is None, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
    )  # fmt: skip
    return nll, regulariser


def backward(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    by_nll: Optional[Tensor],
    by_regulariser: Optional[Tensor],
    constants: Constants,
) -> List[Optional[Tensor]]:
    """Gradients in s, t, raw ν, raw κ and residual from those in NLL and regulariser (N,)."""
    n = s.shape[0]
    kappa = raw_nu if raw_kappa is None else raw_kappa
    by_nll = s.new_zeros(()).expand(n) if by_nll is None else by_nll
    other = by_nll if by_regulariser is None else by_regulariser
    by_s, by_t, by_nu, by_residual = s.new_empty(n), s.new_empty(n, 5), s.new_empty(n), s.new_empty(n, 3)
    by_kappa = by_nu if raw_kappa is None else s.new_empty(n)
    _launch(
        backward_kernel, n, s.device,
        s, t, raw_nu, kappa, residual, force_unit, by_nll, other, by_s, by_t, by_nu, by_kappa, by_residual, n,
        s.stride(0), *t.stride(), raw_nu.stride(0), kappa.stride(0), *residual.stride(), _unit_stride(force_unit),
        by_nll.stride(0), other.stride(0),
        **dampers(constants), PULL_CEILING=constants.pull_ceiling, COUPLED=raw_kappa is None,
        REGULARISER=by_regulariser is not None, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
    )  # fmt: skip
    return [by_s, by_t, by_nu, None if raw_kappa is None else by_kappa, by_residual]


def distribution(
    s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor], force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, ...]:
    """log Σ0, Σ0 (N, 6), ν, κ, plateau (N,); arguments as in `forward`."""
    n = s.shape[0]
    outputs = (s.new_empty(n, 6), s.new_empty(n, 6), s.new_empty(n), s.new_empty(n), s.new_empty(n))
    kappa = raw_nu if raw_kappa is None else raw_kappa
    _launch(
        distribution_kernel, n, s.device,
        s, t, raw_nu, kappa, force_unit, *outputs, n,
        s.stride(0), *t.stride(), raw_nu.stride(0), kappa.stride(0), _unit_stride(force_unit),
        **dampers(constants), COUPLED=raw_kappa is None, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
    )  # fmt: skip
    return outputs
