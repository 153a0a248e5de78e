"""Force errors of configurations beside what a readout says of the same atoms: what the constants are fitted to."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.records import Records, recorded
from e2ip_plugins.fitting.report import FitReport, species_name
from e2ip_plugins.fitting.training_atoms import Record
from e2ip_plugins.leverage.form import Support, log_around
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.processes import gather_objects
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.vanishing import vanishing
from e2ip_plugins.scores import references

#: Columns (N, …) of atoms by name: ``residual``, ``forces``, ``frames``, ``heads``, ``kinds``, ``distance``,
#: ``typical`` (`Support.log_typical`), ``around`` (`log_around`) and the parameters of the family.
AtomTable = Dict[str, np.ndarray]


@dataclass
class ForceErrors:
    """Force errors of a batch of atoms.

    Attributes
    ----------
    residual : (N, 3)
        Reference minus predicted forces in eV/Å. Atoms with one that is not finite are left out, as are configurations
        with a species that has no training atoms.
    frames : (N,) int
        Number, in its data set, of the configuration of every atom.
    forces : (N, 3), optional
        Predicted, in eV/Å: atoms whose force vanishes by symmetry are left out.
    """

    residual: Tensor
    frames: Tensor
    forces: Optional[Tensor] = None


class LeftOut(NamedTuple):
    """Configurations that were left out for species without training atoms.

    Attributes
    ----------
    number : int
        Of the configurations.
    species : frozenset of int
        Indices of the species without training atoms.
    """

    number: int = 0
    species: FrozenSet[int] = frozenset()

    def joined(self, other: "LeftOut") -> "LeftOut":
        """Return these and other configurations as one."""
        return LeftOut(self.number + other.number, self.species | other.species)

    def in_words(self, species: Sequence[str]) -> str:
        """Return how many configurations have which species."""
        names = ", ".join(species_name(index, species) for index in sorted(self.species))
        s, have = ("", "has") if self.number == 1 else ("s", "have")
        return f"{self.number} validation configuration{s} {have} {names}, of which there are no training atoms"


@contextmanager
def last_call_of(readout: Readout) -> Iterator[Dict[str, Any]]:
    """Yield a dictionary that every call of a readout fills anew: scalars, kinds, heads, support, outputs."""
    call: Dict[str, Any] = {}

    def of_leverage(module: Leverage, inputs: Tuple[Any, ...], support: Support) -> None:
        scalars, species, heads = inputs[0], inputs[1], inputs[2]
        heads = torch.zeros_like(species) if heads is None or len(module.growth) == 1 else heads
        call.update(scalars=scalars.detach(), kinds=heads * module.species_per_head() + species, heads=heads)
        call["support"] = support

    def of_readout(module: Readout, inputs: Tuple[Any, ...], outputs: Dict[str, Tensor]) -> None:
        call["outputs"] = {name: value.detach() for name, value in outputs.items()}

    handles = [readout.leverage.register_forward_hook(of_leverage), readout.register_forward_hook(of_readout)]
    try:
        yield call
    finally:
        for handle in handles:
            handle.remove()


def kinds_of(leverage: Leverage, head: int) -> slice:
    """Return the kinds of a head."""
    species = leverage.species_per_head()
    return slice(head * species, (head + 1) * species)


def parameters_of(readout: Readout, columns: Dict[str, Any]) -> Dict[str, Any]:
    """Return the parameters of a readout's family from a dictionary that has them beside others."""
    return {key.name: columns[key.name] for key in readout.family.parameter_keys}


def collect_errors(
    readout: Readout, batches: Iterable[ForceErrors], name: str, records: Optional[Records] = None
) -> Tuple[AtomTable, LeftOut]:
    """Run batches and return a table of their atoms, the same in every process of a distributed training.

    Also returns which configurations were left out for species without training atoms. ``name`` is that of the pass.
    """
    with last_call_of(readout) as call:
        parts = list(recorded(records, name, batches, lambda errors: _columns(readout, call, errors)))
    left_out = [LeftOut(int(part.pop("left_out")), frozenset(part.pop("lacking").tolist())) for part in parts]
    gathered = gather_objects((parts, reduce(LeftOut.joined, left_out, LeftOut())))
    parts = [part for of_process, _ in gathered for part in of_process]
    names = parts[0] if parts else {}
    table = {name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in names}
    # In their order, whichever process has had them.
    order = np.argsort(table["frames"], kind="stable") if table else np.zeros(0, dtype=int)
    return select(table, order), reduce(LeftOut.joined, (of_process for _, of_process in gathered))


