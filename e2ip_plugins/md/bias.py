"""`BiasedCalculator`: drives molecular dynamics to where a model is uncertain."""

import math
from typing import Any, List, Optional

import numpy as np
from ase import Atoms
from ase.calculators.calculator import CalculationFailed, Calculator, PropertyNotImplementedError, all_changes

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE, UNFITTED
from e2ip_plugins.predictions.ase_properties import ImplementedProperties
from e2ip_plugins.predictions.columns import uncertainties

#: Uncertainties that a bias can be made of, and the unit of its width.
BIAS_KEYS = {"forces_epistemic_std": "eV/Å", LEVERAGE.name: "1"}

#: Properties to which the bias contributes nothing, or which would be wrong with it.
_WITHOUT = ("stress", "stresses", "virials", "energies", "node_energy")

_NUMBERS = (int, float, np.number)


class BiasedCalculator(Calculator):
    """Add a bias energy that falls where the uncertainty rises: uncertainty-driven dynamics.

    The form is that of Kulichenko et al. 2023 (Nat. Comput. Sci. 3, 230, https://doi.org/10.1038/s43588-023-00406-5),
    with the uncertainties u of the N atoms, A the strength and B the width:

        E_bias = A [exp(-m / B²) - 1],   m = Σ u² / N.

    In the paper, m is the variance of an ensemble's energies per atom, σ_E² / (N_M N_A). Here energies have no
    uncertainty, but forces have and, by its leverage, the environment of an atom. The bias lies between 0 and -A; its
    gradient goes to 0 where u is much larger than B. The bias is conservative: its forces are minus its gradient, by
    ``calculator.uncertainty_gradient``, which costs about one more evaluation.

    The results ``energy``, ``free_energy`` and ``forces`` include the bias, ``energy_unbiased`` and
    ``forces_unbiased`` do not; ``energy_bias`` is their difference. Uncertainties do not change. There is no stress.

    Take half the time step that the model alone needs: docs/howto/md.md shows what that does to the energy.

    Parameters
    ----------
    calculator : ase.calculators.calculator.Calculator
        ``MACECalculator`` of one model or ``nequip_ext.E2IPCalculator.from_saved_model``, with a readout.
    strength : float
        A in eV, for the structure as a whole. A negative strength drives away from where the model is uncertain.
    width : float
        B in the unit of the key.
    key : str
        ``forces_epistemic_std`` (eV/Å) or ``e2ip_leverage``.

    Raises
    ------
    InputError
        A calculator without ``uncertainty_gradient``, invalid numbers and names; at the first evaluation: a model
        without readout, a leverage that was not fitted, a calibration with a floor.
    """

    def __init__(self, calculator: Any, strength: float, width: float, key: str = "forces_epistemic_std") -> None:
        if not callable(getattr(calculator, "uncertainty_gradient", None)):
            usable = "a MACECalculator or nequip_ext.E2IPCalculator.from_saved_model"
            raise InputError(f"{type(calculator).__name__} has no uncertainty_gradient: take {usable}")
        if key not in BIAS_KEYS:
            raise InputError(f"key={key!r}: choose from {', '.join(f'{k} ({unit})' for k, unit in BIAS_KEYS.items())}")
        if not (isinstance(strength, _NUMBERS) and math.isfinite(strength)):
            raise InputError(f"strength={strength!r}: a finite energy in eV")
        if not (isinstance(width, _NUMBERS) and math.isfinite(width) and width > 0.0):
            raise InputError(f"width={width!r}: a number above 0, in the unit of {key} ({BIAS_KEYS[key]})")
        self.calculator, self.strength, self.width, self.key = calculator, float(strength), float(width), key
        hidden = [name for name in uncertainties() if name in calculator.implemented_properties]
        names = [name for name in calculator.implemented_properties if name not in (*_WITHOUT, *hidden)]
        names += ["energy_unbiased", "forces_unbiased", "energy_bias"]
        self.implemented_properties = ImplementedProperties(names, hidden)
        super().__init__()

    def get_property(self, name: str, atoms: Optional[Atoms] = None, allow_calculation: bool = True) -> Any:
        """Return a property as any calculator of ASE does; refuse one to which the bias contributes nothing."""
        if name in _WITHOUT:
            reason = "its bias has forces alone; run at constant volume"
            raise PropertyNotImplementedError(f"a BiasedCalculator has no {name}: {reason}")
        return super().get_property(name, atoms, allow_calculation)

    def calculate(
        self,
        atoms: Optional[Atoms] = None,
        properties: Optional[List[str]] = None,
        system_changes: List[str] = all_changes,
    ) -> None:
        """Evaluate the calculator and the gradient of its uncertainty; set ``results``."""
        super().calculate(atoms, properties or ["energy"], system_changes)
        energy, forces = (self.calculator.get_property(name, self.atoms) for name in ("energy", "forces"))
        inner = self.calculator.results.copy()
        for name in _WITHOUT:
            inner.pop(name, None)
        if self.key == LEVERAGE.name and np.any(np.asarray(inner.get(self.key, UNFITTED)) < 0.0):
            raise InputError("the model's leverage has not been fitted, see e2ip fit: it cannot bias a run")
        square, gradient = self.calculator.uncertainty_gradient(self.atoms, lambda outputs: outputs[self.key].square())
        count, variance = len(square), self.width**2
        share = math.exp(-float(np.mean(square, dtype=np.float64)) / variance)
        bias = self.strength * (share - 1.0)
        push = self.strength * share / (count * variance) * gradient
        if not (math.isfinite(bias) and np.isfinite(push).all()):
            raise CalculationFailed(f"the bias of {self.key} is not finite: an atom lies on another, or has no number")
        biased = {
            "energy": energy + bias,
            "free_energy": inner.get("free_energy", energy) + bias,
            "forces": forces + push,
            "energy_unbiased": energy,
            "forces_unbiased": forces,
            "energy_bias": bias,
        }
        inner.update(biased)
        self.results = inner
