"""What subcommands share: which host a model file is of, where output may go, warnings."""

import tempfile
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, Iterator, Optional, Sequence

import typer

from e2ip_plugins.errors import InputError, UncertaintyWarning

#: Ending of a model file: the host it belongs to, whose ``fit_file`` is an entry point of this package.
HOSTS = {".model": "mace", ".ckpt": "nequip", ".zip": "nequip"}

#: For commands that only evaluate.
WITH_COMPILED = {**HOSTS, ".pt2": "nequip"}

#: Option of commands that predict.
Dtype = Annotated[Optional[str], typer.Option(help="float32 or float64, MACE only. [default: the model's]")]


def warn(text: str) -> None:
    """On standard error."""
    typer.secho(f"e2ip: warning: {text}", fg=typer.colors.YELLOW, err=True)


def opened(group: str, host: str, model: Path, **options: Any) -> Any:
    """What a host's adapter makes of a model file."""
    why = f"{model} is a model of {host}"
    open_it = entry_point(group, host, why)
    try:
        return open_it(model, **options)
    except InputError:
        raise
    # Unpickling lets whatever goes wrong inside it through.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == host:
            raise _not_installed(why, host, error) from error
        if not zipfile.is_zipfile(model):
            raise InputError(f"{model}: is damaged, cut off or of another kind: no zip archive") from error
        raise InputError(f"{model}: {host} cannot open it ({type(error).__name__}: {error})") from error


def check_new(output: Path, endings: Sequence[str], option: str = "") -> None:
    from e2ip_plugins.predictions.trajectories import check_is_new

    if output.suffix not in endings:
        raise InputError(f"{option}{output}: frames go into an extxyz file, {' or '.join(endings)}")
    check_is_new(output, option)


def host_of(model: Path, hosts: Dict[str, str] = HOSTS) -> str:
    host = hosts.get(model.suffix)
    if host is None:
        raise InputError(f"{model}: is none of {', '.join(hosts)}: give a MACE model, a NequIP checkpoint or package")
    if not model.is_file():
        raise InputError(f"{model}: {'is a folder' if model.is_dir() else 'no such file'}")
    return host


def beside(model: Path, ending: str) -> Path:
    return model.with_name(model.name.removesuffix(".zip").removesuffix(".nequip").removesuffix(model.suffix) + ending)


def check_output(output: Path, inputs: Sequence[Path], overwrite: bool, endings: Sequence[str] = ()) -> None:
    """What a command reads is never replaced, whatever the user says; ``endings``, if given, are those of frames."""
    if output.is_dir():
        raise InputError(f"--output {output}: is a folder")
    if output.exists() and any(path.exists() and output.samefile(path) for path in inputs):
        raise InputError(f"--output {output}: is a file that this command reads; choose another name")
    if output.exists() and not overwrite:
        raise InputError(f"--output {output}: is there already; choose another name, or --overwrite")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.parent}")
    try:
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise InputError(f"--output {output}: nothing can be written to that folder ({error.strerror})") from error
    if endings and output.suffix not in endings:
        raise InputError(f"--output {output}: frames go into an extxyz file, {' or '.join(endings)}")


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder ({error.strerror})") from error


def check_model_output(output: Path, model: Path, overwrite: bool) -> None:
    """`check_output` for another model of the same host."""
    check_output(output, [model], overwrite)
    endings = [ending for ending, host in HOSTS.items() if host == HOSTS[model.suffix]]
    if output.suffix not in endings:
        raise InputError(f"--output {output}: the name of such a model ends with {' or '.join(endings)}")


def check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name).item()
    # torch has an error of its own, and often a long one, for every way in which a device may be missing.
    except Exception as error:
        raise InputError(f"--device {name}: torch cannot compute there ({str(error)[:60]}...); try cpu") from error


def check_dtype(name: Optional[str]) -> None:
    if name not in (None, "float32", "float64"):
        raise InputError(f"--dtype {name}: choose float32 or float64")


def entry_point(group: str, host: str, why: str) -> Callable[..., Any]:
    """What a host's adapter gives for a command; the core imports no adapter."""
    from importlib.metadata import entry_points

    found = entry_points(group=f"e2ip_plugins.{group}", name=host)
    if not found:
        raise InputError("this installation of e2ip-plugins is older than its code: install it anew (pip install .)")
    try:
        return next(iter(found)).load()
    except ModuleNotFoundError as error:
        raise _not_installed(why, host, error) from error


def _not_installed(why: str, host: str, error: ModuleNotFoundError) -> InputError:
    return InputError(
        f"{why}, which is not installed here ({error}): run it in an environment with e2ip-plugins[{host}]"
    )


@contextmanager
def told_warnings() -> Iterator[None]:
    """Every warning of ours as `warn` tells it; others as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UncertaintyWarning)
        shown = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, UncertaintyWarning):
                warn(message)
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show
        yield
