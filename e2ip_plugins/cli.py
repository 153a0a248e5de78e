"""The ``e2ip`` command."""

import enum
from pathlib import Path
from typing import Annotated, List, Optional

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


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    out: Annotated[Path, typer.Option(help="Folder for compare.md, .json, .png and .pdf.")] = Path("e2ip_compare"),
    unit: Annotated[Unit, typer.Option(help="Unit of tables and figures; the JSON has both.")] = Unit.eV,
    ref_forces: Annotated[Optional[str], typer.Option(help="Column of the reference forces. [default: found]")] = None,
    ref_energy: Annotated[Optional[str], typer.Option(help="Name of the reference energy. [default: found]")] = None,
) -> None:
    """Compare predictions: errors, calibration and usefulness of the uncertainties.

    Reads what `mace_eval_configs` and NequIP's TestTimeXYZFileWriter write, with or without
    uncertainties. Scores that need a distribution stay empty for a deterministic model.
    """
    for path in files:
        if not path.is_file():
            what = "is a folder; give the extxyz file in it" if path.is_dir() else "no such file"
            raise InputError(f"{path}: {what}")
    from rich.console import Console

    from e2ip_plugins.report.compare import compare, load_models
    from e2ip_plugins.report.figures import write_figure
    from e2ip_plugins.report.tables import markdown, print_tables, write_json

    names = None if labels is None else [label.strip() for label in labels.split(",")]
    models = load_models(files, names, ref_forces, ref_energy)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder ({error.strerror})") from error
    for m in models:
        for text in m.left_out:
            typer.secho(f"e2ip: warning: {m.predictions.path}: {text}", fg=typer.colors.YELLOW, err=True)
    result = compare(models)
    print_tables(result, unit.value, Console())
    write_json(result, out / "compare.json")
    write_figure(models, unit.value, out / "compare")
    (out / "compare.md").write_text(markdown(result, unit.value, "compare.png"), encoding="utf-8")
    typer.echo(f"Written: {out}/compare.md, .json, .png, .pdf")
