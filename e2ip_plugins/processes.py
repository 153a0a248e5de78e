"""What the processes of a distributed training tell each other."""

from typing import Any, List

import torch


def distributed() -> bool:
    """Return whether this is one of the processes of a distributed training."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather_objects(mine: Any) -> List[Any]:
    """Return the objects that all processes of a distributed training pass, in the order of their ranks."""
    gathered = [mine]
    if distributed():
        gathered *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, mine)
    return gathered
