"""Names of family, readout and calibration in the frames that NequIP's xyz writers write."""

import functools
from typing import Any, List, Optional, Union

import ase
from nequip.train.callbacks import write_xyz

from e2ip_plugins import families
from e2ip_plugins.keys import FAMILY_KEY, FRAME_KEYS, MODEL_KEY
from nequip_ext.model.readout import find_name


def name_models_in_files() -> None:
    """Let NequIP's xyz writers name family and readout in every frame whose columns hold the family's parameters.

    Their columns are tensors, so names have to be added to what they make of an output: `to_ase` of their module is
    wrapped, once, and the method of the test-time writer, which alone sees the model.
    """
    if not hasattr(write_xyz.to_ase, "names_family"):
        write_xyz.to_ase = _naming_family(write_xyz.to_ase)
    writer = write_xyz.TestTimeXYZFileWriter
    if not hasattr(writer.on_test_batch_end, "names_readout"):
        writer.on_test_batch_end = _naming_readout(writer.on_test_batch_end)


def _naming_family(to_ase: Any) -> Any:
    @functools.wraps(to_ase)
    def wrapped(
        *args: Any, extra_fields: Optional[List[str]] = None, **kwargs: Any
    ) -> Union[ase.Atoms, List[ase.Atoms]]:
        made = to_ase(*args, extra_fields=extra_fields, **kwargs)
        family = families.of_outputs(extra_fields or [])
        if family is not None:
            for frame in made if isinstance(made, list) else [made]:
                said = {FAMILY_KEY: family.uq_family, **args[0]}
                frame.info.update({key: said[key] for key in FRAME_KEYS if key in said})
        return made

    wrapped.names_family = True  # type: ignore[attr-defined]
    return wrapped


def _naming_readout(on_test_batch_end: Any) -> Any:
    @functools.wraps(on_test_batch_end)
    def wrapped(
        self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:  # once in a data set: the name is a hash of all weights
            self.uq_model = find_name(pl_module)
        if self.uq_model is not None:
            key = f"test_{dataloader_idx}_output"
            outputs = {**outputs, key: {**outputs[key], MODEL_KEY: self.uq_model}}
        on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    wrapped.names_readout = True  # type: ignore[attr-defined]
    return wrapped
