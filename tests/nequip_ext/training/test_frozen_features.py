"""``forces: fixed``: what is remembered of the inner model is what it would compute."""

import ase
import pytest
import torch
from nequip.data import AtomicDataDict

from nequip_ext.model.readout import find_readout
from nequip_ext.training.frozen_features import _Forward, forget, remember

PAINN = {
    "_target_": "nequip_ext.PaiNNModel",
    **{"seed": 1, "model_dtype": "float64", "type_names": ["H", "C", "O"], "r_max": 4.0, "num_radial": 4},
    **{"num_features": 8, "num_layers": 2, "per_type_energy_scales": 1.3, "per_type_energy_shifts": None},
}


@pytest.mark.parametrize("architecture", ["vectors and tensors", "scalars", "PaiNN"])
def test_every_structure_is_computed_once(make_model, gnn_config, frames, to_data, architecture):
    if architecture == "PaiNN":
        pytest.importorskip("torch_geometric")
    changes = {} if architecture == "vectors and tensors" else {"l_max": 0, "num_layers": 1}
    inner = PAINN if architecture == "PaiNN" else gnn_config(**changes)
    model, plain = (make_model(inner)[1].train() for _ in range(2))
    holder = torch.nn.ModuleDict({"sole_model": model})
    remember(holder)
    remember(holder)
    assert isinstance(model.forward, _Forward) and not isinstance(model.forward.compute, _Forward)
    compute, counted = model.forward.compute, []
    model.forward.compute = lambda data: counted.append(data) or compute(data)

    def step(model, *chosen):
        data = [to_data(atoms) for atoms in chosen]
        batch = AtomicDataDict.batched_from_list(data) if len(data) > 1 else data[0]
        output = model(batch)
        for parameter in model.parameters():
            parameter.grad = None
        output["e2ip_nu"].sum().backward()
        return output, [parameter.grad for parameter in find_readout(model).parameters()]

    # A molecule of cell and periodicity as the others', and an atom without neighbours.
    one, two, three = (atoms.copy() for atoms in frames)
    for atoms in (one, three):
        atoms.cell, atoms.pbc = [30.0] * 3, True
    four = ase.Atoms("O", cell=[30.0] * 3, pbc=True)
    step(model, one, two)
    step(model, three, four)
    for chosen in ([three, one], [two], [two, four, three, one]):
        found, gradients = step(model, *chosen)
        expected, others = step(plain, *chosen)
        names = ("total_energy", "forces", "stress", "e2ip_log_sigma0", "e2ip_nu", "forces_cov", "e2ip_leverage")
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-10)
        for name in (AtomicDataDict.BATCH_KEY, AtomicDataDict.EDGE_INDEX_KEY):
            if len(chosen) > 1:
                assert torch.equal(found[name], expected[name])
    assert len(counted) == 2
    moved = one.copy()
    moved.positions[0, 0] += 1e-9
    step(model, moved, two)
    assert len(counted) == 3
    forget(holder)
    assert "forward" not in vars(model)
