"""``E2IPCalculator``: NequIP's ASE calculator with the uncertainties among its results."""

import math
from typing import Any, ClassVar, Dict

from nequip.data import AtomicDataDict
from nequip.integrations.ase import NequIPCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.families import derive_niw
from e2ip_plugins.keys import NIW, OUTPUT_KEYS, PARAMETER_KEYS


class E2IPCalculator(NequIPCalculator):
    """``NequIPCalculator`` whose ``results`` also hold every key of `e2ip_plugins.keys`.

    ``atoms.calc.results["forces_cov"]`` is the (N, 3, 3) covariance in eV²/Å², and so on. Load compiled
    models made with ``nequip-compile --target e2ip_ase`` through ``from_compiled_model``.
    """

    implemented_properties: ClassVar = [*NequIPCalculator.implemented_properties, *(key.name for key in OUTPUT_KEYS)]

    @classmethod
    def _get_aoti_compile_target(cls) -> Dict[str, Any]:
        from nequip.scripts._compile_utils import COMPILE_TARGET_DICT

        return COMPILE_TARGET_DICT["e2ip_ase"]

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
        # Σ0 takes the unit factor of forces squared, its logarithm twice the log of it on the diagonal.
        factor = self.energy_units_to_eV / self.length_units_to_A
        log_sigma0 = parameters["e2ip_log_sigma0"].clone()
        log_sigma0[:, :3] += 2.0 * math.log(factor)
        parameters["e2ip_log_sigma0"] = log_sigma0
        for name, value in {**parameters, **derive_niw(parameters)}.items():
            self.results[name] = value.numpy()
        self.results["uq_family"] = NIW
