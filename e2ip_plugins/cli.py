"""The ``e2ip`` command."""

import dataclasses
import enum
from pathlib import Path
from typing import Annotated, Any, Callable, List, Optional

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


def _host_of(model: Path) -> str:
    host = _HOSTS.get(model.suffix)
    if host is None:
        raise InputError(f"{model}: is none of {', '.join(_HOSTS)}: give a MACE model, a NequIP checkpoint or package")
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
