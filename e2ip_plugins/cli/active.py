"""Subcommands of active learning: select, label."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError


def select_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a fitted leverage.")],
    trajectories: Annotated[List[Path], typer.Argument(metavar="TRAJECTORY ...", help="Frames to choose from.")],
    train: Annotated[List[Path], typer.Option(help="Frames that the model was trained on; may be repeated.")],
    number: Annotated[int, typer.Option(min=1, help="Number of frames to select.")],
    output: Annotated[Path, typer.Option(help="Selected frames, in order of selection.")] = Path("selected.extxyz"),
    method: Annotated[
        str, typer.Option(metavar="leverage|random|farthest|energy", help="Method of selection.")
    ] = "leverage",
    every: Annotated[int, typer.Option(min=1, help="Take only every N-th frame into account.")] = 1,
    min_distance: Annotated[float, typer.Option(help="Smallest distance, in sums of covalent radii.")] = 0.6,
    max_force: Annotated[float, typer.Option(help="Largest predicted force on an atom, in eV/Å.")] = 50.0,
    max_leverage: Annotated[float, typer.Option(help="Largest leverage of an atom.")] = float("inf"),
    allow_parts: Annotated[
        bool, typer.Option("--allow-parts", help="Allow structures in more parts than in the training set.")
    ] = False,
    weight: Annotated[
        Optional[float],
        typer.Option(help="Training atoms that an atom of a selected frame counts for. [default: atoms per feature]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of method random.")] = 0,
    head: checks.Head = None,
    device: checks.Device = "cpu",
    batch_size: checks.BatchSize = 10,
    overwrite: checks.Overwrite = False,
) -> None:
    """Choose frames of runs that are worth a label: uncertain, unlike each other, and physically possible.

    With leverage, the frame with the largest mean leverage is taken, its atoms enter the moments of the training set,
    and all others are scored anew. A frame like one that was taken therefore drops out. random and farthest
    (farthest-point selection, in the same features) serve for comparison. energy takes the frame with the largest
    energy uncertainty per atom, and then those of which the energies of the frames taken tell least.
    """
    import ase.io

    from e2ip_plugins.active.select import Candidate, SelectOptions, select
    from e2ip_plugins.active.validity import Validity
    from e2ip_plugins.files import replacing
    from e2ip_plugins.predictions.labelled_files import read_frames

    host = checks.host_of(model)
    checks.check_output(output, [model, *trajectories, *train], overwrite, frames=True)
    validity = Validity(min_distance, max_force, max_leverage, not allow_parts)
    options = SelectOptions(number, method, validity, weight, seed)
    training = read_frames(train, need_forces=False, on_note=checks.warn)
    candidates = []
    for path in trajectories:
        frames = checks.read_trajectory(path)
        candidates += [Candidate(frames[index], str(path), index) for index in range(0, len(frames), every)]
    feature_model = checks.opened("passes", host, model, head=head, device=device, batch_size=batch_size)
    selection = select(feature_model, training, candidates, options)
    with replacing(output) as unfinished:
        ase.io.write(unfinished, selection.marked_frames(), format="extxyz")
    checks.tell(selection)
    typer.echo(f"Written: {output}")


def label_command(
    frames: Annotated[Path, typer.Argument(metavar="FRAMES.extxyz", help="Frames to label.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUT.extxyz", help="Labelled frames; those that it has are not computed again.")
    ],
    calculator: Annotated[
        str, typer.Option(metavar="MODULE:CLASS", help="Calculator of ASE, for example tblite.ase:TBLite.")
    ],
    argument: Annotated[
        Optional[List[str]],
        typer.Option(
            metavar="NAME=VALUE", help="Argument of the calculator, for example method=GFN2-xTB; may be repeated."
        ),
    ] = None,
) -> None:
    """Label frames with reference energies and forces (REF_energy, REF_forces), by any calculator of ASE.

    Run an interrupted command again: it goes on where it was. Frames whose calculation fails are skipped and listed,
    with exit status 1; the next call tries them again.
    """
    from e2ip_plugins.active.label import LabelOptions, label
    from e2ip_plugins.predictions.chunks import split_slice

    options = LabelOptions(calculator, argument or ())
    atoms = checks.read_trajectory(frames)
    if output.exists() and output.samefile(split_slice(frames)[0]):
        raise InputError(f"{output}: is the file of frames itself")
    labels = label(atoms, output, options, lambda text: checks.warn(f"{frames}, {text}"))
    if labels.note:
        checks.warn(labels.note)
    typer.echo(f"{labels.labelled} labelled, {labels.existing} there already, {len(labels.failed)} failed")
    typer.echo(f"Written: {output}" if labels.labelled or labels.existing else "Written: nothing")
    if labels.failed:
        raise typer.Exit(1)
