"""The ``e2ip`` command."""

import dataclasses
import enum
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, List, Optional, Sequence

import typer

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError

# Subcommands import what they need themselves: help and errors must not wait for torch and matplotlib.


class _Group(typer.core.TyperGroup):
    """Input errors of every subcommand end as one line, with exit status 2."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.secho(f"e2ip: error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    rich_markup_mode="markdown", cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


class Unit(str, enum.Enum):
    """Energy unit of tables and figures."""

    eV = "eV"
    kcal = "kcal"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Evidential force uncertainty for NequIP and MACE: tools for what their own commands wrote."""


@app.command("compare")
def compare_command(
    files: Annotated[
        List[Path],
        typer.Argument(metavar="BASELINE.xyz E2IP.xyz ...", help="extxyz files with predictions for the same frames."),
    ],
    labels: Annotated[
        Optional[str], typer.Option(help="Names of the models, separated by commas. [default: file names]")
    ] = None,
    ood: Annotated[
        Optional[List[Path]],
        typer.Option(
            metavar="BASELINE_ood.xyz",
            help="The models' predictions for out-of-distribution frames: once per model, in the same order.",
        ),
    ] = None,
    calibration: Annotated[
        Optional[List[str]],
        typer.Option(
            metavar="FILE",
            help="Calibration to apply first: once per model, in the same order; none for a model that stays as it is.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.md, .json, .png and .pdf.")] = Path("e2ip_compare"),
    unit: Annotated[Unit, typer.Option(help="Unit of tables and figures; the JSON has both.")] = Unit.eV,
    ref_forces: Annotated[Optional[str], typer.Option(help="Column of the reference forces. [default: found]")] = None,
    ref_energy: Annotated[Optional[str], typer.Option(help="Name of the reference energy. [default: found]")] = None,
) -> None:
    """Compare predictions: errors, calibration and usefulness of the uncertainties.

    Reads what `mace_eval_configs` and NequIP's TestTimeXYZFileWriter write, with or without
    uncertainties. Scores that need a distribution stay empty for a deterministic model.

    With --ood every model's figures stand beside those out of distribution, and a table says how
    well leverage and epistemic uncertainty find the frames out of distribution.

    With --calibration, files of `e2ip calibrate` are applied to the predictions. To see a model
    with and without, name its file twice and give none for the first.
    """
    for path in [*files, *(ood or [])]:
        if not path.is_file():
            what = "is a folder; give the extxyz file in it" if path.is_dir() else "no such file"
            raise InputError(f"{path}: {what}")
    from rich.console import Console

    from e2ip_plugins.report.compare import compare, load_both_sets, load_models
    from e2ip_plugins.report.figures import write_figure
    from e2ip_plugins.report.tables import markdown, print_tables, write_json
    from e2ip_plugins.scores.calibration import Calibration

    chosen = [None if path == "none" else Calibration.read(path) for path in calibration or []]
    names = None if labels is None else [label.strip() for label in labels.split(",")]
    if ood:
        models, ood_models = load_both_sets(files, ood, names, ref_forces, ref_energy, chosen)
    else:
        models, ood_models = load_models(files, names, ref_forces, ref_energy, chosen), []
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder ({error.strerror})") from error
    for m in [*models, *ood_models]:
        for text in m.left_out:
            typer.secho(f"e2ip: warning: {m.predictions.path}: {text}", fg=typer.colors.YELLOW, err=True)
        if m.predictions.calibration is not None:
            text = f"{m.predictions.path}: was calibrated already, with {m.predictions.calibration}"
            typer.secho(f"e2ip: note: {text}", fg=typer.colors.YELLOW, err=True)
    result = compare(models, ood_models)
    print_tables(result, unit.value, Console())
    write_json(result, out / "compare.json")
    write_figure(models, unit.value, out / "compare", ood_models)
    (out / "compare.md").write_text(markdown(result, unit.value, "compare.png"), encoding="utf-8")
    typer.echo(f"Written: {out}/compare.md, .json, .png, .pdf")


