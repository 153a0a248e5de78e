"""What NequIP's xyz writers lack: the names of family, readout and calibration, and calibrated uncertainties."""

import functools
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import ase
from nequip.data import AtomicDataDict
from nequip.train.callbacks import write_xyz
from nequip.utils import RankedLogger

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY, FRAME_KEYS, MODEL_KEY
from e2ip_plugins.scores.calibration import Calibration
from nequip_ext.readout import find_model_name

logger = RankedLogger(__name__, rank_zero_only=True)


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
            self.uq_model = find_model_name(pl_module)
        if self.uq_model is not None:
            key = f"test_{dataloader_idx}_output"
            outputs = {**outputs, key: {**outputs[key], MODEL_KEY: self.uq_model}}
        on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    wrapped.names_readout = True  # type: ignore[attr-defined]
    return wrapped


class E2IPXYZFileWriter(write_xyz.TestTimeXYZFileWriter):
    """``TestTimeXYZFileWriter`` that calibrates the uncertainties it writes.

    Parameters
    ----------
    calibration : str
        File of ``e2ip calibrate``.
    **settings
        As for ``TestTimeXYZFileWriter``; ``chemical_symbols`` is needed, and ``extra_fields`` with the parameters of
        the model's family.
    """

    def __init__(self, *args: Any, calibration: Union[str, Path], **settings: Any) -> None:
        self.calibration = Calibration.read(calibration)
        super().__init__(*args, **settings)
        if self.chemical_symbols is None:
            raise InputError("E2IPXYZFileWriter needs chemical_symbols: a calibration goes by species")
        self.calibration.check(families.of_outputs(self.extra_fields), (), "what extra_fields name")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """`InputError` for a calibration of a model that is there already, while another one is going to be tested."""
        if self.calibration.uq_model is not None:
            raise InputError(
                f"{self.calibration.path}: was fitted to predictions of a trained model, not of the one that this "
                "training makes; train first, then run=[test] with the calibration of that model"
            )

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """`InputError` for a calibration of another model."""
        self.calibration.check_model(find_model_name(pl_module), "the one that is tested")
        logger.info(f"the uncertainties that are written are calibrated by {self.calibration.path}")

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Dict[str, Any],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As in the stock callback."""
        key = f"test_{dataloader_idx}_output"
        calibrated = {**outputs, key: self.calibrated(outputs[key], batch)}
        super().on_test_batch_end(trainer, pl_module, calibrated, batch, batch_idx, dataloader_idx)

    def calibrated(self, output: Dict[str, Any], batch: Dict[str, Any]) -> Dict[str, Any]:
        """A model's output with calibrated uncertainties, in NequIP's shapes."""
        family = families.of_outputs(output)
        types = batch[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1).tolist()
        species = [self.chemical_symbols[number] for number in types]
        self.calibration.check(family, species, "the data")
        assert family is not None
        parameters = {key.name: output[key.name].reshape(-1, *key.shape) for key in family.parameter_keys}
        found = self.calibration.in_units(family, parameters, 1.0, species)
        found = {name: value.reshape(output[name].shape) for name, value in found.items() if name in output}
        return {**output, **found, CALIBRATION_KEY: Path(self.calibration.path).name}
