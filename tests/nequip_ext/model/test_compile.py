"""Train-time compilation (traced graph) and ahead-of-time compilation with our outputs."""

import numpy as np
import pytest
import torch
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import ENERGY_OUTPUTS, FRAME_OUTPUTS, LEVERAGE
from nequip_ext import E2IPCalculator, E2IPLoss, E2IPModel
from nequip_ext.inference import batches
from nequip_ext.inference.calculator import open_model

KEYS = families.get(families.DEFAULT).output_keys()
INNER = "training_module.model.model"
TRACED = [
    pytest.param("e2ip", {"l_max": 0}, id="scalar-only"),
    pytest.param("e2ip", {"l_max": 2}, id="l2", marks=pytest.mark.nightly),
    pytest.param("shallow", {"l_max": 1}, id="shallow", marks=pytest.mark.nightly),
]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("readout", "architecture"), TRACED)
def test_traced_model_trains_like_the_eager_one(gnn_config, frames, to_data, readout, architecture, monkeypatch):
    """``compile_mode: compile`` traces once, here in eval mode; the trace must fit other sizes and training.

    Code generation from the trace takes minutes and is NequIP's business: the trace itself is run. What
    a compiled model does with unused outputs, a gradient of zero into each of them, is done by hand.
    """
    monkeypatch.setattr(torch, "compile", lambda model, **k: model)
    eager = E2IPModel(model=gnn_config(**architecture), seed=3, readout=readout)
    traced = E2IPModel(model=gnn_config(compile_mode="compile", **architecture), seed=3, readout=readout)
    assert traced.is_compile_graph_model
    molecule, periodic, water = (to_data(atoms) for atoms in frames)
    rtol = 1e-10 if readout == "e2ip" else 1e-9  # members' forces are derivatives
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
            (E2IPLoss(readout=readout)(output, target)["weighted_sum"] + unused).backward()
        for key in families.get(readout).output_keys():
            assert torch.allclose(eager(dict(data))[key.name], output[key.name], rtol=rtol, atol=1e-4 * rtol), key.name
        expected, got = gradients(eager), gradients(traced)
        assert expected.keys() == got.keys() and any("e2ip_readout" in name for name in got)
        for name, gradient in expected.items():
            assert torch.isfinite(gradient).all()
            assert torch.allclose(gradient, got[name], rtol=100 * rtol, atol=0.01 * rtol), name


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


@pytest.fixture(scope="module")
def train_smallest(tmp_path_factory, train, train_files, fast_compiler):
    """Function that trains the smallest model that has everything: two layers, a fitted leverage."""

    def run(*options):
        sizes = ("max_epochs=1", "run=[train]", f"{INNER}.num_features=2", f"{INNER}.parity=false")
        folder = tmp_path_factory.mktemp("run") / "run"
        return train("nequip_e2ip", folder, train_files, *sizes, *options, env=fast_compiler) / "best.ckpt"

    return run


@pytest.fixture(scope="module")
def checkpoint(train_smallest):
    """Path of one whose energies have error bars, and whose stresses have some that were not fitted."""
    path = train_smallest("evidence=leverage")
    content = torch.load(path, weights_only=False)
    names = [name for name in content["state_dict"] if name.endswith("energies.stress_factors")]
    assert names
    content["state_dict"].update({name: torch.tensor([[0.7, 1.3]]) for name in names})
    torch.save(content, path)
    return path


def test_ahead_of_time_compiled_model(checkpoint, compile_for, frames, run_compiled):
    """``nequip-compile --target e2ip_ase``; its file behind ASE, and in a Python with torch alone."""
    compiled = compile_for(checkpoint, "e2ip_ase")
    reference = E2IPCalculator.from_saved_model(checkpoint)
    calculator = open_model(compiled, uncertainties="on request")
    with pytest.raises(InputError, match="'on request': the readout is a part of the compiled file"):
        E2IPCalculator.from_compiled_model(
            str(compiled), chemical_species_to_atom_type_map=True, uncertainties="on request"
        )
    names = ("forces", LEVERAGE.name, *(key.name for key in KEYS))
    found = run_compiled(compiled, [calculator.atoms_to_data(atoms) for atoms in frames])
    for atoms, outputs in zip(frames, found, strict=True):
        reference.calculate(atoms)
        calculator.calculate(atoms)
        assert calculator.results["uq_model"] == reference.results["uq_model"]
        of_frame = [key.name for key in (FRAME_OUTPUTS if atoms.pbc.all() else ENERGY_OUTPUTS)]
        for results in (calculator.results, reference.results):
            assert [key.name for key in FRAME_OUTPUTS if key.name in results] == of_frame
        for name in of_frame:
            largest = np.abs(reference.results[name]).max()
            assert largest > 0 and np.allclose(calculator.results[name], reference.results[name], atol=1e-4 * largest)
        for name in ("energy", *names):
            assert np.allclose(calculator.results[name], reference.results[name], rtol=1e-4, atol=1e-5), name
        for name in names:
            expected = calculator.results[name]
            assert np.allclose(outputs[name].reshape(expected.shape), expected, rtol=1e-9, atol=1e-12), name

    # One frame at a time in `e2ip evaluate`.
    opened, expected = batches.open_model(compiled), batches.open_model(checkpoint)
    assert opened.one_by_one and opened.family is families.get("e2ip") and opened.species == ["H", "C", "O"]
    agrees_with_the_checkpoint(opened, expected, frames)
    with pytest.raises(InputError, match=r"cannot be opened as a compiled model.*compiled for `cpu`"):
        batches.open_model(compiled, device="meta")


