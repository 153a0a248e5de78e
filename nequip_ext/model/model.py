"""``E2IPModel``: any NequIP energy model with a readout of the forces' uncertainty."""

import math
from typing import Any, Dict, List, Optional, Union

import torch
from hydra.utils import get_method

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.readout.settings import Settings, resolve_force_unit
from nequip_ext.compat import IS_0_16
from nequip_ext.model.compiler import mend
from nequip_ext.model.configs import TRAINED, Config, sections, source_of
from nequip_ext.model.readout import LAST_KEY, FeatureTap, GraphReadout, find_readout

#: Arguments of models that usually come from the statistics of the training data: a number, or one for every type.
STATISTICS = ("per_type_energy_scales", "per_type_energy_shifts", "avg_num_neighbors")


def E2IPModel(
    model: Dict[str, Any],
    seed: int,
    readout: str = families.DEFAULT,
    evidence: Optional[str] = None,
    force_unit: Union[float, str, None] = None,
    preset: Optional[str] = None,
    evidence_weight: Optional[float] = None,
    forces_rms: Optional[float] = None,
    forces: Optional[str] = None,
    model_dtype: Optional[str] = None,
    compile_mode: Optional[str] = None,
    **options: Any,
) -> torch.nn.Module:
    """Build a model as NequIP would and add a readout to it.

    Energies, forces and stresses are those of the inner model to the last bit.

    Example usage in config:

    .. code-block:: yaml

        model:
          _target_: nequip_ext.E2IPModel
          seed: ${seed}
          model:
            _target_: nequip.model.NequIPGNNModel
            seed: ${seed}
            model_dtype: float32
            # ... as usual

    Parameters
    ----------
    model : dict
        Config of the inner model with its ``_target_``: NequIPGNNModel, AllegroModel, ModelFromPackage,
        ModelFromCheckpoint, modify, … It must compute forces.
    seed : int
        Seed of the readout's weights, which have their own random stream.
    readout : str
        Predictive family; ``evidence``, ``preset`` and ``evidence_weight`` are options of ``e2ip``, the default.
    evidence : str, optional
        ``leverage``, ``coupled`` or ``independent``; default: the preset's.
    force_unit : float or str, optional
        σ_ref in eV/Å or ``auto`` (needs ``forces_rms``); default 0.0433641. Saved in the model.
    preset : str, optional
        ``default`` (the default) or ``paper``.
    evidence_weight : float, optional
        λ ≥ 0 of the regulariser in the loss; default: the preset's. Only with ``evidence: independent``.
    forces_rms : float, optional
        Component RMS of the training forces in eV/Å: ``${training_data_stats:forces_rms}``.
    forces : str, optional
        What trains the forces: ``likelihood`` (the default), or ``host``: the mean square error of NequIP's own losses
        alone, to the last bit, while the readout learns beside it; or ``fixed``: nothing, energies and forces stay
        those of the inner model, a ``ModelFromCheckpoint`` or ``ModelFromPackage``, and the readout learns alone.
        `E2IPLoss` is needed for all of them.
    model_dtype, compile_mode : str, optional
        Passed on to the inner model, for callers that set them on the outermost model.
    **options
        Options of other readouts.

    Returns
    -------
    torch.nn.Module
        The inner builder's ``GraphModel`` (or ``ModuleDict`` of them), changed in place.

    Raises
    ------
    InputError
        For options that do not go together and inner models that cannot carry the readout.
    """
    families.get(readout).check_names(options, E2IPModel)
    options.update(evidence=evidence, preset=preset, evidence_weight=evidence_weight)
    settings = Settings.of(readout, options, resolve_force_unit(force_unit, forces_rms), forces)
    if not isinstance(model, dict) or "_target_" not in model:
        raise InputError("E2IPModel needs 'model': the config of the inner model with its _target_")
    inner = dict(model)
    inner.update({k: v for k, v in (("model_dtype", model_dtype), ("compile_mode", compile_mode)) if v is not None})
    _check_statistics(inner)
    trained = source_of(inner) is not None
    inner_target = inner.pop("_target_")
    built = get_method(inner_target)(**inner)

    if settings.forces == "fixed":
        if not trained:
            raise InputError(
                "forces 'fixed' trains the readout of an existing model, but the inner model is a new "
                f"{inner_target}: give {' or '.join(TRAINED)}, or leave forces out"
            )
        built.requires_grad_(False)
    for graph_model in built.values() if isinstance(built, torch.nn.ModuleDict) else [built]:
        _add_readout(mend(graph_model), settings, seed)
    return built


