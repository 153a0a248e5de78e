"""Subcommands on prediction files: compare, ensemble, calibrate, view."""

import dataclasses
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError

if TYPE_CHECKING:
    from e2ip_plugins.report.scored_model import ScoredModel


class Unit(str, enum.Enum):
    """Energy unit of tables and figures."""

    eV = "eV"
    kcal = "kcal"


class Colour(str, enum.Enum):
    """What `e2ip view` colours atoms by."""

    deviation = "deviation"
    epistemic = "epistemic"
    error = "error"
    leverage = "leverage"


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
    out: Annotated[
        Path, typer.Option("--output", "--out", help="Folder for compare.md, .json, .png and .pdf; replaces its files.")
    ] = Path("e2ip_compare"),
    unit: Annotated[Unit, typer.Option(help="Unit of tables and figures; the JSON has both.")] = Unit.eV,
    ref_forces: checks.ForcesKey = None,
    ref_energy: checks.EnergyKey = None,
) -> None:
    """Compare predictions: errors, calibration and usefulness of the uncertainties.

    Reads what `mace_eval_configs` and NequIP's TestTimeXYZFileWriter write, with or without
    uncertainties. Scores that need a distribution stay empty for a deterministic model.

    With --ood every model's figures stand beside those out of distribution, and a table shows how
    well leverage and epistemic uncertainty find the frames out of distribution. Those frames need
    no reference forces; without them their errors and coverages stay empty.

    Of models with uncertainties of energies a table shows how good those of energies are, and those of
    differences between frames of one composition.

    With --calibration, files of `e2ip calibrate` are applied to the predictions. To see a model
    with and without its calibration, name its file twice and give none for the first.
    """
    from rich.console import Console

    from e2ip_plugins.files import naming
    from e2ip_plugins.report.compare import compare, load_both_sets, load_models
    from e2ip_plugins.report.figures import write_figure
    from e2ip_plugins.report.tables import markdown, print_tables, write_json
    from e2ip_plugins.scores.calibration import Calibration

    for path in [*files, *(ood or [])]:
        checks.whole_file(path)
    calibrations = [None if path == "none" else Calibration.read(path) for path in calibration or []]
    names = None if labels is None else [label.strip() for label in labels.split(",")]
    options = (names, ref_forces, ref_energy, calibrations)
    models, ood_models = load_both_sets(files, ood, *options) if ood else (load_models(files, *options), [])
    checks.make_folder(out)
    for model in [*models, *ood_models]:
        _tell_doubts(model)
    result = compare(models, ood_models)
    print_tables(result, unit.value, Console())
    with naming(out):
        write_json(result, out / "compare.json")
        write_figure(models, unit.value, out / "compare", ood_models)
        (out / "compare.md").write_text(markdown(result, unit.value, "compare.png"), encoding="utf-8")
    typer.echo(f"Written: {out}/compare.md, .json, .png, .pdf")


def _tell_doubts(model: "ScoredModel") -> None:
    p = model.predictions
    for text in model.left_out:
        checks.warn(f"{p.path}: {text}")
    if model.calibration and (doubt := model.calibration.doubt(p.uq_model, str(p.path))):
        checks.warn(doubt)
    if p.calibration is not None:
        _note(f"{p.path}: was calibrated already, with {p.calibration}")


def _note(text: str) -> None:
    typer.secho(f"e2ip: note: {text}", fg=typer.colors.YELLOW, err=True)