@app.command("ensemble")
def ensemble_command(
    files: Annotated[
        List[Path],
        typer.Argument(metavar="MEMBER_1.xyz MEMBER_2.xyz ...", help="The members' predictions for the same frames."),
    ],
    output: Annotated[Path, typer.Option(help="The ensemble's predictions.")] = Path("ensemble.xyz"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    ref_forces: Annotated[Optional[str], typer.Option(help="Column of the reference forces. [default: found]")] = None,
    ref_energy: Annotated[Optional[str], typer.Option(help="Name of the reference energy. [default: found]")] = None,
) -> None:
    """Combine predictions of several models into those of their ensemble.

    Mean forces and energies; the covariance is that of the members' forces (K - 1 in the denominator)
    plus, for members with uncertainties, the mean of theirs. `e2ip compare` reads the result.
    """
    from e2ip_plugins.report.ensemble import combine

    if output.exists() and (not overwrite or output.is_dir() or any(f.exists() and output.samefile(f) for f in files)):
        reason = "is a folder" if output.is_dir() else "is there already; choose another name, or --overwrite"
        reason = "is a member" if any(f.exists() and output.samefile(f) for f in files) else reason
        raise InputError(f"--output {output}: {reason}")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}")
    for text in combine(files, output, ref_forces, ref_energy):
        typer.secho(f"e2ip: warning: {text}", fg=typer.colors.YELLOW, err=True)
    typer.echo(f"Written: {output}")


