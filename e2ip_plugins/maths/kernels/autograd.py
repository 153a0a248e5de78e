"""Autograd around the kernels: a kernel's own first derivatives where it has them, plain ones of any order."""

from typing import Callable, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels.constants import Constants

Grads = Sequence[Optional[Tensor]]


def weighted_gradients(values: Sequence[Tensor], inputs: Sequence[Tensor], weights: Grads, create_graph: bool) -> Grads:
    """Gradients in all inputs of those values that have a weight."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight is not None]
    return torch.autograd.grad(
        [p[0] for p in pairs], inputs, [p[1] for p in pairs], create_graph=create_graph, allow_unused=True
    )


def fresh(inputs: Sequence[Tensor], connected: bool) -> Sequence[Tensor]:
    """Views, or an input computed from another one would carry its share of the gradient twice; or new leaves."""
    return [x.view_as(x) if connected and x.requires_grad else x.detach().requires_grad_() for x in inputs]


def plain_gradients(
    function: Callable, inputs: Sequence[Tensor], force_unit: Tensor, constants: Constants, weights: Grads
) -> Grads:
    """Gradients in the inputs of a function of `plain`, of which as many results as there are ``weights`` count.

    Where autograd records they can be differentiated themselves, in inputs and weights alike.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        views = fresh(inputs, create_graph)
        values = function(*views, force_unit, constants)[: len(weights)]
        return weighted_gradients(values, views, weights, create_graph)


class Kernel(NamedTuple):
    """How one path computes a public function.

    Attributes
    ----------
    forward : callable
        From inputs, σ_ref and constants to results.
    plain : callable
        The same in plain operations.
    differentiable : int
        How many of the results, the first ones, have a gradient.
    backward : callable, optional
        From inputs, σ_ref, gradients of the results and constants to gradients of the inputs. Without one the gradients
        come from the plain form.
    """

    forward: Callable
    plain: Callable
    differentiable: int
    backward: Optional[Callable] = None


class Fused(torch.autograd.Function):
    """The kernel's results as one node of the graph."""

    @staticmethod
    def forward(ctx, kernel: Kernel, force_unit: Tensor, constants: Constants, *inputs: Tensor) -> Tuple[Tensor, ...]:
        results = kernel.forward(*inputs, force_unit, constants)
        ctx.save_for_backward(force_unit, *inputs)
        ctx.kernel, ctx.constants = kernel, constants
        ctx.mark_non_differentiable(*results[kernel.differentiable :])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, *weights: Optional[Tensor]) -> Grads:
        (force_unit, *inputs), kernel = ctx.saved_tensors, ctx.kernel
        weights = weights[: kernel.differentiable]
        if kernel.backward is None or torch.is_grad_enabled():
            grads = plain_gradients(kernel.plain, inputs, force_unit, ctx.constants, weights)
        else:
            grads = kernel.backward(*inputs, force_unit, *weights, ctx.constants)
        return (None, None, None, *grads)
