"""Tensors by structure, kept until they are too many."""

import torch

from e2ip_plugins.readout.frozen_features import FrozenFeatures, structure_key


def test_what_is_kept_is_a_copy_without_a_graph():
    memory, batch = FrozenFeatures(), torch.ones(6, 2, dtype=torch.float32, requires_grad=True)
    memory.put(b"a", {"forces": batch[:2]})
    memory.put(b"b", {"forces": 2.0 * batch[2:]})
    assert memory.get((b"a", b"c")) is None
    b, a = memory.get((b"b", b"a"))
    assert bool((a["forces"] == 1.0).all()) and bool((b["forces"] == 2.0).all())
    assert not a["forces"].requires_grad and a["forces"].untyped_storage().nbytes() == 16
    memory.put(b"a", {"forces": torch.zeros(2, 2)})  # what is known stays
    assert bool((memory.get((b"a",))[0]["forces"] == 1.0).all())
    assert memory.bytes == 48


def test_too_much_is_forgotten_for_good(caplog):
    memory = FrozenFeatures(max_bytes=100)
    memory.put(b"a", {"x": torch.zeros(10, dtype=torch.float32)})
    assert memory.get((b"a",)) is not None and not caplog.text
    memory.put(b"b", {"x": torch.zeros(30, dtype=torch.float32)})
    memory.put(b"c", {"x": torch.zeros(1, dtype=torch.float32)})
    assert memory.get((b"a",)) is None and memory.get((b"c",)) is None
    assert caplog.text.count("are computed anew in every epoch") == 1


def test_keys_tell_values_and_shapes_apart():
    x = torch.arange(6.0)
    keys = [(x,), (x.reshape(2, 3),), (x.reshape(3, 2),), (x + 1e-6,), (x, x), (x[:3], x[3:]), (-x,)]
    assert len({structure_key(*tensors) for tensors in keys}) == len(keys)
    assert structure_key(x) == structure_key(x.clone().requires_grad_())
