"""The product of every atom's features with the matrix of its kind; neither time nor memory grows with the kinds."""

from typing import List

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import paths


def is_graph(x: Tensor) -> bool:
    """Return whether this call is traced, compiled or transformed, so that no shape may depend on data."""
    if torch.jit.is_scripting():
        return False
    else:
        return paths.tracer_of([x]) != paths.NOT_TRACED


def own_products(x: Tensor, matrices: Tensor, index: Tensor, few: int = 1024, little: int = 2**23) -> Tensor:
    """Return the product (N, D) of every row of ``x`` with its matrix.

    Parameters
    ----------
    x : (N, D)
    matrices : (D, A, D)
        Of every kind the matrix ``matrices[:, kind]``.
    index : (N,) int
        Kind of every row.
    few, little : int
        Up to ``few`` numbers A·D per atom every row is multiplied with all matrices, except on a CPU where these are
        more than ``little`` multiplications N·A·D². Those are few operations, each of which costs on a small molecule
        what a thousand atoms would. With more, the forms below are faster; measured by ``benchmarks/kinds.py``.
    """
    features, kinds = matrices.shape[0], matrices.shape[1]
    if kinds == 1:
        return torch.mm(x, matrices[:, 0])
    # A GPU would have to tell how many atoms of each kind there are, and the host to wait for it.
    fixed = is_graph(x) or (x.is_cuda and not x.requires_grad)
    if kinds * features <= few and (fixed or x.shape[0] * kinds * features**2 <= little):
        return _of_all(x, matrices, index)
    # In the order of the kinds, so that a matrix stays in the processor's cache until it is not needed any more.
    order = index.argsort()
    x, index = x.index_select(0, order), index.index_select(0, order)
    products = _row_by_row(x, matrices, index) if fixed else _kind_by_kind(x, matrices, index)
    return torch.empty_like(products).index_copy_(0, order, products)


def _of_all(x: Tensor, matrices: Tensor, index: Tensor) -> Tensor:
    features, kinds = matrices.shape[0], matrices.shape[1]
    products = torch.mm(x, matrices.reshape(features, kinds * features)).reshape(-1, kinds, features)
    return torch.gather(products, 1, index.reshape(-1, 1, 1).expand(-1, 1, features)).squeeze(1)


def _kind_by_kind(x: Tensor, matrices: Tensor, index: Tensor) -> Tensor:
    """For rows in the order of their kinds. The only form with second derivatives in ``x`` for many kinds."""
    counts: List[int] = torch.bincount(index, minlength=matrices.shape[1]).tolist()
    # Of no atoms there is nothing to put together.
    products, start = [x[:0]], 0
    for kind, count in enumerate(counts):
        if count > 0:
            products.append(torch.mm(x[start : start + count], matrices[:, kind]))
            start += count
    return torch.cat(products)


def _row_by_row(x: Tensor, matrices: Tensor, index: Tensor) -> Tensor:
    """As sums of the matrices' rows with the features as weights: no copies, no shapes that depend on data.

    Differentiable once in ``x``, and not at all in the matrices where these are not in the graph.
    """
    features, kinds = matrices.shape[0], matrices.shape[1]
    first = torch.arange(0, features * kinds, kinds, dtype=torch.int32, device=x.device)
    rows = first + index.to(torch.int32).unsqueeze(1)
    return torch.nn.functional.embedding_bag(
        rows, matrices.reshape(features * kinds, features), mode="sum", per_sample_weights=x
    )
