"""`MACECalculator` returns the uncertainty keys of e²IP models; other models run the stock code alone.

The stock ``calculate`` drops what it has no place for: while it runs, each model keeps what it puts out, which becomes
ASE results after it has returned.
"""

import logging
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, Union

import numpy as np
import torch
from ase.data import chemical_symbols
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family, committee_views
from e2ip_plugins.keys import FAMILY_KEY, FORCE_VIEWS, LEVERAGE, MODEL_KEY
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.readout.gradient import Uncertainty, evaluate, in_units
from e2ip_plugins.readout.readout import unfitted
from e2ip_plugins.scores.calibration import Calibration
from mace_ext.heard import Heard
from mace_ext.inference.gradient import uncertainty_gradient as gradient_of
from mace_ext.model.files import choose_head, embedded
from mace_ext.model.readout import find_family, find_name, find_readout, has_leverage


def init(stock: Callable, self: Any, *args: Any, calibration: Union[str, Path, None] = None, **kwargs: Any) -> None:
    """``MACECalculator.__init__``: list the extra properties, when every model of the calculator has them.

    Parameters
    ----------
    calibration : str or Path, optional
        File of ``e2ip calibrate``, to be applied to the uncertainties of one model.
    """
    self._uq_calibration = None if calibration is None else Calibration.read(calibration)
    stock(self, *args, **kwargs)
    found = [find_family(model) for model in self.models]
    #: Family of each model; empty unless all of them have a readout.
    self._uq_families = [family for family in found if family is not None] if None not in found else []
    #: Name of the readout; None for committees and stock models.
    self._uq_model = find_name(self.models[0], getattr(self, "head", None)) if len(found) == 1 else None
    if self._uq_calibration is not None:
        if len(found) > 1:
            raise InputError(f"{calibration}: is for one model, not for the mixture of the {len(found)} of a committee")
        self._uq_calibration.check(found[0], (), "the model", self._uq_model)
    if self._uq_families:
        keys = self._uq_families[0].output_keys() if self.num_models == 1 else FORCE_VIEWS
        keys += (LEVERAGE,) if all(map(has_leverage, self.models)) else ()
        # A new list: the stock one extends the list that all ASE calculators share.
        self.implemented_properties = [*self.implemented_properties, *(key.name for key in keys)]
        for warning in dict.fromkeys(unfitted(find_readout(model)) for model in self.models):
            if warning:
                logging.warning(warning)
    elif any(found):
        count = f"{len(found) - found.count(None)} of {len(found)}"
        logging.warning(f"Only {count} models have an e2ip readout: the committee returns no uncertainties")


