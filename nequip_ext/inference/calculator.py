"""``E2IPCalculator``: NequIP's ASE calculator with the uncertainties among its results."""

import functools
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterable, List, Optional, Tuple, Type, Union

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import all_changes
from nequip.data import AtomicDataDict
from nequip.nn import graph_model

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import FRAME_OUTPUTS, LEVERAGE
from e2ip_plugins.predictions.ase_properties import CalculatorResults, ImplementedProperties, register_with_ase
from e2ip_plugins.predictions.checks import StructureCheck
from e2ip_plugins.predictions.locks import CalculatorLock
from e2ip_plugins.predictions.on_request import ALWAYS, ResultsOnRequest, is_on_request, shallow_copy
from e2ip_plugins.readout.gradient import Uncertainty
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import in_units, model_results, warn_if_unfitted
from nequip_ext.compat import NequIPCalculator
from nequip_ext.inference.gradient import uncertainty_gradient
from nequip_ext.inference.on_request import HostModel
from nequip_ext.model.checkpoints import explained, refuse_conversion, refuse_head
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_name, find_readout
from nequip_ext.registration import register
from nequip_ext.training.labels import known_species


def _properties(of: Iterable[Type[Family]]) -> ImplementedProperties:
    names = [key.name for family in of for key in family.output_keys()]
    names += [key.name for key in (LEVERAGE, *FRAME_OUTPUTS)]
    return ImplementedProperties(NequIPCalculator.implemented_properties, dict.fromkeys(names))


register_with_ase()


