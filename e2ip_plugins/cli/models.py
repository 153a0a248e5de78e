"""Subcommands that take a model file and write one, or its predictions: fit, evaluate, strip."""

import zipfile
from pathlib import Path
from typing import Annotated, List, Optional

import typer

from e2ip_plugins.cli import checks


def fit_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip; with or without a readout.")],
    train: Annotated[List[Path], typer.Option(help="Training frames, as the model had them; may be repeated.")],
    valid: Annotated[List[Path], typer.Option(help="Other frames, with forces, to fit constants on; may be repeated.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The fitted model, .ckpt for a stock package. [default: MODEL with -e2ip]")
    ] = None,
    forces_key: Annotated[Optional[str], typer.Option(help="Array of the reference forces. [default: found]")] = None,
    head: Annotated[Optional[str], typer.Option(help="MACE head of the frames, where there are more.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Frames per batch.")] = 10,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Fit a model's uncertainty to its training set, without training.

    The epistemic part of the uncertainty then grows where the training set supports an atom's
    environment less (evidence mode leverage). A model without a readout gets one that knows one
    standard deviation per species besides. Energies and forces stay what they are.
    """
    import numpy as np

    from e2ip_plugins.predictions.labelled import once, read_frames, same_frames

    host = checks.host_of(model)
    if output is None:
        ending = model.suffix if host != "nequip" else ".nequip.zip" if _packages_readout(model) else ".ckpt"
        output = checks.beside(model, f"-e2ip{ending}")
    checks.check_model_output(output, model, overwrite)
    checks.check_device(device)
    training = read_frames(train, forces_key, need_forces=False)
    given = read_frames(valid, forces_key)
    validation = once(given)
    if len(validation) < len(given):
        checks.warn(f"{len(given) - len(validation)} validation frames are there more than once, and count once")
    shared = same_frames(training, validation)
    if shared:
        checks.warn(
            f"{shared} of {len(validation)} validation frames are training frames: constants come out too small; give "
            "frames that the model was not trained on"
        )
    lacking = sum(int((~np.isfinite(frame.forces).all(-1)).sum()) for frame in validation)
    if lacking:
        checks.warn(f"{lacking} validation atoms have no finite reference force and are left out")
    report = checks.entry_point("fit", host, f"{model} is a model of {host}")(
        model, training, validation, output, head=head, device=device, batch_size=batch_size
    )
    for text in report.warnings:
        checks.warn(text)
    for line in report.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")


def _packages_readout(model: Path) -> bool:
    """Whether a file is a package of NequIP that carries the code of a readout."""
    if not zipfile.is_zipfile(model):
        return False
    with zipfile.ZipFile(model) as archive:
        return any(name.endswith("nequip_ext/model/readout.py") for name in archive.namelist())


def evaluate_command(
    model: Annotated[
        Path, typer.Argument(help="MACE .model, NequIP .ckpt, .nequip.zip or .nequip.pt2, with a readout.")
    ],
    source: Annotated[Path, typer.Argument(metavar="IN.extxyz", help="Frames, of any number.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.extxyz", help="The frames with predictions.")],
    batch_atoms: Annotated[
        Optional[int], typer.Option(min=1, help="Atoms per batch, at most. [default: 512, unless --batch-edges]")
    ] = None,
    batch_edges: Annotated[Optional[int], typer.Option(min=1, help="Pairs of neighbours per batch, at most.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    dtype: checks.Dtype = None,
    head: Annotated[Optional[str], typer.Option(help="MACE head, where there are more.")] = None,
    calibration: Annotated[
        Optional[Path], typer.Option(help="File of e2ip calibrate, applied to the uncertainties.")
    ] = None,
    stress: Annotated[bool, typer.Option("--stress", help="Also the stress of fully periodic frames.")] = False,
    no_covariances: Annotated[
        bool,
        typer.Option("--no-covariances", help="Leave 3x3 columns out, which follow from the parameters."),
    ] = False,
    part: Annotated[str, typer.Option(metavar="I/N", help="Only the I-th of N pieces of the input.")] = "1/1",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad frames out and list them in OUT.extxyz.skipped.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Predict energies, forces and uncertainties of many frames.

    Takes files larger than memory. The same command goes on where it was stopped, for whatever
    reason: until the output is complete it is called OUT.extxyz.part. `e2ip compare` and
    `e2ip calibrate` read it, with the references that the input has.

    --part 1/8 to 8/8 are eight commands for as many processes or nodes; their outputs one after
    another (cat) are the whole.
    """
    from e2ip_plugins.evaluation.evaluate import Options, check_files, digest_of, evaluate, part_of, skipped_file
    from e2ip_plugins.evaluation.progress import progress
    from e2ip_plugins.scores.calibration import Calibration

    host = checks.host_of(model, checks.WITH_COMPILED)
    options = Options(
        batch_atoms=512 if batch_atoms is None and batch_edges is None else batch_atoms,
        batch_edges=batch_edges,
        calibration=None if calibration is None else Calibration.read(calibration),
        stress=stress,
        covariances=not no_covariances,
        part=part_of(part),
        skip_bad=skip_bad,
        overwrite=overwrite,
    )
    checks.check_dtype(dtype)
    check_files(source, output, overwrite)
    checks.check_device(device)
    opened = checks.entry_point("evaluate", host, f"{model} is a model of {host}")(
        model, device=device, dtype=dtype, head=head
    )
    if opened.warning:
        checks.warn(opened.warning)
    settings = {"the model": digest_of(model), "--dtype": opened.dtype, "--head": head or "none"}
    try:
        with progress(source, options.part) as told:
            state = evaluate(opened, source, output, options, settings, told, str(model))
    except KeyboardInterrupt:
        checks.warn("interrupted; what is finished is kept: the same command goes on")
        raise typer.Exit(130) from None  # as of any command that Ctrl-C ends
    if state.skipped:
        first = state.skipped[0][1]
        number = f"{len(state.skipped)} bad frame{'s' * (len(state.skipped) != 1)}"
        checks.warn(f"{number} left out, listed in {skipped_file(output)}; the first: {first}")
    if state.without_stress:
        number = f"{state.without_stress} of {state.written}"
        checks.warn(
            f"--stress: {number} frames have none: it is for frames that are periodic in all directions, and "
            "compiled models may lack it"
        )
    typer.echo(f"Written: {output}, {state.written} frame{'s' * (state.written != 1)}")
    if state.skipped and not state.written:
        raise typer.Exit(1)


def strip_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a readout.")],
    output: Annotated[Optional[Path], typer.Option(help="The stock model. [default: MODEL with -stock]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Take the readout off a model.

    What is left is the host's own model, which needs no plugin. Energies and forces stay what they are, to the
    last bit.
    """
    host = checks.host_of(model)
    if output is None:
        output = checks.beside(
            model, "-stock.nequip.zip" if model.name.endswith(".nequip.zip") else f"-stock{model.suffix}"
        )
    checks.check_model_output(output, model, overwrite)
    checks.entry_point("strip", host, f"{model} is a model of {host}")(model, output)
    typer.echo(f"Written: {output}")
