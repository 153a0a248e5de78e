"""Rooms that a batch passes in a training step of MACE, and a frame in ``e2ip evaluate``.

    .nox/mace/bin/python benchmarks/walk.py

A room is entered by a call from another room of ours, and left when that call has returned; while it calls others, it
is not left. What is entered on the way of a return belongs to that return. Entries by the same caller in a row are
one. Formulas (`maths`, `leverage/form.py`), names, errors and files are tools of every room, and are not counted.
"""

import argparse
import importlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ase.io

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "demo" / "data"
PACKAGES = ("e2ip_plugins", "mace_ext")
#: What every room uses: rooms and modules, and functions that list names.
TOOLS = ("maths", "form", "keys", "errors", "files", "contract", "_hook", "seams")
NAMES = ("output_keys", "table", "uncertainties")


class Walk:
    """Entries of rooms, in order: depth among rooms, room, name of the first function."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str, str]] = []
        self.returns = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note the entries of rooms."""
        stack: list[str | None] = []  # of every Python call, the room if it is one of ours
        left: set[str] = set()
        returned = sys.maxsize  # depth of the return that is under way

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal returned
            if event == "call":
                stack.append(room := room_of(frame))
                rooms = [name for name in stack[:-1] if name]
                if room is None or (rooms and rooms[-1] == room):
                    return
                path = [name for i, name in enumerate(rooms) if not i or rooms[i - 1] != name]
                entry = (len(path), room, frame.f_code.co_name)
                siblings = [e for e in self.entries if e[0] <= len(path)]
                if siblings and siblings[-1][:2] == entry[:2]:
                    return
                if len(path) <= returned:
                    returned = len(path) if room in left and room not in path else sys.maxsize
                    self.returns += returned == len(path)
                self.entries.append(entry)
            elif event == "return" and stack:
                room = stack.pop()
                if room and room not in stack:
                    left.add(room)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def text(self, title: str) -> str:
        """Return the walk as a Markdown section."""
        lines = [f"{'  ' * depth}- `{room}`: {name}" for depth, room, name in self.entries]
        return "\n".join([f"## {title}", "", *lines, "", f"Returns to a room that was left: {self.returns}.", ""])


def room_of(frame: FrameType) -> str | None:
    """Return the room of a call of a function of ours; None for others, and for tools."""
    parts = Path(frame.f_code.co_filename).parts
    package = next((name for name in PACKAGES if name in parts), None)
    if package is None:
        return None
    room = parts[len(parts) - parts[::-1].index(package)].removesuffix(".py")
    tool = (
        {room, parts[-1].removesuffix(".py")} & set(TOOLS)
        or frame.f_code.co_name.startswith("<")
        or frame.f_code.co_name in NAMES
    )
    return None if tool else f"{package}.{room}"


def train(folder: Path, walk: Walk) -> Path:
    """Train a tiny model for an epoch, with calls of its second step noted; return the model."""
    from mace.cli import run_train
    from mace.tools import build_default_arg_parser

    steps = importlib.import_module("mace.tools.train")  # mace.tools has a function of that name
    count, take_step = 0, steps.take_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != 2:
            return take_step(*args, **kwargs)
        with walk.recorded():
            return take_step(*args, **kwargs)

    steps.take_step = noted
    sets = {name: folder / f"{name}.extxyz" for name in ("train", "valid")}
    for name, path in sets.items():
        ase.io.write(path, ase.io.read(DATA / f"{name}.extxyz", ":8"), format="extxyz")
    command = ["--config", str(ROOT / "configs" / "mace_e2ip.yaml"), "--name", "walk", "--work_dir", str(folder)]
    command += ["--train_file", str(sets["train"]), "--valid_file", str(sets["valid"]), "--max_num_epochs", "1"]
    command += ["--num_channels", "4", "--correlation", "1", "--max_ell", "1", "--batch_size", "4", "--device", "cpu"]
    run_train.run(build_default_arg_parser().parse_args(command))
    steps.take_step = take_step
    return folder / "walk.model"


def evaluate(model: Path, folder: Path, walk: Walk) -> None:
    """Evaluate two frames, with the calls of the second one noted."""
    from e2ip_plugins.evaluation.evaluate import evaluate
    from e2ip_plugins.evaluation.options import EvaluateOptions
    from mace_ext.inference.batches import open_model

    source = folder / "frames.extxyz"
    ase.io.write(source, ase.io.read(DATA / "test.extxyz", ":2"), format="extxyz")
    recording = walk.recorded()

    def on_progress(state: Any) -> None:
        if state.written == 1:
            recording.__enter__()
        elif state.written == 2:
            recording.__exit__(None, None, None)

    evaluate(open_model(model), source, folder / "out.extxyz", EvaluateOptions(batch_atoms=1), {}, on_progress)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    step, frame = Walk(), Walk()
    with tempfile.TemporaryDirectory() as name:
        model = train(Path(name), step)
        logging.disable()
        evaluate(model, Path(name), frame)
    print(step.text("A batch in a training step of MACE"), frame.text("A frame in e2ip evaluate"), sep="\n")


if __name__ == "__main__":
    main()
