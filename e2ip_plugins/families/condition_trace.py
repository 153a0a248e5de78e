"""Conditioning of covariances at every step of a training, in a CSV file: for the benchmark ``damping``.

Where the environment variable ``E2IP_CONDITION_TRACE`` names a file as the family ``e2ip-ablation`` is made, every
evaluation of its loss in training appends a line: over the atoms of the batch, mean, least and largest ratio of the
extreme eigenvalues of the predicted covariance (negative where the least eigenvalue is not positive, as in the paper's
figure of its ablation of damping); how many atoms have such an eigenvalue; how many have a covariance that is not
finite; and how many atoms there are.
"""

import torch
from torch import Tensor

VARIABLE = "E2IP_CONDITION_TRACE"
COLUMNS = ("mean", "least", "largest", "indefinite", "not_finite", "atoms")


def append_line(path: str, covariance: Tensor) -> None:
    """Append a line about covariances (N, 3, 3).

    Eigenvalues are computed in double precision: what they tell is a property of the matrices, not of the solver.
    """
    finite = torch.isfinite(covariance).flatten(1).all(1)
    values = torch.linalg.eigvalsh(covariance[finite].detach().double())
    ratio = values[:, 2] / values[:, 0]
    figures = [ratio.mean(), ratio.min(), ratio.max()] if len(ratio) else [torch.tensor(torch.nan)] * 3
    counts = [int((values[:, 0] <= 0).sum()), int((~finite).sum()), len(finite)]
    with open(path, "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write(",".join(COLUMNS) + "\n")
        file.write(",".join([f"{float(figure):.6g}" for figure in figures] + [str(count) for count in counts]) + "\n")
