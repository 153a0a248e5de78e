"""Subcommands that move atoms with a model: md, lammps."""

from pathlib import Path
from typing import Annotated, Any, Dict, List, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError

# Options that both commands have.
ModelFile = Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt, .nequip.zip or .pt2.")]
WatchTexts = Annotated[
    Optional[List[str]],
    typer.Option(
        metavar="NAME|NAME=NUMBER|NAME=q0.99",
        help="Threshold of an uncertainty, or quantile of held-out frames, for example e2ip_leverage=q0.99; a name "
        "alone takes the quantile that is advised for the number of held-out frames. May be repeated. Names: "
        "forces_epistemic_std, e2ip_leverage, forces_principal_std, forces_conformal_extent, "
        "energy_uncertainty_per_atom.",
    ),
]
HeldOut = Annotated[
    Optional[Path], typer.Option(help="File of e2ip calibrate, or predictions for frames not trained on.")
]
Window = Annotated[
    Optional[int], typer.Option(min=1, help="Checks over which values are smoothed by their median. [default: 1]")
]
Level = Annotated[
    Optional[float],
    typer.Option(help="Level of the conformal region whose forces_conformal_extent is watched. [default: 0.9]"),
]
Interval = Annotated[Optional[int], typer.Option(min=1, help="Steps between two checks of --watch. [default: 10]")]


def _actions(default: str) -> Any:
    text = f"What happens above a threshold; may be repeated. [default: {default}]"
    return typer.Option(metavar="warn|collect|stop", help=text)


def md_command(
    model: ModelFile,
    start: Annotated[Path, typer.Argument(metavar="START.extxyz", help="Structure to start from.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.extxyz", help="Frames of the run.")],
    steps: Annotated[int, typer.Option(help="Number of time steps.")],
    temperature: Annotated[Optional[str], typer.Option(help="In K; 300:1500 for a ramp. [default: 300]")] = None,
    timestep: Annotated[float, typer.Option(help="Time step in fs.")] = 0.5,
    thermostat: Annotated[str, typer.Option(metavar="nve|langevin|bussi", help="Thermostat of ASE.")] = "langevin",
    friction: Annotated[Optional[float], typer.Option(help="Of langevin, in 1/fs. [default: 0.01]")] = None,
    time_constant: Annotated[Optional[float], typer.Option(help="Of bussi, in fs. [default: 100]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of velocities and thermostat.")] = 0,
    keep_velocities: Annotated[
        bool, typer.Option("--keep-velocities", help="Start with the velocities of the structure; draw none.")
    ] = False,
    interval: Annotated[int, typer.Option(help="Steps between frames that are written.")] = 10,
    frame: Annotated[int, typer.Option(help="Frame of START; negative numbers count from its end.")] = -1,
    watch: WatchTexts = None,
    held_out: HeldOut = None,
    action: Annotated[Optional[List[str]], _actions("stop")] = None,
    check_interval: Interval = None,
    window: Window = None,
    level: Level = None,
    collected: Annotated[
        Optional[Path], typer.Option(help="File of frames above a threshold. [default: OUT with -monitor]")
    ] = None,
    calibration: checks.Calibrated = None,
    head: checks.Head = None,
    device: checks.Device = "cpu",
    dtype: checks.Dtype = None,
) -> None:
    """Run molecular dynamics that knows its uncertainty.

    ASE's dynamics runs with a model of MACE or NequIP. Frames are written with all uncertainties. With --watch, a
    monitor checks them during the run and warns, collects frames or stops. Positions and forces that are not finite
    end the run.
    """
    from e2ip_plugins.md.dynamics import RunOptions, parse_temperature
    from e2ip_plugins.md.run import run
    from e2ip_plugins.predictions.on_request import ON_REQUEST
    from e2ip_plugins.predictions.trajectories import check_output

    host = checks.host_of(model, checks.WITH_COMPILED)
    ramp = parse_temperature(temperature)
    options = RunOptions(steps, *ramp, timestep, thermostat, friction, time_constant, seed, interval, keep_velocities)
    defaults = {"action": ["stop"], "frames": output.with_name(f"{output.stem}-monitor{output.suffix}")}
    monitored = {"action": action, "check_interval": check_interval, "window": window, "collected": collected}
    watched = _watch(watch, defaults, {"held_out": held_out, "level": level, **monitored})
    check_output(output, frames=True)
    if watched is not None and watched.frames.resolve() == output.resolve():
        raise InputError(f"--collected {watched.frames}: is where all frames go; choose another name")
    frames = checks.read_trajectory(start)
    if not -len(frames) <= frame < len(frames):
        raise InputError(f"--frame {frame}: {start} has {len(frames)} frames")
    atoms = frames[frame].copy()
    opening = {"device": device, "calibration": calibration, "head": head, "dtype": dtype}
    atoms.calc = checks.opened("calculator", host, model, **opening, uncertainties=ON_REQUEST)
    outcome = run(atoms, options, output, watched, where=f"{start}, frame {frame % len(frames)}")
    for line in outcome.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")
    if outcome.interrupted:
        raise typer.Exit(130)  # as usual after Ctrl-C


