"""The ``e2ip`` command, made of a file for every kind of subcommand.

Subcommands import what they need when they are called: help and errors must not wait for torch and matplotlib.
"""

import errno
from typing import Annotated

import typer

from e2ip_plugins import __version__
from e2ip_plugins.cli import active, benchmarks, checks, energies, models, readouts, reports, runs
from e2ip_plugins.errors import InputError


class _Group(typer.core.TyperGroup):
    """Print each warning of this package as a line, and an input error as one line with exit status 2."""

    def invoke(self, ctx):
        try:
            with checks.printed_warnings():
                return super().invoke(ctx)
        except InputError as error:
            typer.secho(f"e2ip: error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            # Errors of the machine, not of the program: a full disk, a folder that may not be written to.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            typer.secho(f"e2ip: error: {error.filename or 'a file'}: {error.strerror}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    rich_markup_mode="markdown", cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Evidential force uncertainty for NequIP and MACE: tools for what their own commands wrote."""


app.command("compare")(reports.compare_command)
app.command("ensemble")(reports.ensemble_command)
app.command("calibrate")(reports.calibrate_command)
app.command("view")(reports.view_command)
app.command("difference")(energies.difference_command)
app.command("members")(energies.members_command)
app.command("bench")(benchmarks.bench_command)
app.command("fetch")(benchmarks.fetch_command)
app.command("fit")(models.fit_command)
app.command("update")(readouts.update_command)
app.command("export-readout")(readouts.export_readout_command)
app.command("attach")(readouts.attach_command)
app.command("evaluate")(models.evaluate_command)
app.command("strip")(models.strip_command)
app.command("md")(runs.md_command)
app.command("select")(active.select_command)
app.command("label")(active.label_command)
app.command("lammps")(runs.lammps_command)
app.command("lammps-plugin")(models.lammps_plugin_command)
