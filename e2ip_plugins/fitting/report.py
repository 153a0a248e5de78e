"""What a fit of the leverage says to the user: its report, and warnings."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

import numpy as np

from e2ip_plugins.errors import InputError, plural
from e2ip_plugins.fitting.constants import FittedConstants
from e2ip_plugins.leverage.form import FORM

if TYPE_CHECKING:
    from e2ip_plugins.fitting.energies import FittedLength, FittedStress

#: Validation configurations below which a warning says that they are few: of ten, a factor on the variance is known to
#: a tenth (docs/howto/calibrate.md).
FEW_CONFIGURATIONS = 10

#: Rise of the NLL on validation configurations, in nats per atom, that is worth a warning.
NLL_RISE = 0.1

#: Median leverage of validation atoms from which they are no sample of what the model was trained on.
UNLIKE_TRAINING = 3.0

#: What to do with a model that was not fitted at the end of its training.
WAY_OUT = "fit it: e2ip fit MODEL --train … --valid … --output FITTED"

#: What `e2ip update` fits to, and between which models its NLL compares.
_UPDATE = ("new", "before the update", "after it")


@dataclass
class FitReport:
    """Result of a fit.

    Attributes
    ----------
    atoms : dict
        Training atoms by (head, species); empty where moments were fitted before and stay.
    shrinkage : dict
        Weight of the pooled moments in those of species with few atoms.
    constants : dict
        `FittedConstants` by head; empty for families that do not take the leverage.
    regions : int
        Of all species.
    warnings : list of str
    species_std : dict
        By head and name of the species, standard deviation at leverage 1 in eV/Å, where a readout that knows the
        species alone was fitted.
    heads : sequence of str
        Names of the model's heads; empty for a model without heads.
    energies : dict
        `FittedLength` by head, of those whose energies have error bars.
    stresses : dict
        `FittedStress` by head, likewise.
    part : int, optional
        Number of training atoms of a part of a fit, which has nothing else.
    """

    atoms: Dict[Tuple[int, int], int] = field(default_factory=dict)
    shrinkage: Dict[Tuple[int, int], float] = field(default_factory=dict)
    constants: Dict[int, FittedConstants] = field(default_factory=dict)
    regions: int = 0
    warnings: List[str] = field(default_factory=list)
    species_std: Dict[int, Dict[str, float]] = field(default_factory=dict)
    heads: Sequence[str] = ()
    energies: Dict[int, "FittedLength"] = field(default_factory=dict)
    stresses: Dict[int, "FittedStress"] = field(default_factory=dict)
    part: Optional[int] = None

    @property
    def fitted_heads(self) -> List[int]:
        """Heads that there was anything to fit to."""
        return sorted({head for head, _ in self.atoms} | set(self.constants))

    def of_head(self, head: int) -> str:
        """Return the name of a head in brackets, after a blank; an empty string for a model with one head."""
        return f" (head {self.heads[head]})" if len(self.heads) > 1 else ""

    def lines(self) -> List[str]:
        """Return the fit in words, one line per data set."""
        if self.part is not None:
            return [f"leverage: features of {self.part} training atoms"]
        lines = [self._of_moments()]
        # An update takes no training atoms.
        kind, before, after = ("validation", "without the leverage", "with it") if self.atoms else _UPDATE
        for head, c in self.constants.items():
            where = self.of_head(head)
            low, high = c.growth_interval
            factor, error = math.exp(0.5 * c.log_scale), 0.5 * c.log_scale_error
            size = f"standard deviation times {factor:.3g} +- {error * factor:.2g} at leverage 1"
            if head in self.species_std:
                listed = ", ".join(f"{name} {std:.3g}" for name, std in self.species_std[head].items())
                size = f"standard deviation at leverage 1 {listed} eV/Å, all together +- {error:.0%}"
            lines.append(
                f"leverage{where}: growth {c.growth:.3g} ({low:.2g} to {high:.2g}), {size}; NLL of "
                f"{plural(c.configurations, f'{kind} configuration')} in nats per atom, lower is "
                f"better: {c.nll[0]:.3f} {before}, {c.nll[1]:.3f} {after}"
                + (
                    " (higher: it does not help on these frames, which are like the training set)"
                    if c.nll[1] > c.nll[0]
                    else ""
                )
            )
            ratio = math.exp(0.5 * c.optimism)
            if ratio >= 1.005:
                lines.append(
                    f"leverage{where}: validation errors are {ratio:.3g} +- {0.5 * c.optimism_error * ratio:.2g} times "
                    "those of training atoms with the same error bar: those of unlike atoms grow more"
                )
        for head, fitted in self.energies.items():
            lines.append(
                f"energies{self.of_head(head)}: their errors are those of forces times {fitted.length:.3g} +- "
                f"{fitted.error:.2g} Å, by {plural(fitted.frames, 'validation energy')}"
            )
        for head, stress in self.stresses.items():
            (hydrostatic, deviatoric), errors = stress.factors, stress.errors
            lines.append(
                f"stress{self.of_head(head)}: errors of {stress.frames} validation stresses are those of energies per "
                f"volume times {hydrostatic:.3g} +- {errors[0]:.2g} (hydrostatic) and {deviatoric:.3g} +- "
                f"{errors[1]:.2g} (deviatoric)"
            )
        return lines

    def _of_moments(self) -> str:
        if not self.atoms:
            return "leverage: moments of the training set as they were; validation configurations are the new frames"
        data_sets, species = {head for head, _ in self.atoms}, {species_index for _, species_index in self.atoms}
        return (
            f"leverage: features of {sum(self.atoms.values())} training atoms, {len(species)} species"
            + (f" of {len(data_sets)} heads" if len(data_sets) > 1 else "")
            + f" in {self.regions} regions"
        )

    def warn_of_unlike(self, head: int, distance: np.ndarray) -> None:
        """Add a warning where validation atoms, of distances d (N,), are unlike the training set."""
        leverage = 0.5 * float(np.median(distance))
        if leverage > UNLIKE_TRAINING:
            self.warnings.append(
                f"half of the validation atoms{self.of_head(head)} have a leverage above {leverage:.3g}, where "
                "training atoms have 1 on average: were these the frames that the model was trained on, and are the "
                "validation frames of the same kind?"
            )

    def warn_of_species(self, features: int, species: Sequence[str]) -> None:
        """Add warnings about species with few training atoms, or none."""
        few = sorted(key for key, count in self.atoms.items() if count < features)
        listed = ", ".join(
            f"{species_name(key[1], species)}{self.of_head(key[0])} ({self.atoms[key]} atoms, "
            f"{self.shrinkage[key]:.0%} of the moments from all species)"
            for key in few
        )
        if listed:
            self.warnings.append(f"fewer training atoms than features ({features}): {listed}")
        present = {species_index for _, species_index in self.atoms}
        missing = [species_name(index, species) for index in range(len(species)) if index not in present]
        if missing:
            self.warnings.append(no_training_atoms(missing))

    def warn_of_energies(self) -> None:
        """Add warnings where validation energies are few, or they or stresses are mostly off by the same amount."""
        for head, energies in self.energies.items():
            if energies.frames < FEW_CONFIGURATIONS:
                self.warnings.append(
                    f"{energies.frames} validation energies{self.of_head(head)} can hardly tell how large error bars "
                    "of energies must be, which may be several times too narrow: give some dozens"
                )
            error = energies.spread / energies.frames**0.5
            if abs(energies.offset) > max(energies.spread, 3.0 * error):
                self.warnings.append(
                    f"energies{self.of_head(head)}: reference minus predicted energy is {energies.offset:.3g} +- "
                    f"{error:.2g} eV per atom on average of the validation frames, more than it scatters. Error "
                    "bars take it for scatter, and those of differences are too wide: train longer on energies, or "
                    "give those of the reference (atoms, functional) that the training had"
                )
        for head, stress in self.stresses.items():
            if abs(stress.offset) > 3.0 * stress.offset_error:
                self.warnings.append(
                    f"stress{self.of_head(head)}: reference minus predicted hydrostatic stress is {stress.offset:.3g} "
                    f"+- {stress.offset_error:.2g} eV/Å³ ({stress.offset * 160.2177:.3g} GPa) on average of the "
                    "validation frames, which error bars of stresses leave out (those of forces and energies do not "
                    "depend on it): was the model trained on stresses, and do the reference's have Pulay stress?"
                )

    def warn_of_constants(self, constant_readout: bool, prior_growth: float) -> None:
        """Add warnings about few validation configurations, or none, and about those that are described worse."""
        for head, c in self.constants.items():
            if c.configurations < FEW_CONFIGURATIONS:
                self.warnings.append(
                    f"{plural(c.configurations, 'validation configuration')}{self.of_head(head)} "
                    "can hardly tell how large the error bars must be: give some dozens"
                )
            # The growth being for frames unlike them, they may be described a little worse, which the report shows.
            if not constant_readout and c.nll[1] > c.nll[0] + NLL_RISE:
                before = "without leverage" if self.atoms else _UPDATE[1]
                self.warnings.append(
                    f"the validation configurations ({c.configurations}){self.of_head(head)} are described worse "
                    f"than {before} (NLL {c.nll[0]:.3f} -> {c.nll[1]:.3f}): are they few, or unlike what the "
                    "model was trained on?"
                )
        lacking = sorted({head for head, _ in self.atoms} - set(self.constants))
        if lacking:
            self.warnings.append(
                f"no validation atoms with forces{''.join(map(self.of_head, lacking))}: the growth is the expected "
                f"{prior_growth:g}, the standard deviation at leverage 1 as it was trained"
            )


def no_training_atoms(species: Sequence[str], where: str = "") -> str:
    """Return a warning about species without training atoms; ``where`` names the head, after a blank."""
    return (
        f"no training atoms of {', '.join(species)}{where}: their leverage is {FORM.max_leverage:g}, their epistemic "
        "variance at its ceiling"
    )


def species_name(species_index: int, species: Sequence[str]) -> str:
    """Return the name of a species, or its number where it has none."""
    return species[species_index] if species_index < len(species) else f"species {species_index}"


def failure_message(error: Exception) -> str:
    """Return why a fit at the end of a training failed, for a warning."""
    if isinstance(error, InputError):
        return str(error)
    return f"{type(error).__name__}: {error}; what is wrong put right, {WAY_OUT}"
