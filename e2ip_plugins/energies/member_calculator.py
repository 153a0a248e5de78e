"""A member as an ASE calculator: energies and forces of one of the models that an error vector describes."""

from typing import Any, List, Optional

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from e2ip_plugins.energies.draws import random_directions
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_ERROR_VECTOR


class MemberCalculator(Calculator):
    """E + u · r_k and its forces, in eV and eV/Å.

    Member k is the same model as column k of `e2ip_plugins.energies.members` with the same seed. Its forces need a
    second evaluation with gradients: a step takes about twice as long as one of the model.

    Parameters
    ----------
    calculator : ase.calculators.calculator.Calculator
        Of MACE or NequIP, eager, with error bars of energies.
    member : int
        k, from 0.
    seed : int

    Raises
    ------
    InputError
        A negative number; at the first evaluation: a model without error bars of energies.
    """

    implemented_properties: List[str] = ["energy", "forces"]  # noqa: RUF012, as in ASE's classes

    def __init__(self, calculator: Any, member: int, seed: int = 0) -> None:
        super().__init__()
        if member < 0:
            raise InputError(f"member {member}: members are numbered from 0")
        self.calculator, self.member, self.seed = calculator, member, seed
        self._direction: Optional[np.ndarray] = None

    def calculate(
        self,
        atoms: Optional[Atoms] = None,
        properties: Optional[List[str]] = None,
        system_changes: List[str] = all_changes,
    ) -> None:
        """Evaluate the model, and the slope of its error in the direction of the member."""
        super().calculate(atoms, properties, system_changes)
        frame = self.atoms.copy()
        energy, forces = (self.calculator.get_property(name, frame) for name in ("energy", "forces"))
        u = self.calculator.results.get(ENERGY_ERROR_VECTOR.name)
        if u is None:
            raise InputError(
                "the model has no error bars of energies, of which members are made: e2ip fit gives it some where the "
                "validation frames have energies"
            )
        if self._direction is None:
            self._direction = random_directions(self.member + 1, len(u), self.seed)[-1]
        direction = self._direction

        def error(outputs: Any) -> Any:
            vectors = outputs[ENERGY_ERROR_VECTOR.name]
            return vectors @ vectors.new_tensor(direction)

        _, slope = self.calculator.uncertainty_gradient(frame, error)
        self.results = {"energy": float(energy + u @ direction), "forces": forces - slope}
