"""Train-time compilation (traced graph) and ahead-of-time compilation with our outputs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.keys import LEVERAGE
from nequip_ext import E2IPCalculator, E2IPLoss, E2IPModel

KEYS = families.get(families.DEFAULT).output_keys()
ARCHITECTURES = [
    pytest.param({"l_max": 0}, id="scalar-only"),
    pytest.param({"l_max": 2}, id="l2", marks=pytest.mark.nightly),
]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_traced_model_trains_like_the_eager_one(gnn_config, frames, to_data, architecture, monkeypatch):
    """``compile_mode: compile`` traces once, here in eval mode; the trace must fit other sizes and training.

    Code generation from the trace takes minutes and is NequIP's business: the trace itself is run. What
    a compiled model does with unused outputs, a gradient of zero into each of them, is done by hand.
    """
    monkeypatch.setattr(torch, "compile", lambda model, **k: model)
    eager = E2IPModel(model=gnn_config(**architecture), seed=3)
    traced = E2IPModel(model=gnn_config(compile_mode="compile", **architecture), seed=3)
    assert traced.is_compile_graph_model
    molecule, periodic, water = (to_data(atoms) for atoms in frames)
    batches = [[molecule, water], [water, periodic, molecule], [periodic, periodic]]

    traced.eval()
    traced(AtomicDataDict.batched_from_list(batches[0]))
    eager.train(), traced.train()
    for members in batches:
        data = AtomicDataDict.batched_from_list(members)
        target = {**data, "forces": torch.randn(data["pos"].shape), "total_energy": torch.randn(len(members), 1)}
        for model in (eager, traced):
            model.zero_grad()
            output = model(dict(data))
            unused = sum(0.0 * value.sum() for value in output.values() if value.requires_grad)
            (E2IPLoss()(output, target)["weighted_sum"] + unused).backward()
        for key in KEYS:
            assert torch.allclose(eager(dict(data))[key.name], output[key.name], rtol=1e-10, atol=1e-14), key.name
        expected, got = gradients(eager), gradients(traced)
        assert expected.keys() == got.keys() and any("e2ip_readout" in name for name in got)
        for name, gradient in expected.items():
            assert torch.isfinite(gradient).all()
            assert torch.allclose(gradient, got[name], rtol=1e-8, atol=1e-12), name


def test_derivatives_of_the_uncertainty(make_model, gnn_config, frames, to_data):
    """Biased dynamics needs ∂(uncertainty)/∂x, and training on it second derivatives."""
    _, model = make_model(gnn_config(num_features=2))
    data = to_data(frames[2])
    positions = data["pos"].clone().requires_grad_(True)

    def uncertainty(pos):
        log_sigma0 = model.model.func({**data, "pos": pos})["e2ip_log_sigma0"]
        return (log_sigma0 * torch.linspace(1.0, 2.0, 6)).sum(-1)

    assert torch.autograd.gradcheck(uncertainty, positions, rtol=1e-4, atol=1e-9)
    assert torch.autograd.gradgradcheck(uncertainty, positions, rtol=1e-3, atol=1e-7)


def test_ahead_of_time_compiled_model(gnn_config, frames, tmp_path, fast_compiler, train_files):
    """``nequip-compile --target e2ip_ase`` and E2IPCalculator.from_compiled_model."""
    tools = Path(sys.executable).parent
    configs = Path(__file__).parents[2] / "configs"
    run = [tools / "nequip-train", "-cp", configs, "-cn", "nequip_e2ip", f"hydra.run.dir={tmp_path}", "run=[train]"]
    run += [f"{name}_file={path}" for name, path in train_files.items()]
    inner = "training_module.model.model"
    run += [
        "max_epochs=1",
        "evidence=leverage",
        "cutoff_radius=3.0",
        f"{inner}.num_features=2",
        f"{inner}.l_max=1",
        f"{inner}.parity=false",
    ]
    subprocess.run(run, env=fast_compiler, check=True, capture_output=True)
    compiled = tmp_path / "model.nequip.pt2"
    command = [tools / "nequip-compile", tmp_path / "best.ckpt", compiled, "--mode", "aotinductor"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--target", "e2ip_ase"], env=fast_compiler, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]

    reference = E2IPCalculator.from_saved_model(tmp_path / "best.ckpt")
    calculator = E2IPCalculator.from_compiled_model(compiled, chemical_species_to_atom_type_map=True)
    for atoms in frames:
        reference.calculate(atoms)
        calculator.calculate(atoms)
        for name in ("energy", "forces", LEVERAGE.name, *(key.name for key in KEYS)):
            assert np.allclose(calculator.results[name], reference.results[name], rtol=1e-4, atol=1e-5), name
