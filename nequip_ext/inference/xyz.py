"""``E2IPXYZFileWriter``: NequIP's test-time xyz writer with calibrated uncertainties."""

from pathlib import Path
from typing import Any, Dict, Union

from nequip.data import AtomicDataDict
from nequip.train.callbacks import write_xyz
from nequip.utils import RankedLogger

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CALIBRATION_KEY
from e2ip_plugins.scores.calibration import Calibration
from e2ip_plugins.scores.results import calibrated_columns
from nequip_ext.model.readout import find_name

logger = RankedLogger(__name__, rank_zero_only=True)


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
        """Raise `InputError` for a calibration of an existing model, because another one is going to be tested."""
        if self.calibration.uq_model is not None:
            raise InputError(
                f"{self.calibration.path}: was fitted to predictions of a trained model, not of the one that this "
                "training makes; train first, then run=[test] with the calibration of that model"
            )

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise `InputError` for a calibration of another model."""
        self.calibration.check_model(find_name(pl_module), "the one that is tested")
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
        """Write as the stock callback does, with calibrated uncertainties."""
        key = f"test_{dataloader_idx}_output"
        calibrated = {**outputs, key: self.calibrated(outputs[key], batch)}
        super().on_test_batch_end(trainer, pl_module, calibrated, batch, batch_idx, dataloader_idx)

    def calibrated(self, output: Dict[str, Any], batch: Dict[str, Any]) -> Dict[str, Any]:
        """Return a model's output with calibrated uncertainties, in NequIP's shapes."""
        family = families.of_outputs(output)
        types = batch[AtomicDataDict.ATOM_TYPE_KEY].reshape(-1).tolist()
        species = [self.chemical_symbols[number] for number in types]
        self.calibration.check(family, species, "the data")
        assert family is not None
        changed = calibrated_columns(self.calibration, family, output, species)
        return {**output, **changed, CALIBRATION_KEY: Path(self.calibration.path).name}
