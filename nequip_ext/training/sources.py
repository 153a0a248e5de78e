"""Data that NequIP reads, for ``e2ip fit``: HDF5, LMDB and npz files, and the data section of a training's YAML."""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
from hydra.utils import instantiate
from nequip.data import AtomicDataDict
from nequip.data.dataset import HDF5Dataset, NequIPLMDBDataset, NPZDataset
from nequip.data.dict import from_dict
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset, Dataset

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.predictions.stored_frames import FrameSource
from nequip_ext.training.labels import in_memory, label_transforms, labelled, predicted_labels, whole_of

_WAY_OUT = "of arrays with other names give a YAML with the data section of a training, whose key_mapping says them"


class Source(FrameSource):
    """Frames of a data set of NequIP's."""

    def __init__(self, path: Path, dataset: Dataset, split: str = "") -> None:
        self.path, self.dataset, self.split = path, dataset, split
        stored = in_memory(dataset)
        labels = {} if stored is None else predicted_labels(stored.whole)
        numbers = [] if stored is None else [number for number, _ in stored.numbered]
        #: Labels that are predictions, by number of the frame here.
        self.predicted: Dict[int, Any] = {i: labels[number] for i, number in enumerate(numbers) if number in labels}

    def walk(self) -> Iterator[Optional[LabelledFrame]]:
        """Yield all frames."""
        return map(self.read, range(len(self.dataset)))  # type: ignore[arg-type]

    def read(self, number: int) -> LabelledFrame:
        """Return a frame by its number."""
        where = f"{self.path}, frame {number}{self.split}"
        try:
            data = self.dataset[number]
        # Libraries raise whatever goes wrong in a file that was cut off.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"{where}: cannot be read ({reason}); was the file cut off?") from error
        if AtomicDataDict.ATOMIC_NUMBERS_KEY not in data:
            raise InputError(f"{where}: has no atomic numbers")
        return labelled(data, where, self.predicted.get(number, {}))


class _Arrays(Dataset):
    """Frames of an npz file, whose arrays are in memory: NequIP reads all of them for every frame."""

    def __init__(self, path: str) -> None:
        mapping = NPZDataset(path).key_mapping
        with np.load(path) as file:
            self.arrays = {field: file[name] for name, field in mapping.items()}
        self.size = len(self.arrays[AtomicDataDict.POSITIONS_KEY])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> AtomicDataDict.Type:
        species = AtomicDataDict.ATOMIC_NUMBERS_KEY
        return from_dict({field: x if field == species else x[index] for field, x in self.arrays.items()})


#: How files are opened, by their ending.
_FORMATS: Dict[str, Callable[[str], Dataset]] = {
    ".h5": HDF5Dataset,
    ".hdf5": HDF5Dataset,
    ".lmdb": NequIPLMDBDataset,
    ".npz": _Arrays,
}


def open_source(path: Path, keys: Tuple[Optional[str], Optional[str]], split: str) -> Optional[FrameSource]:
    """Open a file of one of NequIP's data sets, or the YAML of a training; None for others.

    Parameters
    ----------
    path : Path
    keys : (str or None, str or None)
        Not used: such data have NequIP's names.
    split : str
        ``train`` or ``val``: the set that is wanted of a YAML.

    Raises
    ------
    InputError
        Missing and damaged files, and data sections that NequIP cannot use.
    """
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    try:
        if path.suffix in (".yaml", ".yml"):
            return Source(path, _of_training(path, split), f" of the {split} set")
        if path.suffix in _FORMATS:
            return Source(path, _FORMATS[path.suffix](str(path)))
    except InputError:
        raise
    # NequIP and its libraries raise whatever goes wrong.
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        way_out = f"; {_WAY_OUT}" if path.suffix in _FORMATS else ""
        raise InputError(f"{path}: NequIP cannot open it ({reason}){way_out}") from error
    return None


def _of_training(path: Path, split: str) -> Dataset:
    """Return the training or the validation set of a data section, without what only a model needs."""
    config = OmegaConf.load(path)
    if "data" not in config:
        raise InputError(f"{path}: has no section 'data', as the YAML of nequip-train has")
    module = instantiate(config.data, _recursive_=False)
    module.prepare_data()
    module.setup("fit")
    datasets: List[Any] = module.train_dataset if split == "train" else module.val_dataset
    for dataset in datasets:
        whole_of(dataset).transforms = label_transforms(dataset)
    return datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