def _columns(readout: Readout, call: Dict[str, Any], errors: ForceErrors) -> Record:
    """Return the columns of a batch that the model has been run on, and what is left out for which species."""
    _, index = torch.unique(errors.frames.to(errors.residual.device), return_inverse=True)
    # What a species without training atoms does to its neighbours says nothing about those that have some.
    lacking = readout.leverage.regions()[call["kinds"]] == 0
    supported = torch.ones(len(index), dtype=torch.bool, device=lacking.device)
    supported[index[lacking]] = False
    finite = torch.isfinite(errors.residual).all(-1)
    usable = finite & supported[index]
    # Configurations whose forces do not count are none that were left out for their species.
    unsupported = torch.unique(index[finite & ~usable])
    species = torch.unique(
        call["kinds"][lacking & torch.isin(index, unsupported)] % readout.leverage.species_per_head()
    )
    forces = torch.full_like(errors.residual, np.nan) if errors.forces is None else errors.forces.detach()
    usable &= ~vanishing(forces, errors.residual)
    support, parameters = call["support"], parameters_of(readout, call["outputs"])
    columns = {
        **parameters,
        **{"residual": errors.residual, "forces": forces, "frames": errors.frames.to(usable.device)},
        **{"heads": call["heads"], "kinds": call["kinds"]},
        **{"distance": support.distance, "typical": support.log_typical},
        "around": log_around(support, readout.family.log_variance(parameters)),
    }
    table = {name: values[usable].detach().cpu().numpy() for name, values in columns.items()}
    return {**table, "left_out": np.array(len(unsupported)), "lacking": species.cpu().numpy()}


def collect_validation(
    readout: Readout,
    batches: Iterable[ForceErrors],
    report: FitReport,
    species: Sequence[str] = (),
    records: Optional[Records] = None,
) -> AtomTable:
    """Return a table of the atoms of a validation set, each configuration once; adds warnings to the report.

    ``species`` are names for messages.

    Raises
    ------
    InputError
        Where they say nothing about errors.
    """
    table, left_out = collect_errors(readout, batches, "validation set", records)
    if not table or not len(table["residual"]):
        lacking = f" ({left_out.in_words(species)})" if left_out.number else ""
        raise InputError(
            "the validation set has no configuration with finite reference forces whose species the training set has"
            f"{lacking}, or all forces vanish by symmetry (isolated atoms, perfect crystals): the constants of "
            "evidence mode 'leverage' are fitted to those; give it such configurations"
        )
    if not np.abs(table["residual"]).max():
        raise InputError(
            "all validation errors are zero: there is nothing to fit to; give other validation configurations"
        )
    if left_out.number:
        report.warnings.append(f"{left_out.in_words(species)}: left out")
    copies = _copies(table)
    if copies:
        report.warnings.append(
            f"{len(copies)} validation configuration{'s are' if len(copies) > 1 else ' is'} there more than once, and "
            "count once"
        )
        table = select(table, ~np.isin(table["frames"], copies))
    for head, of_head in by_head(table).items():
        predicted = np.isfinite(of_head["forces"]).all(-1)
        forces = of_head["forces"][predicted]
        doubt = references.doubt(of_head["residual"][predicted] + forces, forces)
        report.warnings += [f"validation set{report.of_head(head)}: {doubt}"] if doubt else []
    return table


def select(table: AtomTable, atoms: np.ndarray) -> AtomTable:
    """Return the table of some atoms, which a mask or indices name."""
    return {name: values[atoms] for name, values in table.items()}


def by_head(table: AtomTable) -> Dict[int, AtomTable]:
    """Return the table of every head."""
    heads = np.unique(table["heads"]).tolist() if table else []
    return {int(head): select(table, table["heads"] == head) for head in heads}


def _copies(table: AtomTable) -> List[int]:
    """Return the configurations that repeat another, with the same errors and leverages to a network's precision."""
    frames, index = np.unique(table["frames"], return_inverse=True)
    atoms = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    size = np.bincount(index, np.square(table["residual"]).sum(-1))
    copies: List[int] = []
    near: List[int] = []
    # Copies are neighbours in this order.
    for i in np.argsort(size, kind="stable"):
        near = [j for j in near if size[i] - size[j] <= 1e-3 * size[i]]
        if any(_alike(select(table, atoms[i]), select(table, atoms[j])) for j in near):
            copies.append(int(frames[i]))
        else:
            near.append(i)
    return copies


def _alike(a: AtomTable, b: AtomTable) -> bool:
    return (
        len(a["kinds"]) == len(b["kinds"])
        and all(np.array_equal(a[name], b[name]) for name in ("heads", "kinds"))
        and np.allclose(a["residual"], b["residual"], rtol=1e-3, atol=1e-4)
        and np.allclose(a["distance"], b["distance"], rtol=1e-3)
    )
