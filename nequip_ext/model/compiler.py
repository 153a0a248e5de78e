"""Repairs a fault of torch's compiler on the CPU before a model is compiled for training.

Where inductor fuses two loops it may determine the reads and writes of one of them again, and then forgets that a
buffer which this loop reads is written in place before (pytorch/pytorch#185509). Code that reads a sum over neighbours
can then run before the sum: with torch 2.13, AlphaNet's compiled forces were wrong by several per cent. This module
goes when no torch that NequIP accepts has the fault; it does no harm to others.
"""

import functools
from typing import Any


def mend(model: Any) -> Any:
    """Return the model; if NequIP compiles it, repair inductor for the whole process."""
    # By name, because packages carry their own class.
    if type(model).__name__ == "CompileGraphModel":
        _mend()
    return model


@functools.cache
def _mend() -> None:
    from torch._inductor import scheduler

    kind: Any = scheduler.SchedulerNode
    stock = getattr(kind, "recompute_size_and_body", None)
    if stock is None:
        return

    @functools.wraps(stock)
    def recompute(node: Any, *args: Any, **kwargs: Any) -> None:
        stock(node, *args, **kwargs)
        renames = getattr(node, "mutation_renames", None)
        if renames:
            node.set_read_writes(node.read_writes.rename(renames))

    kind.recompute_size_and_body = recompute