@app.command("calibrate")
def calibrate_command(
    file: Annotated[
        Path, typer.Argument(metavar="VALID.xyz", help="extxyz file with a model's predictions for validation frames.")
    ],
    method: Annotated[
        Optional[List[str]],
        typer.Option(
            metavar="floor|scale|species-scale|conformal",
            help="What to fit (default: scale); conformal may be given beside one of the others.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The calibration.")] = Path("calibration.json"),
    level: Annotated[
        Optional[List[float]],
        typer.Option(help="Level of a conformal radius; may be repeated (default: 0.5, 0.8, 0.9 and 0.95)."),
    ] = None,
    ref_forces: Annotated[Optional[str], typer.Option(help="Column of the reference forces. [default: found]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Fit a calibration of predicted covariances to validation frames.

    Reads predictions as `e2ip compare` does, of any family. `e2ip compare --calibration`, the
    calculators and the evaluation tools of both hosts apply the result.

    scale multiplies the covariance by the factor that makes the calibration error least, and
    species-scale has a factor for every species; floor adds the least isotropic variance with which
    coverage at 90 % is 90 %. conformal finds the radii, in units of the covariance, that hold a
    random atom of a new configuration with at least the probability of their level.

    Whatever the method, the file also has quantiles of the largest uncertainty in a frame, which
    thresholds of e2ip_plugins.md.Monitor may be given as.
    """
    if not file.is_file():
        raise InputError(f"{file}: {'is a folder' if file.is_dir() else 'no such file'}")
    if output.exists() and (output.is_dir() or not overwrite):
        reason = "is a folder" if output.is_dir() else "is there already; choose another name, or --overwrite"
        raise InputError(f"--output {output}: {reason}")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}")
    from e2ip_plugins.report.predictions import read_predictions
    from e2ip_plugins.scores import frame_maxima
    from e2ip_plugins.scores.metrics import COVERAGE_LEVELS
    from e2ip_plugins.tools import calibrate

    methods, levels = method or ["scale"], level or list(COVERAGE_LEVELS)
    calibrate.check(methods, levels)
    if level and "conformal" not in methods:
        raise InputError("--level: only --method conformal has levels")
    predictions = read_predictions(file, ref_forces)
    found = calibrate.calibrate(calibrate.Sample.of(predictions), methods, levels)
    found = dataclasses.replace(found, frame_maxima=frame_maxima.of_predictions(predictions, found))
    found.write(output)
    for text in found.notes:
        typer.secho(f"e2ip: note: {text}", fg=typer.colors.YELLOW, err=True)
    for line in found.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")


class Preset(str, enum.Enum):
    """How much a benchmark trains."""

    smoke = "smoke"
    cpu = "cpu"
    paper = "paper"


class Host(str, enum.Enum):
    """Whose commands train."""

    mace = "mace"
    nequip = "nequip"


class Backbone(str, enum.Enum):
    """A network in place of NequIP's own."""

    painn = "painn"
    alphanet = "alphanet"


@app.command("bench")
def bench_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="rmd17, water, silica, shift, efficiency, rotation, damping, fullwater or md22."
        ),
    ],
    host: Annotated[Host, typer.Option(help="Framework of this environment that trains.")],
    preset: Annotated[Preset, typer.Option(help="smoke: minutes; cpu: hours; paper: days, on a GPU.")] = Preset.smoke,
    data: Annotated[
        Optional[Path], typer.Option(envvar="E2IP_DATA", help="Folder that holds rmd17/, acac/, silica/ and water/.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and tables, for any number of benchmarks.")] = Path(
        "e2ip_bench"
    ),
    backbone: Annotated[Optional[Backbone], typer.Option(help="With --host nequip: another network.")] = None,
    sets: Annotated[Optional[str], typer.Option(help="Data sets, separated by commas. [default: all]")] = None,
    methods: Annotated[Optional[str], typer.Option(help="Methods, separated by commas. [default: all]")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    cluster: Annotated[str, typer.Option(help="Run trainings as jobs of submitit: slurm or local.")] = "",
    tables: Annotated[bool, typer.Option("--tables", help="Train nothing, write tables of what is finished.")] = False,
) -> None:
    """Train and judge every method of one table of the paper.

    Trainings go through the host's own commands. What is finished is skipped, what was stopped or
    killed goes on, and tables that need the same model share it. Tables hold both hosts, whichever
    has finished runs in the folder.
    """
    from e2ip_plugins.bench import commands, plan, runs
    from e2ip_plugins.bench.cost import measure
    from e2ip_plugins.bench.data import find_all
    from e2ip_plugins.bench.tables import write

    if name not in plan.BENCHMARKS:
        raise InputError(f"unknown benchmark '{name}'; choose from: {', '.join(plan.BENCHMARKS)}")
    benchmark, amount = plan.BENCHMARKS[name], plan.PRESETS[preset.value]
    chosen_sets = plan.chosen(sets, benchmark.sets, "--sets")
    chosen_methods = plan.chosen(methods, benchmark.methods, "--methods")
    trainer = host.value
    if backbone is not None:
        trainer = f"{trainer}-{backbone.value}"
        if trainer not in plan.HOSTS:
            raise InputError(f"--backbone {backbone.value}: networks of NequIP; give --host nequip with it")
    found = plan.runs(name, trainer, amount, chosen_sets, chosen_methods)
    failed = []
    roots = [*([data] if data else []), Path.cwd()]
    if tables:
        runs.check_settings(found, amount, [], out)
    else:
        commands.check_host(trainer)
        for chosen in chosen_sets:  # before anything is written
            find_all(plan.dataset(chosen), roots)
        runs.check_settings(found, amount, roots, out)
        out.mkdir(parents=True, exist_ok=True)
        failed = runs.execute_all(found, amount, roots, out, jobs, cluster, typer.echo)
        measure(found, out, typer.echo)
    if len(failed) < len(found):
        page, raw = write(name, preset.value, chosen_sets, chosen_methods, out)
        typer.echo(f"Written: {page}, {raw}")
    if failed:
        raise InputError(
            f"{len(failed)} of {len(found)} runs failed ({', '.join(run.name for run in failed)}): mend what their "
            f"{out}/runs/NAME/log.txt says and run the command again; the others are kept"
        )


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fullwater, buckyball, nanotube, rmd17_aspirin, ...")],
    to: Annotated[Path, typer.Option(envvar="E2IP_DATA", help="Folder of data; the files go into a folder NAME.")],
    seed: Annotated[int, typer.Option(help="Of the random split.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Split anew, in place of what is there.")] = False,
) -> None:
    """Download a published data set and write it as extxyz, for either host.

    NequIP's own data modules download and split; needs NequIP and a network.
    """
    there = sorted((to / name).glob(f"{name}_*.extxyz"))
    if there and not overwrite:
        raise InputError(f"{there[0]} is there already: choose another folder, or --overwrite")
    for path in _entry_point("fetch", "nequip", "e2ip fetch needs NequIP's data modules")(name, to, seed):
        typer.echo(f"Written: {path}")


