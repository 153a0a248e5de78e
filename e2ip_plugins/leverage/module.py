"""The leverage as a module that models carry; its formulas stand in `e2ip_plugins.leverage.form`."""

from typing import Any, Dict, Final, List, NamedTuple, Optional

import torch
from torch import Tensor, nn

from e2ip_plugins.keys import UNFITTED
from e2ip_plugins.leverage.energies import EnergyErrors
from e2ip_plugins.leverage.form import (
    FORM,
    Around,
    LeverageForm,
    Support,
    mean_around,
    mean_over_regions,
    softened,
)
from e2ip_plugins.leverage.products import is_graph, own_products

#: Coordinates of regions that a kind does not have, in units in which atoms are 1 apart: too far to count.
NOWHERE = 1e10


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
    """Leverage h of every atom and what follows from it, see `e2ip_plugins.leverage.form`; buffers only, no weights.

    It also carries `EnergyErrors`, as ``energies``: everything that a fit fills is in one place.

    Smooth in the positions, invariant, and the same for an atom whatever else is in the batch.

    Most buffers are by kind of atom (head and species), those of regions by kind and region; kinds that have fewer
    regions have `NOWHERE` as the offsets of the others. A region is described along the axes of its kind, each in units
    of the kind's standard deviation: by its middle, and by how many times narrower than the kind it is. No buffer's
    name contains ``scale`` or ``shift``, see `e2ip_plugins.readout.readout.Readout`.

    Parameters
    ----------
    num_scalars : int
        0e features D.
    num_species, num_heads : int
        Each data set (MACE calls them heads) has moments and constants of its own.
    strictly_local : bool
        Whether an atom's leverage must not depend on its neighbours' features: h̄ is h then.
    """

    strictly_local: Final[bool]
    unfitted: Final[float] = UNFITTED
    #: Weight of a pair of atoms at one place, beside which all other neighbours count for nothing.
    touching: Final[float] = 1e20
    #: Numbers (atoms, regions, features) that are computed at once, on a CPU and on a GPU, where launches cost more. Up
    #: to three copies are in memory: 3 and 200 MB in float32. From ``benchmarks/kinds.py``.
    at_once: Final[int] = 2**18
    at_once_on_gpu: Final[int] = 2**24
    centres: Tensor  # (kinds, D): μ
    log_variance: Tensor  # (kinds,): ln v̄, `Support.log_typical`; files have the old name
    log_factor: Tensor  # (kinds,): `Support.log_scale`, the fitted one; MACE cuts tensors with "scale" in their names
    growth: Tensor  # (heads,)
    surplus: Tensor  # (heads,)
    fitted: Tensor
    whitening: Tensor  # (D, A, D): U(Λ + ρ)^(-1/2)/√τ of the A kinds with training atoms; it multiplies rows x - μ
    axes: Tensor  # (kinds,): index of a kind's matrix U(Λ + ρ)^(-1/2)/√τ among those A of ``whitening``
    region_stretch: Tensor  # (kinds, R, D), 0 where there is no region
    region_offsets: Tensor  # (kinds, R, D)
    region_norms: Tensor  # (kinds, R): 2τ of ψ and what makes the mean of h 1, the same for all regions of a kind

    def __init__(self, num_scalars: int, num_species: int, num_heads: int = 1, strictly_local: bool = False) -> None:
        super().__init__()
        self.strictly_local = strictly_local
        kinds = num_species * num_heads
        self.register_buffer("centres", torch.zeros(kinds, num_scalars))
        self.register_buffer("log_variance", torch.zeros(kinds))
        self.register_buffer("log_factor", torch.zeros(kinds))
        self.register_buffer("growth", torch.ones(num_heads))
        self.register_buffer("surplus", torch.zeros(num_heads))
        self.register_buffer("fitted", torch.tensor(False))
        self.register_buffer("axes", torch.zeros(kinds, dtype=torch.long))
        self.energies = EnergyErrors(num_scalars, num_species, num_heads)
        for name in ("whitening", "region_stretch", "region_offsets", "region_norms"):
            self.register_buffer(name, torch.empty(0))
        self.resize(1)

    def forward(
        self,
        scalars: Tensor,
        species: Tensor,
        heads: Optional[Tensor] = None,
        neighbours: Optional[Neighbours] = None,
        form: LeverageForm = FORM,
    ) -> Support:
        """Return the `Support` of all atoms.

        Parameters
        ----------
        scalars : (N, num_scalars)
        species : (N,) int
            Index among the model's species.
        heads : (N,) int, optional
            Data set of every atom, where there are several.
        neighbours : Neighbours, optional
            None: h̄ is h, and u is v.
        form : LeverageForm
        """
        kinds, growth, surplus = species, self.growth, self.surplus
        if heads is not None and growth.shape[0] > 1:
            kinds = heads * self.species_per_head() + species
            growth, surplus = growth[heads], surplus[heads]
        # Features that are not finite are no features of a training atom.
        whitened = self.whitened(scalars, kinds)
        leverage = self.leverages_of(whitened, kinds, form)
        leverage = torch.nan_to_num(leverage, nan=float("inf"), posinf=float("inf"))
        around: Optional[Around] = None
        if neighbours is not None:
            # Two atoms at one place, whose features may be finite, count for each other and for nobody else.
            weight = neighbours.envelope.to(leverage.dtype).clamp(min=0.0)  # rounding at the cutoff
            weight = weight.masked_fill(neighbours.lengths == 0, self.touching)
            total = torch.ones_like(leverage).index_add_(0, neighbours.receiver, weight)
            leverage = leverage.masked_fill(total > 0.1 * self.touching, float("inf"))
            if not self.strictly_local:
                around = Around(neighbours.sender, neighbours.receiver, weight, total)
        h = mean = leverage.clamp(max=form.max_leverage)
        if around is not None:
            mean = mean_around(h, around)
        return Support(
            leverage=torch.where(self.fitted, leverage, self.unfitted),
            distance=h + mean,
            growth=growth,
            surplus=surplus,
            log_typical=self.log_variance.index_select(0, kinds),
            log_scale=self.log_factor.index_select(0, kinds),
            fitted=self.fitted,
            whitened=whitened,
            around=around,
        )

    def species_per_head(self) -> int:
        """Return the number of kinds that a head has; kinds are counted head by head."""
        return self.centres.shape[0] // self.growth.shape[0]

    def distances(self, scalars: Tensor, kinds: Tensor, form: LeverageForm = FORM) -> Tensor:
        """Return h (N,) of atoms from their own features alone, at most `LeverageForm.max_leverage`.

        It is NaN where features are NaN.

        The name is kept, although `Support.distance` is d: the fit also calls this method of the class that a package
        of `nequip-package` carries.
        """
        return self.leverages_of(self.whitened(scalars, kinds), kinds, form)

    def whitened(self, scalars: Tensor, kinds: Tensor) -> Tensor:
        """Return z/√τ (N, D)."""
        # Offsets are small, since the kind's centre has been taken off before: no digits are lost.
        offsets = scalars - self.centres.index_select(0, kinds)
        return own_products(offsets, self.whitening, self.axes.index_select(0, kinds))

    def leverages_of(self, whitened: Tensor, kinds: Tensor, form: LeverageForm = FORM) -> Tensor:
        """Return h (N,) of whitened features."""
        numbers = self.at_once_on_gpu if whitened.is_cuda else self.at_once
        atoms = max(1, numbers // max(1, self.region_stretch.shape[1] * self.region_stretch.shape[2]))
        # Compilers fuse the operations: there are no such numbers in memory.
        if is_graph(whitened) or whitened.shape[0] <= atoms:
            return self._leverages(whitened, kinds, form)
        parts: List[Tensor] = []
        for start in range(0, whitened.shape[0], atoms):
            parts.append(self._leverages(whitened[start : start + atoms], kinds[start : start + atoms], form))
        return torch.cat(parts)

    def _leverages(self, whitened: Tensor, kinds: Tensor, form: LeverageForm) -> Tensor:
        # The sign is lost in the square. What is gathered has no name, so that it is freed at once.
        deviations = torch.addcmul(
            self.region_offsets.index_select(0, kinds),
            whitened.unsqueeze(1),
            self.region_stretch.index_select(0, kinds),
            value=-1.0,
        )
        psi = softened(deviations).sum(-1)
        return mean_over_regions(psi * self.region_norms.index_select(0, kinds), form)

    def regions(self) -> Tensor:
        """Return how many regions every kind has (kinds,)."""
        return (self.region_stretch[:, :, 0] > 0.0).sum(1)

    def reset(self) -> None:
        """Become unfitted: a training goes on, and with it the features move."""
        self.fitted.fill_(False)
        self.energies.reset()

    def resize(self, num_matrices: int, regions: int = 1) -> None:
        """Make room for the matrices of that many kinds, and for that many regions of each; the fit before is lost."""
        self.reset()
        kinds, features = self.centres.shape
        self.whitening = self.centres.new_zeros(features, num_matrices, features)
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
        self.energies.take_head(source.energies, head)

    def _load_from_state_dict(self, state_dict: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        centres = state_dict.get(prefix + "centres")
        # Each training set has its number of regions. The state of another network is refused below and must leave this
        # one as it is: MACE may go on with it.
        if centres is not None and centres.shape == self.centres.shape:
            for name in ("whitening", "region_stretch", "region_offsets", "region_norms"):
                buffer: Tensor = getattr(self, name)
                saved = state_dict.get(prefix + name, buffer)
                if saved.shape != buffer.shape:
                    setattr(self, name, buffer.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
