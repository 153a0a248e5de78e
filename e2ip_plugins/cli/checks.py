"""What subcommands share: common options, MACE or NequIP for a model file, checks of outputs, warnings."""

import re
import sys
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import typer

from e2ip_plugins.errors import InputError, UncertaintyWarning, plural

#: Framework of a model file, by its ending. The framework's adapter has entry points of this package.
HOSTS = {".model": "mace", ".ckpt": "nequip", ".zip": "nequip"}

#: The same for commands that only evaluate.
WITH_COMPILED = {**HOSTS, ".pt2": "nequip"}

#: Endings of data that the frameworks read, each its own.
OF_HOSTS = (".h5", ".hdf5", ".lmdb", ".aselmdb", ".mdb", ".npz", ".yaml", ".yml")

#: Names of reference forces and energies, None where they are to be found.
Keys = Tuple[Optional[str], Optional[str]]

# Options that several commands have.
# Both pairs of names work in every command.
ForcesKey = Annotated[
    Optional[str],
    typer.Option(
        "--forces-key",
        "--ref-forces",
        help="Column of the reference forces. [default: REF_forces, forces, dft_forces, forces_pbe and the like]",
    ),
]
EnergyKey = Annotated[
    Optional[str],
    typer.Option(
        "--energy-key", "--ref-energy", help="Name of the reference energy. [default: that beside the forces]"
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Dtype = Annotated[Optional[str], typer.Option(help="float32 or float64, MACE only. [default: the model's]")]
Head = Annotated[Optional[str], typer.Option(help="MACE head, for models with several.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Frames per batch.")]
Calibrated = Annotated[Optional[Path], typer.Option(help="File of e2ip calibrate, applied to the uncertainties.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")]


def warn(text: str) -> None:
    """Print a warning on standard error."""
    typer.secho(f"e2ip: warning: {text}", fg=typer.colors.YELLOW, err=True)


def host_of(model: Path, hosts: Dict[str, str] = HOSTS) -> str:
    """Return the framework of a model file, ``mace`` or ``nequip``."""
    if not model.is_file():
        raise InputError(f"{model}: {'is a folder' if model.is_dir() else 'no such file'}")
    host = hosts.get(model.suffix)
    if host is None:
        raise InputError(f"{model}: is none of {', '.join(hosts)}: give a MACE model, a NequIP checkpoint or package")
    return host


def opened(group: str, host: str, model: Path, **options: Any) -> Any:
    """Return what the adapter of a framework makes of a model file; device and dtype are checked first."""
    if "device" in options:
        check_device(options["device"])
    if options.get("dtype") not in (None, "float32", "float64"):
        raise InputError(f"--dtype {options['dtype']}: choose float32 or float64")
    why = f"{model} is a model of {host}"
    open_model = entry_point(group, host, why)
    try:
        return open_model(model, **options)
    except InputError:
        raise
    # Unpickling lets any error inside it through.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == host:
            raise _not_installed(why, host, error) from error
        if not zipfile.is_zipfile(model):
            raise InputError(f"{model}: is damaged, cut off or of another kind: no zip archive") from error
        raise InputError(f"{model}: {host} cannot open it ({type(error).__name__}: {error})") from error


def entry_point(group: str, host: str, why: str) -> Callable[..., Any]:
    """Return what the adapter of a framework provides for a command; the core imports no adapter."""
    from importlib.metadata import entry_points

    points = entry_points(group=f"e2ip_plugins.{group}", name=host)
    if not points:
        raise InputError("this installation of e2ip-plugins is older than its code: install it anew (pip install .)")
    try:
        return next(iter(points)).load()
    except ModuleNotFoundError as error:
        raise _not_installed(why, host, error) from error


def _not_installed(why: str, host: str, error: ModuleNotFoundError) -> InputError:
    return InputError(
        f"{why}, which is not installed here ({error}): run it in an environment with e2ip-plugins[{host}]"
    )


def check_device(name: str) -> None:
    """`InputError` for a device on which torch cannot compute."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    # torch has another error, and often a long one, for every way in which a device may be missing.
    except Exception as error:
        raise InputError(f"--device {name}: torch cannot compute there ({str(error)[:60]}...); try cpu") from error


def check_output(
    output: Path, inputs: Sequence[Path], overwrite: bool, frames: bool = False, option: str = "--output "
) -> None:
    """`InputError` for an output that cannot be written or must not be replaced."""
    from e2ip_plugins.predictions import trajectories

    more = {"frames": frames, "replace": overwrite}
    trajectories.check_output(output, option, inputs=inputs, permission="--overwrite", **more)


def model_output(
    output: Optional[Path], model: Path, overwrite: bool, addition: str, ending: Optional[str] = None
) -> Path:
    """Return the option ``--output`` of a command that makes another model of the same framework.

    By default it is the name of the model with an addition and, unless there is another ``ending``, the model's own.
    """
    if output is None:
        name = model.name.removesuffix(".zip").removesuffix(".nequip").removesuffix(model.suffix)
        output = model.with_name(f"{name}-{addition}{model.name[len(name) :] if ending is None else ending}")
    check_output(output, [model], overwrite)
    endings = [ending for ending, host in HOSTS.items() if host == HOSTS[model.suffix]]
    if output.suffix not in endings:
        raise InputError(f"--output {output}: the name of such a model ends with {' or '.join(endings)}")
    return output


def read_trajectory(path: Path) -> Any:
    """Return the frames of a file, and warn of one that is cut off."""
    from e2ip_plugins.predictions import trajectories

    frames, note = trajectories.read_trajectory(path)
    if note:
        warn(note)
    return frames


def stored_frames(paths: Sequence[Path], host: str, split: str, keys: Keys, need_forces: bool) -> Any:
    """Return frames that stay in their files, of which the framework of a model may be the only one to read some.

    ``split`` is ``train`` or ``val``: which of the sets of a training they are, where a file has several.
    """
    from e2ip_plugins.predictions.stored_frames import FrameSource, StoredFrames

    def open_source(path: Path, keys: Keys) -> Optional[FrameSource]:
        if not (path.is_dir() or path.suffix in OF_HOSTS):
            return None
        return entry_point("frames", host, f"{path}: is read by {host}")(path, keys, split)

    return StoredFrames(paths, keys[0], need_forces, warn, keys[1], open_source)


def stored_references(paths: Sequence[Path], host: str, keys: Keys, kind: str) -> Any:
    """Return frames with reference forces, each once, and print what these are called and what is left out.

    ``kind`` is a word for the frames.
    """
    with_copies = stored_frames(paths, host, "val", keys, need_forces=True)
    frames = with_copies.once()
    if len(frames) < len(with_copies):
        warn(f"{len(with_copies) - len(frames)} {kind} frames are there more than once, and count once")
    if frames.lacking:
        warn(f"{frames.lacking} {kind} atoms have no finite reference force and are left out")
    typer.echo(f"references of {plural(len(frames), f'{kind} frame')}: {', '.join(frames.names)}")
    return frames


def whole_file(path: Path) -> Path:
    """Return the file of a path that may name a slice of it; `InputError` where there is none."""
    from e2ip_plugins.predictions.chunks import check_is_file, split_slice

    file, _ = split_slice(path)
    check_is_file(file)
    return file


def tell(result: Any) -> None:
    """Print the warnings of a result on standard error, and its lines."""
    for text in result.warnings:
        warn(text)
    for line in result.lines():
        typer.echo(line)


@contextmanager
def resumable() -> Iterator[None]:
    """Say, when the user interrupts long work, that it can go on."""
    try:
        yield
    except KeyboardInterrupt:
        warn("interrupted; what is finished is kept: the same command goes on")
        raise typer.Exit(130) from None  # as usual after Ctrl-C


def make_folder(out: Path) -> None:
    """Make the folder ``--output``."""
    if out.is_file():
        raise InputError(f"--output {out}: is a file; give a folder, which may be new")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {out}: cannot make this folder ({error.strerror})") from error


#: Packages whose warnings are for their developers: of a user's command they would hide the lines that matter.
_NOISY = re.compile(r"[/\\](torch|e3nn|mace|nequip|lightning|pytorch_lightning)[/\\]")


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Let `warn` print every `UncertaintyWarning`, and leave out those for developers of other packages.

    Whoever asks for these, with ``PYTHONWARNINGS`` or ``python -W``, gets them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UncertaintyWarning)
        show_other = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, UncertaintyWarning):
                warn(message)
            elif sys.warnoptions or not (issubclass(category, FutureWarning) or _NOISY.search(str(where[0]))):
                show_other(message, category, *where, **more)

        warnings.showwarning = show
        yield
