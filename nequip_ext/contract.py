"""The contract with NequIP: what is called, replaced or derived from, and the releases that were tested.

Names that modules of this package import need no term: an import that fails says what is missing (`nequip_ext`).
Imported whenever NequIP is: nothing of NequIP is imported before it is looked at.
"""

import functools
import sys
from typing import List

from e2ip_plugins import contract
from e2ip_plugins.errors import InputError

#: Releases that were tested (docs/releases.md). Others are used, with a warning, if they have all that is needed.
TESTED = ("0.16.2", "0.17.1", "0.18.0", "0.19.0", "0.19.1")

#: Terms by module, see `e2ip_plugins.contract.problem`.
TERMS = {
    "nequip.data": (
        "AtomicDataDict.batched_from_list",
        "AtomicDataDict.with_batch_(data)",
        "DataStatisticsManager.__init__(metrics, dataloader_kwargs, type_names)",
        "DataStatisticsManager.get_statistics(data_source)",
        "from_ase(atoms, ...)",
    ),
    "nequip.data._key_registry": (
        "_EDGE_FIELDS",
        "_NODE_FIELDS",
        "get_field_type(field, error_on_unregistered)",
        "register_fields(..., node_fields, cartesian_tensor_fields)",
    ),
    "nequip.data.datamodule": ("rMD17DataModule.DATASET_MAP",),
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
        "data_dict_from_package(package_path)",
    ),
    "nequip.model.utils": ("override_model_compile_mode(compile_mode)",),
    "nequip.nn": (
        "ConvNetLayer",
        "ForceStressOutput.__init__(func, ...)",
        "SequentialGraphNetwork.append(name, module)",
        "SequentialGraphNetwork.insert(name, module, after, before)",
    ),
    "nequip.nn.graph_model": ("R_MAX_KEY",),
    "nequip.nn.utils": ("with_edge_vectors_(data, ...)",),
    "nequip.scripts._compile_utils": ("COMPILE_TARGET_DICT", "register_compile_targets(target_dict)"),
    "nequip.scripts._package_utils": ("register_libraries_as_external_for_packaging(extern_modules, ...)",),
    "nequip.train": (
        "EnergyForceLoss",
        "EnergyForceMetrics",
        "MetricsManager.__init__(metrics, ..., type_names)",
        "NequIPLightningModule.__init__(..., model, num_datasets, info_dict)",
        "NequIPLightningModule.evaluation_model",
    ),
    "nequip.train.callbacks.write_xyz": (
        "TestTimeXYZFileWriter.on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)",
        "XYZFileWriter",
        "to_ase(..., extra_fields)",
    ),
    "nequip.utils": ("get_current_code_versions(verbose)",),
}

#: What some releases lack; `nequip_ext.compat` replaces it.
OPTIONAL = {
    "nequip.model.saved_models.package._cpu_deserialize_always": "0.19.1 and later",
    "nequip.integrations.ase": "0.17 and later",
    "nequip.integrations.utils": "0.17 and later",
    "nequip.train.callbacks.write_xyz.XYZFileWriter": "0.18 and later",
}


@functools.cache
def _problems() -> List[str]:
    return contract.problems(TERMS, OPTIONAL)


def problem(*reasons: str) -> str:
    """Return what an installed NequIP lacks, ``reasons`` included, or an empty string."""
    version = contract.installed("nequip")
    if version is None:
        return f"NequIP is not installed; tested: {', '.join(TESTED)}"
    return contract.explained([*_problems(), *reasons], "NequIP", version, TESTED)


def holds() -> bool:
    """Return whether NequIP is in use and has all that is needed."""
    return "nequip" in sys.modules and not problem()


def check(*reasons: str) -> None:
    """Raise `InputError` where something is missing; warn, once in a process, where the release was not tested."""
    missing = problem(*reasons)
    if missing:
        raise InputError(
            f"e2ip-plugins does not work with this installation: {missing}; install one of these releases "
            f"(pip install nequip=={TESTED[-1]}). NequIP without e2ip is not affected."
        )
    contract.warn_if_untested("NequIP", contract.installed("nequip"), TESTED)