def _check_statistics(inner: Config) -> None:
    """Raise `InputError` for statistics that are not finite: they come from such labels, and would make outputs NaN."""
    for section in sections(inner):
        for name in STATISTICS:
            value = section.get(name)
            numbers = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            wrong = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
            # Types that the data lack have NaN, which `nequip_ext.training.data_sets.check_lacking_types` looks at.
            if any(map(math.isinf, wrong)) or len(wrong) == len(numbers):
                raise InputError(
                    f"{name} of the inner model is {value}: the training data have non-finite labels, or none. Atoms "
                    "with NaN or infinite reference forces are left out of the statistics and of the loss with "
                    "'stats_manager: _target_: nequip_ext.E2IPDataStatisticsManager' in the data section, which also "
                    "names frames with such energies: leave those out, or give a number instead of the statistic."
                )


def lacking_types(config: Config) -> Dict[str, List[str]]:
    """Return names of statistics in a model's config with the atom types for which they are NaN."""
    lacking: Dict[str, List[str]] = {}
    for section in sections(config):
        for name in STATISTICS:
            value = section.get(name)
            if isinstance(value, (list, tuple)):
                value = dict(zip(section.get("type_names", ()), value, strict=False))
            if isinstance(value, dict):
                types = [key for key, number in value.items() if isinstance(number, float) and math.isnan(number)]
                lacking.update({name: types} if types else {})
    return lacking


def _add_readout(graph_model: Any, settings: Settings, seed: int) -> None:
    if not getattr(graph_model, "is_graph_model", False):
        raise InputError(f"E2IPModel cannot use a {type(graph_model).__name__}: the inner _target_ is no NequIP model")
    if IS_0_16 and getattr(graph_model, "is_compile_graph_model", False):
        raise InputError(
            "with NequIP 0.16 a model that is compiled for training puts out nothing but what a batch has labels for, "
            "and no readout can learn: leave compile_mode out, or take NequIP 0.17 or later"
        )
    force_module = graph_model.model
    if type(force_module).__name__ != "ForceStressOutput" or not force_module.do_derivatives:
        raise InputError(
            f"E2IPModel needs a model that computes forces, but the inner model ends in {type(force_module).__name__} "
            "without derivatives (do_derivatives: true)"
        )
    sequence = force_module.func
    if find_readout(graph_model) is not None:
        raise InputError(
            "the inner model already has an e2ip readout: use it without E2IPModel around it, or take it off first "
            "with e2ip strip"
        )

    name = _tapped(sequence)
    if name is not None:
        layer = getattr(sequence, name)
        sequence.insert(
            "e2ip_tap", FeatureTap(dict(layer.irreps_in), factor=getattr(layer, "tapped", 1.0)), before=name
        )
        if hasattr(layer, "tapped"):  # a backbone of ours
            # The next module brings features into e3nn's order; compiled models omit that if it is not read.
            sequence.insert("e2ip_last_tap", FeatureTap(dict(layer.irreps_out), LAST_KEY), after=name)
    # At the end, because checkpoints hold NequIP's averages of weights in the order of the modules.
    readout = GraphReadout(
        dict(sequence.irreps_out), graph_model.model_dtype, len(graph_model.type_names), settings, seed
    )
    parameter = next(graph_model.parameters(), None)
    if parameter is not None:
        readout.to(parameter.device)
    sequence.append("e2ip_readout", readout)
    for outer in (force_module, graph_model):
        outer.irreps_out.update({k: v for k, v in readout.irreps_out.items() if k not in outer.irreps_out})


def _tapped(sequence: torch.nn.Module) -> Optional[str]:
    """Return the module of an energy model whose input the readout taps; None if nothing before the end has vectors."""
    children = list(sequence.named_children())
    # By attributes and names, because packages carry their own classes.
    mixings = [name for name, child in children if hasattr(child, "tapped")]
    layers = [name for name, child in children if type(child).__name__ == "ConvNetLayer"]
    # The input of a first layer are type embeddings.
    directional = mixings or layers[1:]
    return directional[-1] if directional else None