def calculate(stock: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """``MACECalculator.calculate``: add `uncertainty_results` to ``self.results``."""
    if not self._uq_families:
        stock(self, *args, **kwargs)
        return
    _check(self, kwargs.get("atoms", args[0] if args else None))
    models = self.models
    heard = [Heard(model) for model in models]
    self.models = heard
    try:
        stock(self, *args, **kwargs)
    finally:
        self.models = models
    outputs = _outputs(self._uq_families, [model.output for model in heard], len(self.atoms))
    leverage = outputs.pop(LEVERAGE.name)
    if LEVERAGE.name in self.implemented_properties:
        self.results[LEVERAGE.name] = leverage.mean(0).cpu().numpy()
    # Not the tensor: on the CPU (0.3.15 and 0.3.16) the stock code has multiplied a committee's by its unit factor.
    forces = self.results.get("forces_comm")
    factor = self.energy_units_to_eV / self.length_units_to_A
    if self._uq_calibration is None:
        self.results.update(uncertainty_results(self._uq_families, outputs, factor, forces))
    else:
        (family,) = self._uq_families
        own = {name: values[0] for name, values in outputs.items()}
        self.results.update(self._uq_calibration.results(family, own, factor, self.atoms.symbols))
    if self._uq_model is not None:
        self.results[MODEL_KEY] = self._uq_model


def _check(calculator: Any, atoms: Any) -> None:
    """`InputError` for a structure that MACE would predict numbers of that mean nothing."""
    if atoms is not None:
        known = [chemical_symbols[z] for z in calculator.z_table.zs]
        check_structure(atoms, "the structure", known)


def _outputs(members: List[Type[Family]], outputs: List[Dict[str, Tensor]], num_atoms: int) -> Dict[str, Tensor]:
    """Each member's outputs and leverage, (M, N, ...); what a member does not put out is NaN.

    Padding atoms (MACE 0.3.16) come last and are left out.
    """
    wanted = [key for family in members for key in (*family.output_keys(), LEVERAGE)]
    found: Dict[str, Tensor] = {}
    for key in wanted:
        missing = outputs[0]["forces"].new_full((num_atoms, *key.shape), float("nan"))
        values = [output.get(key.name) for output in outputs]
        found[key.name] = torch.stack([missing if v is None else v.detach()[:num_atoms] for v in values])
    return found


def uncertainty_gradient(
    self: Any, atoms: Any, uncertainty: Uncertainty = "forces_epistemic_std"
) -> Tuple[np.ndarray, np.ndarray]:
    """``MACECalculator.uncertainty_gradient``: `mace_ext.uncertainty_gradient` of an ASE frame, in eV and Å.

    Positions are read as they are, like MACE's own forces: with ``length_units_to_A`` other than 1 they are to be in
    the model's length unit.

    Parameters
    ----------
    atoms : ase.Atoms
    uncertainty : str or callable
        An output key, or a function of the dictionary of all output keys.

    Returns
    -------
    value : (N,) array for the default
    gradient : (N, 3) array
        ∂(Σ value)/∂(positions).
    """
    if self.num_models > 1 or self.use_compile:
        found = f"has {self.num_models} models" if self.num_models > 1 else "is compiled"
        raise InputError(
            f"uncertainty_gradient needs a MACECalculator with one model and without compile_mode; this one {found}"
        )
    _check(self, atoms)
    model = self.models[0]
    family = find_family(model)
    dtype = next(model.parameters()).dtype
    data = {
        key: value.to(dtype) if torch.is_tensor(value) and torch.is_floating_point(value) else value
        for key, value in self._atoms_to_batch(atoms).to_dict().items()
    }
    if family is not None:
        factor, calibrated = self.energy_units_to_eV / self.length_units_to_A, None
        if self._uq_calibration is not None:
            calibrated = self._uq_calibration.with_gradient(family, factor, atoms.symbols)
        uncertainty = in_units(uncertainty, family, factor, calibrated)

    def of_real_atoms(outputs):
        # Padding atoms, if there are any, come last.
        return evaluate(uncertainty, {key: value[: len(atoms)] for key, value in outputs.items()})

    value, gradient = gradient_of(model, data, of_real_atoms)
    return value.cpu().numpy(), gradient[: len(atoms)].cpu().numpy() / self.length_units_to_A


def uncertainty_results(
    members: List[Type[Family]],
    outputs: Dict[str, Tensor],
    force_factor: float,
    committee_forces: Optional[np.ndarray] = None,
) -> Dict[str, Any]:
    """NumPy arrays for ``calc.results``, in eV and Å, and of a single model the name of its family.

    Parameters
    ----------
    members : list of M Family
    outputs : dict
        Of the M models, in the models' own units, (M, N, ...).
    force_factor : float
        Model force unit in eV/Å. Covariances carry it squared, standard deviations once.
    committee_forces : (M, N, 3) array, optional
        Forces of the members in eV/Å, where M > 1. Such a mixture is of no family: it has the common views alone.
    """
    found = [
        family.outputs_in_units({name: values[i] for name, values in outputs.items()}, force_factor)
        for i, family in enumerate(members)
    ]
    results = found[0]
    if committee_forces is not None:
        views = {key.name: torch.stack([member[key.name] for member in found]) for key in FORCE_VIEWS}
        results = committee_views(views, torch.as_tensor(committee_forces, device=views["forces_cov"].device))
    arrays: Dict[str, Any] = {name: value.cpu().numpy() for name, value in results.items()}
    return arrays if committee_forces is not None else {**arrays, FAMILY_KEY: members[0].uq_family}


def open_model(
    path: Union[str, Path],
    device: str = "cpu",
    calibration: Union[str, Path, None] = None,
    head: Optional[str] = None,
    dtype: Optional[str] = None,
) -> Any:
    """``MACECalculator`` of a ``.model`` file, with a readout or without.

    ``head`` is needed where the model has several; ``dtype`` is float32 or float64, the model's own by default.
    """
    from mace.calculators import MACECalculator

    wanted = {"calibration": calibration, "head": head, "default_dtype": dtype}
    given = {name: value for name, value in wanted.items() if value is not None}
    try:
        calculator = MACECalculator(model_paths=str(path), device=device, **given)
    except ValueError:
        # MACE's way to say that it wants a head.
        only = choose_head(Path(path), torch.load(path, map_location="cpu", weights_only=False), head)
        if head is not None:
            raise
        # Before 0.3.14 also where there is one, of another name than Default.
        calculator = MACECalculator(model_paths=str(path), device=device, **{**given, "head": only})
    if head is not None:
        # In place of one that is not there MACE takes the last.
        choose_head(Path(path), calculator.models[0], head)
    of_frame, of_atoms = embedded(calculator.models[0])
    if of_frame or of_atoms:
        # MACE asks for them under names of its own.
        calculator.info_keys = {**calculator.info_keys, **of_frame}
        calculator.arrays_keys = {**calculator.arrays_keys, **of_atoms}
    return calculator
