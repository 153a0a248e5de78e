"""What a predictive family is: all that the rest of this package asks of one.

A family turns coefficients, which the trunk computes from a model's features, into the parameters of a distribution
over every atom's force. To add one:

1. Write a file of this folder with a subclass of `Family`. Its distribution is a Gaussian or Student-t with a full
   covariance (the default), or a Student-t for each component (``law_name = "componentwise"``). Any other distribution
   needs a subclass of `Law` in laws.py, an entry in ``_LAWS`` there, and that entry's name as ``law_name``.
2. Add the class to `e2ip_plugins.families.FAMILIES`.
3. Test it. tests/core/families/test_interface.py tests every listed family by itself; what is special to one family
   goes into tests/core/families/test_NAME.py.

tests/families/isotropic.py is the shortest example; eip.py shows options, several parameters and a law of its own.

A family must define ``name``, ``uq_family``, ``parameter_keys``, ``num_scalars``, ``num_tensors``,
``initial_scalars``, ``forward``, ``force_loss``, ``derive`` and ``law_arguments``; without ``log_matrix`` also
``convert`` and ``widen``, and, if it takes a support, ``log_variance`` and ``far_out``.
"""

import inspect
import math
import sys
from typing import Any, Callable, ClassVar, Dict, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FORCE_VIEWS, OutputKey
from e2ip_plugins.leverage.form import FORM, LeverageForm, Support, flattening
from e2ip_plugins.maths.spd import flattened, log_of_widened

#: Knee τ and ceiling c of the dampers on the isotropic (0e) and traceless (2e) part of the logarithm of a covariance in
#: units of σ_ref². Its conditioning depends on the latter alone (paper, appendix on damping functions).
SCALAR_DAMPER, TENSOR_DAMPER = (14.0, 15.0), (4.0, 5.0)

#: σ of an untrained model in units of σ_ref. Starting far below the first errors costs epochs.
INITIAL_SIGMA = 10.0


class Option(NamedTuple):
    """An option of a family: ``NAME: …`` of ``E2IPModel`` in NequIP, ``--e2ip_NAME`` in MACE, whatever the family.

    Attributes
    ----------
    name : str
        Families may share a name, each with its own help, default and choices. The arguments that every readout has,
        such as ``seed``, ``force_unit`` and ``forces``, have taken theirs (tests/core/families/test_table.py).
    help : str
        In ASCII, because MACE's help is.
    default
        None: `Family.resolve` sets it.
    type : callable
        From a string to the value: MACE's command line gives strings, and NequIP's YAML may.
    loss_only : bool
        Whether the option changes the loss alone, so that trained weights can be used with any value of it.
    choices : tuple of str
        Values; empty: any, or what `Family.resolve` checks.
    """

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str
    loss_only: bool = False
    choices: Tuple[str, ...] = ()


def beta_option(default: float) -> Option:
    """Return the option of families whose loss is `pulled`."""
    description = "pull of the likelihood on the forces, from 0 (its own) to 1 (of the mean square error)"
    return Option("beta", description, default, float, loss_only=True)


