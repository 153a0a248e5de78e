"""Graphs that NequIP traces for training: the same gradients in the weights as the eager model, at other sizes, too."""

import pytest
import torch
from hydra.utils import get_method
from nequip.data import AtomicDataDict

from nequip_ext.model.backbones.layers import LayerNorm


def gradients(model, batch, target):
    """Of a loss on forces; NequIP's own tests differentiate energies, which do not see what is lost here."""
    model.zero_grad()
    output = model(dict(batch))
    loss = (output["forces"] - target).square().mean()
    (loss + sum(0.0 * value.sum() for value in output.values() if value.requires_grad)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def pair(config):
    """An eager and a traced model with the same weights, none of them those of the start."""
    found = []
    for mode in ("eager", "compile"):
        arguments = {**config, "compile_mode": mode}
        model = get_method(arguments.pop("_target_"))(**arguments).train()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise.to(parameter.dtype))
        found.append(model)
    return found


def batches(frames, to_data):
    molecule, periodic, water = (to_data(atoms) for atoms in frames)
    return [
        AtomicDataDict.batched_from_list(members)
        for members in ([molecule, water], [water, periodic, molecule], [periodic, periodic])
    ]


def largest_difference(eager, traced, found):
    worst = 0.0
    for batch in found:
        target = torch.randn(batch["pos"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        expected, got = gradients(eager, batch, target), gradients(traced, batch, target)
        assert expected.keys() == got.keys()
        size = max(float(g.abs().max()) for g in expected.values())
        worst = max(worst, *(float((expected[k] - got[k]).abs().max()) / size for k in expected))
    return worst


TARGETS = ["nequip_ext.PaiNNModel", "nequip_ext.AlphaNetModel"]
EVERY = [
    (target, preset, dtype) for target in TARGETS for preset in ("default", "paper") for dtype in ("float64", "float32")
]
#: Tracing takes seconds.
SOME = [pytest.param(*case, marks=() if case == EVERY[0] else pytest.mark.nightly) for case in EVERY]


@pytest.mark.parametrize(("target", "preset", "dtype"), SOME)
def test_weight_gradients_of_the_traced_graph(backbone_config, frames, to_data, monkeypatch, target, preset, dtype):
    """Generated code takes minutes; the graph itself is run."""
    monkeypatch.setattr(torch, "compile", lambda model, **k: model)
    eager, traced = pair(backbone_config(target, preset, model_dtype=dtype))
    assert traced.is_compile_graph_model
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    assert largest_difference(eager, traced, batches(frames, to_data)) < tolerance


@pytest.mark.nightly
def test_weight_gradients_of_generated_code(kind, backbone_config, frames, to_data):
    eager, compiled = pair(backbone_config(*kind, model_dtype="float32"))
    assert largest_difference(eager, compiled, batches(frames, to_data)) < 1e-5


def test_the_layer_norm_is_torchs_and_traces_where_that_does_not():
    """Power of the tests above: the fused operator loses a derivative in such a graph."""
    from nequip.utils.fx import nequip_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    z = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = LayerNorm(6).double(), torch.nn.LayerNorm(6).double()
    assert torch.allclose(ours(z), theirs(z), atol=1e-14)

    def force_loss(norm):
        def run(x, weight):
            x = x.requires_grad_(True)
            energy = norm((x @ weight).sin()).pow(3).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

        return run

    differences = []
    for norm in (ours, theirs):
        found = []
        for traced in (False, True):
            function = force_loss(norm)
            if traced:
                function = make_fx(function, decomposition_table=nequip_decomp_table())(x.clone(), z.clone())
            weight = z.clone().requires_grad_(True)
            found.append(torch.autograd.grad(function(x.clone(), weight).square().sum(), weight)[0])
        differences.append(float((found[0] - found[1]).abs().max() / found[0].abs().max()))
    assert differences[0] < 1e-12 < 1e-3 < differences[1]
