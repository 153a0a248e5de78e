"""How well covariances are conditioned at every step of a training, in a file that the environment asks for.

``E2IP_CONDITION_TRACE=FILE`` makes every evaluation of the training loss append a line to the CSV file: over the atoms
of the batch, mean, least and largest ratio of the extreme eigenvalues of the predicted covariance (negative where the
least eigenvalue is not positive, as in the paper's figure of its ablation of damping); how many atoms have such an
eigenvalue; how many have a covariance that is not finite; and how many atoms there are.
"""

import os
from typing import Dict

import torch
from torch import Tensor

VARIABLE = "E2IP_CONDITION_TRACE"
COLUMNS = ("mean", "least", "largest", "indefinite", "not_finite", "atoms")


def trace(outputs: Dict[str, Tensor]) -> None:
    """Append a line for ``forces_cov`` (N, 3, 3) if that is asked for and this is a step of a training.

    Eigenvalues are computed in double precision: what they tell is a property of the matrices, not of the solver.
    """
    path = os.environ.get(VARIABLE)
    if not path or not outputs["forces_cov"].requires_grad:
        return
    covariance = outputs["forces_cov"].detach().double()
    finite = torch.isfinite(covariance).flatten(1).all(1)
    values = torch.linalg.eigvalsh(covariance[finite])
    ratio = values[:, 2] / values[:, 0]
    figures = [ratio.mean(), ratio.min(), ratio.max()] if len(ratio) else [torch.tensor(torch.nan)] * 3
    counts = [int((values[:, 0] <= 0).sum()), int((~finite).sum()), len(finite)]
    with open(path, "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write(",".join(COLUMNS) + "\n")
        file.write(",".join([f"{float(figure):.6g}" for figure in figures] + [str(count) for count in counts]) + "\n")