class Family(nn.Module):
    """Base class of predictive families.

    A module without weights. MACE scripts its ``forward``, NequIP traces it: pure torch, no branch on data, and no
    constants of the file, which TorchScript does not read: make them attributes in ``__init__``. A branch on an option
    is fine: annotate the attribute that holds the option as ``Final``, so that TorchScript drops the other
    branch. Packaged models carry the family's file, which must import no SciPy, ASE or metrics.

    Attributes
    ----------
    name : str
        Name that users write: ``--readout NAME``, ``readout: NAME``; first part of metric names.
    uq_family : str
        Name that files carry. Families whose parameters mean the same share it.
    options : tuple of Option
    parameter_keys : tuple of OutputKey
        The distribution's parameters: the interchange between models, files and tools.
    own_views : tuple of OutputKey
        Derived keys in addition to `e2ip_plugins.keys.FORCE_VIEWS`.
    num_scalars, num_tensors : int
        Coefficients per atom: 0e ones, and 0 or 1 of 2e (five components).
    initial_scalars : tuple of float
        Where the 0e coefficients start.
    takes_support : bool
        Whether, with its options, it grows its covariance with the leverage, that is, takes a `Support`. Those
        derived from `NIW` do in evidence mode ``leverage``.
    takes_forces : bool
        Whether its 0e coefficients are atoms' shares of energies, in any unit per atom. The family gets the forces of
        these energies instead. It starts from no constants then (``initial_scalars`` is empty): an energy has no zero.
    equivariant : bool
        Whether its covariance turns with the structure. That of families in a fixed frame does not.
    log_matrix : str
        Name of the parameter that is the logarithm of the covariance, or of a matrix proportional to it, as sym6. With
        it the default `log_variance`, `convert` and `widen` work; `niw` shows what a matrix that is only proportional
        adds to the first and the last. A family without it defines the last two, and `log_variance` and `far_out` if
        it takes a support.
    law_name : str
        Name in ``_LAWS`` of families/laws.py. ``elliptical`` (default): a Gaussian or Student-t with a full covariance;
        ``componentwise``: a Student-t for each component.
    """

    name: ClassVar[str]
    uq_family: ClassVar[str]
    options: ClassVar[Tuple[Option, ...]] = ()
    parameter_keys: ClassVar[Tuple[OutputKey, ...]]
    own_views: ClassVar[Tuple[OutputKey, ...]] = ()
    equivariant: ClassVar[bool] = True
    log_matrix: ClassVar[str]
    law_name: ClassVar[str] = "elliptical"

    num_scalars: int
    num_tensors: int
    initial_scalars: Tuple[float, ...]
    takes_support: bool
    takes_forces: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        """``options`` are complete, as `resolve` gives them."""
        super().__init__()
        self.takes_support = False

    def forward(self, coefficients: Tensor, force_unit: Tensor, support: Optional[Support] = None) -> Dict[str, Tensor]:
        """Return every key of `output_keys`, and ``e2ip_plateau`` (N,).

        The plateau is 1 where a damper of the covariance is past its knee, else 0. A coefficient that the family
        reads and that is not finite must give a covariance that is not finite, for its atom alone.

        Parameters
        ----------
        coefficients : (N, num_columns)
            0e coefficients first, then 2e in e3nn's component order. Where it ``takes_forces``: x, y and z of minus
            the gradient of the sum of the first 0e coefficient over atoms, then of the second, …, per Å.
        force_unit : ()
            σ_ref in eV/Å.
        support : Support, optional
            To be ignored unless ``takes_support``.
        """
        raise NotImplementedError

    def num_columns(self) -> int:
        """Return the number of columns of the coefficients."""
        return (3 if self.takes_forces else 1) * self.num_scalars + 5 * self.num_tensors

    def constant_scalars(self) -> Tuple[Tuple[float, ...], ...]:
        """Return candidates of 0e coefficients for a fit without a trained readout; all atoms get the best ones.

        Most families have one candidate.
        """
        return (self.initial_scalars,)

    @classmethod
    def log_variance(cls, parameters: Dict[str, Tensor]) -> Tensor:
        """Return the logarithm of a component's variance (N,), in eV²/Å², geometric mean over directions.

        Families may leave out a factor that is the same for all leverages, as `NIW` does with that of ν.
        """
        return parameters[cls.log_matrix][..., :3].sum(-1) / 3.0

    def force_loss(self, residual: Tensor, outputs: Dict[str, Tensor]) -> Tensor:
        """Return the loss per atom (N,), in (eV/Å)² and about as large as a mean square error.

        Force weights then keep their meaning: 2σ_ref²/3 times the negative log likelihood of residuals in units of
        σ_ref has the gradient of a mean square error where residuals are σ_ref. Add a constant that keeps it at least
        0: schedulers with a relative threshold misread a negative loss. Degrees of freedom that are learned need a
        bound above 2, or the likelihood has none.

        Parameters
        ----------
        residual : (N, 3)
            Reference minus predicted forces in eV/Å; 0 for atoms that do not count, where the gradient must be finite,
            too.
        outputs : dict
            Outputs of `forward`, with ``e2ip_coefficients`` (N, C) and ``e2ip_force_unit`` (N,).
        """
        raise NotImplementedError

    @staticmethod
    def derive(parameters: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """Return every derived key (…, 3, 3), … from the parameters (…, shape of their key)."""
        raise NotImplementedError

    @classmethod
    def convert(cls, parameters: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
        """Return the parameters after forces were multiplied by a unit factor > 0."""
        log_matrix = parameters[cls.log_matrix]
        diagonal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=log_matrix.dtype, device=log_matrix.device)
        return {**parameters, cls.log_matrix: log_matrix + 2.0 * math.log(force_factor) * diagonal}

    @classmethod
    def widen(cls, parameters: Dict[str, Tensor], factor: Tensor, floor: Tensor) -> Dict[str, Tensor]:
        """Return the parameters of the same distributions with covariance ``factor`` · covariance + ``floor`` · I.

        What has no unit, such as degrees of freedom and the epistemic share, stays; with a factor of 1 and a floor of 0
        everything does, to the last bit.

        Parameters
        ----------
        parameters
        factor : (…,)
            Greater than 0.
        floor : (…,)
            In eV²/Å², at least 0.
        """
        return {**parameters, cls.log_matrix: log_of_widened(parameters[cls.log_matrix], factor, floor)}

    @classmethod
    def far_out(cls, parameters: Dict[str, Tensor], far: Tensor, form: LeverageForm = FORM) -> Dict[str, Tensor]:
        """Return what is left of the shape of a distribution far from the training atoms; its size stays.

        The traceless part of the covariance's logarithm is extrapolated there, and becomes larger than that of errors.

        Parameters
        ----------
        parameters
        far : (…,)
            g of `e2ip_plugins.leverage.form`, from 0 to 1.
        """
        return {**parameters, cls.log_matrix: flattened(parameters[cls.log_matrix], flattening(far, form))}

    @staticmethod
    def law_arguments(parameters: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """Return the keyword arguments of the law's entry in ``_LAWS``, from NumPy parameters (N, …).

        ``elliptical``: ``log_matrix`` (N, 6), the logarithm of the scale matrix Λ, and optionally ``log_factor``,
        ``dof`` m (with it the covariance is m/(m-2) Λ) and ``epistemic_share``, all (N,). ``componentwise``: ``shift``,
        ``log_scale``, ``dof`` and ``epistemic_share`` (N, 3).
        """
        raise NotImplementedError

    @classmethod
    def output_keys(cls) -> Tuple[OutputKey, ...]:
        """Return all keys that a model of this family puts out for users."""
        return cls.parameter_keys + FORCE_VIEWS + cls.own_views

    @classmethod
    def in_units(cls, parameters: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
        """Return every output key from parameters, after forces were multiplied by a unit factor > 0."""
        converted = cls.convert({key.name: parameters[key.name] for key in cls.parameter_keys}, force_factor)
        return {**converted, **cls.derive(converted)}

    @classmethod
    def outputs_in_units(cls, outputs: Dict[str, Tensor], force_factor: float) -> Dict[str, Tensor]:
        """Return the same from the outputs of a model: where the factor is 1, nothing is derived anew."""
        keys = cls.output_keys()
        if force_factor == 1.0 and all(key.name in outputs for key in keys):
            return {key.name: outputs[key.name] for key in keys}
        return cls.in_units(outputs, force_factor)

    @classmethod
    def resolve(cls, user_options: Mapping[str, Any]) -> Dict[str, Any]:
        """Return complete options from those that the user gave; `InputError` for what does not go together."""
        cls.check_names(user_options)
        options = {option.name: user_options.get(option.name, option.default) for option in cls.options}
        for option in cls.options:
            if option.choices and options[option.name] not in option.choices:
                listed = ", ".join(option.choices)
                raise InputError(f"unknown {option.name} '{options[option.name]}'; choose from: {listed}")
        return options

    @classmethod
    def of_weights(cls, options: Mapping[str, Any]) -> Dict[str, Any]:
        """Return the options that trained weights depend on: two readouts may exchange weights where these are equal.

        Values of an option with which the weights mean the same are replaced by one of them.
        """
        return {option.name: options[option.name] for option in cls.options if not option.loss_only}

    @classmethod
    def check_names(cls, user_options: Mapping[str, Any], taker: Optional[Callable] = None) -> None:
        """Raise `InputError` for options of another family.

        Parameters
        ----------
        taker : callable, optional
            Function that takes them as its ``**options``: one of its keywords may be misspelt.
        """
        known = [option.name for option in cls.options]
        for name in user_options:
            if name not in known:
                message = f"{name} is no option of readout '{cls.name}', whose own options are: "
                message += ", ".join(known) or "none"
                if taker is not None:
                    keywords = [keyword for keyword in inspect.signature(taker).parameters if keyword != "options"]
                    message += f"; {taker.__name__} itself takes {', '.join(keywords)}"
                raise InputError(message)


def pulled(residual: Tensor, log_variance: Tensor, beta: float) -> Tensor:
    """Return the residual (N, 3) with its gradient multiplied by exp(β · ``log_variance``) (N,).

    A likelihood pulls on a force with the inverse of its covariance. Atoms that are predicted badly get a large
    variance, then hardly any pull, and stay bad: the pitfall of heteroscedastic regression (Seitzer et al. 2022,
    https://arxiv.org/abs/2203.09168), which makes the balance with the energy term depend on the stage of training,
    too. Their β-NLL weakens it; here it does so in the force alone: the value of the loss and its gradients in the
    distribution's parameters stay those of the likelihood.

    Parameters
    ----------
    residual : (N, 3)
    log_variance : (N,)
        In units of σ_ref².
    beta : float
        0: the likelihood's pull, 1: about that of the mean square error.
    """
    constant = residual.detach()
    pull = torch.exp(beta * log_variance.detach())
    return constant + pull.to(residual.dtype).unsqueeze(-1) * (residual - constant)


def checked_number(options: Mapping[str, Any], name: str, most: float = sys.float_info.max) -> float:
    """Return an option that is a number from 0 to ``most``; `InputError` for others."""
    value = options[name]
    if isinstance(value, str) or not 0.0 <= value <= most:
        wanted = "finite number >= 0" if most == sys.float_info.max else f"number from 0 to {most:g}"
        raise InputError(f"{name} must be a {wanted}, got {value}")
    return float(value)


def force_views(aleatoric: Tensor, epistemic: Tensor) -> Dict[str, Tensor]:
    """Return the keys of `e2ip_plugins.keys.FORCE_VIEWS` from both parts (…, 3, 3) of a covariance in eV²/Å²."""
    covariance = aleatoric + epistemic
    return {
        "forces_cov": covariance,
        "forces_aleatoric_cov": aleatoric,
        "forces_epistemic_cov": epistemic,
        "forces_uncertainty": covariance.diagonal(dim1=-2, dim2=-1).sqrt(),
        "forces_epistemic_std": (epistemic.diagonal(dim1=-2, dim2=-1).sum(-1) / 3.0).sqrt(),
    }


def committee_views(members: Dict[str, Tensor], forces: Tensor) -> Dict[str, Tensor]:
    """Return the force views of an equally weighted committee.

    Law of total variance: the covariance of the mixture is the mean of the members' covariances plus the covariance of
    their mean forces. The second is disagreement between models, hence epistemic. The mixture is of no family: it has
    no parameters.

    Parameters
    ----------
    members
        Derived keys of the M members, (M, N, …).
    forces : (M, N, 3)
        In eV/Å.
    """
    deviation = forces - forces.mean(0)
    spread = (deviation.unsqueeze(-1) * deviation.unsqueeze(-2)).mean(0)
    return force_views(members["forces_aleatoric_cov"].mean(0), members["forces_epistemic_cov"].mean(0) + spread)
