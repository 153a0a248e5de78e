"""Names of family, readout and calibration in the frames that NequIP's xyz writers write."""

import functools
from typing import Any, Callable, List, Optional

from nequip.train.callbacks import write_xyz

from e2ip_plugins import families
from e2ip_plugins.keys import FAMILY_KEY, FRAME_KEYS, MODEL_KEY, PREDICTED_KEY
from e2ip_plugins.predictions.fingerprints import force_sizes
from nequip_ext.model.readout import find_name


def name_models_in_files() -> None:
    """Let NequIP's xyz writers name family and readout in every frame whose columns hold the family's parameters.

    Their columns are tensors, so names have to be added to what they make of an output: `to_ase` of their module is
    wrapped, and the method of the test-time writer, which alone sees the model.
    """
    _wrap_once(write_xyz, "to_ase", _name_family)
    _wrap_once(write_xyz.TestTimeXYZFileWriter, "on_test_batch_end", _name_readout)


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


def _name_family(to_ase: Callable, *args: Any, extra_fields: Optional[List[str]] = None, **kwargs: Any) -> Any:
    made = to_ase(*args, extra_fields=extra_fields, **kwargs)
    family = families.of_outputs(extra_fields or [])
    if family is not None:
        names = {FAMILY_KEY: family.uq_family, **args[0]}
        for frame in made if isinstance(made, list) else [made]:
            frame.info.update({key: names[key] for key in FRAME_KEYS if key in names})
            if frame.calc is not None and "forces" in frame.calc.results:
                frame.info[PREDICTED_KEY] = force_sizes(frame.calc.results["forces"])
    return made


def _name_readout(
    stock: Callable,
    writer: Any,
    trainer: Any,
    pl_module: Any,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int = 0,
) -> None:
    if batch_idx == 0:  # once in a data set: the name is a hash of all weights
        writer.uq_model = find_name(pl_module)
    if writer.uq_model is not None:
        key = f"test_{dataloader_idx}_output"
        outputs = {**outputs, key: {**outputs[key], MODEL_KEY: writer.uq_model}}
    stock(writer, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
