"""Options of a `Monitor` as commands have them: ``--watch`` and all that goes with it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Type

from ase import Atoms

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import CONFORMAL_EXTENT
from e2ip_plugins.md.monitor import ACTIONS, Monitor
from e2ip_plugins.md.thresholds import WATCHED, Quantile, Threshold, watchable


@dataclass(frozen=True)
class Watch:
    """Options of a `Monitor`, whose docstring describes them, the steps between two checks, and what prints notes."""

    thresholds: Dict[str, Threshold]
    action: Sequence[str] = ("stop",)
    held_out: Optional[Path] = None
    level: float = 0.9
    window: int = 1
    frames: Path = Path("monitor.xyz")
    interval: int = 10
    tell: Callable[[str], None] = field(default=print, compare=False)

    def attach(self, dynamics: Any, atoms: Atoms) -> Monitor:
        """Make the monitor of a structure and attach it to a dynamics of ASE or a `LammpsDriver`."""
        monitor = self.monitor(atoms)
        dynamics.attach(monitor, interval=self.interval)
        return monitor

    def monitor(self, atoms: Atoms, kind: Type[Monitor] = Monitor) -> Monitor:
        """Make the monitor of a structure."""
        options = {name: getattr(self, name) for name in ("action", "held_out", "level", "window", "frames")}
        monitor = kind(atoms, self.thresholds, **options)
        if kind is Monitor:  # others are those of further processes, which say nothing
            for note in monitor.notes:
                self.tell(f"monitor: {note}")
        return monitor


def parse_watch(texts: Sequence[str], action: Sequence[str] = (), **options: Any) -> Watch:
    """Return the `Watch` of a command's options.

    Parameters
    ----------
    texts : sequence of str
        Values of ``--watch``: ``NAME=NUMBER`` or, for a quantile of the held-out frames, ``NAME=q0.99``; ``NAME`` alone
        takes the quantile that is advised for their number.
    action : sequence of str
        Values of ``--action``, of which each may name several actions, separated by commas.
    **options
        Further fields of `Watch`.

    Raises
    ------
    InputError
        Names, thresholds and actions that mean nothing, and options without effect or without what they need.
    """
    thresholds: Dict[str, Threshold] = {}
    for text in texts:
        name, threshold = _parse_threshold(text)
        if name in thresholds:
            raise InputError(f"--watch {text}: {name} has a threshold already; give one for each")
        thresholds[name] = threshold
    actions = [name.strip() for text in action for name in text.split(",")]
    for name in actions:
        if name not in ACTIONS:
            raise InputError(f"--action {name}: choose from {', '.join(ACTIONS)}; --action may be repeated")
    conformal = CONFORMAL_EXTENT.name in thresholds
    if "held_out" not in options and Quantile() in thresholds.values():
        name = next(name for name, threshold in thresholds.items() if threshold == Quantile())
        raise InputError(
            f"--watch {name}: without a number the threshold comes from held-out frames; give --held-out, a file of "
            f"e2ip calibrate or predictions for frames not trained on, or a number: --watch {name}=0.5"
        )
    if "held_out" not in options and (conformal or any(isinstance(t, Quantile) for t in thresholds.values())):
        raise InputError("--watch: quantiles and conformal regions come from held-out frames; give --held-out")
    if "level" in options and not conformal:
        raise InputError(f"--level: for --watch {CONFORMAL_EXTENT.name}=…")
    return Watch(thresholds, actions or ("stop",), **options)


def _parse_threshold(text: str) -> Tuple[str, Threshold]:
    name, sign, value = text.partition("=")
    name = name.strip()
    if name not in WATCHED:
        raise InputError(f"--watch {text}: {name!r} cannot be watched; choose from {watchable()}")
    if not sign:
        return name, Quantile()
    try:
        return name, Quantile(float(value[1:])) if value.startswith("q") else float(value)
    except InputError as error:
        raise InputError(f"--watch {text}: {error}") from error
    except ValueError as error:
        raise InputError(f"--watch {text}: a name and a number or quantile, such as e2ip_leverage=q0.99") from error
