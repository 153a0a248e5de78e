"""The calls of `triton_kernels`, for tensors of any layout, and operators that graphs can contain in their place."""

import functools
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import plain
from e2ip_plugins.maths.kernels.autograd import fresh, plain_gradients, weighted_gradients
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.kernels.triton_kernels import backward_kernel, distribution_kernel, forward_kernel

#: Of the functions here: a packaged model may bring their callers from another version.
SIGNATURES = 6

#: Atoms per program. 256 would need twice the registers per thread in the backward kernel.
BLOCK = 128

FUSION = {"enable_fp_fusion": True}


def fixed(constants: Constants, double: bool) -> dict:
    """What every kernel is compiled for."""
    (s_knee, s_ceiling), (t_knee, t_ceiling) = constants.scalar_damper, constants.tensor_damper
    return {
        "S_KNEE": s_knee, "S_CEILING": s_ceiling, "T_KNEE": t_knee, "T_CEILING": t_ceiling,
        "COUPLED": constants.coupled, "DOUBLE": double, "BLOCK": BLOCK,
    }  # fmt: skip


def start(kernel, programs: int, arguments: Sequence, flags: dict, wrap: Optional[Callable] = None) -> None:
    """Launch a kernel; the device is that of the first argument. ``wrap`` is torch's `wrap_triton` inside operators."""
    device = arguments[0].device
    if wrap is not None:
        wrap(kernel)[(programs,)](*arguments, **flags)
    elif programs == 0:
        return
    elif device.type != "cuda":
        kernel[(programs,)](*arguments, **flags)
    else:
        # Triton launches on the current device, not on that of its arguments.
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **flags, **FUSION)


