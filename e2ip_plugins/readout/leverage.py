"""How well the training set supports an atom's environment: what an epistemic uncertainty can honestly grow with.

The leverage of an atom is the squared Mahalanobis distance of its 0e features to those of the training atoms of its
species, divided by the effective number of features, so that its mean over the training atoms is 1. In Bayesian linear
regression with a matrix-normal-inverse-Wishart prior it is what the predictive variance grows with, the inverse of the
belief count κ; further out a smooth model errs like the remainder of an expansion, with the squared distance, so that
there the *standard deviation* grows like the leverage. `Leverage` computes it, `e2ip_plugins.tools.fit` fits it.
"""

from typing import Any, Final, NamedTuple, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.families.interface import Support

#: Rounds of averaging over neighbours: a force is a derivative of the energies of its whole receptive field.
ROUNDS = 3

#: Leverage of a species that the training set has no atom of; also what enters the mean over neighbours at most.
FAR = 1e6


class Neighbours(NamedTuple):
    """Pairs of atoms within the cutoff, each in both directions.

    Attributes
    ----------
    lengths : (E,)
        In Å.
    envelope : (E,)
        Smooth weight of a pair, 0 from the cutoff on.
    sender, receiver : (E,) int
    """

    lengths: Tensor
    envelope: Tensor
    sender: Tensor
    receiver: Tensor


class Leverage(nn.Module):
    """Leverage h of every atom, and what grows with it; buffers only, no weights.

    No buffer's name contains ``scale`` or ``shift``, see `e2ip_plugins.readout.readout.Readout`.

    With h̄ the mean of h over neighbours, repeated a few times, the predicted standard deviation grows by the factor
    (1 + a (h + h̄)) / (1 + 2a), which is 1 at h = h̄ = 1. Smooth in the positions, invariant, and the same for an atom
    whatever else is in the batch.

    Parameters
    ----------
    num_scalars : int
        0e features D.
    num_species, num_heads : int
        Each data set of the host (MACE: head) has moments and constants of its own.
    rounds : int
        0 for models that must stay strictly local: h̄ is h then.
    """

    rounds: Final[int]
    far: Final[float] = FAR
    rows: Tensor
    means: Tensor
    whitening: Tensor
    log_variance: Tensor
    growth: Tensor
    log_factor: Tensor
    fitted: Tensor

    def __init__(self, num_scalars: int, num_species: int, num_heads: int = 1, rounds: int = ROUNDS) -> None:
        super().__init__()
        self.rounds = rounds
        # As many rows as there can be: compiled models know the shapes of buffers, and are compiled before the fit.
        kinds = num_species * num_heads
        self.register_buffer("rows", torch.full((kinds,), -1))
        self.register_buffer("means", torch.zeros(kinds, num_scalars))
        self.register_buffer("whitening", torch.zeros(num_scalars, kinds, num_scalars))
        self.register_buffer("log_variance", torch.zeros(kinds))
        self.register_buffer("growth", torch.full((num_heads,), 0.5))
        self.register_buffer("log_factor", torch.zeros(kinds))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(
        self, scalars: Tensor, species: Tensor, heads: Optional[Tensor] = None, neighbours: Optional[Neighbours] = None
    ) -> Support:
        """Leverage and what a family makes of it (N,); see `Support`.

        Parameters
        ----------
        scalars : (N, num_scalars)
        species : (N,) int
            Index among the model's species.
        heads : (N,) int, optional
            Data set of every atom, where there are several.
        neighbours : Neighbours, optional
            None: h̄ is h.
        """
        count = self.growth.shape[0]
        kinds = species
        if heads is not None and count > 1:
            kinds = heads * (self.rows.shape[0] // count) + species
        row = self.rows[kinds]
        known = row >= 0
        row = row.clamp(min=0)
        h = self._distance(scalars, row)
        h = torch.where(known, h, torch.full_like(h, self.far))
        # Features that are not finite are no features of a training atom.
        h = torch.nan_to_num(h, nan=float("inf"), posinf=float("inf"))
        mean = h.clamp(max=self.far)
        if neighbours is not None:
            # Two atoms at one place: hosts may give such a pair finite features.
            touching = torch.zeros_like(h).index_add(0, neighbours.receiver, (neighbours.lengths == 0).to(h.dtype))
            h = torch.where(touching > 0, torch.full_like(h, float("inf")), h)
            mean = h.clamp(max=self.far)
            if self.rounds > 0:
                weight = neighbours.envelope.to(h.dtype)
                total = torch.ones_like(h).index_add(0, neighbours.receiver, weight)
                for _ in range(self.rounds):
                    received = torch.zeros_like(h).index_add(0, neighbours.receiver, weight * mean[neighbours.sender])
                    mean = (mean + received) / total
        growth = self.growth
        if heads is not None and count > 1:
            growth = self.growth[heads]
        return Support(
            leverage=torch.where(self.fitted, h, torch.full_like(h, float("nan"))),
            distance=h.clamp(max=self.far) + mean,
            growth=growth,
            log_variance=self.log_variance[row],
            log_scale=self.log_factor[row],
            fitted=self.fitted,
        )

    def _distance(self, scalars: Tensor, row: Tensor) -> Tensor:
        """(x - μ)ᵀ (C + ρ)⁻¹ (x - μ) / d_eff of every atom (N,), by the moments of its row."""
        away = scalars - self.means[row]
        features, rows = self.whitening.shape[0], self.whitening.shape[1]
        # By all rows at once, then one of them chosen: without copies of matrices or shapes that depend on data.
        white = torch.matmul(away, self.whitening.reshape(features, rows * features))
        if rows > 1:
            index = row.reshape(-1, 1, 1).expand(-1, 1, features)
            white = white.reshape(-1, rows, features).gather(1, index).squeeze(1)
        return white.square().sum(-1)

    def reset(self) -> None:
        """Back to unfitted: a training goes on, and with it the features move."""
        self.fitted.fill_(False)

    def resize(self, rows: int) -> None:
        """Room for the moments of that many kinds of atoms; what there was is lost."""
        self.reset()
        self.rows.fill_(-1)
        features = self.means.shape[1]
        self.means = self.means.new_zeros(rows, features)
        self.whitening = self.means.new_zeros(features, rows, features)
        self.log_variance, self.log_factor = self.means.new_zeros(rows), self.means.new_zeros(rows)

    def take_head(self, source: "Leverage", head: int) -> None:
        """Become what ``source`` is for one of its heads."""
        per_head = len(source.rows) // len(source.growth)
        for name, value in source.named_buffers():
            setattr(self, name, value.clone())
        self.rows = source.rows[head * per_head : (head + 1) * per_head].clone()
        self.growth = source.growth[head : head + 1].clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, own in list(self._buffers.items()):
            assert own is not None
            saved = state_dict.get(prefix + name)
            if saved is None:  # saved before there was a leverage, or from a stock model: as if never fitted
                state_dict[prefix + name] = torch.zeros_like(own) if name == "fitted" else own.clone()
            elif saved.shape != own.shape:  # fitted to the species of its training set alone, see `resize`
                setattr(self, name, own.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
