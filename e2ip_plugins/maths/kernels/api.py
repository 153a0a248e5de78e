"""The two public functions: checks, promotion and the way to the chosen path."""

import math
import os
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.maths.kernels import eager, paths, plain
from e2ip_plugins.maths.kernels.autograd import OnePass, PlainBackward, Recompute, force_unit_tensor
from e2ip_plugins.maths.kernels.constants import Constants

_SHAPES = {"s": (), "t": (5,), "raw_nu": (), "raw_kappa": (), "residual": (3,)}


def nll_terms(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    residual: Tensor,
    force_unit: Tensor,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
    pull_ceiling: Optional[float] = None,
    path: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Negative log likelihood and evidence regulariser of every atom, from the head's raw outputs.

    Dampers, SPD map, evidence and Student-t density in one (paper, Eq. 9, 10, 14, 25), with analytic first
    derivatives and right higher ones. A coefficient that is NaN or infinite makes its own atom's NLL NaN; with
    ``E2IP_DEBUG=1`` in the environment it raises an error, except in traced and scripted code.

    Parameters
    ----------
    s : (N,)
        0e coefficient, before its damper.
    t : (N, 5)
        2e coefficients in e3nn's component order, before their damper.
    raw_nu, raw_kappa : (N,)
        Evidence before softplus. ``raw_kappa=None``: coupled evidence, κ = ν - 5 + 1e-6.
    residual : (N, 3)
        y - γ in eV/Å.
    force_unit : float or tensor () or (N,)
        σ_ref in eV/Å; gets no gradient. TorchScript takes a tensor only.
    scalar_damper, tensor_damper : (float, float)
        Knee τ and ceiling c.
    pull_ceiling : float, optional
        In units of σ_ref: the gradient of the NLL in the residual is multiplied by
        max(1, det(Λ)^(1/3)/(pull_ceiling σ_ref)²), so that a larger predicted σ does not weaken the pull on the force
        (see `e2ip_plugins.readout.loss`). Values and all other gradients are those of the likelihood.
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
        For wrong shapes, tensors on different devices, a force_unit ≤ 0 (where it can be read without
        making a GPU wait), dampers or ceilings that are none, an unknown or impossible path.

    Examples
    --------
    Two atoms whose head puts out zeros, with errors of nothing and of 1 eV/Å:

    >>> zeros, residual = torch.zeros(2), torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    >>> nll, regulariser = nll_terms(
    ...     zeros, torch.zeros(2, 5), zeros, zeros, residual, 0.5, scalar_damper=(14.0, 15.0), tensor_damper=(4.0, 5.0)
    ... )
    >>> nll
    tensor([2.4935, 3.3395])
    >>> regulariser
    tensor([ 0.0000, 12.7726])
    """
    if torch.jit.is_scripting():
        return plain.nll_terms(
            s, t, raw_nu, raw_kappa, residual, force_unit, scalar_damper, tensor_damper, pull_ceiling
        )
    else:
        constants = _constants(scalar_damper, tensor_damper, pull_ceiling)
        return _nll_terms([s, t, raw_nu, raw_kappa, residual], force_unit, constants, path)


def distribution(
    s: Tensor,
    t: Tensor,
    raw_nu: Tensor,
    raw_kappa: Optional[Tensor],
    force_unit: Tensor,
    scalar_damper: Tuple[float, float],
    tensor_damper: Tuple[float, float],
    path: Optional[str] = None,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The distribution of every atom's force, from the head's raw outputs (paper, Eq. 9, 10).

    U_ale and U_epi are scalar multiples of Σ0 (`e2ip_plugins.maths.student.aleatoric_factor`, `epistemic_factor`), to
    be expanded outside. A gradient that is asked for is that of the plain composition on every path.

    Parameters
    ----------
    s, t, raw_nu, raw_kappa, force_unit, scalar_damper, tensor_damper, path
        As in `nll_terms`, which also names the errors.

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
    An atom whose head puts out zeros has Σ0 = σ_ref²; one that is past its damper's knee stays finite:

    >>> zeros, s = torch.zeros(2), torch.tensor([0.0, 100.0])
    >>> _, sigma0, nu, kappa, plateau = distribution(
    ...     s, torch.zeros(2, 5), zeros, zeros, 0.5, scalar_damper=(14.0, 15.0), tensor_damper=(4.0, 5.0)
    ... )
    >>> sigma0[0]
    tensor([0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000])
    >>> nu, kappa, plateau
    (tensor([5.6931, 5.6931]), tensor([0.6931, 0.6931]), tensor([0., 1.]))
    """
    if torch.jit.is_scripting():
        return plain.distribution(s, t, raw_nu, raw_kappa, force_unit, scalar_damper, tensor_damper)
    else:
        constants = _constants(scalar_damper, tensor_damper)
        return _distribution([s, t, raw_nu, raw_kappa], force_unit, constants, path)


def _constants(
    scalar_damper: Tuple[float, float], tensor_damper: Tuple[float, float], pull_ceiling: Optional[float] = None
) -> Constants:
    for name, damper in (("scalar_damper", scalar_damper), ("tensor_damper", tensor_damper)):
        if len(damper) != 2 or not 0.0 < damper[0] < damper[1]:
            raise InputError(f"{name} is {damper}, expected (knee, ceiling) with 0 < knee < ceiling")
    if pull_ceiling is not None and not pull_ceiling > 0.0:
        raise InputError(f"pull_ceiling is {pull_ceiling}; it must be greater than 0 (in units of σ_ref)")
    return Constants(*scalar_damper, *tensor_damper, pull_ceiling)


def _nll_terms(
    inputs: List[Optional[Tensor]], force_unit: Tensor, constants: Constants, path: Optional[str]
) -> Tuple[Tensor, Tensor]:
    observer, inputs, force_unit = _prepare(inputs, force_unit)
    like = inputs[0]
    if observer != paths.NOBODY:
        force_unit = force_unit_tensor(force_unit, like)
        if _as_operator(observer, like, path):
            return torch.ops.e2ip.nll_terms(*inputs, force_unit.expand(like.shape[0]), *constants)
        return plain.nll_terms(*inputs, force_unit, constants[:2], constants[2:4], constants.pull_ceiling)
    recorded = _recorded(inputs)
    kernels = ("forward", "backward") if recorded else ("forward",)
    if paths.choose(like.device, like.dtype, kernels, path) == "triton":
        launch, force_unit = paths.triton_launch(), force_unit_tensor(force_unit, like)
        if recorded:
            return Recompute.apply(*inputs, force_unit, constants, launch.forward, launch.backward)
        return launch.forward(*inputs, force_unit, constants)
    if recorded:
        return OnePass.apply(*inputs, force_unit, constants)
    return eager.loss_and_gradients(*inputs, force_unit, constants, False)[:2]


def _distribution(
    inputs: List[Optional[Tensor]], force_unit: Tensor, constants: Constants, path: Optional[str]
) -> Tuple[Tensor, ...]:
    observer, inputs, force_unit = _prepare(inputs, force_unit)
    like = inputs[0]
    if observer != paths.NOBODY:
        force_unit = force_unit_tensor(force_unit, like)
        if _as_operator(observer, like, path):
            return torch.ops.e2ip.distribution(*inputs, force_unit.expand(like.shape[0]), *constants[:4])
        return plain.distribution(*inputs, force_unit, constants[:2], constants[2:4])
    kernel = eager.distribution
    if paths.choose(like.device, like.dtype, ("distribution",), path) == "triton":
        kernel, force_unit = paths.triton_launch().distribution, force_unit_tensor(force_unit, like)
    if _recorded(inputs):
        return PlainBackward.apply(*inputs, force_unit, constants, kernel)
    return kernel(*inputs, force_unit, constants)


def _recorded(inputs: List[Optional[Tensor]]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _as_operator(observer: str, like: Tensor, path: Optional[str]) -> bool:
    # Elsewhere the compiler fuses the plain form by itself.
    wanted = observer == paths.GRAPH and like.device.type in paths.TRITON_DEVICES and paths.requested(path) == "triton"
    return wanted and paths.has_operators()


def _prepare(inputs: List[Optional[Tensor]], force_unit) -> Tuple[str, List[Optional[Tensor]], Tensor]:
    """Who observes the call (see `paths.observer`), the inputs in one dtype, and σ_ref without gradient."""
    present = [x for x in inputs if x is not None]
    observer = paths.observer(present)
    if not torch.compiler.is_compiling():
        _check(inputs, force_unit, observer != paths.NOBODY)
    first = present[0]
    if first.dtype not in (torch.float32, torch.float64) or any(x.dtype != first.dtype for x in present):
        dtype = torch.float32
        for x in present:
            dtype = torch.promote_types(dtype, x.dtype)
        inputs = [x if x is None else x.to(dtype) for x in inputs]
        first = inputs[0]
    if isinstance(force_unit, Tensor):
        force_unit = force_unit.detach().to(dtype=first.dtype, device=first.device, non_blocking=first.is_cuda)
    else:
        force_unit = float(force_unit)
    return observer, inputs, force_unit


def _check(inputs: List[Optional[Tensor]], force_unit, traced: bool) -> None:
    first = inputs[0]
    for x, (name, shape) in zip(inputs, _SHAPES.items(), strict=False):
        if x is None and name == "raw_kappa":
            continue
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; a tensor is needed")
        if x.shape != first.shape[:1] + shape or not first.shape:
            wanted = f"(N, {shape[0]})" if shape else "(N,)"
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected {wanted} with the same N for all")
        if x.device != first.device:
            raise InputError(f"{name} is on {x.device}, s on {first.device}: move all of them to one device")
        if not x.is_floating_point():
            raise InputError(f"{name} has dtype {x.dtype}; a floating-point dtype is needed")
    unit = force_unit
    if isinstance(force_unit, Tensor):
        if force_unit.dim() > 1 or (force_unit.dim() == 1 and force_unit.shape != first.shape):
            raise InputError(f"force_unit has shape {tuple(force_unit.shape)}, expected () or {tuple(first.shape)}")
        # A 0-d tensor is moved to where the others are, if it has a value.
        if force_unit.device != first.device and (force_unit.dim() or force_unit.is_meta):
            raise InputError(f"force_unit is on {force_unit.device}, s on {first.device}: move it there")
        # Elsewhere to look would make the host wait.
        known = not traced and force_unit.dim() == 0 and force_unit.device.type == "cpu"
        unit = force_unit.item() if known else 1.0
    if not 0.0 < unit < math.inf:
        raise InputError(f"force_unit is {unit}; it must be a number greater than 0 (σ_ref in eV/Å)")
    if os.environ.get("E2IP_DEBUG", "0") not in ("0", "") and not traced and not first.is_meta:
        for x, name in zip(inputs, _SHAPES, strict=False):
            if x is not None:
                _check_finite(name, x)
        if isinstance(force_unit, Tensor) and not (force_unit > 0).all():
            raise InputError("force_unit is not greater than 0 for every atom (E2IP_DEBUG=1)")


def _check_finite(name: str, x: Tensor) -> None:
    good = torch.isfinite(x.detach())
    bad = ~(good if good.dim() == 1 else good.all(1))
    if bad.any():
        atoms = bad.nonzero().flatten()
        first = ", ".join(str(int(i)) for i in atoms[:5]) + (", …" if len(atoms) > 5 else "")
        raise InputError(f"{name} is NaN or infinite for {len(atoms)} of {len(bad)} atoms: {first} (E2IP_DEBUG=1)")
