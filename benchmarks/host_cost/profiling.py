"""Where the readout's time goes: operators and milliseconds of its parts, forward and backward.

Parts are marked from outside, by hooks on modules and by wrapping functions where the adapters look them up, so that
the code under test is the code that ships. Backward nodes are attributed to the forward operator that made them.
"""

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from host_cost.measure import synchronise

_MARK = "part: "
_OPTIMISER = "Optimizer.step"  # torch's own mark
_REST = "everything else"
_ALL = "all"
_EMPTY = {"forward_ops": 0.0, "forward_ms": 0.0, "backward_ops": 0.0, "backward_ms": 0.0}

#: Functions wrapped, where the code looks them up -> part.
_FUNCTIONS = {
    ("e2ip_plugins.families.e2ip", "distribution"): "map to Σ0, ν, κ",
    ("e2ip_plugins.families.niw", "_views"): "derived keys",
}
_LOSS = {"nequip": ("nequip_ext.training.loss", "force_loss"), "mace": ("mace_ext.training.loss", "force_loss")}

#: Where all of the readout happens in a prediction.
_WHOLE = {
    "nequip": ("nequip_ext.model.readout", "GraphReadout", "forward"),
    "mace": ("mace_ext.model.model", "ScaleShiftMACE", "_outputs"),
}

#: Class of a module -> part; nested parts are subtracted from the outer one.
_MODULES = {
    "GraphReadout": "readout, rest",
    "Readout": "readout, rest",
    "Trunk": "trunk",
    "EdgePool": "edge pool",
    "Leverage": "leverage",
}


def seconds_inside(host: str, function: Callable, device: str, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds spent in the readout during each of several predictions in eager mode, and those of the predictions.

    The difference of two whole predictions has the noise of both; this has that of the small part alone.
    """
    module, name, method = _WHOLE[host]
    owner = getattr(importlib.import_module(module), name)
    original, spent, whole = getattr(owner, method), [], []

    def timed(*args):
        synchronise(device)
        start = time.perf_counter()
        result = original(*args)
        synchronise(device)
        spent.append(time.perf_counter() - start)
        return result

    setattr(owner, method, timed)
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            synchronise(device)
            whole.append(time.perf_counter() - start)
    finally:
        setattr(owner, method, original)
    return spent, whole


@contextlib.contextmanager
def marked(host: str, parts: dict) -> Iterator[None]:
    """Marks around the readout's modules and functions, and around losses, for the time of the context."""
    handles, originals = [], []
    modules = [(m, _MODULES[type(m).__name__]) for m in parts["readout"].modules() if type(m).__name__ in _MODULES]
    for loss in parts.get("losses", []):
        # NequIP's loss is a dictionary of terms that are called one by one.
        terms = loss.items() if isinstance(loss, torch.nn.ModuleDict) else [("loss", loss)]
        modules += [(term, f"{name}, rest") for name, term in terms]
    for module, part in modules:
        handles += _mark_module(module, part)
    for (name, function), part in {**_FUNCTIONS, _LOSS[host]: "force loss"}.items():
        owner = importlib.import_module(name)
        originals.append((owner, function, getattr(owner, function)))
        setattr(owner, function, _mark_function(getattr(owner, function), part))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, function, original in originals:
            setattr(owner, function, original)


def _mark_module(module: torch.nn.Module, part: str) -> list:
    open_marks = []

    def enter(*_) -> None:
        open_marks.append(record_function(_MARK + part))
        open_marks[-1].__enter__()

    def leave(*_) -> None:
        open_marks.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _mark_function(function: Callable, part: str) -> Callable:
    def wrapped(*args, **kwargs):
        with record_function(_MARK + part):
            return function(*args, **kwargs)

    return wrapped


def profile_parts(host: str, functions: dict[str, Callable], parts: dict, repeats: int = 9) -> dict:
    """Operators and milliseconds per call of every part, of the baseline and of e2ip.

    Operators are those of ATen that no other operator called. The profiler itself costs about a microsecond per
    operator: the figures say where time goes, not how much there is. On a GPU milliseconds are the host's.
    """
    rows = {}
    with marked(host, parts):
        for variant in ("baseline", "e2ip"):
            calls = []
            for _ in range(repeats + 1):
                with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(_MARK + _REST):
                    functions[variant]()
                by_part = _attribute(profiler.events())
                by_part[_ALL] = {key: sum(row[key] for row in by_part.values()) for key in _EMPTY}
                calls.append(by_part)
            del calls[0]  # the first one warms the profiler up
            for part in sorted(calls[0], key=lambda name: (name != _ALL, name)):
                # Medians, because on a busy machine an interruption hits a different part each time.
                row = {key: statistics.median(call[part][key] for call in calls) for key in _EMPTY}
                rows[f"{variant}, {part}"] = row
    return {"note": f"medians of {repeats} calls, under the profiler", "parts": rows}


def _attribute(events: list) -> dict[str, dict[str, float]]:
    """Rows by part."""
    part_of_node: dict[int, str] = {}
    rows: dict[str, dict[str, float]] = {}

    def add(part: str, direction: str, ops: int = 0, microseconds: float = 0.0) -> None:
        row = rows.setdefault(part, dict(_EMPTY))
        row[f"{direction}_ops"] += ops
        row[f"{direction}_ms"] += microseconds / 1e3

    for event in sorted(events, key=lambda e: e.time_range.start):
        owner = _ancestor(event, _is_owner)
        forward = owner is not None and not _is_node(owner)
        if _is_owner(event):
            span = event.time_range.elapsed_us()
            if _is_node(event):
                add(part_of_node.get(event.sequence_nr, _REST), "backward", microseconds=span)
            else:
                add(_part(event), "forward", microseconds=span)
            if forward:  # what is inside is not its owner's
                add(_part(owner), "forward", microseconds=-span)
        elif event.name.startswith("aten::"):
            if forward and event.sequence_nr >= 0:
                # The last operator to show a node's number is the one that made the node.
                part_of_node[event.sequence_nr] = _part(owner)
            if owner is not None and not _ancestor(event, lambda e: e.name.startswith("aten::")):
                part = _part(owner) if forward else part_of_node.get(owner.sequence_nr, _REST)
                add(part, "forward" if forward else "backward", ops=1)
    return rows


def _is_node(event) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def _is_owner(event) -> bool:
    """Marks, nodes of the graph and optimiser steps share all the time of a call among them."""
    return event.name.startswith((_MARK, _OPTIMISER)) or _is_node(event)


def _part(mark) -> str:
    return "optimiser" if mark.name.startswith(_OPTIMISER) else mark.name.removeprefix(_MARK)


def _ancestor(event, condition: Callable):
    parent = event.cpu_parent
    while parent is not None and not condition(parent):
        parent = parent.cpu_parent
    return parent
