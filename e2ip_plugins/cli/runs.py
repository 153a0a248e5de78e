"""Subcommands that go from a model to new frames: md, select, label, lammps."""

from pathlib import Path
from typing import Annotated, Any, Dict, List, Mapping, Optional

import typer

from e2ip_plugins.cli import checks
from e2ip_plugins.errors import InputError

# Options that several of these commands have.
HeldOut = Annotated[
    Optional[Path], typer.Option(help="File of e2ip calibrate, or predictions for frames not trained on.")
]
Window = Annotated[
    Optional[int], typer.Option(min=1, help="Checks over which values are smoothed by their median. [default: 1]")
]
Level = Annotated[
    Optional[float], typer.Option(help="Of the region whose forces_conformal_extent is watched. [default: 0.9]")
]
Calibrated = Annotated[Optional[Path], typer.Option(help="File of e2ip calibrate, for the uncertainties.")]
Head = Annotated[Optional[str], typer.Option(help="MACE head, where there are more.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]


def md_command(
    model: Annotated[Path, typer.Argument(help="MACE .model, NequIP .ckpt, .nequip.zip or .pt2.")],
    start: Annotated[Path, typer.Argument(metavar="START.extxyz", help="Structure to start from.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.extxyz", help="Frames of the run.")],
    steps: Annotated[int, typer.Option(help="Time steps.")],
    temperature: Annotated[Optional[str], typer.Option(help="In K; 300:1500 for a ramp. [default: 300]")] = None,
    timestep: Annotated[float, typer.Option(help="In fs.")] = 0.5,
    thermostat: Annotated[str, typer.Option(metavar="nve|langevin|bussi", help="ASE's own.")] = "langevin",
    friction: Annotated[Optional[float], typer.Option(help="Of langevin, in 1/fs. [default: 0.01]")] = None,
    time_constant: Annotated[Optional[float], typer.Option(help="Of bussi, in fs. [default: 100]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of velocities and thermostat.")] = 0,
    keep_velocities: Annotated[
        bool, typer.Option("--keep-velocities", help="Those of the structure, in place of drawn ones.")
    ] = False,
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
    held_out: HeldOut = None,
    action: Annotated[
        Optional[List[str]],
        typer.Option(metavar="warn|collect|stop", help="Above a threshold; may be repeated. [default: stop]"),
    ] = None,
    check_interval: Annotated[
        Optional[int], typer.Option(help="Steps between two looks at the thresholds. [default: 10]")
    ] = None,
    window: Window = None,
    level: Level = None,
    collected: Annotated[
        Optional[Path], typer.Option(help="Frames above a threshold. [default: OUT with -monitor]")
    ] = None,
    calibration: Calibrated = None,
    head: Head = None,
    device: Device = "cpu",
    dtype: checks.Dtype = None,
) -> None:
    """Run molecular dynamics that knows its uncertainty.

    ASE's dynamics with a model of either host. Frames are written with all uncertainties; with --watch a monitor looks
    at them on the way and warns, collects frames or stops. Positions and forces that are no numbers end the run.
    """
    from e2ip_plugins.md import run as runs
    from e2ip_plugins.predictions.trajectories import TEXT, read_trajectory

    host = checks.host_of(model, checks.WITH_COMPILED)
    first, last = (runs.Settings.temperature, None) if temperature is None else runs.parse_temperature(temperature)
    for option, value, owner in (("--friction", friction, "langevin"), ("--time-constant", time_constant, "bussi")):
        if value is not None and thermostat != owner:
            raise InputError(f"{option} is for --thermostat {owner}, not {thermostat}")
    settings = runs.Settings(
        steps,
        first,
        last,
        timestep,
        thermostat,
        runs.Settings.friction if friction is None else friction,
        runs.Settings.time_constant if time_constant is None else time_constant,
        seed,
        interval,
        runs.Settings.check_interval if check_interval is None else check_interval,
        keep_velocities,
    )
    watching = {"--action": action, "--check-interval": check_interval, "--window": window, "--collected": collected}
    if temperature is not None and settings.without_temperature:
        raise InputError("--temperature: nve with --keep-velocities has the temperature of those; leave it out")
    thresholds = _thresholds(watch, held_out, watching)
    actions = _actions(action) or ["stop"]
    _check_level(level, thresholds)
    checks.check_new(output, TEXT)
    frames, note = read_trajectory(start)
    if note:
        checks.warn(note)
    if not -len(frames) <= frame < len(frames):
        raise InputError(f"--frame {frame}: {start} has {len(frames)} frames")
    watched = None
    given: Dict[str, Any] = {"level": level, "window": window}
    if thresholds:
        place = collected or output.with_name(f"{output.stem}-monitor{output.suffix}")
        checks.check_new(place, TEXT, "--collected ")
        if place.resolve() == output.resolve():
            raise InputError(f"--collected {place}: is where all frames go; choose another name")
        watched = runs.Watch(
            thresholds,
            actions,
            held_out,
            frames=place,
            **{name: value for name, value in given.items() if value is not None},
        )
    checks.check_device(device)
    checks.check_dtype(dtype)
    atoms = frames[frame].copy()
    wanted = {"device": device, "calibration": calibration, "head": head, "dtype": dtype}
    atoms.calc = checks.opened("calculator", host, model, **wanted)
    outcome = runs.run(atoms, settings, output, watched, where=f"{start}, frame {frame % len(frames)}")
    for line in outcome.lines():
        typer.echo(line)
    typer.echo(f"Written: {output}")
    if outcome.interrupted:
        raise typer.Exit(130)  # as of any command that Ctrl-C ends


def _thresholds(watch: Optional[List[str]], held_out: Optional[Path], others: Mapping[str, object]) -> Dict[str, Any]:
    """Of a `Monitor`; `InputError` for options (``others`` too) that mean nothing where nothing is watched."""
    from e2ip_plugins.md.thresholds import parse_watch

    given = [name for name, value in {"--held-out": held_out, **others}.items() if value is not None]
    if given and not watch:
        raise InputError(f"{', '.join(given)}: for --watch, which says what is watched")
    return parse_watch(watch or [], held_out)


def _actions(given: Optional[List[str]]) -> List[str]:
    """Of a `Monitor`."""
    from e2ip_plugins.md.monitor import ACTIONS

    actions = [name.strip() for text in given or [] for name in text.split(",")]
    for name in actions:
        if name not in ACTIONS:
            raise InputError(f"--action {name}: choose from {', '.join(ACTIONS)}; --action may be repeated")
    return actions


def _check_level(level: Optional[float], thresholds: Dict[str, Any]) -> None:
    from e2ip_plugins.keys import CONFORMAL_EXTENT

    if level is not None and CONFORMAL_EXTENT.name not in thresholds:
        raise InputError(f"--level: for --watch {CONFORMAL_EXTENT.name}=…")


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
    seed: Annotated[int, typer.Option(min=0, help="Of method random.")] = 0,
    head: Head = None,
    device: Device = "cpu",
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

    from e2ip_plugins.active import select as selecting
    from e2ip_plugins.active.validity import Validity
    from e2ip_plugins.files import replacing
    from e2ip_plugins.predictions.columns import without_labels
    from e2ip_plugins.predictions.labelled import read_frames
    from e2ip_plugins.predictions.trajectories import TEXT, read_trajectory

    host = checks.host_of(model)
    checks.check_output(output, [model, *trajectories, *train], overwrite, TEXT)
    if method not in selecting.METHODS:
        raise InputError(f"--method {method}: choose from {', '.join(selecting.METHODS)}")
    if weight is not None and method != "leverage":
        raise InputError(f"--weight is for --method leverage, not {method}")
    limits = {"--min-distance": min_distance, "--max-force": max_force, "--max-leverage": max_leverage}
    for name, value in {**limits, **({} if weight is None else {"--weight": weight})}.items():
        if math.isnan(value) or value < 0.0 or (name == "--weight" and not 0.0 < value < math.inf):
            above = "above 0" if name == "--weight" else "of at least 0"
            raise InputError(f"{name} {value}: a number {above}")
    training = read_frames(train, need_forces=False)
    candidates = []
    for path in trajectories:
        frames, note = read_trajectory(path)
        if note:
            checks.warn(note)
        chosen = range(0, len(frames), every)
        candidates += [selecting.Candidate(frames[index], str(path), index) for index in chosen]
    checks.check_device(device)
    opened = checks.opened("passes", host, model, head=head, device=device, batch_size=batch_size)
    validity = Validity(min_distance, max_force, max_leverage, not allow_parts)
    found = selecting.select(opened, training, candidates, number, method, validity, weight, seed)
    for text in found.warnings:
        checks.warn(text)
    written = []
    for rank, (taken, score) in enumerate(zip(found.frames, found.scores, strict=True)):
        frame = without_labels(taken.atoms)
        frame.info.update(select_rank=rank, select_score=score, select_method=method)
        frame.info.update(select_source=taken.source, select_index=taken.index)
        written.append(frame)
    with replacing(output) as unfinished:
        ase.io.write(unfinished, written, format="extxyz")
    rejected = selecting.told(found.rejected)
    typer.echo(f"{len(candidates)} frames, {found.valid} candidates ({rejected}); {len(written)} taken")
    typer.echo(f"{selecting.SCORES[method]}: {found.scores[0]:.3g} of the first, {found.scores[-1]:.3g} of the last")
    typer.echo(f"Written: {output}")


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
    from e2ip_plugins.active.label import calculator_of, label
    from e2ip_plugins.predictions.trajectories import read_trajectory

    found, note = read_trajectory(frames)
    if output.exists() and output.samefile(frames):
        raise InputError(f"{output}: is the file of frames itself")
    if note:
        checks.warn(note)

    def say(text: str) -> None:
        checks.warn(f"{frames}, {text}")

    method = " ".join([calculator, *sorted(argument or [])])
    result = label(found, output, calculator_of(calculator, argument or []), say, method)
    if result.note:
        checks.warn(result.note)
    typer.echo(f"{result.labelled} labelled, {result.there} there already, {len(result.failed)} failed")
    typer.echo(f"Written: {output}" if result.labelled or result.there else "Written: nothing")
    if result.failed:
        raise typer.Exit(1)


def lammps_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="MACE .model, NequIP .ckpt, .nequip.zip or .pt2.")],
    script: Annotated[Path, typer.Argument(metavar="in.lammps", help="LAMMPS input with a line '# e2ip'.")],
    species: Annotated[str, typer.Option(help="Chemical symbol of every atom type, in order: 'C H O'.")],
    key: Annotated[
        Optional[List[str]],
        typer.Option(help="Uncertainty for LAMMPS, may be repeated. [default: forces_epistemic_std, e2ip_leverage]"),
    ] = None,
    watch: Annotated[
        Optional[List[str]],
        typer.Option(metavar="NAME=NUMBER", help="Threshold of a monitor; q0.99: a quantile of --held-out."),
    ] = None,
    held_out: HeldOut = None,
    action: Annotated[
        Optional[List[str]],
        typer.Option(metavar="warn|collect|stop", help="Above a threshold; may be repeated. [default: warn]"),
    ] = None,
    interval: Annotated[Optional[int], typer.Option(help="Steps between checks of the monitor. [default: 10]")] = None,
    window: Window = None,
    level: Level = None,
    frames: Annotated[
        Optional[Path], typer.Option(help="Where the monitor's frames go. [default: monitor.xyz]")
    ] = None,
    calibration: Calibrated = None,
    head: Head = None,
    device: Device = "cpu",
    dtype: checks.Dtype = None,
) -> None:
    """Run LAMMPS with the forces of a model, and its uncertainties as per-atom properties.

    The line `# e2ip` of the input file stands for the model: after box, atoms and masses, before dumps and
    runs. Dumps and computes there read d_forces_epistemic_std, d_e2ip_leverage and so on. A monitor that stops
    the run ends it with exit status 3.
    """
    from e2ip_plugins.md.lammps_script import run_script, split
    from e2ip_plugins.md.monitor import MonitorStop
    from e2ip_plugins.predictions.trajectories import TEXT

    split(script)
    watching = {"--action": action, "--interval": interval, "--window": window, "--frames": frames}
    thresholds = _thresholds(watch, held_out, watching)
    actions = _actions(action) or ["warn"]
    _check_level(level, thresholds)
    given: Dict[str, Any] = {"interval": interval, "level": level, "window": window}
    place = frames or Path("monitor.xyz")
    if thresholds:
        checks.check_new(place, TEXT, "--frames ")
    host = checks.host_of(model, checks.WITH_COMPILED)
    checks.check_device(device)
    checks.check_dtype(dtype)
    wanted = {"device": device, "calibration": calibration, "head": head, "dtype": dtype}
    try:
        calculator = checks.opened("calculator", host, model, **wanted)
        run_script(
            script,
            calculator,
            species.replace(",", " ").split(),
            keys=key or None,
            thresholds=thresholds,
            held_out=held_out,
            action=actions,
            frames=place,
            **{name: value for name, value in given.items() if value is not None},
        )
    except MonitorStop as stop:
        typer.secho(f"e2ip: stopped: {stop}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(3) from stop
