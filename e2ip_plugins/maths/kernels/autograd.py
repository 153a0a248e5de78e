"""Autograd functions around the kernels: fused first derivatives, plain ones of any higher order."""

from typing import Callable, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import eager, plain
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.student import evidence

Gradients = Tuple[Optional[Tensor], ...]


def force_unit_tensor(force_unit: Union[float, Tensor], like: Tensor) -> Tensor:
    """σ_ref as a tensor () or (N,)."""
    if isinstance(force_unit, Tensor):
        return force_unit
    return torch.full((), force_unit, dtype=like.dtype, device=like.device)


def _gradients(
    values: Sequence[Tensor],
    outputs: Sequence[Optional[Tensor]],
    inputs: Sequence[Optional[Tensor]],
    needed: Sequence[bool],
    create_graph: bool,
) -> List[Optional[Tensor]]:
    """Gradients of ``values``, weighted with those ``outputs`` that are there, in the inputs that are needed."""
    pairs = [(value, grad) for value, grad in zip(values, outputs, strict=True) if grad is not None]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    grads = iter(
        torch.autograd.grad(
            [p[0] for p in pairs], wanted, [p[1] for p in pairs], create_graph=create_graph, allow_unused=True
        )
    )
    return [next(grads) if need else None for need in needed]


def plain_gradients(
    inputs: Sequence[Optional[Tensor]],
    force_unit: Union[float, Tensor],
    constants: Constants,
    outputs: Sequence[Optional[Tensor]],
    needed: Sequence[bool],
) -> List[Optional[Tensor]]:
    """Gradients of the plain composition that can themselves be differentiated, in inputs and ``outputs`` alike.

    ``inputs`` are s, t, raw ν, raw κ, residual; ``outputs`` the incoming gradients of NLL and regulariser.
    """
    with torch.enable_grad():
        # Views, or an input computed from another one would carry its share of the gradient twice.
        views = [None if x is None else x.view_as(x) for x in inputs]
        values = plain.nll_terms(
            *views, force_unit_tensor(force_unit, inputs[0]), constants[:2], constants[2:4], constants.pull_ceiling
        )
        return _gradients(values, outputs, views, needed, create_graph=True)


