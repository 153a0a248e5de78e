"""Logarithm of symmetric positive definite matrices for models: differentiable, scriptable, traceable."""

import numpy as np
import torch
from torch import Tensor, nn

from e2ip_plugins.maths.spd import matrix_to_sym6, sym6_matvec


def sym6_adjugate(x: Tensor) -> Tensor:
    """Adjugate of a symmetric matrix, sym6 in and out: its inverse times its determinant."""
    xx, yy, zz, yz, xz, xy = x.unbind(-1)
    return torch.stack(
        [
            yy * zz - yz * yz,
            xx * zz - xz * xz,
            xx * yy - xy * xy,
            xy * xz - xx * yz,
            xy * yz - yy * xz,
            xz * yz - zz * xy,
        ],
        dim=-1,
    )


def sym6_determinant(x: Tensor, adjugate: Tensor) -> Tensor:
    """det (...,) of a sym6 matrix: three times that is the trace of its product with its adjugate."""
    products = x * adjugate
    return (products[..., :3].sum(-1) + 2.0 * products[..., 3:].sum(-1)) / 3.0


class SymmetricLog(nn.Module):
    """Logarithm of SPD matrices with condition numbers up to 1e3, sym6 (..., 6) in and out, by quadrature.

    log A = ∫₀¹ (A - I)(I + t (A - I))⁻¹ dt, with A scaled so that its eigenvalues lie about 1. No eigenvectors, hence
    smooth at degenerate eigenvalues, and no solver that gives up a whole batch for one matrix that is not finite.
    Computed in float64, with an absolute error below 1e-11.
    """

    nodes: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        nodes, weights = np.polynomial.legendre.leggauss(48)
        self.register_buffer("nodes", torch.from_numpy(0.5 * (nodes + 1.0)), persistent=False)
        self.register_buffer("weights", torch.from_numpy(0.5 * weights), persistent=False)

    def _apply(self, fn, recurse=True):
        # Constants keep their digits when a model becomes a float32 one.
        nodes, weights = self.nodes, self.weights
        super()._apply(fn, recurse)
        self.nodes, self.weights = nodes.to(self.nodes.device), weights.to(self.weights.device)
        return self

    def forward(self, matrix: Tensor) -> Tensor:
        x = matrix.double()
        adjugate = sym6_adjugate(x)
        harmonic = 3.0 * sym6_determinant(x, adjugate) / adjugate[..., :3].sum(-1)
        # Between the smallest and the largest eigenvalue. The result does not depend on it.
        middle = (x[..., :3].sum(-1) / 3.0 * harmonic).sqrt().detach()
        one = torch.cat([torch.ones_like(x[..., :3]), torch.zeros_like(x[..., 3:])], dim=-1)
        excess = x / middle.unsqueeze(-1) - one
        shifted = one.unsqueeze(-2) + self.nodes.unsqueeze(-1) * excess.unsqueeze(-2)
        adjugate = sym6_adjugate(shifted)
        weights = self.weights / sym6_determinant(shifted, adjugate)
        log = _sym6_product((weights.unsqueeze(-1) * adjugate).sum(-2), excess)
        return torch.cat([log[..., :3] + torch.log(middle).unsqueeze(-1), log[..., 3:]], dim=-1).to(matrix.dtype)


def _sym6_product(x: Tensor, y: Tensor) -> Tensor:
    """Product of two symmetric matrices that commute, sym6 in and out."""
    columns = [
        sym6_matvec(x, torch.stack([y[..., 0], y[..., 5], y[..., 4]], dim=-1)),
        sym6_matvec(x, torch.stack([y[..., 5], y[..., 1], y[..., 3]], dim=-1)),
        sym6_matvec(x, torch.stack([y[..., 4], y[..., 3], y[..., 2]], dim=-1)),
    ]
    product = torch.stack(columns, dim=-1)
    return matrix_to_sym6(0.5 * (product + product.transpose(-1, -2)))
