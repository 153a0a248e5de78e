"""Fit of the leverage of MACE models: at the end of `mace_run_train`, and of model files by ``e2ip fit``.

MACE loads the best checkpoint once more after training, for every stage; then it saves the model, compiles it, and
makes the final tables. The fit comes right after that load, so that all of them carry it.
"""

import logging
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Sequence

import torch
from mace import data
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric.dataloader import DataLoader
from torch.utils.data import ConcatDataset, Dataset, Subset

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.files import save
from e2ip_plugins.fitting.fit import Labelled, Report, fit_leverage, in_words, is_constant, some
from e2ip_plugins.fitting.training_atoms import distributed
from e2ip_plugins.predictions.checks import check_atoms
from e2ip_plugins.predictions.labelled import Frame
from e2ip_plugins.readout.settings import Settings, resolve_force_unit
from mace_ext.model.files import choose_head, configuration, open_file, precision_of, species_of
from mace_ext.model.model import add_readout
from mace_ext.model.readout import find_readout
from mace_ext.training.remembered import remembering

#: Seconds after which a pass over the data says how far it has come.
PATIENCE = 10.0

Say = Callable[[str], None]


class Training(NamedTuple):
    """What a fit needs of the training that has just ended.

    Attributes
    ----------
    train_loader : DataLoader
    valid_loaders : dict of DataLoader
        By MACE head.
    device : torch.device
    """

    train_loader: Any
    valid_loaders: Dict[str, Any]
    device: torch.device


def fit_trained(model: Any, training: Training) -> None:
    """Fit the leverage of a model to the data it was trained on, and log what was found.

    All processes of a distributed training must call it. A fit that is impossible leaves the model unfitted, with a
    warning: the training is not lost for it.
    """
    logging.info("Fitting the leverage to training and validation set")
    valid = list(training.valid_loaders.values())
    train, batch_size = training.train_loader.dataset, training.train_loader.batch_size
    validation: Any = ConcatDataset([loader.dataset for loader in valid])
    try:
        with remembering(model, more=False):
            report = fit_model(
                model,
                in_order(train, batch_size),
                in_order(validation, valid[0].batch_size),
                training.device,
                say=logging.info,
                known=in_order(train, batch_size, some(len(train), len(validation))),
            )
    except Exception as error:
        if distributed() and not isinstance(error, InputError):
            raise  # InputError meets all processes; with another error they would wait for this one
        model.e2ip_readout.leverage.reset()
        logging.warning(f"The leverage was not fitted: {in_words(error)}")
        return
    for warning in report.warnings:
        logging.warning(warning)
    for line in report.lines(model.heads):
        logging.info(line)


def fit_model(
    model: Any,
    training: Iterable[Any],
    validation: Iterable[Any],
    device: Any,
    constant: bool = False,
    say: Optional[Say] = None,
    known: Iterable[Any] = (),
) -> Report:
    """Fit the leverage of an e²IP model in place; nothing else of it changes, nor does torch's random state.

    Parameters
    ----------
    model : ScaleShiftMACE
        Not wrapped by DDP.
    training, validation
        Loaders; of distributed processes, each has its share. Atoms count if their configuration's weights are not
        zero, those of ``validation`` and ``known`` if their reference forces are finite, too.
    device
        Where the model is.
    constant : bool
        See `fit_leverage`.
    say : callable, optional
        Takes lines about the progress.
    known
        The same, of training configurations whose errors are compared with those of the validation set.
    """

    def features() -> Iterator[torch.Tensor]:
        for batch in _with_progress(training, "training set", say):
            batch = batch.to(device)
            with torch.no_grad():
                model.uncertainty_outputs(batch.to_dict())
            yield (batch.weight * (batch.energy_weight + batch.forces_weight) > 0)[batch.batch]

    def residuals(loader: Any, what: str) -> Iterator[Labelled]:
        for batch in _with_progress(loader, what, say):
            batch = batch.to(device)
            forces = model(batch.to_dict(), compute_force=True)["forces"].detach()
            counts = (batch.weight * batch.forces_weight > 0)[batch.batch]
            missing = torch.full_like(forces, float("nan"))
            yield Labelled(torch.where(counts.unsqueeze(-1), batch.forces - forces, missing), batch.batch, forces)

    species = species_of(model)
    with _frozen(model):
        return fit_leverage(
            model.e2ip_readout,
            features(),
            residuals(validation, "validation set"),
            species,
            constant,
            known=residuals(known, "errors of the training set"),
        )


