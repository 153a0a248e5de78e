"""Settings of a readout: one frozen object that the model carries; loss, metrics and checks of checkpoints read it."""

import math
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple, Union

from e2ip_plugins import __version__, families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.formats import READOUTS
from e2ip_plugins.keys import KCAL_PER_MOL

#: ``force_unit: auto`` is this fraction of the training forces' component RMS.
AUTO_FORCE_UNIT_FRACTION = 0.03


#: What trains the forces: the likelihood of the readout; the loss of NequIP or MACE alone, to the last bit, while the
#: readout learns from detached features and residuals; or nothing: they stay those of a given model.
FORCES = ("likelihood", "host", "fixed")


class Settings(NamedTuple):
    """Settings of a readout.

    Attributes
    ----------
    family : str
        Its name.
    options : dict
        The family's options, complete and checked; not to be changed.
    force_unit : float
        σ_ref in eV/Å.
    given : frozenset of str
        Options that the user wrote, as against defaults.
    version : int
        Number of the format, see `READOUTS`.
    forces : str
        One of `FORCES`.
    """

    family: str
    options: Mapping[str, Any]
    force_unit: float
    given: FrozenSet[str] = frozenset()
    version: int = READOUTS.number
    forces: str = FORCES[0]

    @classmethod
    def of(cls, family: str, options: Mapping[str, Any], force_unit: float, forces: Optional[str] = None) -> "Settings":
        """Return settings from a user's options (None: not given); `InputError` for unknown and contradictory ones.

        >>> Settings.of("e2ip", {"evidence": None}, 0.05).options["evidence"]
        'leverage'
        """
        converted = _converted(family, options)
        forces = FORCES[0] if forces is None else forces
        if forces not in FORCES:
            raise InputError(f"forces is '{forces}'; choose from: {', '.join(FORCES)}")
        if forces != FORCES[0] and families.get(family).takes_forces:
            raise InputError(
                f"forces '{forces}' does not go with readout '{family}', whose members' forces cannot be learned "
                "without the features that they are derivatives of; leave it out"
            )
        return cls(family, families.get(family).resolve(converted), force_unit, frozenset(converted), forces=forces)

    @property
    def detached(self) -> bool:
        """Whether the readout alone learns from its loss."""
        return self.forces != FORCES[0]

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], where: str) -> "Settings":
        """Return settings from `to_dict`, options that the family did not have yet at their defaults.

        Raises
        ------
        FormatError
            This version does not read them; ``where`` names model or file.
        """
        READOUTS.check(saved.get("version"), where, saved.get("release"))
        family, options, given = saved["family"], saved["options"], frozenset(saved["given"])
        defaults = families.get(family).resolve({name: options[name] for name in given})
        return cls(family, {**defaults, **options}, saved["force_unit"], given, forces=saved["forces"])

    def __reduce__(self) -> Tuple[Callable[[Mapping[str, Any], str], "Settings"], Tuple[Dict[str, Any], str]]:
        """Let pickled models come back by `from_dict`, too."""
        return _unpickled, (self.to_dict(), "this model")

    def to_dict(self) -> Dict[str, Any]:
        """Return plain Python, for checkpoints."""
        return {
            "version": self.version,
            "release": __version__,
            "family": self.family,
            "force_unit": self.force_unit,
            "options": dict(self.options),
            "given": sorted(self.given),
            "forces": self.forces,
        }

    def build(self) -> Family:
        """Return the family as a module."""
        return families.get(self.family)(self.options)

    def with_aliases(self, family: Optional[str], options: Mapping[str, Any], owner: str) -> "Settings":
        """Return these settings with the options of the loss that were written elsewhere.

        An option that only the loss reads may be written with the loss alone; all others must be the model's.

        Parameters
        ----------
        family, options
            As written there; None: not written.
        owner : str
            Name of the place, for the message.

        Raises
        ------
        InputError
            Where the two differ.
        """
        if family is not None and family != self.family:
            raise InputError(f"{owner} has readout '{family}', the model '{self.family}': give them the same")
        loss_only = {option.name for option in families.get(self.family).options if option.loss_only}
        others = _converted(self.family, options)
        families.get(self.family).check_names(others)
        chosen = {name: self.options[name] for name in self.given}
        for name, value in others.items():
            if name in loss_only and name not in self.given:
                chosen[name] = value
            elif value != self.options[name]:
                raise InputError(
                    f"{owner} has {name} {value}, the model {self.options[name]}: give them the same, or leave it out "
                    f"of {owner}"
                )
        return self.of(self.family, chosen, self.force_unit, self.forces)

    def with_leverage(self, where: str) -> "Settings":
        """Return the same readout in evidence mode ``leverage``, or as it is where its family has no such mode.

        Parameters
        ----------
        where : str
            Model or file, for the message.

        Raises
        ------
        InputError
            Where the weights would mean something else then.
        """
        options = {option.name: option for option in families.get(self.family).options}
        if "evidence" not in options or self.build().takes_support:
            return self
        chosen = {name: self.options[name] for name in self.given if not options[name].loss_only}
        changed = self.of(self.family, {**chosen, "evidence": "leverage"}, self.force_unit, self.forces)
        if self.differences(changed, weights_only=True):
            raise InputError(
                f"{where} was trained in evidence mode '{self.options['evidence']}', whose weights mean something else "
                "in mode 'leverage': only models of modes 'leverage' and 'coupled' and models without a readout can be "
                "fitted; train it anew in mode 'leverage'"
            )
        return changed

    def differences(self, other: "Settings", weights_only: bool = False) -> List[str]:
        """Return the names of what differs; ``weights_only``: of what changes the meaning of a readout's weights."""
        if self.family != other.family:
            return ["readout"]
        mine, others = self.options, other.options
        if weights_only:
            mine, others = (families.get(self.family).of_weights(options) for options in (mine, others))
        names = [name for name in mine if mine[name] != others[name]]
        # Saved in single precision by some models.
        same_unit = math.isclose(self.force_unit, other.force_unit, rel_tol=1e-6)
        names = names if same_unit else [*names, "force_unit"]
        return names if weights_only or self.forces == other.forces else [*names, "forces"]

    def describe(self, name: str) -> Any:
        """Return the value of what `differences` names."""
        return {"readout": self.family, "force_unit": self.force_unit, "forces": self.forces, **self.options}[name]


