"""`e2ip fetch`: published data sets, from NequIP's own data modules into extxyz files that either host reads."""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import ase
import ase.io
from nequip.data.datamodule import MD22DataModule, WaterDataModule, rMD17DataModule

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import replacing
from nequip_ext.training.labels import labelled


class Source(NamedTuple):
    """A data module of NequIP, its arguments besides seed and folder, and how many test frames are written at most."""

    module: Callable[..., Any]
    arguments: Dict[str, Any]
    test_frames: Optional[int] = None


#: By the NAME of `e2ip fetch`. Splits are random, by the seed.
SOURCES: Dict[str, Source] = {
    "fullwater": Source(WaterDataModule, {"train_val_test_split": [0.8, 0.1, 0.1]}),
    "buckyball": Source(MD22DataModule, {"dataset": "buckyball_catcher", "train_val_split": [540, 60]}, 1000),
    "nanotube": Source(MD22DataModule, {"dataset": "double_walled_nanotube", "train_val_split": [720, 80]}, 1000),
    **{
        f"rmd17_{name}": Source(
            rMD17DataModule, {"dataset": name, "subset_len": 2000, "train_val_test_split": [950, 50, 1000]}
        )
        for name in rMD17DataModule.DATASET_MAP
    },
}


def fetch(name: str, folder: Path, seed: int = 0) -> List[Path]:
    """Download a data set unless its raw files exist, and write its splits.

    Parameters
    ----------
    name : str
        One of `SOURCES`.
    folder : Path
        Gets ``NAME/NAME_train.extxyz``, ``…_valid…`` and ``…_test…``, with ``REF_energy`` in eV and ``REF_forces`` in
        eV/Å, and NequIP's raw files in ``NAME/raw``.
    seed : int
        Of the split.

    Returns
    -------
    list of Path
        Of the three files.

    Raises
    ------
    InputError
        For an unknown name, and where the download fails.
    """
    if name not in SOURCES:
        raise InputError(f"unknown data set '{name}'; choose from: {', '.join(SOURCES)}")
    source, raw = SOURCES[name], folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    module = source.module(seed=seed, transforms=[], data_source_dir=str(raw), **source.arguments)
    try:
        module.prepare_data()
    except OSError as error:  # no network, no such address any more, a full disk
        raise InputError(f"{name}: cannot be downloaded to {raw} ({error}); put its raw files there by hand") from error
    module.setup("fit")
    module.setup("test")
    written = []
    for label, (dataset,), most in (
        ("train", module.train_dataset, None),
        ("valid", module.val_dataset, None),
        ("test", module.test_dataset, source.test_frames),
    ):
        path = folder / name / f"{name}_{label}.extxyz"
        with replacing(path) as unfinished:
            ase.io.write(unfinished, list(_frames(dataset, most)), format="extxyz")
        written.append(path)
    return written


def _frames(dataset: Any, most: Optional[int]) -> Iterator[ase.Atoms]:
    for frame in (labelled(dataset[i]) for i in range(min(len(dataset), most or len(dataset)))):
        assert frame.energy is not None and frame.forces is not None
        frame.atoms.info["REF_energy"] = float(frame.energy.values)
        frame.atoms.new_array("REF_forces", frame.forces.values)
        yield frame.atoms
