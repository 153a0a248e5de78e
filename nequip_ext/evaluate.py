"""What NequIP's xyz writers lack: ``uq_family``, the name of the predictive family, and calibrated uncertainties."""

import functools
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import ase
from nequip.data import AtomicDataDict
from nequip.train.callbacks import write_xyz

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CALIBRATION_KEY, FAMILY_KEY
from e2ip_plugins.scores.calibration import Calibration


def name_family_in_files() -> None:
    """Let NequIP's xyz writers name the family in every frame whose columns hold its parameters.

    Their columns are tensors, so the name has to be added to what they make of an output: `to_ase` of their module is
    wrapped, once.
    """
    if not hasattr(write_xyz.to_ase, "names_family"):
        write_xyz.to_ase = _naming_family(write_xyz.to_ase)


def _naming_family(to_ase: Any) -> Any:
    @functools.wraps(to_ase)
    def wrapped(
        *args: Any, extra_fields: Optional[List[str]] = None, **kwargs: Any
    ) -> Union[ase.Atoms, List[ase.Atoms]]:
        made = to_ase(*args, extra_fields=extra_fields, **kwargs)
        family = families.of_outputs(extra_fields or [])
        if family is not None:
            for frame in made if isinstance(made, list) else [made]:
                frame.info[FAMILY_KEY] = family.uq_family
                if CALIBRATION_KEY in args[0]:
                    frame.info[CALIBRATION_KEY] = args[0][CALIBRATION_KEY]
        return made

    wrapped.names_family = True  # type: ignore[attr-defined]
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
