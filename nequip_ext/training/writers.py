"""NequIP's xyz writers: names of family, readout and calibration in every frame, one file of all processes."""

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import torch
from nequip.train.callbacks import write_xyz

from e2ip_plugins import families
from e2ip_plugins.keys import ENERGY_UNCERTAINTY, FAMILY_KEY, FRAME_KEYS, FRAME_OUTPUTS, MODEL_KEY, PREDICTED_KEY
from e2ip_plugins.predictions.fingerprints import force_sizes
from e2ip_plugins.processes import distributed, gather_objects
from e2ip_plugins.scores.results import energy_results
from nequip_ext.model.readout import find_name

#: Key of the frames of a batch among outputs, for `_to_ase`.
_SHARE = "e2ip_share"

_OF_FRAMES = frozenset(key.name for key in FRAME_OUTPUTS)


class Share(NamedTuple):
    """Frames that this process has of a pass over a data set.

    Attributes
    ----------
    numbers : list of list of int
        Numbers in the data set, batch by batch.
    written : set of int
        Numbers of the frames that all processes have written: a sampler repeats frames to give all processes as many.
    batch : int
        Present batch.
    """

    numbers: List[List[int]]
    written: Set[int]
    batch: int = 0


def mend_writers() -> None:
    """Let NequIP's xyz writers name family and readout in every frame, and write one file from several processes.

    Their columns are tensors, so names have to be added to what they make of an output: `to_ase` of their module is
    wrapped, and the methods of the writers, which alone see model and loader. Their processes would all write into the
    same file, one in the line of another.
    """
    _wrap_once(write_xyz, "to_ase", _to_ase)
    for prefix, writer, method in (
        ("test", "TestTimeXYZFileWriter", "on_test_batch_end"),
        ("val", "ValTimeXYZFileWriter", "on_validation_batch_end"),
    ):
        if hasattr(write_xyz, writer):
            _wrap_once(getattr(write_xyz, writer), method, functools.partial(_batch_end, prefix))


def _wrap_once(owner: Any, name: str, function: Callable) -> None:
    """Replace a function of NequIP's by ``function(stock, …)``, in the first training of a process."""
    stock = getattr(owner, name)
    if hasattr(stock, "e2ip_stock"):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    wrapped.e2ip_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _to_ase(to_ase: Callable, *args: Any, extra_fields: Optional[List[str]] = None, **kwargs: Any) -> Any:
    if extra_fields is not None:
        # Whether a model has error bars of stresses shows after the fit: where it has none, they are not written.
        extra_fields = [name for name in extra_fields if name in args[0] or name not in _OF_FRAMES]
    made = to_ase(*args, extra_fields=extra_fields, **kwargs)
    family = families.of_outputs(extra_fields or [])
    if family is not None:
        names = {FAMILY_KEY: family.uq_family, **args[0]}
        for frame in made if isinstance(made, list) else [made]:
            frame.info.update({key: names[key] for key in FRAME_KEYS if key in names})
            energies = {key.name: frame.info.pop(key.name)[None] for key in FRAME_OUTPUTS if key.name in frame.info}
            if ENERGY_UNCERTAINTY.name in energies:
                energies[ENERGY_UNCERTAINTY.name] = energies[ENERGY_UNCERTAINTY.name][:, 0]
                frame.info.update(energy_results(energies, 0))
            if frame.calc is not None and "forces" in frame.calc.results:
                frame.info[PREDICTED_KEY] = force_sizes(frame.calc.results["forces"])
    share: Optional[Share] = args[0].get(_SHARE)
    return made if share is None else _of_all_processes(made if isinstance(made, list) else [made], share)


def _of_all_processes(frames: List[Any], share: Share) -> List[Any]:
    """Return the frames that all processes have of a batch, each once, in their order; none where this is not the
    first process."""
    mine = list(zip(share.numbers[share.batch], frames, strict=True))
    new = {number: frame for part in gather_objects(mine) for number, frame in part if number not in share.written}
    share.written.update(new)
    return [new[number] for number in sorted(new)] if torch.distributed.get_rank() == 0 else []


def _share(loaders: Any, dataloader_idx: int) -> Share:
    loader = loaders[dataloader_idx] if isinstance(loaders, (list, tuple)) else loaders
    return Share([list(numbers) for numbers in loader.batch_sampler], set())


def _batch_end(
    prefix: str,
    stock: Callable,
    writer: Any,
    trainer: Any,
    pl_module: Any,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int = 0,
) -> None:
    added: Dict[str, Any] = {}
    if prefix == "test":
        if batch_idx == 0:  # once in a data set: the name is a hash of all weights
            writer.uq_model = find_name(pl_module)
        if writer.uq_model is not None:
            added[MODEL_KEY] = writer.uq_model
    if distributed():
        if batch_idx == 0:
            writer.e2ip_share = _share(getattr(trainer, f"{prefix}_dataloaders"), dataloader_idx)
        added[_SHARE] = writer.e2ip_share._replace(batch=batch_idx)
    if added:
        key = f"{prefix}_{dataloader_idx}_output"
        outputs = {**outputs, key: {**outputs[key], **added}}
    stock(writer, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
