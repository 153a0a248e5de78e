"""``forces: fixed``: what is remembered of the stock model is what it would compute."""

import copy
import functools

import pytest
import torch

from mace_ext.training import frozen_features
from mace_ext.training.frozen_features import remembering


@pytest.mark.parametrize("hidden_irreps", ["8x0e", "8x0e+8x1o+8x2e"])
def test_every_structure_is_computed_once(make_model, make_batch, frames, hidden_irreps):
    model = make_model(hidden_irreps=hidden_irreps).requires_grad_(False)
    readout = model.e2ip_readout.requires_grad_(True)
    readout.settings = readout.settings._replace(forces="fixed")
    model.set_readout(readout)
    plain, counted = copy.deepcopy(model), []
    options = {"training": True, "compute_stress": True}

    def step(model, batch):
        output = model(dict(batch), **options)
        for parameter in model.e2ip_readout.parameters():
            parameter.grad = None
        output["e2ip_nu"].sum().backward()
        return output, [parameter.grad for parameter in model.e2ip_readout.parameters()]

    with remembering(model):
        compute = model.host_forward.compute
        model.host_forward.compute = lambda *args, **kwargs: counted.append(args) or compute(*args, **kwargs)
        step(model, make_batch(frames[:2]))
        step(model, make_batch(frames[2:]))
        # Other batches of the same structures.
        for chosen in ([2, 0], [1], [1, 2, 0]):
            batch = make_batch([frames[i] for i in chosen])
            found, gradients = step(model, batch)
            expected, others = step(plain, batch)
            for name in ("energy", "forces", "stress", "node_feats", "e2ip_log_sigma0", "e2ip_nu", "e2ip_leverage"):
                torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradients, others, rtol=1e-9, atol=1e-12)
        assert len(counted) == 2
        # Other structures, and other options.
        moved = frames[0].copy()
        moved.positions[0, 0] += 1e-9
        step(model, make_batch([moved]))
        model(make_batch(frames[:1]), compute_hessian=True)
        unbound = frames[2].copy()
        unbound.pbc = False
        step(model, make_batch([unbound]))
        assert len(counted) == 5
        # Fewer: the fit of the leverage, and an evaluation.
        model.uncertainty_outputs(make_batch(frames[:2]))
        evaluated = model(make_batch(frames[2:]), training=False, compute_virials=True)
        expected = plain(make_batch(frames[2:]), compute_virials=True)
        for name in ("forces", "virials"):
            torch.testing.assert_close(evaluated[name], expected[name])
        assert len(counted) == 5
    assert "host_forward" not in vars(model)
    with remembering(model, more=False):
        compute = model.host_forward.compute
        model.host_forward.compute = lambda *args, **kwargs: counted.append(args) or compute(*args, **kwargs)
        model.uncertainty_outputs(make_batch(frames))
        assert len(counted) == 5
        moved.positions[0, 0] += 1e-9
        for _ in range(2):
            model(make_batch([moved]))
        assert len(counted) == 7
    learning = make_model()  # its forces, too
    with remembering(learning):
        assert "host_forward" not in vars(learning)


def test_a_training_is_the_same_without(train, monkeypatch):
    stock = train(name="stock", max_num_epochs=2).folder / "stock.model"
    options = ("--readout=e2ip", "--e2ip_forces=fixed", f"--foundation_model={stock}")
    runs = [train(*options, name="with", max_num_epochs=3)]
    monkeypatch.setattr(
        frozen_features, "FrozenFeatures", functools.partial(frozen_features.FrozenFeatures, max_bytes=0)
    )
    runs.append(train(*options, name="without", max_num_epochs=3))
    one, two = (run.model.e2ip_readout.state_dict() for run in runs)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-9)
    assert not any("host_forward" in vars(run.model) for run in runs)
