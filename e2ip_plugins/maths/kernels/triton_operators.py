"""`triton_kernels` as operators that torch.compile, torch.export and make_fx take into their graphs.

They are ``torch.ops.e2ip.nll_terms`` and ``torch.ops.e2ip.distribution``; on the CPU, the plain form.
"""

import functools
from typing import Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import eager, plain
from e2ip_plugins.maths.kernels.autograd import one_pass_gradients, plain_distribution_gradients, plain_gradients
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.kernels.triton_kernels import backward_kernel, distribution_kernel, forward_kernel
from e2ip_plugins.maths.kernels.triton_launch import BLOCK, grid


@functools.cache
def register() -> None:
    """Make the operators, when something first traces for a GPU: older torch has no `triton_op`."""
    wrap = torch.library.wrap_triton

    @torch.library.triton_op("e2ip::nll_terms", mutates_args={})
    def nll_op(
        s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor], residual: Tensor, force_unit: Tensor,
        s_knee: float, s_ceiling: float, t_knee: float, t_ceiling: float, pull_ceiling: Optional[float],
    ) -> Tuple[Tensor, Tensor]:  # fmt: skip
        n = s.shape[0]
        nll, regulariser = s.new_empty(n), s.new_empty(n)
        kappa = raw_nu if raw_kappa is None else raw_kappa
        wrap(forward_kernel)[grid(n)](
            s, t, raw_nu, kappa, residual, force_unit, nll, regulariser, n,
            s.stride(0), t.stride(0), t.stride(1), raw_nu.stride(0), kappa.stride(0),
            residual.stride(0), residual.stride(1), force_unit.stride(0),
            S_KNEE=s_knee, S_CEILING=s_ceiling, T_KNEE=t_knee, T_CEILING=t_ceiling,
            COUPLED=raw_kappa is None, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
        )  # fmt: skip
        return nll, regulariser

    @torch.library.triton_op("e2ip::nll_terms_backward", mutates_args={})
    def backward_op(
        s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor], residual: Tensor, force_unit: Tensor,
        by_nll: Tensor, by_regulariser: Tensor,
        s_knee: float, s_ceiling: float, t_knee: float, t_ceiling: float, pull_ceiling: Optional[float],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        n = s.shape[0]
        by_s, by_t, by_nu, by_residual = s.new_empty(n), s.new_empty(n, 5), s.new_empty(n), s.new_empty(n, 3)
        # Without a raw κ nothing is written there.
        by_kappa = s.new_empty(0 if raw_kappa is None else n)
        kappa = raw_nu if raw_kappa is None else raw_kappa
        wrap(backward_kernel)[grid(n)](
            s, t, raw_nu, kappa, residual, force_unit, by_nll, by_regulariser,
            by_s, by_t, by_nu, by_kappa, by_residual, n,
            s.stride(0), t.stride(0), t.stride(1), raw_nu.stride(0), kappa.stride(0),
            residual.stride(0), residual.stride(1), force_unit.stride(0), by_nll.stride(0), by_regulariser.stride(0),
            S_KNEE=s_knee, S_CEILING=s_ceiling, T_KNEE=t_knee, T_CEILING=t_ceiling, PULL_CEILING=pull_ceiling,
            COUPLED=raw_kappa is None, REGULARISER=True, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
        )  # fmt: skip
        return by_s, by_t, by_nu, by_kappa, by_residual

    @torch.library.triton_op("e2ip::distribution", mutates_args={})
    def distribution_op(
        s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Optional[Tensor], force_unit: Tensor,
        s_knee: float, s_ceiling: float, t_knee: float, t_ceiling: float,
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        n = s.shape[0]
        log_sigma0, sigma0, nu, out_kappa = s.new_empty(n, 6), s.new_empty(n, 6), s.new_empty(n), s.new_empty(n)
        plateau = s.new_empty(n)
        kappa = raw_nu if raw_kappa is None else raw_kappa
        wrap(distribution_kernel)[grid(n)](
            s, t, raw_nu, kappa, force_unit, log_sigma0, sigma0, nu, out_kappa, plateau, n,
            s.stride(0), t.stride(0), t.stride(1), raw_nu.stride(0), kappa.stride(0), force_unit.stride(0),
            S_KNEE=s_knee, S_CEILING=s_ceiling, T_KNEE=t_knee, T_CEILING=t_ceiling,
            COUPLED=raw_kappa is None, DOUBLE=s.dtype == torch.float64, BLOCK=BLOCK,
        )  # fmt: skip
        return log_sigma0, sigma0, nu, out_kappa, plateau

    @nll_op.register_kernel("cpu")
    def _(s, t, raw_nu, raw_kappa, residual, force_unit, *constants):
        c = Constants(*constants)
        return plain.nll_terms(s, t, raw_nu, raw_kappa, residual, force_unit, c[:2], c[2:4])

    @distribution_op.register_kernel("cpu")
    def _(s, t, raw_nu, raw_kappa, force_unit, *constants):
        return plain.distribution(s, t, raw_nu, raw_kappa, force_unit, constants[:2], constants[2:4])

    @backward_op.register_kernel("cpu")
    def _(s, t, raw_nu, raw_kappa, residual, force_unit, by_nll, by_regulariser, *constants):
        # Autograd is off in here, so the eager kernel's own gradients.
        inputs, c = (s, t, raw_nu, raw_kappa, residual), Constants(*constants)
        rows = eager.loss_and_gradients(*inputs, force_unit, c, True)[2]
        grads = one_pass_gradients(inputs, rows, force_unit, by_nll, by_regulariser)
        grads[3] = s.new_empty(0) if grads[3] is None else grads[3]
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in grads)

    def keep(constants: int):
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:-constants])
            ctx.constants = inputs[-constants:]

        return setup_context

    def nll_backward(ctx, by_nll, by_regulariser):
        saved = ctx.saved_tensors
        by_s, by_t, by_nu, by_kappa, by_residual = backward_op(*saved, by_nll, by_regulariser, *ctx.constants)
        by_kappa = None if saved[3] is None else by_kappa
        return (by_s, by_t, by_nu, by_kappa, by_residual, None, *[None] * len(ctx.constants))

    def second_backward(ctx, *weights):
        *inputs, force_unit, by_nll, by_regulariser = ctx.saved_tensors
        with torch.enable_grad():
            # Views, so that gradients stop here (see `plain_gradients`).
            views = [None if x is None else x.view_as(x) for x in (*inputs, by_nll, by_regulariser)]
            views = [x if x is None or x.requires_grad else x.detach().requires_grad_() for x in views]
            present = [x is not None for x in views[:5]]
            grads = plain_gradients(views[:5], force_unit, Constants(*ctx.constants), views[5:], present)
            pairs = [(x, w) for x, w in zip(grads, weights, strict=True) if x is not None]
            wanted = [x for x in views if x is not None]
            second = iter(
                torch.autograd.grad(
                    [p[0] for p in pairs], wanted, [p[1] for p in pairs], create_graph=True, allow_unused=True
                )
            )
        result = [None if x is None else next(second) for x in views]
        return (*result[:5], None, *result[5:], *[None] * len(ctx.constants))

    def distribution_backward(ctx, *outputs):
        *inputs, force_unit = ctx.saved_tensors
        constants, needed = Constants(*ctx.constants), ctx.needs_input_grad[:4]
        grads = plain_distribution_gradients(inputs, force_unit, constants, outputs, needed)
        return (*grads, None, *[None] * len(ctx.constants))

    nll_op.register_autograd(nll_backward, setup_context=keep(5))
    backward_op.register_autograd(second_backward, setup_context=keep(5))
    distribution_op.register_autograd(distribution_backward, setup_context=keep(4))