def _unpickled(saved: Mapping[str, Any], where: str) -> Settings:
    return Settings.from_dict(saved, where)


def _converted(family: str, options: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the options of a family that are not None, strings as the values that they stand for."""
    types = {option.name: option.type for option in families.get(family).options}
    converted = {name: value for name, value in options.items() if value is not None}
    for name, value in converted.items():
        if isinstance(value, str) and name in types:
            try:
                converted[name] = types[name](value)
            except ValueError as error:
                raise InputError(f"{name} must be a {types[name].__name__}, got '{value}'") from error
    return converted


def resolve_force_unit(force_unit: Union[float, str, None], forces_rms: Optional[float] = None) -> float:
    """Return σ_ref in eV/Å from a number, ``None`` (1 kcal/mol/Å) or ``auto``.

    Parameters
    ----------
    force_unit
        Number > 0 in eV/Å, a string holding one, ``auto`` or ``None``.
    forces_rms
        Root mean square of the training forces' components in eV/Å; needed by ``auto``.

    Raises
    ------
    InputError
        For anything else.

    Examples
    --------
    >>> resolve_force_unit("auto", forces_rms=2.0)
    0.06
    """
    if force_unit is None:
        return KCAL_PER_MOL
    if wants_auto_unit(force_unit):
        if forces_rms is None or not (math.isfinite(forces_rms) and forces_rms > 0):
            raise InputError(
                "force_unit 'auto' needs the training forces' component RMS (a finite number > 0), "
                f"got {forces_rms}; give force_unit as a number in eV/Å instead"
            )
        return AUTO_FORCE_UNIT_FRACTION * float(forces_rms)
    try:
        value = float(force_unit)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 < value < math.inf:
        raise InputError(f"force_unit must be 'auto' or a finite number > 0 in eV/Å, got {force_unit!r}")
    return value


def wants_auto_unit(force_unit: Union[float, str, None]) -> bool:
    """Return whether the force unit comes from the training forces."""
    return isinstance(force_unit, str) and force_unit.strip().lower() == "auto"
