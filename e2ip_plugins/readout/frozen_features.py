"""Outputs of a model whose energies and forces are fixed: computed once in a training, by structure.

With ``forces: fixed`` the readout alone learns. All features that it reads, and all errors, are then the same in every
epoch.
"""

import hashlib
import logging
from typing import Dict, Optional, Tuple

from torch import Tensor

#: Bytes of tensors that are kept at most.
MAX_BYTES = 4 * 2**30


class FrozenFeatures:
    """Tensors by structure, as long as they are not too many; without gradients.

    Parameters
    ----------
    max_bytes : int
        Beyond it everything is forgotten for good: batches are drawn at random, and one that is known in part is
        computed as a whole.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.bytes, self.full = max_bytes, 0, False
        self._tensors: Dict[bytes, Dict[str, Tensor]] = {}

    def get(self, keys: Tuple[bytes, ...]) -> Optional[Tuple[Dict[str, Tensor], ...]]:
        """Return the tensors of all these structures, or None."""
        return tuple(self._tensors[key] for key in keys) if all(key in self._tensors for key in keys) else None

    def put(self, key: bytes, tensors: Dict[str, Tensor]) -> None:
        """Keep copies."""
        if self.full or key in self._tensors:
            return
        # Not a view, which would keep the whole batch.
        self._tensors[key] = {name: values.detach().clone() for name, values in tensors.items()}
        self.bytes += sum(values.nbytes for values in self._tensors[key].values())
        if self.bytes > self.max_bytes:
            self.full, self._tensors = True, {}
            logging.warning(
                f"Features of the training set take more than {self.max_bytes / 2**30:g} GiB: they are computed anew "
                "in every epoch"
            )


def structure_key(*tensors: Tensor) -> bytes:
    """Return what tells a structure from others: a hash of the tensors that describe it."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()