class E2IPCalculator(NequIPCalculator):
    """``NequIPCalculator`` whose ``results`` also hold every output of the model's readout, and ``uq_family``.

    ``atoms.calc.results["forces_cov"]`` is the (N, 3, 3) covariance in eV²/Å², and so on. Load compiled
    models made with ``nequip-compile --target e2ip_ase`` through ``from_compiled_model``. ASE's own calls take the
    results as those of ``NequIPCalculator``: ``SinglePointCalculator(atoms, **atoms.calc.results)``,
    ``atoms.get_properties(["energy", "forces"])`` and ``export_properties()``.
    """

    #: Of the class those of all families; of a calculator those of its model, where that can be seen.
    implemented_properties = _properties(families.table().values())

    results: Dict[str, Any]

    #: Readout whose compile target is loaded; see `from_compiled_model`.
    readout: ClassVar[str] = families.DEFAULT

    def __init__(
        self,
        *args: Any,
        calibration: Union[str, Path, None] = None,
        uncertainties: str = ALWAYS,
        **settings: Any,
    ) -> None:
        """Make a calculator as ``NequIPCalculator`` does.

        Parameters
        ----------
        calibration : str or Path, optional
            File of ``e2ip calibrate``, to be applied to the results.
        uncertainties : str
            ``"always"``: every evaluation computes them. ``"on request"``: they are computed once for a geometry of
            which one is asked for, and energy and forces alone cost what they cost with the stock model.

        Raises
        ------
        InputError
            A calibration of another model; ``"on request"`` with a compiled model, of which the readout is a part, and
            with a model without readout.
        """
        on_request = is_on_request(uncertainties)
        self.calibration = None if calibration is None else Calibration.read(calibration)
        self._lock = CalculatorLock()
        self._check_structure = StructureCheck()
        super().__init__(*args, **settings)
        self._uq_model = find_name(self.model)
        if self.calibration is not None:
            self.calibration.check_model(self._uq_model, "the model")
        readout = find_readout(self.model)
        if readout is not None:
            self.implemented_properties = _properties([families.get(readout.settings.family)])
        #: The model without its readout, which waits for a request; None where it does not wait.
        self._host: Optional[HostModel] = None
        if on_request:
            self.wait_for_requests()

    @classmethod
    def from_compiled_model(
        cls, compile_path: str, *args: Any, readout: str = families.DEFAULT, **settings: Any
    ) -> "E2IPCalculator":
        """Return a calculator with a model that was compiled with ``--target <readout>_ase``.

        Parameters
        ----------
        compile_path : str
            ``….nequip.pt2``.
        readout : str
            Predictive family of the model.
        *args, **settings
            As for ``NequIPCalculator.from_compiled_model``, and ``calibration``, a file of ``e2ip calibrate``.
        """
        # NequIP asks the class for the target.
        subclass = type(cls.__name__, (cls,), {"readout": families.get(readout).name, "__module__": cls.__module__})
        try:
            return super(E2IPCalculator, subclass).from_compiled_model(compile_path, *args, **settings)  # type: ignore[misc]
        except ValueError as error:
            if "keys do not match" not in str(error):
                raise
            raise InputError(
                f"{compile_path}: was not compiled with nequip-compile --target {readout}_ase; if it is of another "
                "readout's target for ASE, name that: readout=..."
            ) from error

    @classmethod
    def from_saved_model(cls, path: str, **settings) -> "E2IPCalculator":
        """Return a calculator with the eager model of a checkpoint or package: slower than compiled, with gradients.

        Parameters
        ----------
        path : str
            ``….ckpt`` or ``….nequip.zip``.
        **settings
            ``device``, ``chemical_species_to_atom_type_map`` (default: as in the training) and others as for
            ``from_compiled_model``.

        Raises
        ------
        InputError
            For a compiled file, and a checkpoint that the installed NequIP makes another model of.
        """
        if str(path).endswith(".pt2"):
            raise InputError(f"{path}: is compiled; E2IPCalculator.from_compiled_model opens it")
        with explained(path):
            settings.setdefault("chemical_species_to_atom_type_map", types_of(path))
            calculator = cls._from_saved_model(path, **settings)
        warn_if_unfitted(find_readout(calculator.model), f"{path}: ")
        return calculator

    @classmethod
    def _get_aoti_compile_target(cls) -> Dict[str, Any]:
        from nequip.scripts._compile_utils import COMPILE_TARGET_DICT

        # Whoever imports this module before NequIP has no target of ours yet.
        register()
        return COMPILE_TARGET_DICT[f"{cls.readout}_ase"]

    def calculate(
        self,
        atoms: Optional[Atoms] = None,
        properties: Optional[List[str]] = None,
        system_changes: List[str] = all_changes,
    ) -> None:
        """Calculate as ``NequIPCalculator``; `InputError` for a structure without meaning for the model."""
        self._check(atoms)
        if self._host is None:
            super().calculate(atoms, properties, system_changes)
            return
        if self._host.model is not self.model:
            self.wait_for_requests()
        # A copy: another thread may pickle this calculator meanwhile.
        working = shallow_copy(self, model=shallow_copy(self._host))
        super(E2IPCalculator, working).calculate(atoms, properties, system_changes)
        del working.model
        self.__dict__.update(working.__dict__)

    def wait_for_requests(self) -> None:
        """Compute uncertainties on request from now on, see ``uncertainties`` of the constructor."""
        if find_readout(self.model) is None:
            compiled = hasattr(getattr(self.model, "model", None), "get_metadata")
            problem = "the model has no readout"
            if compiled:
                problem = "the readout is a part of the compiled file; take its checkpoint or package, or 'always'"
            raise InputError(f"uncertainties='on request': {problem}")
        self._host = HostModel(self.model)

    def get_property(self, *args: Any, **kwargs: Any) -> Any:
        """Return a property; threads that share the calculator take turns, or they would read each other's results."""
        with self._lock:
            return super().get_property(*args, **kwargs)

    def _check(self, atoms: Optional[Atoms]) -> None:
        if atoms is not None:
            self._check_structure(atoms, lambda: known_species(self.transforms))

    def uncertainty_gradient(
        self, atoms: Atoms, uncertainty: Uncertainty = "forces_epistemic_std"
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Return an uncertainty of an ASE frame, and the gradient of its sum in the positions, in eV and Å.

        See `nequip_ext.uncertainty_gradient`. Needs an eager model, not a compiled file. Positions are read as they
        are, like NequIP's own forces: with ``length_units_to_A`` other than 1 they are in the model's length unit.
        """
        self._check(atoms)
        data = self.atoms_to_data(atoms)
        readout = find_readout(self.model)
        if readout is not None:
            family = families.get(readout.settings.family)
            options = (self.calibration, atoms.symbols, self.energy_units_to_eV)
            uncertainty = in_units(uncertainty, family, self._force_factor(), *options)
        value, gradient = uncertainty_gradient(self.model, data, uncertainty)
        return value.cpu().numpy(), gradient.cpu().numpy() / self.length_units_to_A

    def _force_factor(self) -> float:
        return self.energy_units_to_eV / self.length_units_to_A

    def save_extra_outputs(self, out: AtomicDataDict.Type) -> None:
        """Put the outputs of the readout into ``results``, in eV and Å like everything else there."""
        host = self.model
        # The atoms are the calculator's copy, which nobody moves.
        options = (self.atoms, self.calibration, self._uq_model, self._force_factor(), self.energy_units_to_eV)
        if isinstance(host, HostModel):
            if self.calibration is not None:
                self.calibration.check(families.get(host.family_name), self.atoms.symbols, "this structure")
            names = self.implemented_properties.uncertainties
            # The function holds no calculator, which holds the results.
            compute = functools.partial(_read_out, host, options)
            self.results = ResultsOnRequest(self.results, compute, names, CalculatorResults)
        else:
            self.results = CalculatorResults({**self.results, **_ours(out, *options)})


def _read_out(host: HostModel, options: Tuple[Any, ...]) -> Dict[str, Any]:
    # A tenth faster for small structures.
    with torch.inference_mode():
        return _ours(host.read_out(), *options)


def _ours(
    out: AtomicDataDict.Type,
    atoms: Atoms,
    calibration: Optional[Calibration],
    uq_model: Optional[str],
    force_factor: float,
    energy_factor: float,
) -> Dict[str, Any]:
    """Return the readout's results among a model's outputs."""
    family = families.of_outputs(out)
    if family is None:
        raise InputError(
            "the model has no outputs of a readout: train it with nequip_ext.E2IPModel, give it one (e2ip fit), or "
            "use NequIPCalculator"
        )
    # A compiled file may lack views.
    keys = [key for key in (*family.output_keys(), LEVERAGE) if key.name in out]
    outputs = {key.name: out[key.name].detach().cpu().reshape(-1, *key.shape) for key in keys}
    of_frames = [key for key in FRAME_OUTPUTS if key.name in out]
    outputs.update({key.name: out[key.name].detach().cpu().reshape(1, *key.shape) for key in of_frames})
    return model_results(
        family,
        outputs,
        force_factor,
        energy_factor=energy_factor,
        calibration=calibration,
        species=atoms.symbols,
        uq_model=uq_model,
        periodic=bool(atoms.pbc.all()),
    )


def open_model(
    path: Union[str, Path],
    device: str = "cpu",
    calibration: Union[str, Path, None] = None,
    head: Optional[str] = None,
    dtype: Optional[str] = None,
    uncertainties: str = ALWAYS,
) -> NequIPCalculator:
    """Return a calculator of a checkpoint or package, eager, with a readout or without; or of a file for ``e2ip_ase``.

    ``head`` and ``dtype`` are for MACE: `InputError` for a head, and for a precision that is not the model's.
    ``uncertainties`` as the calculator has it; a compiled file computes them always.
    """
    on_request = is_on_request(uncertainties)
    refuse_head(head)
    compiled = Path(path).suffix == ".pt2"
    with explained(path):
        if compiled:
            calculator = E2IPCalculator.from_compiled_model(
                str(path), device=device, chemical_species_to_atom_type_map=True, calibration=calibration
            )
        else:
            calculator = E2IPCalculator.from_saved_model(str(path), device=device, calibration=calibration)
    metadata = calculator.model.model.get_metadata() if compiled else calculator.model.metadata
    refuse_conversion(metadata[graph_model.MODEL_DTYPE_KEY], dtype, path)
    if compiled:
        return calculator
    if find_readout(calculator.model) is not None:
        if on_request:
            calculator.wait_for_requests()
        return calculator
    if calibration is not None:
        raise InputError(
            f"{path}: has no readout, whose uncertainties {calibration} could calibrate; e2ip fit gives a model one"
        )
    return NequIPCalculator(calculator.model, device, transforms=calculator.transforms)
