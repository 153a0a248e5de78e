"""`MACECalculator` returns the uncertainty keys of e²IP models; other models run the stock code alone.

The stock ``calculate`` fills whatever tensors ``_create_result_tensors`` made, for every member of a
committee, and drops what it has no place for: the parameters are created there, kept, and turned into
ASE results after it has returned.
"""

import logging
from functools import wraps

import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import convert_niw, derive_niw, derive_niw_committee
from e2ip_plugins.keys import DERIVED_KEYS, OUTPUT_KEYS, PARAMETER_KEYS
from e2ip_plugins.readout.gradient import evaluate, in_units
from mace_ext.gradient import uncertainty_gradient as gradient_of

#: A committee's mixture is not a Normal-Inverse-Wishart: it has covariances, but no parameters.
COMMITTEE_KEYS = tuple(key.name for key in DERIVED_KEYS if key.name.startswith("forces_"))

_PARAMETERS = tuple(key.name for key in PARAMETER_KEYS)
_PER_ATOM = tuple(key.name for key in OUTPUT_KEYS)


def wrap_init(stock):
    """``MACECalculator.__init__``: list the extra properties, when every model of the calculator has them."""

    @wraps(stock)
    def __init__(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self._e2ip_tensors = None
        with_readout = [hasattr(model, "e2ip_head") for model in self.models]
        self._e2ip = all(with_readout)
        if self._e2ip:
            names = _PER_ATOM if self.num_models == 1 else COMMITTEE_KEYS
            # A new list: the stock one extends the list that all ASE calculators share.
            self.implemented_properties = [*self.implemented_properties, *names]
        elif any(with_readout):
            logging.warning(
                "Only %d of %d models have an e2ip readout: the committee returns no e2ip uncertainties",
                sum(with_readout),
                self.num_models,
            )

    return __init__


def wrap_slice_real_outputs(stock):
    """``MACECalculator._slice_real_outputs``: padding atoms go from our per-atom outputs, too."""

    @wraps(stock)
    def _slice_real_outputs(out, num_real_atoms):
        sliced = stock(out, num_real_atoms)
        for key in _PER_ATOM:
            if key in sliced:
                sliced[key] = sliced[key][:num_real_atoms]
        return sliced

    return staticmethod(_slice_real_outputs)


def wrap_create_result_tensors(stock):
    """``MACECalculator._create_result_tensors``: room for each member's distribution parameters."""

    @wraps(stock)
    def _create_result_tensors(self, num_models, num_atoms, batch, out):
        tensors, node_e0 = stock(self, num_models, num_atoms, batch, out)
        if self._e2ip:
            self._e2ip_tensors = {
                key: torch.zeros(num_models, *out[key].shape, device=self.device, dtype=out[key].dtype)
                for key in _PARAMETERS
            }
            tensors.update(self._e2ip_tensors)
        return tensors, node_e0

    return _create_result_tensors


def wrap_calculate(stock):
    """``MACECalculator.calculate``: add `uncertainty_results` to ``self.results``."""

    @wraps(stock)
    def calculate(self, *args, **kwargs):
        self._e2ip_tensors = None
        stock(self, *args, **kwargs)
        if self._e2ip_tensors is not None:
            # Not the tensor: on the CPU (0.3.16) the stock code has multiplied a committee's by its unit factor.
            forces = self.results.get("forces_comm")
            factor = self.energy_units_to_eV / self.length_units_to_A
            self.results.update(uncertainty_results(self._e2ip_tensors, factor, forces))
            self._e2ip_tensors = None

    return calculate


def uncertainty_gradient(self, atoms, uncertainty="forces_epistemic_std"):
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
    model = self.models[0]
    dtype = next(model.parameters()).dtype
    data = {
        key: value.to(dtype) if torch.is_tensor(value) and torch.is_floating_point(value) else value
        for key, value in self._atoms_to_batch(atoms).to_dict().items()
    }
    wanted = in_units(uncertainty, self.energy_units_to_eV / self.length_units_to_A)

    def of_real_atoms(outputs):
        # Padding atoms, if there are any, come last.
        return evaluate(wanted, {key: value[: len(atoms)] for key, value in outputs.items()})

    value, gradient = gradient_of(model, data, of_real_atoms)
    return value.cpu().numpy(), gradient[: len(atoms)].cpu().numpy() / self.length_units_to_A


def uncertainty_results(parameters, force_factor, committee_forces=None):
    """NumPy arrays for ``calc.results``, in eV and Å.

    Parameters
    ----------
    parameters : dict
        Distribution parameters of M models in the models' own units, (M, N, ...).
    force_factor : float
        Model force unit in eV/Å. Covariances carry it squared, standard deviations once.
    committee_forces : (M, N, 3) array, optional
        Forces of the members in eV/Å, where M > 1.
    """
    parameters = convert_niw(parameters, force_factor)
    if committee_forces is None:
        results = {key: value[0] for key, value in parameters.items()}
        results.update(derive_niw(results))
    else:
        forces = torch.as_tensor(committee_forces, device=parameters["e2ip_nu"].device)
        results = derive_niw_committee(parameters, forces)
    return {key: value.cpu().numpy() for key, value in results.items()}
