"""What releases of NequIP have differently, in one place. An entry goes when its releases are no longer tested."""

from typing import Any, Callable, Dict, List, Optional, Tuple

from nequip.model.saved_models import package
from nequip.train.callbacks import write_xyz

#: Whether the release is 0.16, which lacks some functions; code that needs them raises `InputError`.
IS_0_16 = False

try:
    from nequip.integrations.ase import NequIPCalculator
    from nequip.integrations.utils import basic_transforms
except ModuleNotFoundError:  # 0.16
    from ase import Atoms
    from nequip.ase import NequIPCalculator as _Calculator
    from nequip.ase.nequip_calculator import _create_neighbor_transform
    from nequip.data import AtomicDataDict, from_ase
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper
    from nequip.scripts import _compile_utils

    IS_0_16 = True

    class NequIPCalculator(_Calculator):  # type: ignore[no-redef]
        """The calculator with the methods of later releases."""

        @classmethod
        def _get_aoti_compile_target(cls) -> Dict[str, Any]:
            return _compile_utils.COMPILE_TARGET_DICT["ase"]

        @classmethod
        def from_compiled_model(cls, *args: Any, **settings: Any) -> Any:
            """Open a compiled model: meanwhile the stock function's list of outputs is that of this class."""
            stock = _compile_utils.ASE_OUTPUTS
            _compile_utils.ASE_OUTPUTS = cls._get_aoti_compile_target()["output"]
            try:
                return super().from_compiled_model(*args, **settings)
            finally:
                _compile_utils.ASE_OUTPUTS = stock

        def atoms_to_data(self, atoms: Atoms) -> AtomicDataDict.Type:
            """Return a frame as the model takes it."""
            data = from_ase(atoms)
            for transform in self.transforms:
                data = transform(data)
            return AtomicDataDict.to_(data, self.device)

    def basic_transforms(
        metadata: Dict[str, Any],
        r_max: float,
        type_names: List[str],
        chemical_species_to_atom_type_map: Dict[str, str],
    ) -> List[Callable]:
        """Return the transforms that add types and neighbours to a frame."""
        types = ChemicalSpeciesToAtomTypeMapper(
            model_type_names=type_names, chemical_species_to_atom_type_map=chemical_species_to_atom_type_map
        )
        return [types, _create_neighbor_transform(metadata, r_max, type_names)]


#: Context that loads packages onto the CPU; before 0.19.1 only where there is no GPU.
cpu_deserialize = getattr(package, "_cpu_deserialize_always", None) or package._cpu_deserialize_if_no_cuda

#: Base class of all writers of xyz files; before 0.18 there is one writer.
XYZFileWriter = getattr(write_xyz, "XYZFileWriter", write_xyz.TestTimeXYZFileWriter)


def metric_entries(manager: Any) -> Dict[str, Tuple[Optional[float], bool]]:
    """Return weight, and whether NaN references are left out, of a `MetricsManager`'s metrics by name."""
    if hasattr(manager, "entries"):
        return {name: (entry.coeff, entry.ignore_nan) for name, entry in manager.entries.items()}
    return {name: (entry["coeff"], entry["ignore_nan"]) for name, entry in manager.metrics.items()}  # before 0.19


__all__ = ["IS_0_16", "NequIPCalculator", "XYZFileWriter", "basic_transforms", "cpu_deserialize", "metric_entries"]
