"""``e2ip fit`` for MACE: a ``.model`` file, with or without a readout, gets one with a fitted leverage.

``e2ip update`` fits the constants of such a file anew.
"""

from pathlib import Path
from typing import Optional, Sequence

from e2ip_plugins import families
from e2ip_plugins.files import save
from e2ip_plugins.fitting.batches import OnProgress, fit_loaders, in_order, to_standard_error
from e2ip_plugins.fitting.fit import check_update, is_constant
from e2ip_plugins.fitting.readout_file import fitted_readout
from e2ip_plugins.fitting.records import Work, records_of
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.readout.settings import Settings, resolve_force_unit
from mace_ext.fitting.passes import Graphs, batching, fit_model
from mace_ext.model.files import choose_head, open_file, precision_of
from mace_ext.model.model import add_readout
from mace_ext.model.readout import find_readout


def fit_file(
    model: Path,
    training: Sequence[LabelledFrame],
    validation: Sequence[LabelledFrame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
    on_progress: OnProgress = to_standard_error,
    work: Optional[Work] = None,
) -> FitReport:
    """Fit a ``.model`` file's leverage to its training set, and write it to another file.

    A model with a readout gets evidence mode ``leverage`` where its family has that; a stock model gets e²IP's with a
    constant covariance per species first. Energies and forces stay what they are, to the last bit.

    Parameters
    ----------
    model, output : Path
        Of `mace_run_train`'s ``.model`` files, foundation models included. ``output`` is complete or does not exist.
    training, validation : sequence of LabelledFrame
        The training set needs no forces; where it has them, they tell how much the model is overfitted.
    head : str, optional
        MACE head that the frames belong to; needed where the model has several. The others' leverage is lost.
    device : str
    batch_size : int
        Configurations.
    on_progress : callable
        Takes lines about the progress.
    work : Work, optional
        Keeps what is finished, so that a killed fit goes on; or a part of the fit, which writes no model.

    Raises
    ------
    InputError
        Files and models of another kind, unknown heads and species, and what `fit_leverage` cannot fit.
    """
    net = open_file(model, device)
    head = choose_head(model, net, head)
    with precision_of(net), records_of(work) as records:
        train, valid = (Graphs(frames, net, head) for frames in (training, validation))
        readout = find_readout(net)
        if readout is None:
            add_readout(net, Settings.of(families.DEFAULT, {}, resolve_force_unit(None)).with_leverage(str(model)))
            for trunk in net.e2ip_readout.trunks:
                trunk.make_constant()
        else:
            readout.settings = readout.settings.with_leverage(str(model))
            readout.family = readout.settings.build()
        part = (1, 1) if work is None or work.part is None else work.part
        loaders = fit_loaders(train, [valid], batching(batch_size), batching(batch_size), part)
        constant_readout = is_constant(net.e2ip_readout)
        report = fit_model(net, *loaders, constant_readout=constant_readout, on_progress=on_progress, records=records)
        if report.part is None:
            # On the CPU, or machines without that device could not load what e3nn has compiled.
            save(net.cpu(), output)
    others = [name for name in net.heads if name != head]
    if others and report.part is None:
        report.warnings.append(f"the leverage was fitted for head {head} alone, not for {', '.join(others)}")
    return report


def update_file(
    model: Path,
    frames: Sequence[LabelledFrame],
    output: Path,
    *,
    head: Optional[str] = None,
    device: str = "cpu",
    batch_size: int = 10,
    on_progress: OnProgress = to_standard_error,
) -> FitReport:
    """Fit the constants of a ``.model`` file with a fitted leverage to new frames, and write it to another file.

    What it knows of its training set stays, and so do energies and forces, to the last bit.

    Parameters and what is raised: see `fit_file`. Constants of other heads stay.
    """
    net = open_file(model, device)
    readout = fitted_readout(find_readout(net), model, "to update")
    check_update(readout, frames, model)
    with precision_of(net):
        loader = in_order([Graphs(frames, net, choose_head(model, net, head))], batching(batch_size))
        report = fit_model(net, None, loader, constant_readout=is_constant(readout), on_progress=on_progress)
    save(net.cpu(), output)
    return report