def _launch(
    kernel, inputs: Sequence[Tensor], outputs: Sequence[Tensor], constants: Constants, wrap: Optional[Callable], **flags
) -> None:
    n = inputs[0].shape[0]
    arguments = (*inputs, *outputs, n, *(stride for x in inputs for stride in x.stride()))
    flags.update(fixed(constants, inputs[0].dtype == torch.float64))
    start(kernel, (n + BLOCK - 1) // BLOCK, arguments, flags, wrap)


def forward(
    coefficients: Tensor, residual: Tensor, force_unit: Tensor, constants: Constants, wrap: Optional[Callable] = None
) -> Tuple[Tensor, Tensor]:
    """NLL and regulariser (N,); as `e2ip_plugins.maths.kernels.nll_terms`, tensors of one dtype and device, σ_ref (N,).

    ``wrap`` is torch's `wrap_triton` inside operators.
    """
    n = coefficients.shape[0]
    outputs = coefficients.new_empty(n), coefficients.new_empty(n)
    _launch(forward_kernel, (coefficients, residual, force_unit), outputs, constants, wrap)
    return outputs


def backward(
    coefficients: Tensor,
    residual: Tensor,
    force_unit: Tensor,
    by_nll: Optional[Tensor],
    by_regulariser: Optional[Tensor],
    constants: Constants,
    wrap: Optional[Callable] = None,
) -> Tuple[Tensor, Tensor]:
    """Gradients in coefficients and residual from those in NLL and regulariser (N,)."""
    n = coefficients.shape[0]
    by_nll = coefficients.new_zeros(()).expand(n) if by_nll is None else by_nll
    inputs = (coefficients, residual, force_unit, by_nll, by_nll if by_regulariser is None else by_regulariser)
    outputs = coefficients.new_empty(n, 8), coefficients.new_empty(n, 3)
    _launch(backward_kernel, inputs, outputs, constants, wrap, REGULARISER=by_regulariser is not None)
    return outputs


def distribution(
    coefficients: Tensor, flattening: Tensor, force_unit: Tensor, constants: Constants, wrap: Optional[Callable] = None
) -> Tuple[Tensor, ...]:
    """log Σ0, Σ0 (N, 6), ν, κ, plateau (N,); flattening (N,), other arguments as in `forward`."""
    n = coefficients.shape[0]
    outputs = tuple(coefficients.new_empty(shape) for shape in ((n, 6), (n, 6), (n,), (n,), (n,)))
    _launch(distribution_kernel, (coefficients, flattening, force_unit), outputs, constants, wrap)
    return outputs


#: Those of `Constants`, in types that operators can have.
_FIELDS = dict(zip(Constants._fields, (bool, List[float], List[float]), strict=True))
_COUNT = len(_FIELDS)


def _constants(fields: tuple) -> Constants:
    return Constants(*(tuple(x) if isinstance(x, (list, tuple)) else x for x in fields))


def _operator(name: str, tensors: str, results: int, launcher: Callable, on_cpu: Callable) -> Any:
    """An operator on tensors and constants from two functions that take them."""

    def launch(*arguments):
        constants = _constants(arguments[-_COUNT:])
        # Inductor (torch 2.13) fails on a kernel's argument that was expanded, such as σ_ref.
        as_rows = torch.contiguous_format
        inputs = [x if x.is_contiguous() else x.clone(memory_format=as_rows) for x in arguments[:-_COUNT]]
        return launcher(*inputs, constants, wrap=torch.library.wrap_triton)

    def compute(*arguments):
        return on_cpu(*arguments[:-_COUNT], _constants(arguments[-_COUNT:]))

    # What torch makes the operator's schema of.
    types = {**dict.fromkeys(tensors.split(), Tensor), **_FIELDS}
    parameters = [Parameter(k, Parameter.POSITIONAL_OR_KEYWORD, annotation=x) for k, x in types.items()]
    signature = Signature(parameters, return_annotation=Tuple[results * (Tensor,)])
    vars(launch)["__signature__"] = signature
    operator: Any = torch.library.triton_op(f"e2ip::{name}", launch, mutates_args={})
    operator.register_kernel("cpu")(compute)
    return operator


def _gradients_on_cpu(coefficients, residual, force_unit, by_nll, by_regulariser, constants) -> tuple[Tensor, ...]:
    """As `backward`, from the plain form."""

    def gradients() -> Sequence[Optional[Tensor]]:
        with torch.no_grad():
            inputs, weights = (coefficients, residual), (by_nll, by_regulariser)
            return plain_gradients(plain.nll_terms, inputs, force_unit, constants, weights)

    # Autograd is off inside operators. It is on in a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in thread.submit(gradients).result())


@functools.cache
def register() -> None:
    """Make torch.ops.e2ip.nll_terms and torch.ops.e2ip.distribution, when something first traces for a GPU.

    They take `Constants` field by field; on the CPU they are the plain form.
    """
    inputs = "coefficients residual force_unit"
    nll = _operator("nll_terms", inputs, 2, forward, plain.nll_terms)
    nll_grad = _operator("nll_terms_backward", f"{inputs} by_nll by_regulariser", 2, backward, _gradients_on_cpu)
    spread = _operator("distribution", "coefficients flattening force_unit", 5, distribution, plain.distribution)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:-_COUNT])
        ctx.fields = inputs[-_COUNT:]

    no_fields = _COUNT * (None,)

    def nll_backward(ctx, by_nll, by_regulariser):
        return (*nll_grad(*ctx.saved_tensors, by_nll, by_regulariser, *ctx.fields), None, *no_fields)

    def second_backward(ctx, *weights):
        coefficients, residual, force_unit, *by = ctx.saved_tensors
        with torch.enable_grad():
            views = fresh((coefficients, residual, *by), connected=True)
            grads = plain_gradients(plain.nll_terms, views[:2], force_unit, _constants(ctx.fields), views[2:])
            second = weighted_gradients(grads, views, weights, create_graph=True)
        return (*second[:2], None, *second[2:], *no_fields)

    def spread_backward(ctx, *weights):
        *inputs, force_unit = ctx.saved_tensors
        # The last one, the plateau, has no gradient.
        grads = plain_gradients(plain.distribution, inputs, force_unit, _constants(ctx.fields), weights[:4])
        return (*grads, None, *no_fields)

    nll.register_autograd(nll_backward, setup_context=keep)
    nll_grad.register_autograd(second_backward, setup_context=keep)
    spread.register_autograd(spread_backward, setup_context=keep)
