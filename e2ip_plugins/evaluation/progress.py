"""How far ``e2ip evaluate`` has come, on standard error: a bar on a terminal, a line now and then in a log."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional, Tuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from e2ip_plugins.evaluation.evaluate import State, Told

#: Seconds between two lines in a log.
PATIENCE = 60.0


@contextmanager
def progress(source: Path, part: Tuple[int, int] = (1, 1)) -> Iterator[Told]:
    """What `e2ip_plugins.evaluation.evaluate.evaluate` tells about.

    Parameters
    ----------
    source : Path
        The input; of a compressed one nobody knows how far the end is.
    part : (int, int)
        i of n; taken for an n-th of the file.
    """
    total: Optional[float] = None
    if source.suffix not in (".gz", ".bz2", ".xz"):
        total = max(1.0, source.stat().st_size / part[1])
    began, last, before = time.monotonic(), time.monotonic(), -1
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("frames", total=total)

        def told(state: State) -> None:
            nonlocal last, before
            if before < 0:  # frames of earlier runs, and the first batch, say nothing about the rate
                before = state.written
            now = time.monotonic()
            bar.update(task, completed=min(state.bytes, total or state.bytes), description=f"{state.written} frames")
            if not console.is_terminal and now - last > PATIENCE:
                last = now
                share = "" if total is None else f", {min(100.0, 100.0 * state.bytes / total):.1f} %"
                rate = (state.written - before) / (now - began)
                console.print(f"{state.written} frames{share}, {rate:.3g} frames/s", highlight=False)

        yield told
