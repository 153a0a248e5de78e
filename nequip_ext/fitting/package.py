"""``e2ip fit`` for packages of NequIP: a new package of one with a readout, a checkpoint that reads a stock one."""

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import lightning
import torch
from nequip.data import AtomicDataDict
from nequip.model.saved_models.package import (
    ModelFromPackage,
    _get_package_metadata,
    _suppress_package_importer_exporter_warnings,
    data_dict_from_package,
)
from nequip.scripts._package_utils import _EXTERNAL_MODULES, _INTERNAL_MODULES, _MOCK_MODULES
from nequip.train import NequIPLightningModule
from nequip.train.lightning import _SOLE_MODEL_KEY
from nequip.utils import get_current_code_versions
from nequip.utils.global_state import get_latest_global_state

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import replacing
from e2ip_plugins.fitting.batches import OnProgress
from e2ip_plugins.fitting.fit import check_update
from e2ip_plugins.fitting.readout_file import fitted_readout
from e2ip_plugins.fitting.records import Records
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.predictions.labelled import LabelledFrame
from nequip_ext.compat import IS_0_16, cpu_deserialize
from nequip_ext.fitting.passes import fit_frames
from nequip_ext.model.checkpoints import explained
from nequip_ext.model.elements import types_of
from nequip_ext.model.readout import find_readout, settings_of
from nequip_ext.registration import register

_KINDS = {"train": 1, "val": 0, "test": 0, "predict": 0}


class Package(NamedTuple):
    """Content of a package: models by the way in which they are to be compiled, and an example of their input."""

    importer: torch.package.PackageImporter
    models: Dict[str, torch.nn.ModuleDict]
    example: AtomicDataDict.Type

    @classmethod
    def read(cls, path: Path) -> "Package":
        """Read a package on the CPU; `InputError` for other files."""
        register()  # for `write`: which libraries stay outside
        with _suppress_package_importer_exporter_warnings():
            try:
                importer = torch.package.PackageImporter(str(path))
                names = _get_package_metadata(importer)["available_models"]
            # Reading a broken archive raises whatever goes wrong in it.
            except Exception as error:
                kind = type(error).__name__
                raise InputError(f"{path}: is no package of nequip-package ({kind}: {error})") from error
            with cpu_deserialize():
                models = {
                    name: importer.load_pickle("model", f"{name}_model.pkl", map_location="cpu") for name in names
                }
                return cls(importer, models, importer.load_pickle("model", "example_data.pkl"))

    def write(self, path: Path) -> None:
        """Write the models as they are now, with the code that they use and all else that the package had."""
        with replacing(path) as unfinished, _suppress_package_importer_exporter_warnings():
            # As `nequip-package modify` does it.
            importers = (self.importer, torch.package.importer.sys_importer)
            with torch.package.PackageExporter(str(unfinished), importer=importers) as exporter:
                exporter.mock([f"{package}.**" for package in _MOCK_MODULES])
                exporter.extern([f"{package}.**" for package in _EXTERNAL_MODULES])
                exporter.intern([f"{package}.**" for package in _INTERNAL_MODULES])
                exporter.save_pickle("model", "example_data.pkl", self.example, dependencies=True)
                for resource in ("config.yaml", "package_metadata.txt"):
                    exporter.save_text("model", resource, self.importer.load_text("model", resource))
                for name, modules in self.models.items():
                    exporter.save_pickle("model", f"{name}_model.pkl", modules, dependencies=True)


def fit_package(
    path: Path,
    training: Optional[Sequence[LabelledFrame]],
    validation: Sequence[LabelledFrame],
    output: Path,
    device: str,
    batch_size: int,
    on_progress: OnProgress,
    records: Optional[Records] = None,
) -> Optional[FitReport]:
    """Write a package with a fitted leverage; everything else in it, code included, stays. None for stock packages.

    Parameters, and what is raised: see `nequip_ext.fitting.file.fit_file`; without a training set, `update_file` there.
    """
    package = Package.read(path)
    models = package.models
    model = models["eager"][_SOLE_MODEL_KEY].to(device).eval()
    readout = find_readout(model)
    if readout is None:
        return None
    if not output.name.endswith(".nequip.zip"):
        raise InputError(f"--output {output}: what is made of {path} is a package: the name must end with .nequip.zip")
    known = dict(Leverage(1, 1).named_buffers())
    if dict(getattr(readout, "leverage", torch.nn.Module()).named_buffers()).keys() != known.keys():
        raise InputError(
            f"{path}: carries the code of a version of e2ip-plugins that cannot be fitted: package its checkpoint anew"
        )
    if training is None:
        check_update(fitted_readout(readout, path, "to update"), validation, path)
    for modules in models.values():
        _into_mode_leverage(find_readout(modules), path)
    with explained(path):
        report = fit_frames(model, training, validation, batch_size, types_of(path), on_progress, records)
    if report.part is not None:
        return report
    model.cpu()
    for other in map(find_readout, models.values()):
        other.load_state_dict(readout.state_dict())  # type: ignore[union-attr]
    package.write(output)
    return report


def _into_mode_leverage(readout: Any, path: Path) -> None:
    """Change settings and family of a readout, which are of the classes that the package carries."""
    changed = settings_of(readout).with_leverage(str(path))
    readout.settings = type(readout.settings)(*changed)
    readout.family.takes_support = changed.build().takes_support


def wrap_package(path: Path) -> Dict[str, Any]:
    """Return a checkpoint of a stock package, as of a training without steps: its model is read from the package."""
    if IS_0_16:
        raise InputError(f"{path}: NequIP 0.16 cannot have a stock package fitted: fit the checkpoint it was made of")
    config = {"_target_": f"nequip.model.{ModelFromPackage.__name__}", "package_path": str(path.resolve())}
    target = f"nequip.train.{NequIPLightningModule.__name__}"
    info = {
        "versions": get_current_code_versions(verbose=False),
        "data": {"_target_": "nequip_ext.fitting.package.ExampleOfPackage", "package_path": config["package_path"]},
        "trainer": {},
        "global_options": dict(get_latest_global_state()),
        "runs": [],
        "training_module": {"_target_": target, "model": dict(config)},
    }
    module = NequIPLightningModule(model=config, num_datasets=_KINDS, info_dict=info)
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": module.state_dict(),
        "hparams_name": "kwargs",
        "hyper_parameters": dict(module.hparams),
    }


class ExampleOfPackage:
    """Data of such a checkpoint, for ``nequip-compile``: the frame in the package."""

    def __init__(self, package_path: str, train_dataloader: Optional[Dict[str, Any]] = None) -> None:
        self.package_path = package_path

    def prepare_data(self) -> None:
        """Nothing to do."""

    def setup(self, stage: str) -> None:
        """Nothing to do."""

    def teardown(self, stage: str) -> None:
        """Nothing to do."""

    def train_dataloader(self) -> List[AtomicDataDict.Type]:
        """Return the one frame."""
        return [data_dict_from_package(self.package_path)]
