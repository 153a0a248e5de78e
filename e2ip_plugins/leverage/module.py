"""How well the training set supports an atom's environment: what an epistemic uncertainty can honestly grow with.

The leverage of an atom says how far its 0e features lie from those of the training atoms of its species, 1 being what
training atoms have on average. With z_k its D features in the axes and units of the training atoms' covariance C,

    h = Σ_k ψ(z_k²) / ⟨Σ_k ψ(z_k²)⟩,   ψ(t) = 2τ (√(1 + t/τ) - 1),   z = (Λ + ρ)^(-1/2) Uᵀ (x - μ),   C = U Λ Uᵀ.

With ψ(t) = t this is the leverage of statistics, a squared Mahalanobis distance: in Bayesian linear regression with a
matrix-normal-inverse-Wishart prior the predictive variance grows with it, and its inverse is the belief count κ. That
is what ψ is for small deviations. For large ones, beyond some √τ, it is linear in z: features that are nonlinear in
the positions run away from a narrow training set much faster than errors do. Where a species lives in several regions,
of phases or sites, each has a μ of its own and variances of its own along the species' axes U, and h is the mean over
the regions' own with the weights h_r⁻⁴: the near ones count. The buffers hold z/√τ. `Leverage` computes it,
`e2ip_plugins.fitting.fit` fits it; docs/leverage.md has the tables that these choices
come from.
"""

