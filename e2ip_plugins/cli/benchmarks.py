"""Subcommands of the paper's tables: bench, fetch."""

import enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from e2ip_plugins.bench.plan import BACKBONES, BENCHMARKS, PRESETS
from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError


class Host(str, enum.Enum):
    """Whose commands train."""

    mace = "mace"
    nequip = "nequip"


Preset = enum.Enum("Preset", [(name, name) for name in PRESETS], type=str)  # type: ignore[misc]
Backbone = enum.Enum("Backbone", [(name, name) for name in BACKBONES], type=str)  # type: ignore[misc]


def bench_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"{', '.join(list(BENCHMARKS)[:-1])} or {list(BENCHMARKS)[-1]}."),
    ],
    host: Annotated[Host, typer.Option(help="Framework of this environment that trains.")],
    preset: Annotated[Preset, typer.Option(help="smoke: minutes; cpu: hours; paper: days on a GPU.")] = Preset["smoke"],
    data: Annotated[
        Optional[Path], typer.Option(envvar="E2IP_DATA", help="Folder that holds rmd17/, acac/, silica/ and water/.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and tables, for any number of benchmarks.")] = Path(
        "e2ip_bench"
    ),
    backbone: Annotated[Optional[Backbone], typer.Option(help="With --host nequip: another network.")] = None,
    sets: Annotated[Optional[str], typer.Option(help="Data sets, separated by commas. [default: all]")] = None,
    methods: Annotated[Optional[str], typer.Option(help="Methods, separated by commas. [default: all]")] = None,
    epochs: Annotated[
        float, typer.Option(min=0.01, help="Length of all trainings, in units of the preset's; a folder of its own.")
    ] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    cluster: Annotated[str, typer.Option(help="Run trainings as jobs of submitit: slurm or local.")] = "",
    tables: Annotated[bool, typer.Option("--tables", help="Train nothing, write tables of what is finished.")] = False,
) -> None:
    """Train and judge every method of one table of the paper.

    Trainings go through the host's own commands. What is finished is skipped, what was stopped or
    killed goes on, and tables that need the same model share it. Tables hold all that is
    finished in the folder, of both hosts, whatever a call names.
    """
    from e2ip_plugins.bench import commands, plan, runs
    from e2ip_plugins.bench.cost import measure
    from e2ip_plugins.bench.data import find_all
    from e2ip_plugins.bench.tables import write

    if name not in plan.BENCHMARKS:
        raise InputError(f"unknown benchmark '{name}'; choose from: {', '.join(plan.BENCHMARKS)}")
    benchmark, amount = plan.BENCHMARKS[name], plan.PRESETS[preset.value]
    amount = amount._replace(epochs=epochs * amount.epochs)
    chosen_sets = plan.chosen(sets, benchmark.sets, "--sets")
    chosen_methods = plan.chosen(methods, benchmark.methods, "--methods")
    trainer = host.value
    if backbone is not None:
        trainer = f"{trainer}-{backbone.value}"
        if trainer not in plan.HOSTS:
            raise InputError(f"--backbone {backbone.value}: networks of NequIP; give --host nequip with it")
    found = plan.runs(trainer, amount, chosen_sets, chosen_methods)
    failed = []
    roots = [*([data] if data else []), Path.cwd()]
    if tables:
        runs.check_settings(found, amount, [], out)
        if not any(runs.finished(run, out) for run in found):
            checks.warn(f"{out}: none of the {len(found)} runs that this call names is finished")
    else:
        commands.check_host(trainer)
        runs.check_cluster(cluster)
        for chosen in chosen_sets:  # before anything is written
            find_all(plan.dataset(chosen), roots)
        runs.check_settings(found, amount, roots, out)
        checks.make_folder(out)
        failed = runs.execute_all(found, amount, roots, out, jobs, cluster, typer.echo)
        measure(found, out, typer.echo)
    if len(failed) < len(found):
        # Of all that the folder has: a call for a part must not take the rest out of the table.
        page, raw = write(name, preset.value, benchmark.sets, benchmark.methods, out)
        typer.echo(f"Written: {page}, {raw}")
    if failed:
        raise InputError(
            f"{len(failed)} of {len(found)} runs failed ({', '.join(run.name for run in failed)}): mend what their "
            f"{out}/runs/NAME/log.txt says and run the command again; the others are kept"
        )


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
    for path in checks.entry_point("fetch", "nequip", "e2ip fetch needs NequIP's data modules")(name, to, seed):
        typer.echo(f"Written: {path}")
