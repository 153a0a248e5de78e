"""Subcommands for the readout of a model alone: export-readout, attach, update."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError


def export_readout_command(
    model: Annotated[
        Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a readout and a fitted leverage.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT.e2ip", help="The readout file.")],
    overwrite: checks.Overwrite = False,
) -> None:
    """Write the readout and the leverage of a model to a file of their own, without the network.

    Who has the base model (what `e2ip strip` leaves of MODEL) puts them on it with `e2ip attach`. So error bars of a
    public model can be published by whoever has its training set.
    """
    host = checks.host_of(model)
    if output.suffix != ".e2ip":
        raise InputError(f"{output}: the name of a readout file ends with .e2ip")
    checks.check_output(output, [model], overwrite, option="")
    file = checks.entry_point("export_readout", host, f"{model} is a model of {host}")(model)
    file.write(output)
    for note in file.notes():
        checks.warn(note)
    typer.echo(
        f"Written: {output}, {output.stat().st_size / 1e6:.2g} MB: readout {file.settings.family} ({file.name}) of the "
        f"{file.base.in_words}, {file.base.dtype}, of {len(file.base.species)} species"
    )


def attach_command(
    model: Annotated[
        Path, typer.Argument(metavar="BASE", help="The base model: MACE .model, NequIP .ckpt or .nequip.zip.")
    ],
    readout: Annotated[Path, typer.Argument(metavar="READOUT.e2ip", help="File of `e2ip export-readout`.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The model with the readout, .ckpt for a package. [default: BASE with -e2ip]")
    ] = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Put the readout of a file on the base model that it was fitted on.

    Energies and forces stay what they are, to the last bit, and uncertainties are those of the model that the readout
    was exported from. Files are opened as data alone: nothing in them is executed.
    """
    from e2ip_plugins.fitting.readout_file import ReadoutFile

    host = checks.host_of(model)
    output = checks.model_output(output, model, overwrite, "e2ip", ".ckpt" if host == "nequip" else None)
    file = ReadoutFile.read(readout)
    file.check_host(readout, model, host)
    checks.entry_point("attach", host, f"{model} is a model of {host}")(model, file, readout, output)
    for note in file.notes():
        checks.warn(note)
    typer.echo(f"Written: {output}, with {file.name}")


def update_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a fitted leverage.")],
    frames: Annotated[List[Path], typer.Option(help="New frames with reference forces, 20 to 50; may be repeated.")],
    output: Annotated[Optional[Path], typer.Option(help="The updated model. [default: MODEL with -updated]")] = None,
    forces_key: checks.ForcesKey = None,
    energy_key: checks.EnergyKey = None,
    head: checks.Head = None,
    device: checks.Device = "cpu",
    batch_size: checks.BatchSize = 10,
    overwrite: checks.Overwrite = False,
) -> None:
    """Fit the constants of a model's uncertainty anew to a few frames, without its training set.

    What the model knows of its training set stays. How fast the uncertainty grows, how large it is where the training
    set supports an atom, and the error bars of energies and stresses are fitted to the frames, which should be like
    those that the model is going to be used for. Energies and forces stay what they are.
    """
    host = checks.host_of(model)
    output = checks.model_output(output, model, overwrite, "updated")
    checks.check_device(device)
    new = checks.stored_references(frames, host, (forces_key, energy_key), "new")
    options = {"head": head, "device": device, "batch_size": batch_size}
    report = checks.entry_point("update", host, f"{model} is a model of {host}")(model, new, output, **options)
    checks.tell(report)
    typer.echo(f"Written: {output}")
