"""`soa` through torch.compile: one vectorised loop over atoms.

Made once per process for each of: loss and distribution, constants, dtype, evidence mode, one σ_ref or one per atom.
"""

import functools
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import soa
from e2ip_plugins.maths.kernels.settings import Constants


def _contiguous(force_unit: Tensor) -> Tensor:
    # An expanded scalar is a scalar, whose loop is the shorter one.
    return force_unit[0] if force_unit.dim() and force_unit.stride(0) == 0 else force_unit.contiguous()


def graph(name: str, constants: Constants, dtype: torch.dtype, coupled: bool) -> Callable[..., Tensor]:
    """Function ``name`` of `soa` as straight-line code: its tensors in (raw κ left out if ``coupled``), rows out.

    Every constant is a literal there. torch.compile would take floats from anywhere else for inputs that can
    change, guard them on each call and compile twice.
    """
    function, double = getattr(soa, name), dtype == torch.float64

    if name == "distribution":
        if coupled:

            def rows(s, t, raw_nu, force_unit):
                return torch.stack(function(s, t, raw_nu, None, force_unit, constants, double))
        else:

            def rows(s, t, raw_nu, raw_kappa, force_unit):
                return torch.stack(function(s, t, raw_nu, raw_kappa, force_unit, constants, double))
    elif coupled:

        def rows(s, t, raw_nu, residual, force_unit):
            return torch.stack(function(s, t, raw_nu, None, residual, force_unit, constants, double))
    else:

        def rows(s, t, raw_nu, raw_kappa, residual, force_unit):
            return torch.stack(function(s, t, raw_nu, raw_kappa, residual, force_unit, constants, double))

    return torch.fx.symbolic_trace(rows).forward


@functools.cache
def kernel(name: str, constants: Constants, dtype: torch.dtype, coupled: bool) -> Callable[..., Tensor]:
    """`graph`, compiled; the rows are (K, N)."""
    return torch.compile(graph(name, constants, dtype, coupled), dynamic=True, fullgraph=True)


def loss_and_gradients(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    constants: Constants,
    gradients: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """As `eager.loss_and_gradients`; σ_ref is a tensor."""
    run = kernel("loss_and_gradients", constants, s.dtype, raw_kappa is None)
    evidence = [x.contiguous() for x in (raw_nu, raw_kappa) if x is not None]
    rows = run(s.contiguous(), t.t().contiguous(), *evidence, residual.t().contiguous(), _contiguous(force_unit))
    return rows[0], rows[1], rows[2:]


def distribution(
    s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor], force_unit: Tensor, constants: Constants
) -> Tuple[Tensor, ...]:
    """As `eager.distribution`; σ_ref is a tensor."""
    run = kernel("distribution", constants, s.dtype, raw_kappa is None)
    evidence = [x.contiguous() for x in (raw_nu, raw_kappa) if x is not None]
    rows = run(s.contiguous(), t.t().contiguous(), *evidence, _contiguous(force_unit))
    return rows[:6].t().contiguous(), rows[6:12].t().contiguous(), rows[12], rows[13], rows[14]