def ensemble_command(
    files: Annotated[
        List[Path],
        typer.Argument(metavar="MEMBER_1.xyz MEMBER_2.xyz ...", help="The members' predictions for the same frames."),
    ],
    output: Annotated[Path, typer.Option(help="The ensemble's predictions.")] = Path("ensemble.xyz"),
    isotropic: Annotated[
        bool, typer.Option("--isotropic", help="One variance per atom instead of a matrix: for few members.")
    ] = False,
    overwrite: checks.Overwrite = False,
    ref_forces: checks.ForcesKey = None,
    ref_energy: checks.EnergyKey = None,
) -> None:
    """Combine predictions of several models into those of their ensemble.

    Forces and energies are means. The covariance is that of the members' forces (K - 1 in the
    denominator) plus, for members with uncertainties, the mean of theirs; so is the variance of the energy where all
    members have one. `e2ip compare` reads the result.
    """
    from e2ip_plugins.report.ensemble import combine

    checks.check_output(output, files, overwrite, frames=True)
    for text in combine(files, output, ref_forces, ref_energy, isotropic):
        checks.warn(text)
    typer.echo(f"Written: {output}")


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
    ref_forces: checks.ForcesKey = None,
    ref_energy: checks.EnergyKey = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Fit a calibration of predicted covariances to validation frames.

    Reads predictions as `e2ip compare` does, of any family. `e2ip compare --calibration`, the
    calculators and evaluation tools of MACE and NequIP apply the result.

    scale multiplies the covariance by the factor with the least calibration error, and
    species-scale has a factor for every species; floor adds the least isotropic variance with which
    coverage at 90 % is 90 %. conformal finds the radii, in units of the covariance, that hold a
    random atom of a new configuration with at least the probability of their level.

    Energies whose uncertainties the file has get constants of their own: a factor on their standard
    deviations, that of maximum likelihood, with every method but conformal alone; and with conformal
    the radii in units of them that hold the error of a new frame's energy.

    With every method the file also has quantiles of the largest uncertainty in a frame, from which
    e2ip_plugins.md.Monitor can take its thresholds.
    """
    from e2ip_plugins.predictions.copies import distinct
    from e2ip_plugins.predictions.prediction_files import read_predictions
    from e2ip_plugins.scores import calibration_fit, energy_fit, frame_maxima
    from e2ip_plugins.scores.metrics import COVERAGE_LEVELS
    from e2ip_plugins.scores.sample import Sample

    checks.whole_file(file)
    checks.check_output(output, [file], overwrite)
    methods, levels = method or ["scale"], level or list(COVERAGE_LEVELS)
    calibration_fit.check(methods, levels)
    if level and "conformal" not in methods:
        raise InputError("--level: only --method conformal has levels")
    predictions = distinct(read_predictions(file, ref_forces, ref_energy))
    for text in predictions.remarks:
        checks.warn(f"{file}: {text}")
    calibration = calibration_fit.calibrate(Sample.of(predictions), methods, levels)
    calibration = energy_fit.with_energies(calibration, predictions, levels)
    calibration = dataclasses.replace(calibration, frame_maxima=frame_maxima.of_predictions(predictions, calibration))
    calibration.write(output)
    for text in calibration.notes:
        _note(text)
    for line in calibration.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")


def view_command(
    file: Annotated[Path, typer.Argument(metavar="PREDICTIONS.xyz", help="extxyz file with a model's predictions.")],
    output: Annotated[Optional[Path], typer.Option(help="The page. [default: the file's name with .html]")] = None,
    frames: Annotated[
        Optional[str],
        typer.Option(help="Frame or slice, such as 0, :50 or ::10. [default: 100 frames, evenly spaced]"),
    ] = None,
    colour: Annotated[Colour, typer.Option(help="What atoms and ellipsoids are coloured by.")] = Colour.deviation,
    scale: Annotated[
        Optional[float],
        typer.Option(min=1e-6, help="Å of an ellipsoid's half axis for 1 eV/Å. [default: 0.5 Å for the median]"),
    ] = None,
    calibration: checks.Calibrated = None,
    ref_forces: checks.ForcesKey = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Write an HTML page that shows predictions: structures, ellipsoids of the covariances, and a scatter plot.

    The scatter plot has the error of every atom over its predicted deviation; without reference forces, its leverage.
    Points and atoms are linked: a click on one selects the other. The page is one file of some MB, which any browser
    opens without a network. It is made with chemiscope: pip install 'e2ip-plugins[view]'.
    """
    from e2ip_plugins.report.viewer import write_page
    from e2ip_plugins.scores.calibration import Calibration

    page = checks.whole_file(file).with_suffix(".html")
    output = page if output is None else output
    checks.check_output(output, [file], overwrite)
    applied = None if calibration is None else Calibration.read(calibration)
    typer.echo(write_page(file, output, frames, colour.value, scale, applied, ref_forces))
    typer.echo(f"Written: {output}")