def _watch(texts: Optional[List[str]], defaults: Dict[str, Any], options: Dict[str, Any]) -> Any:
    """Return the `Watch` of ``--watch``, None without it; ``options`` need it, by the names that the command has."""
    from e2ip_plugins.md.watch import parse_watch
    from e2ip_plugins.predictions.trajectories import check_output

    chosen = {name: value for name, value in options.items() if value is not None}
    if not texts:
        if chosen:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
            raise InputError(f"{names}: for --watch, which says what is watched")
        return None
    fields = {"check_interval": "interval", "collected": "frames"}
    named = {fields.get(name, name): value for name, value in chosen.items()}
    watch = parse_watch(texts, **{**defaults, **named, "tell": typer.echo})
    option = "--collected " if "collected" in options else "--frames "
    # Its name follows from that of the run unless the user names it.
    way_out = "" if "frames" in named else "another file for the run"
    check_output(watch.frames, option, frames=True, permission=way_out)
    return watch


def lammps_command(
    model: ModelFile,
    script: Annotated[Path, typer.Argument(metavar="in.lammps", help="LAMMPS input with a line '# e2ip'.")],
    species: Annotated[str, typer.Option(help="Chemical symbol of every atom type, in order: 'C H O'.")],
    key: Annotated[
        Optional[List[str]],
        typer.Option(help="Uncertainty for LAMMPS, may be repeated. [default: forces_epistemic_std, e2ip_leverage]"),
    ] = None,
    uncertainty_interval: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Steps between two evaluations of the uncertainties for LAMMPS. "
            "[default: 1; with --observe or several processes 10]",
        ),
    ] = None,
    watch: WatchTexts = None,
    held_out: HeldOut = None,
    action: Annotated[Optional[List[str]], _actions("warn")] = None,
    interval: Interval = None,
    window: Window = None,
    level: Level = None,
    frames: Annotated[Optional[Path], typer.Option(help="File of the monitor's frames. [default: monitor.xyz]")] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Leave the forces to the input's pair style; runs on many processes.")
    ] = False,
    calibration: checks.Calibrated = None,
    head: checks.Head = None,
    device: checks.Device = "cpu",
    dtype: checks.Dtype = None,
) -> None:
    """Run LAMMPS with the forces of a model, and its uncertainties as per-atom properties.

    The line `# e2ip` of the input file stands for the model: after box, atoms and masses, before dumps and
    runs. Dumps and computes there read d_forces_epistemic_std, d_e2ip_leverage and so on, and the step of these
    values, i_e2ip_step. A monitor that stops the run ends it with exit status 3. With --observe the forces are
    those of the pair style in the input file. `mpiexec -n 4 e2ip lammps …` uses four processes.
    """
    from e2ip_plugins.md.lammps.script import NO_INTERVAL, ScriptOptions, run_script, split
    from e2ip_plugins.md.monitor import MonitorStop
    from e2ip_plugins.predictions.on_request import ON_REQUEST

    split(script)
    if observe and interval is not None:
        raise InputError(NO_INTERVAL)
    monitored = {"action": action, "interval": interval, "window": window, "frames": frames}
    watched = _watch(watch, {"action": ["warn"]}, {"held_out": held_out, "level": level, **monitored})
    host = checks.host_of(model, checks.WITH_COMPILED)
    symbols = species.replace(",", " ").split()
    chosen = interval is not None
    options = ScriptOptions(symbols, key or None, uncertainty_interval, watched, chosen, (), observe, calibration)

    def open_model(batches: bool) -> Any:
        opening = {"device": device, "head": head, "dtype": dtype}
        if batches:
            return checks.opened("evaluate", host, model, **opening)
        return checks.opened("calculator", host, model, **opening, calibration=calibration, uncertainties=ON_REQUEST)

    try:
        run_script(script, open_model, options)
    except MonitorStop as stop:
        typer.secho(f"e2ip: stopped: {stop}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(3) from stop