from typing import Any, Final, NamedTuple, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.keys import UNFITTED
from e2ip_plugins.leverage.form import FAR, NOWHERE, Support


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

    With h̄ the mean of h over an atom and its neighbours, because a force is a derivative of their energies, too, the
    predicted standard deviation grows by the factor (1 + a (h + h̄)) / (1 + 2a), which is 1 at h = h̄ = 1, more slowly
    far out, and on strange atoms by a surplus (`e2ip_plugins.leverage.form.inflate`). Smooth
    in the positions, invariant, and the same for an atom whatever else is in the batch.

    Buffers are by kind of atom (head and species), those of regions by kind and region; kinds that have fewer have the
    others `NOWHERE`. A region is described along the axes of its kind, each in units of the kind's standard deviation:
    where its middle is, and how many times narrower than the kind it is. No name contains ``scale`` or ``shift``, see
    `e2ip_plugins.readout.readout.Readout`.

    Parameters
    ----------
    num_scalars : int
        0e features D.
    num_species, num_heads : int
        Each data set of the host (MACE: head) has moments and constants of its own.
    strictly_local : bool
        Whether an atom's leverage must not depend on its neighbours' features: h̄ is h then.
    """

    # For models that were pickled when the mean had rounds.
    strictly_local: Final[bool] = False
    far: Final[float] = FAR
    unknown: Final[float] = UNFITTED
    centres: Tensor
    log_variance: Tensor
    log_factor: Tensor
    growth: Tensor
    surplus: Tensor
    fitted: Tensor
    whitening: Tensor  # (D, A, D): Uᵀ(Λ + ρ)^(-1/2)/√τ of the A kinds that were seen
    axes: Tensor  # (kinds,): which of them is a kind's
    region_stretch: Tensor  # (kinds, R, D), 0 where there is no region
    region_offsets: Tensor  # (kinds, R, D)
    region_norms: Tensor  # (kinds, R): what makes the mean of h 1

    def __init__(self, num_scalars: int, num_species: int, num_heads: int = 1, strictly_local: bool = False) -> None:
        super().__init__()
        self.strictly_local = strictly_local  # type: ignore[misc]
        kinds = num_species * num_heads
        self.register_buffer("centres", torch.zeros(kinds, num_scalars))
        self.register_buffer("log_variance", torch.zeros(kinds))
        self.register_buffer("log_factor", torch.zeros(kinds))
        self.register_buffer("growth", torch.ones(num_heads))
        self.register_buffer("surplus", torch.zeros(num_heads))
        self.register_buffer("fitted", torch.tensor(False))
        self.register_buffer("whitening", torch.zeros(num_scalars, 1, num_scalars))
        self.register_buffer("axes", torch.zeros(kinds, dtype=torch.long))
        self.register_buffer("region_stretch", torch.zeros(kinds, 1, num_scalars))
        self.register_buffer("region_offsets", torch.full((kinds, 1, num_scalars), NOWHERE))
        self.register_buffer("region_norms", torch.ones(kinds, 1))

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
        kinds, growth, surplus = species, self.growth, self.surplus
        if heads is not None and growth.shape[0] > 1:
            kinds = heads * self.species_per_head() + species
            growth, surplus = growth[heads], surplus[heads]
        # Features that are not finite are no features of a training atom.
        leverage = torch.nan_to_num(self._distance(scalars, kinds), nan=float("inf"), posinf=float("inf"))
        if neighbours is None:
            h = mean = leverage.clamp(max=self.far)
        else:
            # Two atoms at one place, of which hosts may give finite features, count for each other and nobody else.
            weight = neighbours.envelope.to(leverage.dtype).masked_fill(neighbours.lengths == 0, 1e20)
            total = torch.ones_like(leverage).index_add_(0, neighbours.receiver, weight)
            leverage = leverage.masked_fill(total > 1e19, float("inf"))
            h = mean = leverage.clamp(max=self.far)
            if not self.strictly_local:
                mean = h.index_add(0, neighbours.receiver, weight * h.index_select(0, neighbours.sender)) / total
        return Support(
            leverage=torch.where(self.fitted, leverage, self.unknown),
            distance=h + mean,
            growth=growth,
            surplus=surplus,
            log_variance=self.log_variance.index_select(0, kinds),
            log_scale=self.log_factor.index_select(0, kinds),
            fitted=self.fitted,
        )

    def species_per_head(self) -> int:
        """Kinds are counted head by head."""
        return self.centres.shape[0] // self.growth.shape[0]

    def _distance(self, scalars: Tensor, kinds: Tensor) -> Tensor:
        """h (N,), `FAR` at most and for kinds without a region."""
        features, axes = self.whitening.shape[0], self.whitening.shape[1]
        # Along all kinds' axes at once: no copies of matrices, no shapes that depend on data. Offsets are small, since
        # the kind's centre has been taken off before: no digits are lost.
        white = torch.mm(
            scalars - self.centres.index_select(0, kinds), self.whitening.reshape(features, axes * features)
        ).reshape(-1, axes, features)
        own = torch.gather(white, 1, self.axes.index_select(0, kinds).reshape(-1, 1, 1).expand(-1, 1, features))
        # The sign is lost in the square.
        stretch, offsets = self.region_stretch.index_select(0, kinds), self.region_offsets.index_select(0, kinds)
        psi = torch.addcmul(offsets, own, stretch, value=-1.0).square().add_(1.0).sqrt_() - 1.0
        # Within bounds, lest powers of sixteen regions overflow in float32. A larger power bends more sharply where
        # regions meet, and biased dynamics conserves its energy less well.
        h = (psi.sum(-1) * self.region_norms.index_select(0, kinds)).clamp(5e-10, 1e9)
        nearness = h.reciprocal()
        cube = nearness.pow(3)
        return (cube.sum(1) / (cube * nearness).sum(1)).clamp(max=self.far)

    def regions(self) -> Tensor:
        """How many every kind has (kinds,)."""
        return (self.region_stretch[:, :, 0] > 0.0).sum(1)

    def reset(self) -> None:
        """Back to unfitted: a training goes on, and with it the features move."""
        self.fitted.fill_(False)

    def resize(self, axes: int, regions: int = 1) -> None:
        """Room for the axes of that many kinds and for that many regions of each; what was is lost."""
        self.reset()
        kinds, features = self.centres.shape
        self.whitening = self.centres.new_zeros(features, axes, features)
        self.axes = self.axes.new_zeros(kinds)
        self.region_stretch = self.centres.new_zeros(kinds, regions, features)
        self.region_offsets = self.centres.new_full((kinds, regions, features), NOWHERE)
        self.region_norms = self.centres.new_ones(kinds, regions)

    def take_head(self, source: "Leverage", head: int) -> None:
        """Become what ``source`` is for one of its heads."""
        species = source.species_per_head()
        kinds = slice(head * species, (head + 1) * species)
        kept, self.axes = source.axes[kinds].unique(return_inverse=True)
        self.whitening = source.whitening[:, kept].contiguous()
        for name in ("centres", "log_variance", "log_factor", "region_stretch", "region_offsets", "region_norms"):
            setattr(self, name, getattr(source, name)[kinds].clone())
        self.growth, self.surplus = (values[head : head + 1].clone() for values in (source.growth, source.surplus))
        self.fitted = source.fitted.clone()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if "whitening" not in self._buffers:
            kinds, features = self.centres.shape
            fresh = Leverage(features, kinds // self.growth.shape[0], self.growth.shape[0]).to(self.centres)
            self._buffers = fresh._buffers

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Earlier versions kept all regions in one list, which is not read, also where a fit has put today's buffers
        # beside it.
        for name in ("region_kinds", "region_axes", "region_whitening"):
            state_dict.pop(prefix + name, None)
        if prefix + "whitening" not in state_dict:
            # Saved before there was a leverage, from a stock model, or by an earlier version: as if never fitted.
            for name, own in self._buffers.items():
                assert own is not None
                state_dict[prefix + name] = torch.zeros_like(own) if name == "fitted" else own.clone()
        elif state_dict[prefix + "centres"].shape == self.centres.shape:
            # As many regions as its training set asked for. Of another network it is refused below, and must leave
            # this one as it is: hosts may go on with it.
            for name, own in list(self._buffers.items()):
                assert own is not None
                saved = state_dict[prefix + name]
                if saved.shape != own.shape:
                    setattr(self, name, own.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