@pytest.mark.nightly
def test_what_pair_nequip_reads(checkpoint, compile_for, frames, run_compiled):
    """The C++ code of pair_nequip takes order and names of tensors from the metadata, energies, forces and virial from
    the outputs, and for ``compute nequip/atom`` float64 tensors of so many numbers for every atom."""
    compiled = compile_for(checkpoint, "e2ip_pair_nequip")
    with pytest.raises(InputError, match=r"was compiled for LAMMPS: .* --target e2ip_batch"):
        batches.open_model(compiled)
    with pytest.raises(InputError, match=r"was not compiled with nequip-compile --target e2ip_ase"):
        E2IPCalculator.from_compiled_model(str(compiled), chemical_species_to_atom_type_map=True)
    metadata = torch._inductor.aoti_load_package(str(compiled)).get_metadata()
    assert metadata["nequip_aoti_inputs"].split() == ["pos", "edge_index", "atom_types", "cell", "edge_cell_shift"]
    assert metadata["nequip_aoti_outputs"].split()[:3] == ["atomic_energy", "forces", "virial"]
    assert {"r_max", "type_names", "num_types", "allow_tf32"} <= metadata.keys()
    reference = E2IPCalculator.from_saved_model(checkpoint)
    atoms = frames[1]
    (found,) = run_compiled(compiled, [reference.atoms_to_data(atoms)])
    reference.calculate(atoms)
    expected = reference.results
    for key in (*KEYS, LEVERAGE):
        count = int(np.prod(key.shape))
        assert found[key.name].dtype == np.float64 and found[key.name].size == count * len(atoms)
        values = found[key.name].reshape(expected[key.name].shape)
        assert np.allclose(values, expected[key.name], rtol=1e-5, atol=1e-5 * np.abs(expected[key.name]).max()), key
    assert found["atomic_energy"].shape == (len(atoms), 1) and found["forces"].dtype == np.float64
    assert found["atomic_energy"].sum() == pytest.approx(expected["energy"], rel=1e-5)
    assert np.allclose(found["forces"], expected["forces"], atol=1e-5)
    stress = -found["virial"][0] / atoms.get_volume()
    assert np.allclose(stress.ravel()[[0, 4, 8, 5, 2, 1]], expected["stress"], atol=1e-5)


@pytest.mark.nightly
def test_ahead_of_time_compiled_model_with_forces_of_members(train_smallest, compile_for, check_results, frames):
    columns = "trainer.callbacks.3.extra_fields=[ensemble_log_cov]"
    checkpoint = train_smallest("readout=shallow", "preset=null", "+training_module.model.members=4", columns)
    reference = E2IPCalculator.from_saved_model(checkpoint)
    compiled, types = compile_for(checkpoint, "shallow_ase"), {"chemical_species_to_atom_type_map": True}
    calculator = E2IPCalculator.from_compiled_model(compiled, readout="shallow", **types)
    names = [key.name for key in families.get("shallow").output_keys()]
    check_results(calculator, reference, frames, ("energy", "forces", "e2ip_leverage", *names))


def agrees_with_the_checkpoint(opened, reference, frames):
    found, expected = (model.evaluate([model.graph(a)[0] for a in frames], True) for model in (opened, reference))
    assert found.keys() == expected.keys() and "stress" in found and found["energy"].shape == (3,)
    # Without a cell there is no stress.
    periodic = [atoms.pbc.all() for atoms in frames]
    found["stress"], expected["stress"] = found["stress"][periodic], expected["stress"][periodic]
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=1e-4, atol=1e-5), name
