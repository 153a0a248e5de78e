"""`MACECalculator` returns the uncertainty keys of e²IP models; other models run the stock code alone.

The stock ``calculate`` drops what it has no place for: it runs on a copy of the calculator whose models keep what they
put out, which becomes ASE results after it has returned.
"""

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Type, Union

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from ase.outputs import Properties
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import ENERGY_UNCERTAINTY, FORCE_VIEWS, FRAME_OUTPUTS, LEVERAGE
from e2ip_plugins.predictions.ase_properties import ImplementedProperties
from e2ip_plugins.predictions.checks import StructureCheck
from e2ip_plugins.predictions.locks import CalculatorLock
from e2ip_plugins.predictions.on_request import ALWAYS, ResultsOnRequest, is_on_request, shallow_copy
from e2ip_plugins.readout.gradient import Uncertainty, evaluate
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import (
    committee_results,
    in_units,
    model_results,
    standard_results,
    warn_if_unfitted,
)
from mace_ext.inference.batched_mace import prepare_batched
from mace_ext.inference.gradient import uncertainty_gradient as model_gradient
from mace_ext.inference.on_request import HostModel
from mace_ext.model.files import choose_head, embedded
from mace_ext.model.readout import find_family, find_name, find_readout, frame_outputs, has_energies, has_leverage
from mace_ext.observed_model import ObservedModel

if TYPE_CHECKING:
    # Its module is the one that is being patched.
    from mace.calculators import MACECalculator


def init(
    stock: Callable,
    self: "MACECalculator",
    *args: Any,
    calibration: Union[str, Path, None] = None,
    uncertainties: str = ALWAYS,
    **kwargs: Any,
) -> None:
    """Add the extra properties after ``MACECalculator.__init__``, if every model of the calculator has them.

    Parameters
    ----------
    calibration : str or Path, optional
        File of ``e2ip calibrate``, to be applied to the uncertainties of one model.
    uncertainties : str
        ``"always"``: every evaluation computes them. ``"on request"``: they are computed once for a geometry of which
        one is asked for, and energy and forces alone cost what they cost with the stock model.

    Raises
    ------
    InputError
        A calibration of another model or for a committee; ``"on request"`` where the readout is part of a compiled
        model, or where i-PI calls the model.
    """
    self._uq_on_request = is_on_request(uncertainties)
    self._uq_calibration = None if calibration is None else Calibration.read(calibration)
    self._uq_lock = CalculatorLock()
    self._uq_check_structure = StructureCheck()
    stock(self, *args, **kwargs)
    families = [find_family(model) for model in self.models]
    #: Family of each model; empty unless all of them have a readout.
    self._uq_families = [] if None in families else families
    #: Name of the readout; None for committees and stock models.
    self._uq_model = find_name(self.models[0], getattr(self, "head", None)) if len(families) == 1 else None
    if self._uq_calibration is not None:
        if len(families) > 1:
            raise InputError(
                f"{calibration}: is for one model, not for the mixture of the {len(families)} of a committee"
            )
        self._uq_calibration.check(families[0], (), "the model", self._uq_model)
    if self._uq_families:
        keys = self._uq_families[0].output_keys() if self.num_models == 1 else FORCE_VIEWS
        keys += (LEVERAGE,) if all(map(has_leverage, self.models)) else ()
        if all(map(has_energies, self.models)):
            keys += frame_outputs(self.models[0]) if self.num_models == 1 else (ENERGY_UNCERTAINTY,)
        # A new list: the stock one extends the list that all ASE calculators share.
        self.implemented_properties = ImplementedProperties(self.implemented_properties, (key.name for key in keys))
        for model in self.models:
            warn_if_unfitted(find_readout(model))
        _check_request(self)
    elif any(families):
        count = f"{len(families) - families.count(None)} of {len(families)}"
        logging.warning(f"Only {count} models have an e2ip readout: the committee returns no uncertainties")
    if any(families) and hasattr(self, "ase_like_properties"):
        prepare_batched(self)