def plain_distribution_gradients(
    inputs: Sequence[Optional[Tensor]],
    force_unit: Union[float, Tensor],
    constants: Constants,
    outputs: Sequence[Optional[Tensor]],
    needed: Sequence[bool],
) -> List[Optional[Tensor]]:
    """Gradients of `plain.distribution` in s, t, raw ν, raw κ; differentiable where the backward records a graph."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views or fresh leaves, as in `plain_gradients`.
        views = [
            None if x is None else x.view_as(x) if create_graph else x.detach().requires_grad_(need)
            for x, need in zip(inputs, needed, strict=True)
        ]
        values = plain.distribution(*views, force_unit_tensor(force_unit, inputs[0]), constants[:2], constants[2:4])
        # The last one, the plateau, has none.
        return _gradients(values[:4], outputs[:4], views, needed, create_graph)


class OnePass(torch.autograd.Function):
    """The loss of `eager`, which computes values and gradients together: the backward only multiplies."""

    @staticmethod
    def forward(
        ctx,
        s: Tensor,
        t: Tensor,
        raw_nu: Tensor,
        raw_kappa: Optional[Tensor],
        residual: Tensor,
        force_unit: Union[float, Tensor],
        constants: Constants,
    ) -> Tuple[Tensor, Tensor]:
        inputs = (s, t, raw_nu, raw_kappa, residual)
        nll, regulariser, rows = eager.loss_and_gradients(*inputs, force_unit, constants, True)
        ctx.save_for_backward(*inputs, rows)
        ctx.force_unit, ctx.constants = force_unit, constants
        ctx.set_materialize_grads(False)
        return nll, regulariser

    @staticmethod
    def backward(ctx, by_nll: Optional[Tensor], by_regulariser: Optional[Tensor]) -> Gradients:
        *inputs, rows = ctx.saved_tensors
        if torch.is_grad_enabled():
            needed = ctx.needs_input_grad[:5]
            grads = plain_gradients(inputs, ctx.force_unit, ctx.constants, (by_nll, by_regulariser), needed)
            return (*grads, None, None)
        grads = one_pass_gradients(inputs, rows, ctx.force_unit, by_nll, by_regulariser)
        return (*grads, None, None)


def one_pass_gradients(
    inputs: Sequence[Optional[Tensor]],
    rows: Tensor,
    force_unit: Union[float, Tensor],
    by_nll: Optional[Tensor],
    by_regulariser: Optional[Tensor],
) -> List[Optional[Tensor]]:
    """Gradients in s, t, raw ν, raw κ, residual from the rows of `eager.loss_and_gradients`."""
    grads: List[Optional[Tensor]] = [None] * 5
    if by_nll is not None:
        rows = rows * by_nll
        k = 2 if inputs[3] is None else 3
        grads = [rows[0], rows[k : k + 5].t(), rows[1], None if k == 2 else rows[2], rows[k + 5 :].t()]
    if by_regulariser is not None:
        extra = _regulariser_gradients(*inputs[2:], force_unit, by_regulariser)
        grads[2:] = [a if b is None else b if a is None else a + b for a, b in zip(grads[2:], extra, strict=True)]
    return grads


def _regulariser_gradients(
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Union[float, Tensor],
    weight: Tensor,
) -> List[Optional[Tensor]]:
    """Gradients of Σ weight (ν+κ)‖v‖ in raw ν, raw κ and residual, zero in the latter where v = 0."""
    unit = force_unit.unsqueeze(-1) if isinstance(force_unit, Tensor) else force_unit
    v = residual / unit
    norm = (v * v).sum(-1).sqrt()
    direction = torch.where((norm == 0).unsqueeze(-1), torch.zeros_like(v), v / norm.unsqueeze(-1))
    nu, kappa = evidence(raw_nu, raw_kappa)
    by_evidence = weight * norm
    by_nu = by_evidence * raw_nu.sigmoid()
    by_residual = (weight * (nu + kappa)).unsqueeze(-1) * direction / unit
    if raw_kappa is None:
        return [2.0 * by_nu, None, by_residual]
    return [by_nu, by_evidence * raw_kappa.sigmoid(), by_residual]


class Recompute(torch.autograd.Function):
    """For kernels whose backward recomputes everything: only the inputs are kept."""

    @staticmethod
    def forward(
        ctx,
        s: Tensor,
        t: Tensor,
        raw_nu: Tensor,
        raw_kappa: Optional[Tensor],
        residual: Tensor,
        force_unit: Tensor,
        constants: Constants,
        forward_kernel: Callable,
        backward_kernel: Callable,
    ) -> Tuple[Tensor, Tensor]:
        ctx.save_for_backward(s, t, raw_nu, raw_kappa, residual)
        ctx.force_unit, ctx.constants, ctx.kernel = force_unit, constants, backward_kernel
        ctx.set_materialize_grads(False)
        return forward_kernel(s, t, raw_nu, raw_kappa, residual, force_unit, constants)

    @staticmethod
    def backward(ctx, by_nll: Optional[Tensor], by_regulariser: Optional[Tensor]) -> Gradients:
        inputs, none = ctx.saved_tensors, (None, None, None, None)
        if torch.is_grad_enabled():
            needed = ctx.needs_input_grad[:5]
            return (
                *plain_gradients(inputs, ctx.force_unit, ctx.constants, (by_nll, by_regulariser), needed),
                *none,
            )
        return (*ctx.kernel(*inputs, ctx.force_unit, by_nll, by_regulariser, ctx.constants), *none)


class PlainBackward(torch.autograd.Function):
    """A distribution whose graph is one node: values from a kernel, gradients from the plain composition.

    A training step needs the distribution's values, not its gradients, which the loss takes another way.
    """

    @staticmethod
    def forward(
        ctx,
        s: Tensor,
        t: Tensor,
        raw_nu: Tensor,
        raw_kappa: Optional[Tensor],
        force_unit: Union[float, Tensor],
        constants: Constants,
        kernel: Callable,
    ) -> Tuple[Tensor, ...]:
        ctx.save_for_backward(s, t, raw_nu, raw_kappa)
        ctx.force_unit, ctx.constants = force_unit, constants
        ctx.set_materialize_grads(False)
        outputs = kernel(s, t, raw_nu, raw_kappa, force_unit, constants)
        ctx.mark_non_differentiable(outputs[-1])
        return outputs

    @staticmethod
    def backward(ctx, *outputs: Optional[Tensor]) -> Gradients:
        needed = ctx.needs_input_grad[:4]
        grads = plain_distribution_gradients(ctx.saved_tensors, ctx.force_unit, ctx.constants, outputs, needed)
        return (*grads, None, None, None)
