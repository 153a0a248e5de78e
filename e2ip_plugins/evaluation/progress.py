"""Progress of ``e2ip evaluate`` on standard error: a bar on a terminal, a line now and then in a log."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional, Tuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from e2ip_plugins.evaluation.options import State

#: Seconds between two lines in a log.
LOG_INTERVAL = 60.0

_BAR = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def progress(source: Path, part: Tuple[int, int] = (1, 1)) -> Iterator[Callable[[State], None]]:
    """Show the progress of an evaluation; yield its callback.

    Parameters
    ----------
    source : Path
        Input. The length of a compressed one is not known before its end.
    part : (int, int)
        i of n; taken for an n-th of the file.
    """
    compressed = source.suffix in (".gz", ".bz2", ".xz")
    total = None if compressed else max(1.0, source.stat().st_size / part[1])
    began = logged = time.monotonic()
    first: Optional[int] = None
    console = Console(stderr=True)
    with Progress(*_BAR, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("frames", total=total)

        def on_progress(state: State) -> None:
            nonlocal logged, first
            # Frames of earlier runs and the first batch say nothing about the rate.
            first = state.written if first is None else first
            now = time.monotonic()
            bar.update(task, completed=min(state.bytes, total or state.bytes), description=f"{state.written} frames")
            if not console.is_terminal and now - logged > LOG_INTERVAL:
                logged = now
                share = "" if total is None else f", {min(100.0, 100.0 * state.bytes / total):.1f} %"
                rate = (state.written - first) / (now - began)
                console.print(f"{state.written} frames{share}, {rate:.3g} frames/s", highlight=False)

        yield on_progress