def calculate(stock: Callable, self: "MACECalculator", *args: Any, **kwargs: Any) -> None:
    """Add uncertainties to the results of ``MACECalculator.calculate``."""
    if not self._uq_families:
        stock(self, *args, **kwargs)
        return
    _check(self, kwargs.get("atoms", args[0] if args else None))
    observe = HostModel if self._uq_on_request else ObservedModel
    observed = [observe(model) for model in self.models]
    # A copy, and not other models in this calculator: another thread may be at work with it, or pickle it.
    working = shallow_copy(self, models=observed)
    stock(working, *args, **kwargs)
    convert = _conversion(working)
    if self._uq_on_request:
        names = self.implemented_properties.uncertainties

        def compute() -> Dict[str, Any]:
            # A fifth faster for small structures.
            with torch.inference_mode():
                return convert([model.read_out() for model in observed])

        working.results = ResultsOnRequest(working.results, compute, names)
    else:
        working.results.update(convert([model.output for model in observed]))
    del working.models
    vars(self).update(vars(working))


def _conversion(working: "MACECalculator") -> Callable[[List[Dict[str, Tensor]]], Dict[str, Any]]:
    """Return the function from the models' outputs to results in eV and Å, for the calculator's last evaluation.

    It holds the arrays that it needs and not the calculator, which holds the results.
    """
    families, factor = working._uq_families, working.energy_units_to_eV / working.length_units_to_A
    names, atoms = working.implemented_properties.uncertainties, working.atoms
    if len(families) > 1:
        # Not the tensor: on the CPU (0.3.15 and 0.3.16) the stock code has multiplied it by its unit factor.
        forces = working.results["forces_comm"]
        # A release may lack the first name; what the second holds counts only if it is a number for each member.
        energies = working.results.get("energy_comm", working.results.get("energies", ()))
        mixture = (factor, forces, working.energy_units_to_eV, energies)
        return lambda outputs: committee_results(
            [
                (family, _outputs(output, family, names, len(atoms)))
                for family, output in zip(families, outputs, strict=True)
            ],
            *mixture,
        )
    calibration, uq_model, energy_factor = working._uq_calibration, working._uq_model, working.energy_units_to_eV
    if calibration is not None and working._uq_on_request:
        calibration.check(families[0], atoms.symbols, "this structure")
    # ASE has given the calculator a copy of the atoms, which nobody moves.
    return lambda outputs: model_results(
        families[0],
        _outputs(outputs[0], families[0], names, len(atoms)),
        factor,
        energy_factor=energy_factor,
        calibration=calibration,
        species=atoms.symbols,
        uq_model=uq_model,
        periodic=bool(atoms.pbc.all()),
    )


def get_property(stock: Callable, self: "MACECalculator", *args: Any, **kwargs: Any) -> Any:
    """Return a property; threads that share the calculator take turns, or they would read each other's results."""
    if not self._uq_families:
        return stock(self, *args, **kwargs)
    with self._uq_lock:
        return stock(self, *args, **kwargs)


def export_properties(stock: Callable, self: "MACECalculator") -> Properties:
    """Return the results that ASE has a definition of without the uncertainties, of which it has none."""
    if not self._uq_families:
        return stock(self)
    exported = copy.copy(self)
    exported.results = standard_results(self.results)
    return stock(exported)


def _check(calculator: "MACECalculator", atoms: Optional[Atoms]) -> None:
    """Raise `InputError` for a structure without meaning for the model, of which MACE would still predict numbers."""
    if atoms is not None:
        calculator._uq_check_structure(atoms, lambda: [chemical_symbols[z] for z in calculator.z_table.zs])