#: Ending of a model file: the host it belongs to, whose ``fit_file`` is an entry point of this package.
_HOSTS = {".model": "mace", ".ckpt": "nequip", ".zip": "nequip"}


@app.command("fit")
def fit_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip; with or without a readout.")],
    train: Annotated[List[Path], typer.Option(help="Training frames, as the model had them; may be repeated.")],
    valid: Annotated[List[Path], typer.Option(help="Other frames, with forces, to fit constants on; may be repeated.")],
    output: Annotated[Optional[Path], typer.Option(help="The fitted model. [default: MODEL with -e2ip]")] = None,
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
    from e2ip_plugins.tools.frames import read_frames, same_frames

    host = _host_of(model)
    if output is None:
        output = _beside(model, f"-e2ip{'.ckpt' if host == 'nequip' else model.suffix}")
    _check_output(output, model, overwrite)
    _check_device(device)
    training = read_frames(train, need_forces=False)
    validation = read_frames(valid, forces_key)
    shared = same_frames(training, validation)
    if shared:
        warning = (
            f"{shared} of {len(validation)} validation frames are training frames: constants come out too small; give "
            "frames that the model was not trained on"
        )
        typer.secho(f"e2ip: warning: {warning}", fg=typer.colors.YELLOW, err=True)
    report = _entry_point("fit", host, f"this is a model of {host}")(
        model, training, validation, output, head=head, device=device, batch_size=batch_size
    )
    for text in report.warnings:
        typer.secho(f"e2ip: warning: {text}", fg=typer.colors.YELLOW, err=True)
    for line in report.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")


#: For commands that only evaluate.
_WITH_COMPILED = {**_HOSTS, ".pt2": "nequip"}


@app.command("evaluate")
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
    dtype: Annotated[Optional[str], typer.Option(help="float32 or float64, MACE only. [default: the model's]")] = None,
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
    from e2ip_plugins.scores.calibration import Calibration
    from e2ip_plugins.tools.evaluate import Options, check_files, digest_of, evaluate, part_of, skipped_file
    from e2ip_plugins.tools.progress import progress

    host = _host_of(model, _WITH_COMPILED)
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
    if dtype not in (None, "float32", "float64"):
        raise InputError(f"--dtype {dtype}: choose float32 or float64")
    check_files(source, output, overwrite)
    _check_device(device)
    opened = _entry_point("evaluate", host, f"this is a model of {host}")(model, device=device, dtype=dtype, head=head)
    if opened.warning:
        typer.secho(f"e2ip: warning: {opened.warning}", fg=typer.colors.YELLOW, err=True)
    settings = {"the model": digest_of(model), "--dtype": opened.dtype, "--head": head or "none"}
    with progress(source, options.part) as told:
        state = evaluate(opened, source, output, options, settings, told)
    if state.skipped:
        text = f"{len(state.skipped)} bad frames left out, listed in {skipped_file(output)}; the first: "
        typer.secho(f"e2ip: warning: {text}{state.skipped[0][1]}", fg=typer.colors.YELLOW, err=True)
    typer.echo(f"Written: {output}, {state.written} frames")


