"""A fault of torch's compiler on the CPU, mended before a model is compiled for training.

Where inductor fuses two loops it may work out one's reads and writes anew, and then forgets that a buffer it reads is
written to in place before (pytorch/pytorch#185509). What reads a sum over neighbours can so come before the sum:
AlphaNet's compiled forces were wrong by several per cent, with torch 2.13. Goes when no torch that NequIP takes has the
fault; once more is no harm to one that has not.
"""

import functools
from typing import Any


def mend(model: Any) -> Any:
    """The same model; if it is one that NequIP compiles, inductor is mended for the whole process."""
    # By name: a package has a class of its own.
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
