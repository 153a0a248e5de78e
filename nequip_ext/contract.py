"""The contract with NequIP: every name that is called, replaced or derived from, and the releases that were tested.

Imported whenever NequIP is: nothing of NequIP is imported before it is looked at.
"""

import functools
import sys
from typing import Dict, List, Tuple

from e2ip_plugins import contract
from e2ip_plugins.errors import InputError

#: Releases that were tested (docs/reference/releases.md). Others are used, with a warning, if they have all that is
#: named here.
TESTED = ("0.16.2", "0.17.1", "0.18.0", "0.19.0", "0.19.1")

#: Terms by module, see `e2ip_plugins.contract.problem`.
TERMS = {
    "nequip.data": (
        "AtomicDataDict.batched_from_list",
        "AtomicDataDict.frame_from_batched(batched_data, index)",
        "AtomicDataDict.with_batch_(data)",
        "BaseModifier",
        "CommonDataStatisticsManager",
        "DataStatisticsManager.__init__(metrics, dataloader_kwargs, type_names)",
        "DataStatisticsManager.get_statistics(data_source)",
        "Mean",
        "NumNeighbors",
        "PerAtomModifier",
        "RootMeanSquare",
        "from_ase(atoms, ...)",
    ),
    "nequip.data._key_registry": (
        "_CARTESIAN_TENSOR_FIELDS",
        "_EDGE_FIELDS",
        "_GRAPH_FIELDS",
        "_NODE_FIELDS",
        "get_field_type(field, error_on_unregistered)",
        "register_fields(..., node_fields, cartesian_tensor_fields)",
    ),
    "nequip.data.datamodule": ("MD22DataModule", "WaterDataModule", "rMD17DataModule.DATASET_MAP"),
    "nequip.data.dataset": ("HDF5Dataset", "NPZDataset(file_path, ...)", "NequIPLMDBDataset"),
    "nequip.data.dict": ("from_dict(data)",),
    "nequip.integrations.ase": (
        "NequIPCalculator._from_saved_model",
        "NequIPCalculator._get_aoti_compile_target()",
        "NequIPCalculator.atoms_to_data(atoms)",
        "NequIPCalculator.from_compiled_model(compile_path, ...)",
        "NequIPCalculator.save_extra_outputs(out)",
    ),
    "nequip.integrations.utils": (
        "basic_transforms(metadata, r_max, type_names, chemical_species_to_atom_type_map, ...)",
    ),
    "nequip.model": ("ModelFromCheckpoint", "ModelFromPackage"),
    "nequip.model.inference_models": ("load_compiled_model(compile_path, device, ...)",),
    "nequip.model.modify_utils": ("only_apply_persistent_modifiers(persistent_only)",),
    "nequip.model.saved_models.load_utils": ("load_saved_model(input_path, ...)",),
    "nequip.model.saved_models.package": (
        "ModelFromPackage(..., package_path)",
        "_cpu_deserialize_always()",
        "_get_package_metadata(imp)",
        "_suppress_package_importer_exporter_warnings()",
        "data_dict_from_package(package_path)",
    ),
    "nequip.model.utils": ("override_model_compile_mode(compile_mode)",),
    "nequip.nn": (
        "ConvNetLayer",
        "ForceStressOutput.__init__(func, ...)",
        "SequentialGraphNetwork.append(name, module)",
        "SequentialGraphNetwork.insert(name, module, after, before)",
    ),
    "nequip.nn._graph_mixin": ("GraphModuleMixin",),
    "nequip.nn.graph_model": ("R_MAX_KEY",),
    "nequip.nn.utils": ("with_edge_vectors_(data, ...)",),
    "nequip.scripts._compile_utils": ("COMPILE_TARGET_DICT", "register_compile_targets(target_dict)"),
    "nequip.scripts._package_utils": (
        "_EXTERNAL_MODULES",
        "_INTERNAL_MODULES",
        "_MOCK_MODULES",
        "register_libraries_as_external_for_packaging(extern_modules, ...)",
    ),
    "nequip.train": (
        "EnergyForceLoss",
        "EnergyForceMetrics",
        "MaximumAbsoluteError",
        "MeanAbsoluteError",
        "MeanSquaredError",
        "MetricsManager.__init__(metrics, ..., type_names)",
        "NequIPLightningModule.__init__(..., model, num_datasets, info_dict)",
        "NequIPLightningModule.evaluation_model",
        "RootMeanSquaredError",
    ),
    "nequip.train.callbacks.write_xyz": (
        "TestTimeXYZFileWriter.on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)",
        "ValTimeXYZFileWriter.on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)",
        "XYZFileWriter",
        "to_ase(..., extra_fields)",
    ),
    "nequip.train.lightning": ("_SOLE_MODEL_KEY",),
    "nequip.utils": ("RankedLogger", "get_current_code_versions(verbose)"),
    "nequip.utils.global_state": ("get_latest_global_state", "set_global_state"),
}

#: Terms of parts that are not for every release, by the subpackage or module; the rest works without them.
PARTS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    # 0.17 and later.
    "backbones": {
        "nequip.model.energy_modules": ("_append_energy_modules(model, type_names, pair_potential)",),
        "nequip.model.utils": ("model_builder",),
        "nequip.nn": ("ApplyFactor", "PerTypeScaleShift"),
        "nequip.nn.embedding": ("BesselEdgeLengthEncoding", "EdgeLengthNormalizer", "PolynomialCutoff"),
    },
    # 0.17 and later, where torch-sim is installed.
    "torchsim": {
        "nequip.data.transforms": ("NeighborListTransform",),
        "nequip.integrations.torchsim": ("NequIPTorchSimCalc.__init__(model, device, transforms, ...)",),
    },
}

#: What not every release has; `nequip_ext.compat` has what stands in for it.
OPTIONAL = {
    "nequip.model.saved_models.package._cpu_deserialize_always": "0.19.1 and later",
    "nequip.integrations.ase": "0.17 and later",
    "nequip.integrations.utils": "0.17 and later",
    "nequip.train.callbacks.write_xyz.ValTimeXYZFileWriter.on_validation_batch_end": "0.18 and later",
    "nequip.train.callbacks.write_xyz.XYZFileWriter": "0.18 and later",
}


def problem(part: str = "") -> str:
    """Return what an installed NequIP lacks, or an empty string; also for a part."""
    version = contract.installed("nequip")
    if version is None:
        return f"NequIP is not installed; tested: {', '.join(TESTED)}"
    return contract.explained(_problems(part), "NequIP", version, TESTED)


@functools.cache
def _problems(part: str) -> List[str]:
    return contract.problems(TERMS, OPTIONAL) + contract.problems(PARTS.get(part, {}))


def holds() -> bool:
    """Return whether NequIP is in use and has all that is needed."""
    return "nequip" in sys.modules and not problem()


def check(part: str = "") -> None:
    """Raise `InputError` where something is missing; warn, once in a process, where the release was not tested."""
    reason = problem(part)
    if reason:
        raise InputError(
            f"e2ip-plugins does not work with this installation: {reason}; install one of these releases "
            f"(pip install nequip=={TESTED[-1]}). NequIP without e2ip is not affected."
        )
    contract.warn_if_untested("NequIP", contract.installed("nequip"), TESTED)