@app.command("strip")
def strip_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a readout.")],
    output: Annotated[Optional[Path], typer.Option(help="The stock model. [default: MODEL with -stock]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Take the readout off a model.

    What is left is the host's own model, which needs no plugin. Energies and forces stay what they are, to the
    last bit.
    """
    host = _host_of(model)
    if output is None:
        output = _beside(model, "-stock.nequip.zip" if model.name.endswith(".nequip.zip") else f"-stock{model.suffix}")
    _check_output(output, model, overwrite)
    _entry_point("strip", host, f"this is a model of {host}")(model, output)
    typer.echo(f"Written: {output}")


@app.command("md")
def md_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip.")],
    start: Annotated[Path, typer.Argument(metavar="START.extxyz", help="Structure to start from.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.extxyz", help="Frames of the run.")],
    steps: Annotated[int, typer.Option(help="Time steps.")],
    temperature: Annotated[str, typer.Option(help="In K; 300:1500 for a ramp.")] = "300",
    timestep: Annotated[float, typer.Option(help="In fs.")] = 0.5,
    thermostat: Annotated[str, typer.Option(metavar="nve|langevin|bussi", help="ASE's own.")] = "langevin",
    friction: Annotated[float, typer.Option(help="Of langevin, in 1/fs.")] = 0.01,
    time_constant: Annotated[float, typer.Option(help="Of bussi, in fs.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of velocities and thermostat.")] = 0,
    interval: Annotated[int, typer.Option(help="Steps between frames that are written.")] = 10,
    frame: Annotated[int, typer.Option(help="Which frame of START; negative ones count from its end.")] = -1,
    watch: Annotated[
        Optional[List[str]],
        typer.Option(
            metavar="NAME=NUMBER|NAME=q0.99",
            help="Threshold of an uncertainty, or quantile of held-out frames, for example e2ip_leverage=q0.99; may be "
            "repeated.",
        ),
    ] = None,
    held_out: Annotated[
        Optional[Path], typer.Option(help="File of e2ip calibrate, or predictions for frames not trained on.")
    ] = None,
    action: Annotated[
        Optional[List[str]], typer.Option(metavar="warn|collect|stop", help="Above a threshold. [default: stop]")
    ] = None,
    check_interval: Annotated[int, typer.Option(help="Steps between two looks at the thresholds.")] = 10,
    window: Annotated[int, typer.Option(help="Checks over which values are smoothed by their median.")] = 1,
    collected: Annotated[
        Optional[Path], typer.Option(help="Frames above a threshold. [default: OUT with -monitor]")
    ] = None,
    calibration: Annotated[Optional[Path], typer.Option(help="File of e2ip calibrate, for the uncertainties.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Run molecular dynamics that knows its uncertainty.

    ASE's dynamics with a model of either host. Frames are written with all uncertainties; with --watch a monitor looks
    at them on the way and warns, collects frames or stops. Positions and forces that are no numbers end the run.
    """
    import warnings

    from e2ip_plugins.md import UncertaintyWarning
    from e2ip_plugins.md import run as runs
    from e2ip_plugins.md.thresholds import parse_watch
    from e2ip_plugins.tools.trajectories import TEXT, read_trajectory

    host = _host_of(model, _WITH_COMPILED)
    first, last = runs.parse_temperature(temperature)
    settings = runs.Settings(
        steps, first, last, timestep, thermostat, friction, time_constant, seed, interval, check_interval
    )
    if not watch and (held_out or action or collected):
        raise InputError("--held-out, --action and --collected are for --watch, which says what is watched")
    thresholds = parse_watch(watch or [])
    _check_new(output, TEXT)
    frames, _ = read_trajectory(start)
    if not -len(frames) <= frame < len(frames):
        raise InputError(f"--frame {frame}: {start} has {len(frames)} frames")
    watched = None
    if thresholds:
        place = collected or output.with_name(f"{output.stem}-monitor{output.suffix}")
        watched = runs.Watch(thresholds, action or ["stop"], held_out, window=window, frames=place)
    _check_device(device)
    atoms = frames[frame].copy()
    atoms.calc = _opened("calculator", host, model, device=device, calibration=calibration)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UncertaintyWarning)
        shown = warnings.showwarning

        def show(message, category, *where, **more) -> None:
            if not issubclass(category, UncertaintyWarning):
                return shown(message, category, *where, **more)
            typer.secho(f"e2ip: warning: {message}", fg=typer.colors.YELLOW, err=True)

        warnings.showwarning = show
        outcome = runs.run(atoms, settings, output, watched)
    for line in outcome.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")


@app.command("select")
def select_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt or .nequip.zip, with a fitted leverage.")],
    trajectories: Annotated[List[Path], typer.Argument(metavar="TRAJECTORY ...", help="Frames to choose from.")],
    train: Annotated[List[Path], typer.Option(help="Frames that the model was trained on; may be repeated.")],
    number: Annotated[int, typer.Option(min=1, help="Frames wanted.")],
    output: Annotated[Path, typer.Option(help="The frames, in the order in which they were taken.")] = Path(
        "selected.extxyz"
    ),
    method: Annotated[str, typer.Option(metavar="leverage|random|farthest", help="How.")] = "leverage",
    every: Annotated[int, typer.Option(min=1, help="Take every so many frames into account.")] = 1,
    min_distance: Annotated[float, typer.Option(help="Of atoms, in sums of covalent radii.")] = 0.6,
    max_force: Annotated[float, typer.Option(help="Predicted, on an atom, in eV/Å.")] = 50.0,
    max_leverage: Annotated[float, typer.Option(help="Of an atom: beyond that, a frame is of no use.")] = float("inf"),
    allow_parts: Annotated[
        bool, typer.Option("--allow-parts", help="Also structures in more parts than in the training set.")
    ] = False,
    weight: Annotated[
        Optional[float],
        typer.Option(help="Training atoms that an atom of a frame taken counts for. [default: atoms per feature]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of method random.")] = 0,
    head: Annotated[Optional[str], typer.Option(help="MACE head, where there are more.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Frames per batch.")] = 10,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Choose frames of runs that are worth a label: uncertain, unlike each other, and physically possible.

    With leverage, the frame with the largest mean leverage is taken, its atoms enter the moments of the training set,
    and all others are scored anew: what is like a frame that was taken drops out. random and farthest (farthest-point
    selection, in the same features) are there to compare with.
    """
    import math

    import ase.io

    from e2ip_plugins.tools import select as selecting
    from e2ip_plugins.tools.frames import read_frames
    from e2ip_plugins.tools.predicted import without_labels
    from e2ip_plugins.tools.trajectories import TEXT, read_trajectory
    from e2ip_plugins.tools.validity import Validity

    host = _host_of(model)
    _check_output(output, model, overwrite)
    if output.suffix not in TEXT:
        raise InputError(f"--output {output}: frames go into an extxyz file, {' or '.join(TEXT)}")
    if method not in selecting.METHODS:
        raise InputError(f"--method {method}: choose from {', '.join(selecting.METHODS)}")
    limits = {"--min-distance": min_distance, "--max-force": max_force, "--max-leverage": max_leverage}
    for name, value in {**limits, **({} if weight is None else {"--weight": weight})}.items():
        if math.isnan(value) or value < 0.0 or (name == "--weight" and not 0.0 < value < math.inf):
            raise InputError(f"{name} {value}: a number above 0")
    training = read_frames(train, need_forces=False)
    candidates = []
    for path in trajectories:
        frames, note = read_trajectory(path)
        if note:
            typer.secho(f"e2ip: warning: {note}", fg=typer.colors.YELLOW, err=True)
        chosen = range(0, len(frames), every)
        candidates += [selecting.Candidate(frames[index], str(path), index) for index in chosen]
    _check_device(device)
    opened = _opened("passes", host, model, head=head, device=device, batch_size=batch_size)
    validity = Validity(min_distance, max_force, max_leverage, not allow_parts)
    found = selecting.select(opened, training, candidates, number, method, validity, weight, seed)
    for text in found.warnings:
        typer.secho(f"e2ip: warning: {text}", fg=typer.colors.YELLOW, err=True)
    written = []
    for rank, (taken, score) in enumerate(zip(found.frames, found.scores, strict=True)):
        frame = without_labels(taken.atoms)
        frame.info.update(select_rank=rank, select_score=score, select_method=method)
        frame.info.update(select_source=taken.source, select_index=taken.index)
        written.append(frame)
    ase.io.write(output, written, format="extxyz")
    rejected = selecting.told(found.rejected)
    typer.echo(f"{len(candidates)} frames, {found.valid} candidates ({rejected}); {len(written)} taken")
    typer.echo(f"{selecting.SCORES[method]}: {found.scores[0]:.3g} of the first, {found.scores[-1]:.3g} of the last")
    typer.echo(f"Written: {output}")


@app.command("label")
def label_command(
    frames: Annotated[Path, typer.Argument(metavar="FRAMES.extxyz", help="What is to be labelled.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUT.extxyz", help="Labelled frames; those that it has are not computed again.")
    ],
    calculator: Annotated[
        str, typer.Option(metavar="MODULE:CLASS", help="Calculator of ASE, for example tblite.ase:TBLite.")
    ],
    argument: Annotated[
        Optional[List[str]],
        typer.Option(metavar="NAME=VALUE", help="Of the calculator, for example method=GFN2-xTB; may be repeated."),
    ] = None,
) -> None:
    """Label frames with reference energies and forces (REF_energy, REF_forces), by any calculator of ASE.

    Interrupted? Run it again: it goes on where it was. Frames whose calculation fails are skipped and listed, with exit
    status 1, and tried again by the next call.
    """
    from e2ip_plugins.tools.label import calculator_of, label
    from e2ip_plugins.tools.trajectories import read_trajectory

    found, note = read_trajectory(frames)
    if output.exists() and output.samefile(frames):
        raise InputError(f"{output}: is the file of frames itself")
    if note:
        typer.secho(f"e2ip: warning: {note}", fg=typer.colors.YELLOW, err=True)

    def say(text: str) -> None:
        typer.secho(f"e2ip: warning: {frames}, {text}", fg=typer.colors.YELLOW, err=True)

    result = label(found, output, calculator_of(calculator, argument or []), say)
    typer.echo(f"{result.labelled} labelled, {result.there} there already, {len(result.failed)} failed")
    typer.echo(f"Written: {output}" if result.labelled or result.there else "Written: nothing")
    if result.failed:
        raise typer.Exit(1)


@app.command("lammps")
def lammps_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="MACE .model, NequIP .ckpt, .nequip.zip or .pt2.")],
    script: Annotated[Path, typer.Argument(metavar="in.lammps", help="LAMMPS input with a line '# e2ip'.")],
    species: Annotated[str, typer.Option(help="Chemical symbol of every atom type, in order: 'C H O'.")],
    key: Annotated[
        Optional[List[str]],
        typer.Option(help="Uncertainty that LAMMPS gets, may be repeated. [default: forces_epistemic_std, leverage]"),
    ] = None,
    watch: Annotated[
        Optional[List[str]],
        typer.Option(metavar="NAME=NUMBER", help="Threshold of a monitor; q0.99: a quantile of --held-out."),
    ] = None,
    held_out: Annotated[
        Optional[Path], typer.Option(help="File of `e2ip calibrate`, or predictions for held-out frames.")
    ] = None,
    action: Annotated[Optional[List[str]], typer.Option(help="warn, collect, stop; may be repeated.")] = None,
    interval: Annotated[int, typer.Option(help="Steps between checks of the monitor.")] = 10,
    frames: Annotated[Path, typer.Option(help="Where the monitor's frames go.")] = Path("monitor.xyz"),
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Run LAMMPS with the forces of a model, and its uncertainties as per-atom properties.

    The line `# e2ip` of the input file stands for the model: after box, atoms and masses, before dumps and
    runs. Dumps and computes there read d_forces_epistemic_std, d_e2ip_leverage and so on. A monitor that stops
    the run ends it with exit status 3.
    """
    from e2ip_plugins.md.lammps_script import run_script, split
    from e2ip_plugins.md.monitor import MonitorStop
    from e2ip_plugins.md.thresholds import parse_watch

    split(script)
    thresholds = parse_watch(watch or [])
    host = _host_of(model, _WITH_COMPILED)
    _check_device(device)
    calculator = _opened("calculator", host, model, device=device)
    try:
        run_script(
            script,
            calculator,
            species.split(),
            keys=key or None,
            thresholds=thresholds,
            interval=interval,
            held_out=held_out,
            action=action or ["warn"],
            frames=frames,
        )
    except MonitorStop as stop:
        typer.secho(f"e2ip: stopped: {stop}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(3) from stop


def _opened(group: str, host: str, model: Path, **options: Any) -> Any:
    """What a host's adapter makes of a model file."""
    open_it = _entry_point(group, host, f"this is a model of {host}")
    try:
        return open_it(model, **options)
    except InputError:
        raise
    # Unpickling lets whatever goes wrong inside it through.
    except Exception as error:
        raise InputError(f"{model}: {host} cannot open it ({type(error).__name__}: {error})") from error


def _check_new(output: Path, endings: Sequence[str]) -> None:
    if output.suffix not in endings:
        raise InputError(f"{output}: frames go into an extxyz file, {' or '.join(endings)}")
    if output.exists() or not output.parent.is_dir():
        raise InputError(f"{output}: is there already, or its folder is not; choose another name")


def _host_of(model: Path, hosts: Dict[str, str] = _HOSTS) -> str:
    host = hosts.get(model.suffix)
    if host is None:
        raise InputError(f"{model}: is none of {', '.join(hosts)}: give a MACE model, a NequIP checkpoint or package")
    if not model.is_file():
        raise InputError(f"{model}: {'is a folder' if model.is_dir() else 'no such file'}")
    return host


def _beside(model: Path, ending: str) -> Path:
    return model.with_name(model.name.removesuffix(".zip").removesuffix(".nequip").removesuffix(model.suffix) + ending)


def _check_output(output: Path, model: Path, overwrite: bool) -> None:
    if output.exists() and (output.is_dir() or not overwrite or output.samefile(model)):
        reason = "is a folder" if output.is_dir() else "is there already; choose another name, or --overwrite"
        reason = "is the model itself" if output.samefile(model) else reason
        raise InputError(f"--output {output}: {reason}")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}")


def _check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name).item()
    # torch has an error of its own, and often a long one, for every way in which a device may be missing.
    except Exception as error:
        raise InputError(f"--device {name}: torch cannot compute there ({str(error)[:60]}...); try cpu") from error


def _entry_point(group: str, host: str, why: str) -> Callable[..., Any]:
    """What a host's adapter gives for a command; the core imports no adapter."""
    from importlib.metadata import entry_points

    found = entry_points(group=f"e2ip_plugins.{group}", name=host)
    if not found:
        raise InputError("this installation of e2ip-plugins is older than its code: install it anew (pip install .)")
    try:
        return next(iter(found)).load()
    except ModuleNotFoundError as error:
        raise InputError(
            f"{why}, which is not installed here ({error}): run it in an environment with e2ip-plugins[{host}]"
        ) from error
