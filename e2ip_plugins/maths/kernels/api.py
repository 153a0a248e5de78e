"""The two public functions: checks, promotion and the way to the chosen path."""

import os
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import inference, paths, plain
from e2ip_plugins.maths.kernels.autograd import Fused, Kernel
from e2ip_plugins.maths.kernels.constants import Constants

#: Of the coefficients.
COLUMNS = ("s", "raw_nu", "raw_kappa", "t1", "t2", "t3", "t4", "t5")


def nll_terms(
    coefficients: Tensor,
    residual: Tensor,
    force_unit: Tensor,
    coupled: bool,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
    path: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Negative log likelihood and evidence regulariser of every atom, from a trunk's coefficients.

    Dampers, SPD map, evidence and Student-t density in one (paper, Eq. 9, 10, 14, 25), differentiable to any order. A
    coefficient that is NaN or infinite makes its own atom's NLL NaN; with ``E2IP_DEBUG=1`` in the environment it raises
    an error, except in traced and scripted code.

    Parameters
    ----------
    coefficients : (N, 8)
        0e coefficient s before its damper; ν̂ and κ̂, evidence before softplus; 2e coefficients t1 … t5 in e3nn's
        component order, before their damper.
    residual : (N, 3)
        y - γ in eV/Å.
    force_unit : float or tensor () or (N,)
        σ_ref in eV/Å; gets no gradient. TorchScript takes a tensor only.
    coupled : bool
        κ = ν - 5 + 1e-6; κ̂ is ignored, whatever it is, and gets a zero gradient.
    scalar_damper, tensor_damper : (float, float)
        Knee τ and ceiling c.
    path : str, optional
        Overrides ``E2IP_KERNEL`` (see `e2ip_plugins.maths.kernels.paths`).

    Returns
    -------
    nll : (N,)
        -log density of the predictive Student-t, in nats for a density in (eV/Å)⁻³.
    regulariser : (N,)
        (ν + κ) ‖residual‖/σ_ref, with a zero gradient at zero residual.

    Both have the inputs' common dtype, at least float32: bfloat16 and float16 are computed in float32. Gradients have
    the dtype of their input.

    Raises
    ------
    InputError
        For wrong shapes of coefficients and residual, and an unknown or impossible path.

    Examples
    --------
    Two atoms whose coefficients are zero, with errors of nothing and of 1 eV/Å:

    >>> residual, dampers = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), ((14.0, 15.0), (4.0, 5.0))
    >>> nll, regulariser = nll_terms(torch.zeros(2, 8), residual, 0.5, False, *dampers)
    >>> nll
    tensor([2.4935, 3.3395])
    >>> regulariser
    tensor([ 0.0000, 12.7726])
    """
    constants = Constants(coupled, scalar_damper, tensor_damper)
    if torch.jit.is_scripting():
        return plain.nll_terms(coefficients, residual, force_unit, constants)
    else:
        return _nll_terms(coefficients, residual, force_unit, constants, path)


def distribution(
    coefficients: Tensor,
    force_unit: Tensor,
    coupled: bool,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
    path: Optional[str] = None,
    flattening: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The distribution of every atom's force, from a trunk's coefficients (paper, Eq. 9, 10).

    U_ale and U_epi are scalar multiples of Σ0 (`e2ip_plugins.maths.student.aleatoric_factor`, and that over κ), to
    be expanded outside. A gradient that is asked for is that of the plain composition on every path.

    Parameters
    ----------
    coefficients, force_unit, coupled, scalar_damper, tensor_damper, path
        As in `nll_terms`, which also names the errors.
    flattening : (N,), optional
        f ≥ 0: the damped 2e coefficients t become t/√(1 + f ‖t‖²), which is no longer than 1/√f; default 0.

    Returns
    -------
    log_sigma0 : (N, 6)
        log Σ0 in log(eV²/Å²), order xx, yy, zz, yz, xz, xy.
    sigma0 : (N, 6)
        Σ0 in eV²/Å², symmetric positive definite.
    nu, kappa : (N,)
    plateau : (N,)
        1 where a damper is past its knee, else 0; without gradient.

    Examples
    --------
    An atom whose coefficients are zero has Σ0 = σ_ref²; one that is past its damper's knee stays finite:

    >>> coefficients = torch.zeros(2, 8)
    >>> coefficients[1, 0] = 100.0
    >>> _, sigma0, nu, kappa, plateau = distribution(coefficients, 0.5, False, (14.0, 15.0), (4.0, 5.0))
    >>> sigma0[0]
    tensor([0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000])
    >>> nu, kappa, plateau
    (tensor([5.6931, 5.6931]), tensor([0.6931, 0.6931]), tensor([0., 1.]))
    """
    constants = Constants(coupled, scalar_damper, tensor_damper)
    if flattening is None:
        flattening = torch.zeros(1, dtype=coefficients.dtype, device=coefficients.device).expand(coefficients.shape[0])
    if torch.jit.is_scripting():
        return plain.distribution(coefficients, flattening, force_unit, constants)
    else:
        return _distribution(coefficients, flattening, force_unit, constants, path)


