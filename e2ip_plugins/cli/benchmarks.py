"""Subcommands of the paper's tables: bench, fetch."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError


def bench_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A table or data set of ours, or your own FILE.yaml.")],
    host: Annotated[str, typer.Option(help="mace or nequip: framework of this environment that trains.")] = "",
    preset: Annotated[
        str, typer.Option(help="smoke: minutes; cpu, calibration: hours; paper: days on a GPU.")
    ] = "smoke",
    data: Annotated[
        Optional[Path],
        typer.Option(envvar="E2IP_DATA", help="Folder of our data sets (rmd17/, ...); your own files need none."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and tables, for any number of benchmarks.")] = Path(
        "e2ip_bench"
    ),
    backbone: Annotated[str, typer.Option(help="With --host nequip: another network, painn or alphanet.")] = "",
    sets: Annotated[Optional[str], typer.Option(help="Data sets, separated by commas. [default: all]")] = None,
    methods: Annotated[
        Optional[str],
        typer.Option(
            help="Methods of docs/develop/benchmarks.md, like stock,e2ip,mve; stock also trains its ensemble. "
            "[default: the table's]"
        ),
    ] = None,
    seeds: Annotated[
        Optional[int],
        typer.Option(min=1, help="Train no seed above this one. [default: as many as the preset and ensembles have]"),
    ] = None,
    epochs: Annotated[
        float, typer.Option(min=0.01, help="Length of all trainings, in units of the preset's; a folder of its own.")
    ] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    cluster: Annotated[str, typer.Option(help="Run trainings as jobs of submitit: slurm or local.")] = "",
    tables: Annotated[bool, typer.Option("--tables", help="Train nothing, write tables of what is finished.")] = False,
    results: Annotated[
        Optional[Path], typer.Option(help="JSON file that the results join. [default: OUT/NAME_PRESET.json]")
    ] = None,
) -> None:
    """Train and judge methods side by side, by default the stock model and e²IP.

    A data set is described in a few lines of YAML (docs/howto/bench.md). Trainings go through the commands of
    MACE or NequIP. What is finished is skipped, what was stopped or killed goes on, and tables that need
    the same model share it. Tables hold all that is finished in the folder, of both frameworks, whatever
    a call names.
    """
    from e2ip_plugins.bench.benchmark import benchmark
    from e2ip_plugins.bench.plan import Options

    options = Options(
        name, host, preset, data, out, backbone, sets, methods, seeds, epochs, jobs, cluster, tables, results
    )
    written, failed = benchmark(options, typer.echo)
    for path in written:
        typer.echo(f"Written: {path}")
    if failed:
        raise InputError(
            f"{len(failed)} runs failed ({', '.join(run.name for run in failed)}): mend what their "
            f"{out}/runs/NAME/log.txt says and run the command again; the others are kept"
        )


def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fullwater, buckyball, nanotube, rmd17_aspirin, ...")],
    to: Annotated[Path, typer.Option(envvar="E2IP_DATA", help="Folder of data; the files go into a folder NAME.")],
    seed: Annotated[int, typer.Option(help="Seed of the random split.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Split anew, in place of existing files.")] = False,
) -> None:
    """Download a published data set and write it as extxyz, for either framework.

    NequIP's own data modules download and split; needs NequIP and a network.
    """
    existing = sorted((to / name).glob(f"{name}_*.extxyz"))
    if existing and not overwrite:
        raise InputError(f"{existing[0]} is there already: choose another folder, or --overwrite")
    for path in checks.entry_point("fetch", "nequip", "e2ip fetch needs NequIP's data modules")(name, to, seed):
        typer.echo(f"Written: {path}")
