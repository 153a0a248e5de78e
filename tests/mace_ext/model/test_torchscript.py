"""TorchScript: `_compiled.model` and the LAMMPS exports of models with a readout."""

import copy
import zipfile

import numpy as np
import pytest
import torch
from e3nn.util import jit
from mace.calculators import LAMMPS_MACE, MACECalculator
from mace.calculators.lammps_mliap_mace import LAMMPS_MLIAP_MACE

from e2ip_plugins import families
from mace_ext.export.strip import strip_file

OUTPUT_KEYS = families.get("e2ip").output_keys()


@pytest.mark.parametrize(
    ("readout", "hidden_irreps", "rtol", "atol"),
    [
        ("e2ip", "8x0e", 1e-9, 1e-13),
        ("e2ip", "8x0e+8x1o+8x2e", 1e-9, 1e-13),
        ("shallow", "8x0e+8x1o", 1e-8, 1e-12),
    ],
)
def test_compiled_model_gives_the_eager_covariances(
    make_model, make_batch, frames, tmp_path, readout, hidden_irreps, rtol, atol
):
    model = make_model(hidden_irreps=hidden_irreps, readout=readout, heads=("one", "two"))
    # As mace_run_train does it, where an exception would be swallowed.
    torch.jit.save(jit.compile(copy.deepcopy(model)), tmp_path / "compiled.model")
    compiled = torch.jit.load(tmp_path / "compiled.model")
    batch = make_batch(frames, heads=["one", "two"], head="two")
    expected = model({**batch}, compute_stress=True)
    # The second call is the one that runs the optimised graphs.
    for _ in range(2):
        output = compiled({**batch}, compute_stress=True)
    for name in ("energy", "forces", "stress", *(key.name for key in families.get(readout).output_keys())):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=atol)
    # It serves in the stock tools like the model it was made of.
    calculator = MACECalculator(str(tmp_path / "compiled.model"), default_dtype="float64", head="two")
    calculator.calculate(frames[0])
    cov = expected["forces_cov"][: len(frames[0])].detach().numpy()
    np.testing.assert_allclose(calculator.results["forces_cov"], cov, rtol=rtol, atol=atol)


SCRIPTED = """
    import torch
    compiled, exported, batch, target = sys.argv[1:]
    batch = torch.load(batch, weights_only=False)
    output = torch.jit.load(compiled)({**batch})
    lammps = torch.jit.load(exported)({**batch}, torch.ones(len(batch["positions"]), dtype=torch.float64))
    torch.save({**output, "lammps_forces": lammps["forces"]}, target)
    assert not [name for name in sys.modules if name.split(".")[0] in ("mace", "e3nn")]
"""


def test_scripted_models_need_no_plugin(make_model, make_batch, frames, tmp_path, without_plugin):
    """Nor MACE: torch alone runs ``_compiled.model`` with its uncertainties, and the file for LAMMPS."""
    model = make_model()
    torch.jit.save(jit.compile(copy.deepcopy(model)), tmp_path / "compiled.model")
    torch.jit.save(jit.compile(LAMMPS_MACE(copy.deepcopy(model), head="Default")), tmp_path / "lammps.pt")
    batch = make_batch(frames[:1])
    torch.save(batch, tmp_path / "batch.pt")
    files = [tmp_path / name for name in ("compiled.model", "lammps.pt", "batch.pt", "output.pt")]
    done = without_plugin(SCRIPTED, *files)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = model(batch), torch.load(tmp_path / "output.pt")
    for name in ("energy", "forces", *(key.name for key in OUTPUT_KEYS)):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found["lammps_forces"], expected["forces"], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("readout", ["e2ip", "shallow"])
def test_lammps_export_has_the_models_energies_and_forces(make_model, make_batch, frames, run_tool, tmp_path, readout):
    """As it is, and with the readout taken off before: a file of stock MACE."""
    model = make_model(readout=readout)
    torch.save(model, tmp_path / "tiny.model")
    run_tool("mace_create_lammps_model", tmp_path / "tiny.model")
    exported = torch.jit.load(tmp_path / "tiny.model-lammps.pt")
    strip_file(tmp_path / "tiny.model", tmp_path / "stripped.model")
    stripped = jit.compile(LAMMPS_MACE(torch.load(tmp_path / "stripped.model", weights_only=False), head="Default"))
    for file, has_readout in ((exported, True), (stripped, False)):
        assert any("e2ip" in name for name in file.state_dict()) == has_readout
        atoms = frames[0]
        output = file(make_batch([atoms]), torch.ones(len(atoms)), compute_virials=True)
        expected = model(make_batch([atoms]))
        torch.testing.assert_close(output["forces"], expected["forces"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(output["total_energy_local"], expected["energy"], rtol=1e-10, atol=1e-12)


class LammpsData:
    """What LAMMPS's ML-IAP hands to a model, for a molecule without ghost atoms."""

    def __init__(self, batch):
        sender, receiver = batch["edge_index"]
        self.nlocal = self.ntotal = len(batch["positions"])
        self.npairs = len(sender)
        self.elems = batch["node_attrs"].argmax(-1).numpy()
        self.pair_i, self.pair_j = receiver.numpy(), sender.numpy()
        self.rij = (batch["positions"][sender] - batch["positions"][receiver]).detach().numpy()
        self.eatoms = torch.zeros(self.nlocal)

    def forward_exchange(self, values, all_values, _):
        all_values.copy_(values)

    reverse_exchange = forward_exchange

    def update_pair_forces_gpu(self, forces):
        self.forces = torch.zeros(self.nlocal, 3)
        self.forces.index_add_(0, torch.as_tensor(self.pair_i), forces)
        self.forces.index_add_(0, torch.as_tensor(self.pair_j), -forces)


def test_mliap_file(make_model, make_batch, frames, tmp_path):
    """A pickle, so that LAMMPS's Python needs the plugin, or the model is stripped before."""
    model = make_model(hidden_irreps="8x0e")
    torch.save(model, tmp_path / "tiny.model")
    strip_file(tmp_path / "tiny.model", tmp_path / "stripped.model")
    batch = make_batch(frames[:1])
    expected = model({**batch})
    for name in ("tiny", "stripped"):
        # As mace_create_lammps_model --format mliap does it, without the conversion to cuEquivariance.
        loaded = torch.load(tmp_path / f"{name}.model", weights_only=False)
        loaded.lammps_mliap = True
        torch.save(LAMMPS_MLIAP_MACE(loaded), tmp_path / f"{name}-mliap.pt")
        data = LammpsData(batch)
        torch.load(tmp_path / f"{name}-mliap.pt", weights_only=False).compute_forces(data)
        assert data.energy == pytest.approx(expected["energy"].item(), rel=1e-10)
        torch.testing.assert_close(data.forces, expected["forces"], rtol=1e-8, atol=1e-10)
        with zipfile.ZipFile(tmp_path / f"{name}-mliap.pt") as archive:
            (pickle,) = (archive.read(part) for part in archive.namelist() if part.endswith("data.pkl"))
        assert (b"mace_ext" in pickle) == (name == "tiny")


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