def _check_request(calculator: "MACECalculator") -> None:
    """Raise `InputError` where the readout cannot wait."""
    if not calculator._uq_on_request:
        return
    if calculator.use_compile:
        raise InputError("uncertainties='on request': with compile_mode the readout is a part of the compiled model")
    if hasattr(calculator, "ase_like_properties"):
        raise InputError("uncertainties='on request': i-PI calls the model itself; leave it out of mace_kwargs")


def _outputs(output: Dict[str, Tensor], family: Type[Family], wanted: List[str], count: int) -> Dict[str, Tensor]:
    """Return a member's uncertainties of ``count`` atoms; those of padding atoms (MACE 0.3.16) come last."""
    names = [key.name for key in family.output_keys()]
    names += [LEVERAGE.name] if LEVERAGE.name in wanted else []
    of_frames = {key.name: output[key.name].detach()[:1] for key in FRAME_OUTPUTS if key.name in output}
    return {**{name: output[name].detach()[:count] for name in names}, **of_frames}


def uncertainty_gradient(
    self: "MACECalculator", atoms: Atoms, uncertainty: Uncertainty = "forces_epistemic_std"
) -> Tuple[np.ndarray, np.ndarray]:
    """Return `mace_ext.uncertainty_gradient` of an ASE frame, in eV and Å: ``MACECalculator.uncertainty_gradient``.

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
        problem = f"has {self.num_models} models" if self.num_models > 1 else "is compiled"
        raise InputError(
            f"uncertainty_gradient needs a MACECalculator with one model and without compile_mode; this one {problem}"
        )
    _check(self, atoms)
    model = self.models[0]
    dtype = next(model.parameters()).dtype
    data = {
        key: value.to(dtype) if torch.is_tensor(value) and torch.is_floating_point(value) else value
        for key, value in self._atoms_to_batch(atoms).to_dict().items()
    }
    if self._uq_families:
        factor = self.energy_units_to_eV / self.length_units_to_A
        options = (self._uq_calibration, atoms.symbols, self.energy_units_to_eV)
        uncertainty = in_units(uncertainty, self._uq_families[0], factor, *options)

    def of_real_atoms(outputs: Dict[str, Tensor]) -> Tensor:
        # Padding atoms come last, and are of another frame.
        sizes = dict.fromkeys(outputs, len(atoms)) | {key.name: 1 for key in FRAME_OUTPUTS}
        return evaluate(uncertainty, {key: value[: sizes[key]] for key, value in outputs.items()})

    value, gradient = model_gradient(model, data, of_real_atoms)
    return value.cpu().numpy(), gradient[: len(atoms)].cpu().numpy() / self.length_units_to_A


def open_model(
    path: Union[str, Path],
    device: str = "cpu",
    calibration: Union[str, Path, None] = None,
    head: Optional[str] = None,
    dtype: Optional[str] = None,
    uncertainties: str = ALWAYS,
) -> "MACECalculator":
    """Return a ``MACECalculator`` of a ``.model`` file, with a readout or without.

    ``head`` is needed where the model has several; ``dtype`` is float32 or float64, the model's own by default;
    ``uncertainties`` as the calculator has it.
    """
    from mace.calculators import MACECalculator

    options = {"calibration": calibration, "head": head, "default_dtype": dtype, "uncertainties": uncertainties}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        calculator = MACECalculator(model_paths=str(path), device=device, **options)
    except ValueError:
        # MACE asks for a head so, before 0.3.14 also where there is one, of another name than Default.
        options["head"] = choose_head(Path(path), torch.load(path, map_location="cpu", weights_only=False), head)
        calculator = MACECalculator(model_paths=str(path), device=device, **options)
    if head is not None:
        # MACE takes the last one in place of an unknown head.
        choose_head(Path(path), calculator.models[0], head)
    of_frame, of_atoms = embedded(calculator.models[0])
    if of_frame or of_atoms:
        # MACE asks for them under names of its own.
        calculator.info_keys = {**calculator.info_keys, **of_frame}
        calculator.arrays_keys = {**calculator.arrays_keys, **of_atoms}
    return calculator
