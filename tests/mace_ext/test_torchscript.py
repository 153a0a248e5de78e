"""TorchScript: `_compiled.model` and the LAMMPS exports of e²IP models."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from e3nn.util import jit
from mace.calculators import MACECalculator

from e2ip_plugins import families

OUTPUT_KEYS = families.get("e2ip").output_keys()


@pytest.mark.parametrize("hidden_irreps", ["8x0e", "8x0e+8x1o+8x2e"])
def test_compiled_model_gives_the_eager_covariances(make_model, make_batch, frames, tmp_path, hidden_irreps):
    model = make_model(hidden_irreps=hidden_irreps, heads=("one", "two"))
    # As mace_run_train does it, where an exception would be swallowed.
    torch.jit.save(jit.compile(copy.deepcopy(model)), tmp_path / "compiled.model")
    compiled = torch.jit.load(tmp_path / "compiled.model")
    batch = make_batch(frames, heads=["one", "two"], head="two")
    expected = model({**batch}, compute_stress=True)
    # The second call is the one that runs the optimised graphs.
    for _ in range(2):
        output = compiled({**batch}, compute_stress=True)
    for name in ("energy", "forces", "stress", *(key.name for key in OUTPUT_KEYS)):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=1e-13)
    # It serves in the stock tools like the model it was made of.
    calculator = MACECalculator(str(tmp_path / "compiled.model"), default_dtype="float64", head="two")
    calculator.calculate(frames[0])
    cov = expected["forces_cov"][: len(frames[0])].detach().numpy()
    np.testing.assert_allclose(calculator.results["forces_cov"], cov, rtol=1e-9, atol=1e-13)


def test_lammps_export_has_the_models_energies_and_forces(make_model, make_batch, frames, tmp_path):
    model = make_model()
    torch.save(model, tmp_path / "tiny.model")
    script = Path(sys.executable).parent / "mace_create_lammps_model"
    subprocess.run([str(script), str(tmp_path / "tiny.model")], check=True, capture_output=True)
    exported = torch.jit.load(tmp_path / "tiny.model-lammps.pt")
    atoms = frames[0]
    output = exported(make_batch([atoms]), torch.ones(len(atoms)), compute_virials=True)
    expected = model(make_batch([atoms]))
    torch.testing.assert_close(output["forces"], expected["forces"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(output["total_energy_local"], expected["energy"], rtol=1e-10, atol=1e-12)


def test_mliap_path_stops_before_the_readout(make_model, make_batch, frames):
    from mace.calculators.lammps_mliap_mace import MACEEdgeForcesWrapper

    model = make_model(hidden_irreps="8x0e")
    batch = make_batch(frames[:1])
    expected = model({**batch})
    sender, receiver = batch["edge_index"]
    data = {
        "vectors": (batch["positions"][receiver] - batch["positions"][sender]).detach(),
        "node_attrs": batch["node_attrs"],
        "edge_index": batch["edge_index"],
        "batch": batch["batch"],
        "lammps_class": None,
        "natoms": (len(frames[0]), 0),
    }

    def fail(*_):
        raise AssertionError("the readout ran")

    model.e2ip_readout.register_forward_pre_hook(fail)
    _, energies, pair_forces = MACEEdgeForcesWrapper(model)(data)
    torch.testing.assert_close(energies.sum(), expected["energy"][0], rtol=1e-10, atol=1e-12)
    forces = torch.zeros_like(expected["forces"])
    forces.index_add_(0, sender, pair_forces).index_add_(0, receiver, -pair_forces)
    torch.testing.assert_close(forces.abs(), expected["forces"].abs(), rtol=1e-8, atol=1e-10)
