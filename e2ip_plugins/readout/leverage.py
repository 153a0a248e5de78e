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
`e2ip_plugins.tools.fit` fits it; docs/leverage.md has the tables that these choices
come from.
"""

from typing import Any, Dict, Final, List, NamedTuple, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.families.interface import Support
from e2ip_plugins.keys import UNFITTED

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

    With h̄ the mean of h over an atom and its neighbours, because a force is a derivative of their energies, too, the
    predicted standard deviation grows by the factor (1 + a (h + h̄)) / (1 + 2a), which is 1 at h = h̄ = 1, more slowly
    far out, and on strange atoms by a surplus (`e2ip_plugins.families.interface.inflate`). Smooth
    in the positions, invariant, and the same for an atom whatever else is in the batch.

    Buffers are by kind of atom (head and species), and by region of a kind. A region is described along the axes of
    its kind, each in units of the kind's standard deviation: where its middle is, and how many times narrower than the
    kind it is. No name contains ``scale`` or ``shift``, see `e2ip_plugins.readout.readout.Readout`.

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
    region_whitening: Tensor
    region_kinds: Tensor
    region_axes: Tensor
    region_stretch: Tensor
    region_offsets: Tensor
    region_norms: Tensor

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
        self.register_buffer("region_whitening", torch.zeros(num_scalars, 1, num_scalars))
        self.register_buffer("region_kinds", torch.full((1,), -1))
        self.register_buffer("region_axes", torch.zeros(1, dtype=torch.long))
        self.register_buffer("region_stretch", torch.ones(1, num_scalars))
        self.register_buffer("region_offsets", torch.zeros(1, num_scalars))
        self.register_buffer("region_norms", torch.ones(1))

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
        features, axes = self.region_whitening.shape[0], self.region_whitening.shape[1]
        # Along all kinds' axes at once: no copies of matrices, no shapes that depend on data. Offsets are small, since
        # the kind's centre has been taken off before: no digits are lost.
        white = torch.mm(
            scalars - self.centres.index_select(0, kinds), self.region_whitening.reshape(features, axes * features)
        ).reshape(-1, axes, features)
        # The sign is lost in the square.
        z = torch.addcmul(self.region_offsets, white.index_select(1, self.region_axes), self.region_stretch, value=-1.0)
        psi = z.square().add_(1.0).sqrt_() - 1.0
        h = (2.0 * psi.sum(-1) + 1e-12) * self.region_norms
        # Other kinds' regions are far; added, so that infinity stays what it is.
        h = torch.add(h, self.region_kinds != kinds.unsqueeze(-1), alpha=1e20)
        # In units of the smallest, lest powers overflow. A larger power bends more sharply where regions meet, and
        # biased dynamics conserves its energy less well.
        smallest = h.detach().amin(1, keepdim=True)
        nearness = smallest / h
        cube = nearness.pow(3)
        nearest = smallest.squeeze(1) * cube.sum(1) / (cube * nearness).sum(1)
        return nearest.clamp(max=self.far)

    def reset(self) -> None:
        """Back to unfitted: a training goes on, and with it the features move."""
        self.fitted.fill_(False)

    def resize(self, axes: int, regions: Optional[int] = None) -> None:
        """Room for the axes of that many kinds and for that many regions, by default one each; what was is lost."""
        self.reset()
        features = self.centres.shape[1]
        regions = axes if regions is None else regions
        self.region_whitening = self.centres.new_zeros(features, axes, features)
        self.region_kinds = self.region_kinds.new_full((regions,), -1)
        self.region_axes = _each_its_own(self.region_axes, regions).clamp(max=axes - 1)
        self.region_stretch = self.centres.new_ones(regions, features)
        self.region_offsets = self.centres.new_zeros(regions, features)
        self.region_norms = self.centres.new_ones(regions)

    def take_head(self, source: "Leverage", head: int) -> None:
        """Become what ``source`` is for one of its heads."""
        species = source.species_per_head()
        kinds = slice(head * species, (head + 1) * species)
        own = (source.region_kinds >= kinds.start) & (source.region_kinds < kinds.stop)
        self.resize(1)
        if bool(own.any()):
            self.region_kinds = source.region_kinds[own] - kinds.start
            axes, self.region_axes = source.region_axes[own].unique(return_inverse=True)
            self.region_whitening = source.region_whitening[:, axes].contiguous()
            for name in ("region_stretch", "region_offsets", "region_norms"):
                setattr(self, name, getattr(source, name)[own])
        for name in ("centres", "log_variance", "log_factor"):
            setattr(self, name, getattr(source, name)[kinds].clone())
        self.growth, self.surplus = (values[head : head + 1].clone() for values in (source.growth, source.surplus))
        self.fitted = source.fitted.clone()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for name, values in self._before(self._buffers).items():
            self.register_buffer(name, values)

    def _before(self, saved: Any, prefix: str = "") -> Dict[str, Tensor]:
        """Buffers that a leverage saved by an earlier release of this package lacks, as they were then."""
        whitening = saved[prefix + "region_whitening"]
        features, regions = whitening.shape[:2]
        all_of_them = {
            "surplus": torch.zeros_like(saved[prefix + "growth"]),
            # Every region had axes of its own.
            "region_axes": _each_its_own(saved[prefix + "region_kinds"], regions),
            "region_stretch": whitening.new_ones(regions, features),
        }
        return {name: values for name, values in all_of_them.items() if prefix + name not in saved}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        centres = state_dict.get(prefix + "centres")
        if centres is None:  # saved before there was a leverage, or from a stock model: as if never fitted
            for name, own in self._buffers.items():
                assert own is not None
                state_dict[prefix + name] = torch.zeros_like(own) if name == "fitted" else own.clone()
        else:
            state_dict.update({prefix + name: values for name, values in self._before(state_dict, prefix).items()})
            # Of another network it is refused below, and must leave this one as it is: hosts may go on with it.
            if centres.shape == self.centres.shape:
                for name, own in list(self._buffers.items()):
                    assert own is not None
                    saved = state_dict[prefix + name]
                    if saved.shape != own.shape:  # as many regions as its training set asked for
                        setattr(self, name, own.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _each_its_own(like: Tensor, number: int) -> Tensor:
    """Axes of regions, each with a row of its own (number,)."""
    return torch.arange(number, dtype=torch.long, device=like.device)


def what_says_nothing(buffers: Dict[str, Tensor], prefix: str) -> List[str]:
    """Those of a leverage's buffers that earlier releases of this package did not have, where they change nothing."""
    names = []
    surplus, axes = buffers.get(prefix + "surplus"), buffers.get(prefix + "region_axes")
    if surplus is not None and not bool(surplus.any()):
        names.append(prefix + "surplus")
    if axes is not None and torch.equal(axes, _each_its_own(axes, buffers[prefix + "region_whitening"].shape[1])):
        if bool((buffers[prefix + "region_stretch"] == 1.0).all()):
            names += [prefix + "region_axes", prefix + "region_stretch"]
    return names
