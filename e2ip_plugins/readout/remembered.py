"""What a model whose energies and forces stay as they are says of a structure: computed once in a training.

With ``forces: fixed`` the readout alone learns. All that it reads, and all errors, are then the same in every epoch.
"""

import hashlib
import logging
from typing import Dict, Optional, Tuple

from torch import Tensor

#: Bytes of tensors that are kept at most.
LIMIT = 4 * 2**30


class Remembered:
    """Tensors by structure, as long as they are not too many; without gradients.

    Parameters
    ----------
    limit : int
        In bytes. Beyond it everything is forgotten for good: batches are drawn at random, and one that is known in part
        is computed as a whole.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.bytes = limit, 0
        self._found: Optional[Dict[bytes, Dict[str, Tensor]]] = {}

    def get(self, keys: Tuple[bytes, ...]) -> Optional[Tuple[Dict[str, Tensor], ...]]:
        """Of all these structures, or None."""
        found = self._found or {}
        return tuple(found[key] for key in keys) if all(key in found for key in keys) else None

    def put(self, key: bytes, tensors: Dict[str, Tensor]) -> None:
        """Keep copies."""
        if self._found is None or key in self._found:
            return
        # Not a view, which would keep the whole batch.
        self._found[key] = {name: values.detach().clone() for name, values in tensors.items()}
        self.bytes += sum(values.nbytes for values in self._found[key].values())
        if self.bytes > self.limit:
            self._found = None
            logging.warning(
                f"Features of the training set take more than {self.limit / 2**30:g} GiB: they are computed anew in "
                "every epoch"
            )


def key_of(*tensors: Tensor) -> bytes:
    """What tells a structure from others: a hash of what it consists of."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()
