"""Stock commands with the ready configs of both backbones: training, restart, package, export, ASE."""

import subprocess
import sys
import zipfile
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml

from nequip_ext import E2IPCalculator
from nequip_ext.compat import NequIPCalculator
from nequip_ext.model.readout import find_readout

CONFIGS = Path(__file__).parents[4] / "configs"
NAMES = ["painn", pytest.param("alphanet", marks=pytest.mark.nightly)]

WITHOUT_PLUGIN = """
    import ase.io, numpy
    from nequip.integrations.ase import NequIPCalculator

    package, frame, target = sys.argv[1:]
    calculator = NequIPCalculator._from_saved_model(package, chemical_species_to_atom_type_map=True)
    output = calculator.call_model(calculator.atoms_to_data(ase.io.read(frame)))
    numpy.save(target, output["forces_cov"].detach().numpy())
"""


@pytest.mark.parametrize("name", ["painn", "alphanet"])
def test_ready_configs_differ_from_nequips_in_the_network_alone(name):
    ours, stock = (yaml.safe_load((CONFIGS / f"nequip_{part}.yaml").read_text()) for part in (name, "e2ip"))
    assert ours["training_module"]["model"].pop("model")["_target_"].startswith("nequip_ext.")
    stock["training_module"]["model"].pop("model")
    ours.pop("learning_rate"), stock.pop("learning_rate")
    assert ours == stock


@pytest.fixture(scope="module", params=NAMES)
def trained(request, tmp_path_factory, train, train_files):
    """Name and run folder, after two epochs and a restart for a third."""
    name, folder = request.param, tmp_path_factory.mktemp("run") / "run"
    train(f"nequip_{name}", folder, train_files, "max_epochs=2")
    return name, train(f"nequip_{name}", folder, train_files, f"++ckpt_path={folder}/last.ckpt")


def test_restart_and_leverage(trained, logged):
    _, folder = trained
    assert sorted(logged(folder)) == [0, 1] and sorted(logged(folder, version=1)) == [2]
    frames = ase.io.read(folder / "test_dataset0.xyz", ":")
    calculator = E2IPCalculator.from_saved_model(folder / "best.ckpt")
    assert bool(find_readout(calculator.model).leverage.fitted)
    atoms = frames[-1]
    written, forces = atoms.arrays["forces_cov"].reshape(-1, 3, 3), atoms.get_forces()
    atoms.calc = calculator
    assert np.allclose(atoms.get_forces(), forces, atol=1e-5)
    assert np.allclose(calculator.results["forces_cov"], written, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def package(trained, run_tool):
    path = trained[1] / "model.nequip.zip"
    run_tool("nequip-package", "build", trained[1] / "best.ckpt", path)
    return path


def test_package(trained, package, without_plugin, tmp_path):
    """It carries the network, leaves torch-geometric outside, and runs without this plugin."""
    name, folder = trained
    with zipfile.ZipFile(package) as archive:
        names = [member.split("/", 1)[1] for member in archive.namelist()]
        external = archive.read(f"{package.name[:-4]}/.data/extern_modules").decode().split()
    carried = {Path(member).name for member in names if member.startswith("nequip_ext/model/backbones/")}
    assert f"{name}.py" in carried and "models.py" not in carried
    assert not [member for member in names if member.startswith(("torch_geometric", "ase/", "hydra/"))]
    assert any(member.startswith("torch_geometric") for member in external)
    frame, target = tmp_path / "frame.xyz", tmp_path / "covariance.npy"
    atoms = ase.io.read(folder / "test_dataset0.xyz")
    ase.io.write(frame, atoms)
    done = without_plugin(WITHOUT_PLUGIN, package, frame, target)
    assert done.returncode == 0, done.stderr[-3000:]
    written = atoms.arrays["forces_cov"].reshape(-1, 3, 3)
    assert np.allclose(np.load(target), written, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["checkpoint", "package"])
def test_strip(trained, package, run_tool, tmp_path, kind):
    """In a process of its own: what is registered when must not matter."""
    model = {"checkpoint": trained[1] / "best.ckpt", "package": package}[kind]
    stripped = tmp_path / f"stock{'.ckpt' if kind == 'checkpoint' else '.nequip.zip'}"
    run_tool("e2ip", "strip", model, "--output", stripped)
    atoms = ase.io.read(trained[1] / "test_dataset0.xyz")
    results = []
    for path, calculator in ((model, E2IPCalculator), (stripped, NequIPCalculator)):
        found = calculator._from_saved_model(path, device="cpu", chemical_species_to_atom_type_map=True)
        found.calculate(atoms)
        results.append(found.results)
    assert find_readout(found.model) is None and "forces_cov" not in found.results
    assert results[0]["energy"] == results[1]["energy"]
    np.testing.assert_array_equal(results[0]["forces"], results[1]["forces"])


@pytest.mark.nightly
def test_ahead_of_time_compiled_model(trained, compile_for, check_results, frames):
    checkpoint = trained[1] / "best.ckpt"
    reference, compiled = E2IPCalculator.from_saved_model(checkpoint), compile_for(checkpoint, "e2ip_ase")
    calculator = E2IPCalculator.from_compiled_model(compiled, chemical_species_to_atom_type_map=True)
    check_results(calculator, reference, frames, ("energy", "forces", "forces_cov", "e2ip_nu"), rtol=1e-3)


def test_without_torch_geometric(environment):
    """One line that says which extra is missing; NequIP's own models are not affected."""
    code = """
import sys
sys.modules["torch_geometric"] = None
from nequip_ext import E2IPModel
assert "nequip_ext.model.backbones" not in sys.modules
from hydra.utils import get_method
get_method("nequip_ext.AlphaNetModel")
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and 'pip install "e2ip-plugins[nequip,backbones]"' in last, done.stderr[-2000:]
