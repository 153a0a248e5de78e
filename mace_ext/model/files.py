"""``.model`` files of `mace_run_train`: opened with a check of what they are."""

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from ase import Atoms
from ase.data import chemical_symbols
from mace import data
from mace.modules import models

from e2ip_plugins.errors import InputError, UncertaintyWarning


def open_file(path: Path, device: str = "cpu") -> Any:
    """Open a stock or an e²IP `ScaleShiftMACE`; raise `InputError` for anything else."""
    try:
        with warnings.catch_warnings():
            # TorchScript files are refused below.
            warnings.filterwarnings("ignore", message=".*TorchScript archive", category=UserWarning)
            net = torch.load(path, map_location=device, weights_only=False)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    # Unpickling raises whatever goes wrong inside it.
    except Exception as error:
        raise InputError(f"{path}: is not a model file of mace_run_train ({type(error).__name__}: {error})") from error
    if isinstance(net, torch.jit.ScriptModule):
        raise InputError(f"{path}: is a TorchScript file; give the .model file that was written with it")
    if not isinstance(net, models.ScaleShiftMACE):
        raise InputError(f"{path}: is a {type(net).__name__}; only ScaleShiftMACE models have readouts")
    if not hasattr(net, "heads"):  # published before MACE had any
        net.heads = ["Default"]
    # Modules that e3nn has compiled ignore map_location.
    return net.to(device)


def species_of(net: Any) -> List[str]:
    """Return the chemical symbols that a model knows, in the order of its types."""
    return [chemical_symbols[int(z)] for z in net.atomic_numbers]


@contextmanager
def precision_of(net: Any) -> Iterator[None]:
    """Make the model's precision torch's default, in which MACE and e3nn make graphs and intermediate tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(net.parameters()).dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def choose_head(path: Path, net: Any, head: Optional[str]) -> str:
    """Return the head asked for, or the only one; raise `InputError` if it does not exist or must be chosen."""
    if head is None and len(net.heads) == 1:
        return net.heads[0]
    if head is None or head not in net.heads:
        problem = f"has {len(net.heads)} heads" if head is None else f"has no head '{head}'"
        raise InputError(f"{path}: {problem}; give --head, one of: {', '.join(net.heads)}")
    return head


#: Embedded quantities for which MACE has a default.
_WITH_DEFAULTS = ("total_charge", "total_spin", "elec_temp", "external_field")


def embedded(net: Any) -> Tuple[Dict[str, str], Dict[str, str]]:
    """Return where frames hold what a model embeds beside the species (``--embedding_specs``: charge, spin, ...).

    Returns
    -------
    of_frame, of_atoms : dict
        By MACE's names: keys of ``atoms.info``, and of ``atoms.arrays``.
    """
    specs = getattr(net, "embedding_specs", None) or {}
    of_frame, of_atoms = (
        {name: spec.get("key", name) for name, spec in specs.items() if spec["per"] == per} for per in ("graph", "atom")
    )
    return of_frame, of_atoms


def configuration(atoms: Atoms, net: Any, head: str) -> data.Configuration:
    """Return MACE's form of a frame, without labels, with what the model embeds.

    What the frame lacks of that gives a warning, or an `InputError` where MACE has no default for it.
    """
    of_frame, of_atoms = embedded(net)
    if not of_frame and not of_atoms:
        return data.config_from_atoms(atoms, head_name=head)
    missing = {name: key for name, key in of_frame.items() if key not in atoms.info}
    missing |= {name: key for name, key in of_atoms.items() if key not in atoms.arrays}
    needed = ", ".join(key for name, key in missing.items() if name not in _WITH_DEFAULTS)
    if needed:
        raise InputError(f"has no {needed}, which the model was trained with and MACE has no default for")
    if missing:
        warnings.warn(
            f"the model was trained with {', '.join(missing.values())} of every frame, which some frames lack: for "
            "these MACE takes its defaults, no charge and spin 1",
            UncertaintyWarning,
            stacklevel=2,
        )
    keys = data.KeySpecification(info_keys=of_frame, arrays_keys=of_atoms)
    return data.config_from_atoms(atoms, key_specification=keys, head_name=head)
