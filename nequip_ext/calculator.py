"""``E2IPCalculator``: NequIP's ASE calculator with the uncertainties among its results."""

from typing import Any, ClassVar, Dict, Tuple

import numpy as np
from ase import Atoms
from nequip.data import AtomicDataDict
from nequip.integrations.ase import NequIPCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import convert_niw, derive_niw
from e2ip_plugins.keys import NIW, OUTPUT_KEYS, PARAMETER_KEYS
from e2ip_plugins.readout.gradient import Uncertainty, in_units
from nequip_ext.gradient import uncertainty_gradient


class E2IPCalculator(NequIPCalculator):
    """``NequIPCalculator`` whose ``results`` also hold every key of `e2ip_plugins.keys`.

    ``atoms.calc.results["forces_cov"]`` is the (N, 3, 3) covariance in eV²/Å², and so on. Load compiled
    models made with ``nequip-compile --target e2ip_ase`` through ``from_compiled_model``.
    """

    implemented_properties: ClassVar = [*NequIPCalculator.implemented_properties, *(key.name for key in OUTPUT_KEYS)]

    @classmethod
    def from_saved_model(cls, path: str, **settings) -> "E2IPCalculator":
        """Calculator with the eager model of a checkpoint or package; slower than a compiled one, but with gradients.

        Parameters
        ----------
        path : str
            ``….ckpt`` or ``….nequip.zip``.
        **settings
            ``device``, ``chemical_species_to_atom_type_map`` (``True``: type names are species) and others as for
            ``from_compiled_model``.
        """
        return cls._from_saved_model(path, **{"chemical_species_to_atom_type_map": True, **settings})

    @classmethod
    def _get_aoti_compile_target(cls) -> Dict[str, Any]:
        from nequip.scripts._compile_utils import COMPILE_TARGET_DICT

        return COMPILE_TARGET_DICT["e2ip_ase"]

    def uncertainty_gradient(
        self, atoms: Atoms, uncertainty: Uncertainty = "forces_epistemic_std"
    ) -> Tuple[np.ndarray, np.ndarray]:
        """An uncertainty of an ASE frame, and the gradient of its sum in the positions, in eV and Å.

        See `nequip_ext.uncertainty_gradient`. Needs an eager model, not a compiled file. Positions are read as they
        are, like NequIP's own forces: with ``length_units_to_A`` other than 1 they are in the model's length unit.
        """
        factor = self.energy_units_to_eV / self.length_units_to_A
        data = self.atoms_to_data(atoms)
        value, gradient = uncertainty_gradient(self.model, data, in_units(uncertainty, factor))
        return value.cpu().numpy(), gradient.cpu().numpy() / self.length_units_to_A

    def save_extra_outputs(self, out: AtomicDataDict.Type) -> None:
        """Put the evidential outputs into ``results``, in eV and Å like everything else there."""
        missing = [key.name for key in PARAMETER_KEYS if key.name not in out]
        if missing:
            raise InputError(
                f"the model has no e2ip outputs ({', '.join(missing)}): train it with nequip_ext.E2IPModel, "
                "or use NequIPCalculator"
            )
        parameters = {
            key.name: out[key.name].detach().cpu() if key.shape else out[key.name].detach().cpu().squeeze(-1)
            for key in PARAMETER_KEYS
        }
        parameters = convert_niw(parameters, self.energy_units_to_eV / self.length_units_to_A)
        for name, value in {**parameters, **derive_niw(parameters)}.items():
            self.results[name] = value.numpy()
        self.results["uq_family"] = NIW