def _nll_terms(coefficients, residual, force_unit, constants: Constants, path: Optional[str]) -> Tuple[Tensor, Tensor]:
    tensors = {"coefficients": coefficients, "residual": residual}
    tracer, (coefficients, residual), force_unit = _prepare(tensors, force_unit, constants)
    if tracer != paths.NOT_TRACED:
        if _as_operator(tracer, coefficients, path):
            return torch.ops.e2ip.nll_terms(coefficients, residual, force_unit, *constants)
        return plain.nll_terms(coefficients, residual, force_unit, constants)
    recorded = _recorded(coefficients, residual)
    if not _takes_triton(coefficients, ("forward", "backward") if recorded else ("forward",), path):
        return plain.nll_terms_in_double(coefficients, residual, force_unit, constants)
    launch = paths.triton_launch()
    if not recorded:
        return launch.forward(coefficients, residual, force_unit, constants)
    kernel = Kernel(launch.forward, plain.nll_terms, 2, launch.backward)
    return Fused.apply(kernel, force_unit, constants, coefficients, residual)


def _distribution(coefficients, flattening, force_unit, constants: Constants, path: Optional[str]) -> Any:
    tensors = {"coefficients": coefficients, "flattening": flattening}
    tracer, inputs, force_unit = _prepare(tensors, force_unit, constants)
    coefficients = inputs[0]
    if tracer != paths.NOT_TRACED:
        if _as_operator(tracer, coefficients, path):
            return torch.ops.e2ip.distribution(*inputs, force_unit, *constants)
        return plain.distribution(*inputs, force_unit, constants)
    triton = _takes_triton(coefficients, ("distribution",), path)
    forward = paths.triton_launch().distribution if triton else inference.distribution
    if _recorded(*inputs):
        return Fused.apply(Kernel(forward, plain.distribution, 4), force_unit, constants, *inputs)
    return forward(*inputs, force_unit, constants)


def _takes_triton(like: Tensor, kernels: Sequence[str], path: Optional[str]) -> bool:
    return paths.choose(like.device, like.dtype, kernels, path) == "triton"


def _recorded(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _as_operator(tracer: str, like: Tensor, path: Optional[str]) -> bool:
    # Elsewhere the compiler fuses the plain form by itself.
    wanted = tracer == paths.GRAPH and like.device.type in paths.TRITON_DEVICES and paths.requested(path) == "triton"
    return wanted and paths.has_operators()


def _prepare(tensors: Dict[str, Tensor], force_unit, constants: Constants) -> Tuple[str, Sequence[Tensor], Tensor]:
    """Who observes the call (see `paths.tracer`), the tensors in one dtype, and σ_ref (N,) without gradient."""
    tracer = paths.tracer_of(list(tensors.values()))
    if not torch.compiler.is_compiling():
        _check(tensors, force_unit, constants, tracer != paths.NOT_TRACED)
    dtype = torch.float32
    for x in tensors.values():
        dtype = torch.promote_types(dtype, x.dtype)
    inputs = [x.to(dtype) for x in tensors.values()]
    device, count = inputs[0].device, inputs[0].shape[0]
    if isinstance(force_unit, Tensor):
        force_unit = force_unit.detach().to(dtype=dtype, device=device, non_blocking=device.type == "cuda")
    else:
        force_unit = torch.full((), force_unit, dtype=dtype, device=device)
    return tracer, inputs, force_unit.expand(count)


def _check(tensors: Dict[str, Tensor], force_unit, constants: Constants, traced: bool) -> None:
    first = tensors["coefficients"]
    shapes = {"coefficients": (len(COLUMNS),), "residual": (3,), "flattening": ()}
    for name, x in tensors.items():
        if x.shape != (*first.shape[:1], *shapes[name]):
            expected = ", ".join(("N", *map(str, shapes[name])))
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected ({expected}) with the same N for all")
    if os.environ.get("E2IP_DEBUG", "0") not in ("0", "") and not traced and not first.is_meta:
        for k, name in enumerate(COLUMNS):
            if not (constants.coupled and name == "raw_kappa"):
                _check_finite(f"coefficient {name}", first[:, k : k + 1])
        if "residual" in tensors:
            _check_finite("residual", tensors["residual"])
        if isinstance(force_unit, Tensor) and not (force_unit > 0).all():
            raise InputError("force_unit is not greater than 0 for every atom (E2IP_DEBUG=1)")


def _check_finite(name: str, x: Tensor) -> None:
    bad = ~torch.isfinite(x.detach()).all(1)
    if bad.any():
        atoms = bad.nonzero().flatten()
        first = ", ".join(str(int(i)) for i in atoms[:5]) + (", …" if len(atoms) > 5 else "")
        raise InputError(f"{name} is NaN or infinite for {len(atoms)} of {len(bad)} atoms: {first} (E2IP_DEBUG=1)")
