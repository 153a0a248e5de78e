"""Batches of an evaluation: frames are prepared one by one, gathered, evaluated together and made text."""

import io
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import ase.io
import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.options import BatchModel, EvaluateOptions
from e2ip_plugins.keys import LEVERAGE
from e2ip_plugins.predictions.checks import check_structure
from e2ip_plugins.predictions.chunks import Chunk, to_atoms
from e2ip_plugins.predictions.columns import keep_references, put_uncertainties, uncertainties
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import calibrated_energies, energy_results, origin

#: Info of every frame that is written: its number in the input, from 0.
FRAME_KEY = "input_frame"


class PreparedFrame(NamedTuple):
    """A frame that waits for its batch: number and place in the input, for messages, atoms, neighbours and their
    number."""

    number: int
    where: str
    atoms: Atoms
    graph: Any
    edges: int


def prepare(model: BatchModel, chunk: Chunk, source: Path, calibration: Optional[Calibration]) -> PreparedFrame:
    """Return a frame with its neighbours; `InputError` for one that no model could take."""
    where = f"{source}, frame {chunk.number}"
    atoms = to_atoms(chunk, source)
    check_structure(atoms, where, model.species)
    if calibration is not None:
        calibration.check_species(set(atoms.symbols), where)
    # MACE and NequIP get nothing else of the frame: they would read labels, for example.
    bare = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    for key in model.reads:
        if key in atoms.info:
            bare.info[key] = atoms.info[key]
        elif key in atoms.arrays:
            bare.set_array(key, atoms.arrays[key])
    try:
        return PreparedFrame(chunk.number, where, atoms, *model.graph(bare))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


class Results(NamedTuple):
    """Frames of a batch with predictions, and the frames left out: number and reason."""

    frames: List[Atoms]
    skipped: List[Tuple[int, str]]

    def text(self) -> bytes:
        """Return the frames as extxyz."""
        text = io.StringIO()
        ase.io.write(text, self.frames, format="extxyz", write_results=False)
        return text.getvalue().encode()


def predict(model: BatchModel, batch: Sequence[PreparedFrame], options: EvaluateOptions) -> Results:
    """Evaluate a batch, and put its predictions into its frames."""
    results = Results([], [])
    if not batch:
        return results
    try:
        outputs = model.evaluate([frame.graph for frame in batch], options.stress)
    except torch.OutOfMemoryError as error:
        reason = f"the batch of {len(batch)} frames that begins here is too large for the device's memory"
        way = "run the command again with a smaller --batch-atoms"
        raise InputError(f"{batch[0].where}: {reason}; what is finished is kept: {way}") from error
    assert model.family is not None
    names = ("energy", "forces", *(key.name for key in model.family.parameter_keys))
    if len(batch) > 1 and not all(torch.isfinite(outputs[name]).all() for name in names):
        # With stresses, MACE's forces on all frames of a batch are NaN where those on one of them are. Each frame is
        # therefore evaluated by itself.
        singles = [predict(model, [frame], options) for frame in batch]
        return Results([a for r in singles for a in r.frames], [s for r in singles for s in r.skipped])
    species = [symbol for frame in batch for symbol in frame.atoms.symbols]
    columns = columns_of(model, outputs, species, options.calibration, options.covariances)
    columns["forces"] = outputs["forces"].cpu().numpy()
    of_frame = origin(model.family, model.uq_model, options.calibration)
    energies = {key.name: outputs[key.name].cpu() for key in options.frame_outputs if key.name in outputs}
    energies.update(calibrated_energies(options.calibration, energies))
    start, known = 0, uncertainties()
    for i, (number, where, atoms, *_) in enumerate(batch):
        values: Dict[str, Any] = {name: column[start : start + len(atoms)] for name, column in columns.items()}
        start += len(atoms)
        values.update(
            energy_results(energies, i, bool(atoms.pbc.all())), **of_frame, energy=outputs["energy"][i].item()
        )
        if "stress" in outputs and atoms.pbc.all():
            values["stress"] = outputs["stress"][i].cpu().numpy()
        if not all(np.isfinite(values[name]).all() for name in names):
            cause = "(do two atoms lie on each other? Did its training diverge?)"
            problem = f"{where}: the model's prediction is not finite {cause}"
            if not options.skip_bad:
                raise InputError(problem)
            results.skipped.append((number, problem))
            continue
        keep_references(atoms)
        put_uncertainties(atoms, values, known)
        # As ASE writes the results of a calculator, of which it would make two more copies.
        atoms.info[FRAME_KEY] = number
        atoms.info.update({name: values[name] for name in ("energy", "stress") if name in values})
        atoms.arrays["forces"] = values["forces"]
        results.frames.append(atoms)
    return results


def columns_of(
    model: BatchModel,
    outputs: Dict[str, Tensor],
    species: Sequence[str],
    calibration: Optional[Calibration] = None,
    covariances: bool = True,
) -> Dict[str, np.ndarray]:
    """Return all uncertainties per atom (N, …), calibrated, with or without 3×3 tensors; symbols of all N atoms."""
    family = model.family
    assert family is not None
    values = {key.name: outputs[key.name] for key in family.output_keys()}
    if calibration is not None:
        parameters = {key.name: values[key.name].cpu().double() for key in family.parameter_keys}
        values = calibration.in_units(family, parameters, 1.0, species)
    if not covariances:
        values = {key.name: values[key.name] for key in family.output_keys() if key.shape != (3, 3)}
    if LEVERAGE.name in outputs:
        values[LEVERAGE.name] = outputs[LEVERAGE.name]
    return {name: value.cpu().numpy() for name, value in values.items()}
