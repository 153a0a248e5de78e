"""Readout files: readout and leverage of a model, without its network, for everybody who has the same base model.

A base model is the stock model of NequIP or MACE that ``e2ip strip`` leaves. `Base` says which one it is, by a hash of
its weights: the features of another network mean something else, and its leverage would be a number without sense.
"""

import hashlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from e2ip_plugins.fitting.report import WAY_OUT, no_training_atoms
from e2ip_plugins.formats import READOUTS
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings

#: Ending of their names.
SUFFIX = ".e2ip"

#: Digits of a hash that messages show.
SHOWN = 12


class Base(NamedTuple):
    """What tells a base model from others.

    Attributes
    ----------
    host : str
        ``mace`` or ``nequip``.
    weights : str
        Hash of its weights, `hash_of`.
    dtype : str
        Of its weights, ``float32`` or ``float64``.
    species : tuple of str
        Names, in the order of the model's types.
    heads : tuple of str
        Names of MACE's heads; empty for models without.
    """

    host: str
    weights: str
    dtype: str
    species: Tuple[str, ...]
    heads: Tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """Type of model and the first digits of the hash."""
        return f"{self.host} model {self.weights[:SHOWN]}"


class ReadoutFile(NamedTuple):
    """Content of a readout file.

    Attributes
    ----------
    base : Base
        Of the model that the readout belongs to.
    settings : Settings
    state : dict of Tensor
        State of the readout and its leverage, on the CPU.
    name : str
        ``uq_model`` of the readout, see `e2ip_plugins.readout.readout.model_name`.
    versions : dict of str
        Releases of e2ip-plugins and the host that wrote it, for people.
    """

    base: Base
    settings: Settings
    state: Dict[str, Tensor]
    name: str
    versions: Mapping[str, str]

    @classmethod
    def of(cls, readout: Readout, settings: Settings, base: Base, host_version: str) -> "ReadoutFile":
        """Return what a file is to have of the readout of a model."""
        state = {name: values.detach().cpu().clone() for name, values in readout.state_dict().items()}
        name = model_name(readout)
        assert name is not None
        return cls(base, settings, state, name, {"e2ip-plugins": __version__, base.host: host_version})

    def write(self, path: Path) -> None:
        """Write a file that is complete or unchanged."""
        header = {"base": self.base._asdict(), "settings": self.settings.to_dict(), "name": self.name}
        save({"e2ip_readout": READOUTS.number, **header, "versions": dict(self.versions), "state": self.state}, path)

    @classmethod
    def read(cls, path: Path) -> "ReadoutFile":
        """Read a file; nothing in it is executed, wherever it comes from.

        Raises
        ------
        InputError
            For missing files, files of another kind, and those of another version of the format.
        """
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            version = content["e2ip_readout"]
        # Reading a broken archive raises whatever goes wrong in it.
        except Exception as error:
            raise InputError(f"{path}: is no readout file, which e2ip export-readout writes") from error
        READOUTS.check(version, f"{path}:", content.get("versions", {}).get("e2ip-plugins"))
        try:
            base = Base(**{**content["base"], **{key: tuple(content["base"][key]) for key in ("species", "heads")}})
            settings = Settings.from_dict(content["settings"], str(path))
            return cls(base, settings, dict(content["state"]), content["name"], content["versions"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from error

    def check_host(self, path: Path, model: Path, host: str) -> None:
        """Raise `InputError` where the file ``model`` is of MACE and the readout in ``path`` of NequIP, or reversed."""
        if host != self.base.host:
            raise InputError(
                f"{path} has the readout of a {self.base.host} model, and {model} is a model of {host}: give the model "
                f"of {self.base.host}"
            )

    def check_base(self, path: Path, model: Path, base: Base) -> None:
        """Raise `InputError` where ``base``, of the file ``model``, is not what the readout in ``path`` belongs to."""
        mine = self.base
        if base == mine:
            return
        what = f"{path} has the readout of the {mine.in_words}"
        if base.dtype != mine.dtype:
            raise InputError(
                f"{what}, whose weights are {mine.dtype}, and those of {model} are {base.dtype}: give the model in "
                f"{mine.dtype}, as it was when the readout was fitted"
            )
        if base.weights != mine.weights:
            raise InputError(
                f"{what}, and {model} is the {base.in_words}, with other weights: give the base model that the readout "
                "was fitted on, or fit this one with e2ip fit"
            )
        for what_differs, theirs, ours in (("types", mine.species, base.species), ("heads", mine.heads, base.heads)):
            if theirs != ours:
                raise InputError(
                    f"{what}, whose {what_differs} are {', '.join(theirs)}, and those of {model} are "
                    f"{', '.join(ours)}: give the base model that the readout was fitted on"
                )

    def put_on(self, readout: Readout, path: Path) -> None:
        """Fill a new readout of the base model; ``path`` is the file, for messages."""
        try:
            readout.load_state_dict(self.state)
        except RuntimeError as error:
            raise InputError(f"{path}: is damaged: its tensors do not fit its settings ({error})") from error
        if model_name(readout) != self.name:
            raise InputError(f"{path}: is damaged: its tensors are not those of {self.name}")

    def notes(self) -> List[str]:
        """Return what a user should know: species and heads without training atoms."""
        regions = (self.state["leverage.region_stretch"][:, :, 0] > 0.0).any(1)
        notes = []
        for head, known in enumerate(regions.reshape(-1, len(self.base.species)).tolist()):
            missing = [name for name, atoms in zip(self.base.species, known, strict=True) if not atoms]
            where = f" in head {self.base.heads[head]}" if len(self.base.heads) > 1 else ""
            notes += [no_training_atoms(missing, where)] if missing else []
        return notes


def hash_of(state: Mapping[str, Any]) -> str:
    """Return 64 hex digits for names, types, shapes and bytes of the tensors in a state dictionary, whatever its order.

    >>> state = {"a": torch.zeros(2, dtype=torch.float32), "b": torch.ones(())}
    >>> hash_of(state) == hash_of({"b": state["b"], "a": state["a"], "note": "no tensor"})
    True
    >>> hash_of(state) == hash_of({"a": state["a"].double(), "b": state["b"]})
    False
    """
    digest = hashlib.sha256()
    for name, values in sorted(state.items()):
        if isinstance(values, Tensor):
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            digest.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fitted_readout(readout: Optional[Readout], path: Path, purpose: str) -> Readout:
    """Return the readout of a model file; `InputError` if there is none or its leverage was never fitted.

    ``purpose`` says what it is wanted for, in the message: ``to export``.
    """
    if readout is None:
        raise InputError(f"{path}: has no readout {purpose}; {WAY_OUT}")
    if not bool(readout.leverage.fitted):
        raise InputError(
            f"{path}: the leverage of its readout was never fitted, and there is nothing {purpose}; {WAY_OUT}"
        )
    return readout


def refuse_readout(readout: Optional[Readout], path: Path) -> None:
    """Raise `InputError` for the readout of a model that is to get another."""
    if readout is not None:
        raise InputError(f"{path}: has a readout already; take it off with e2ip strip, and attach to what is left")