def in_order(dataset: Any, batch_size: int, chosen: Optional[range] = None) -> DataLoader:
    """Configurations of a data set, default: all, once whatever the seed; of several processes, each has its share."""
    if distributed():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        chosen = (range(len(dataset)) if chosen is None else chosen)[rank::count]
    if chosen is not None:
        dataset = Subset(dataset, chosen)
    # A generator of its own: a loader draws from torch's, shuffled or not.
    return DataLoader(dataset, batch_size, shuffle=False, drop_last=False, generator=torch.Generator())


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Model in evaluation mode and weights without gradients, both as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)


def _with_progress(loader: Any, what: str, say: Optional[Say]) -> Iterator[Any]:
    start, tenths, total = time.monotonic(), 0, len(loader)
    for done, batch in enumerate(loader, 1):
        yield batch
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            if say is not None and time.monotonic() - start > PATIENCE:
                say(f"leverage: {what} {10 * tenths} %")


class Graphs(Dataset):
    """MACE's graphs of frames, made when asked for: a training set's neighbours may not fit into memory."""

    def __init__(self, frames: Sequence[Frame], model: Any, head: str) -> None:
        self.frames, self.model, self.head, self.heads = frames, model, head, list(model.heads)
        self.table = AtomicNumberTable([int(z) for z in model.atomic_numbers])
        self.cutoff = float(model.r_max)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> data.AtomicData:
        frame = self.frames[index]
        try:
            config = configuration(frame.atoms, self.model, self.head)
        except InputError as error:
            raise InputError(f"{frame.where}: {error}") from error
        config.weight = config.property_weights["forces"] = 1.0
        config.properties["forces"] = frame.forces
        return data.AtomicData.from_config(config, self.table, self.cutoff, self.heads)


def fit_file(
    model: Path,
    training: Sequence[Frame],
    validation: Sequence[Frame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
    say: Optional[Say] = None,
) -> Report:
    """Fit a ``.model`` file's leverage to its training set, and write it to another file.

    A model with a readout gets evidence mode ``leverage`` where its family has that; a stock model gets e²IP's with a
    constant covariance per species first. Energies and forces stay what they are, to the last bit.

    Parameters
    ----------
    model, output : path
        Of `mace_run_train`'s ``.model`` files, foundation models included. ``output`` is whole or not there.
    training, validation : sequence of Frame
        Of the training set no forces are needed; those that it has tell how much the model knows by heart.
    head : str, optional
        MACE head that the frames belong to; needed where the model has several. The others' leverage is lost.
    device : str
    batch_size : int
        Configurations.
    say : callable, optional
        Takes lines about the progress; default: to standard error.

    Raises
    ------
    InputError
        Files and models of another kind, unknown heads and species, and what `fit_leverage` cannot fit.
    """
    model, output = Path(model), Path(output)
    if not output.parent.is_dir():
        raise InputError(f"{output}: the folder does not exist")
    if output.exists() and output.samefile(model):
        raise InputError(f"{output}: is the model itself; give the fitted one another name")
    net = open_file(model, device)
    own_head = choose_head(model, net, head)
    check_species(net, [*training, *validation])
    found = find_readout(net)
    with precision_of(net):
        if found is None:
            add_readout(net, Settings.of(families.DEFAULT, {}, resolve_force_unit(None)).with_leverage(str(model)))
            for trunk in net.e2ip_readout.trunks:
                trunk.make_constant()
        else:
            found.settings = found.settings.with_leverage(str(model))
            found.family = found.settings.build()
        train, valid = (Graphs(frames, net, own_head) for frames in (training, validation))
        constant = is_constant(net.e2ip_readout)
        say = say or (lambda line: print(line, file=sys.stderr))
        passes = in_order(train, batch_size), in_order(valid, batch_size)
        known = in_order(train, batch_size, some(len(train), len(valid)))
        report = fit_model(net, *passes, device, constant, say, known)
    others = [name for name in net.heads if name != own_head]
    if others:
        report.warnings.append(f"the leverage was fitted for head {own_head} alone, not for {', '.join(others)}")
    # On the CPU, or machines without that device could not load what e3nn has compiled.
    save(net.cpu(), output)
    return report


def check_species(net: Any, frames: Iterable[Frame]) -> None:
    known = species_of(net)
    for frame in frames:
        check_atoms(frame.atoms.numbers, frame.atoms.positions, frame.where, known)
