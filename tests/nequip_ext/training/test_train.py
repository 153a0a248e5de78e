"""Stock ``nequip-train`` and ``nequip-package`` with the ready configs, end to end."""

import zipfile

import ase.io
import numpy as np
import pytest
import torch
from forked_commands import run_command

from e2ip_plugins import families
from e2ip_plugins.keys import FRAME_OUTPUTS, LEVERAGE
from nequip_ext import E2IPCalculator

FAMILY = families.get(families.DEFAULT)


#: What the ready config writes, and error bars of stresses, which molecules do not get.
COLUMNS = "e2ip_log_sigma0,e2ip_nu,e2ip_kappa,forces_cov,forces_uncertainty,forces_epistemic_std,e2ip_leverage"
FIELDS = f"trainer.callbacks.3.extra_fields=[{COLUMNS},{','.join(key.name for key in FRAME_OUTPUTS)}]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train, train_files):
    return train("nequip_e2ip", tmp_path_factory.mktemp("run") / "e2ip", train_files, FIELDS)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, train, train_files):
    return train("nequip_baseline", tmp_path_factory.mktemp("run") / "baseline", train_files)


def test_validation_log_has_our_figures_beside_the_stock_ones(trained, baseline, logged):
    ours, stock = logged(trained), logged(baseline)
    assert sorted(ours) == sorted(stock) == [0, 1, 2]
    figures = ("nll", "coverage95", "spearman", "condition", "condition_max", "plateau")
    names = {f"val0_epoch/e2ip_{name}" for name in figures}
    assert set(ours[2]) == set(stock[2]) | names


def test_energies_have_figures_after_the_fit(trained, logged):
    """In the test run: error bars of energies are fitted after the training, and its epochs have none."""
    (tested,) = logged(trained, "test0_epoch").values()
    assert np.isfinite(tested["test0_epoch/e2ip_energy_nll"]) and 0 <= tested["test0_epoch/e2ip_energy_coverage95"] <= 1


def test_writer_puts_uncertainties_into_xyz(trained, baseline, train_files):
    frames = ase.io.read(trained / "test_dataset0.xyz", ":")
    reference = ase.io.read(train_files["test"], ":")
    stock = ase.io.read(baseline / "test_dataset0.xyz", ":")
    assert len(frames) == len(reference) == len(stock) == 4
    for frame, expected, plain in zip(frames, reference, stock, strict=True):
        number = len(frame)
        shapes = {"e2ip_log_sigma0": (number, 6), "e2ip_nu": (number,), "forces_cov": (number, 9)}
        for name, shape in shapes.items():
            assert frame.arrays[name].shape == shape
        assert set(frame.arrays) - set(plain.arrays) == {
            *shapes,
            "e2ip_kappa",
            "forces_uncertainty",
            "forces_epistemic_std",
            "e2ip_leverage",
        }
        assert np.allclose(frame.arrays["original_dataset_forces"], expected.arrays["REF_forces"], atol=1e-7)
        parameters = {k: torch.tensor(frame.arrays[k]) for k in ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa")}
        derived = FAMILY.derive(parameters)
        assert np.allclose(derived["forces_cov"].reshape(-1, 9), frame.arrays["forces_cov"], atol=2e-8)
        assert np.isfinite(frame.get_forces()).all()
        assert frame.info["uq_family"] == FAMILY.uq_family and "uq_family" not in plain.info


def test_calculator_gives_what_the_writer_wrote(trained):
    calculator = E2IPCalculator.from_saved_model(trained / "best.ckpt")
    atoms = ase.io.read(trained / "test_dataset0.xyz")
    written = {name: atoms.arrays[name] for name in ("forces_cov", "e2ip_nu", "forces_epistemic_std")}
    forces = atoms.get_forces()
    atoms.calc = calculator
    uq_model = atoms.info["uq_model"]
    assert np.allclose(atoms.get_forces(), forces, atol=1e-5)
    assert calculator.results["uq_model"] == uq_model
    for name, value in written.items():
        assert np.allclose(calculator.results[name].reshape(value.shape), value, rtol=1e-4, atol=1e-7), name
    std, gradient = calculator.uncertainty_gradient(atoms)
    assert np.allclose(std, written["forces_epistemic_std"], rtol=1e-4, atol=1e-7)
    assert gradient.shape == (len(atoms), 3) and np.isfinite(gradient).all()


WITH_PACKAGE = """
    import ase.io, numpy
    from nequip.integrations.ase import NequIPCalculator

    package, frame, target = sys.argv[1:]
    calculator = NequIPCalculator._from_saved_model(package, chemical_species_to_atom_type_map=True)
    output = calculator.call_model(calculator.atoms_to_data(ase.io.read(frame)))
    numpy.savez(target, **{name: value.detach().numpy() for name, value in output.items()})
"""


@pytest.fixture(scope="module")
def package(trained, run_tool):
    path = trained / "model.nequip.zip"
    run_tool("nequip-package", "build", trained / "best.ckpt", path)
    return path


def test_package_carries_the_model_side_alone(package):
    """And of the core's dependencies nothing that a model does not need to run."""
    with zipfile.ZipFile(package) as archive:
        names = [name.split("/", 1)[1] for name in archive.namelist()]
        external = next(archive.read(f"{package.name[:-4]}/{name}") for name in names if name == ".data/extern_modules")
    ours = {name for name in names if name.startswith("e2ip_plugins/")}
    rooms = {"readout", "families", "leverage", "maths", "keys.py", "errors.py", "formats.py", "__init__.py"}
    assert {name.split("/")[1] for name in ours} <= rooms and "e2ip_plugins/leverage/module.py" in ours
    assert "e2ip_plugins/families/laws.py" not in ours
    of_adapter = {name for name in names if name.startswith("nequip_ext/")}
    assert of_adapter == {"nequip_ext/model/readout.py", "nequip_ext/model/graph_module.py"}
    needless = {"scipy", "ase", "torchmetrics", "lightning", "hydra"}
    assert not needless & {name.split("/")[0] for name in names}
    # NequIP has a dummy of Matplotlib in every package, for e3nn.
    assert not {*needless, "matplotlib"} & {name.split(".")[0] for name in external.decode().split()}


def test_packaged_model_needs_no_plugin(trained, package, without_plugin):
    frame, target = trained / "test_dataset0.xyz", trained / "outputs.npz"
    done = without_plugin(WITH_PACKAGE, package, frame, target)
    assert done.returncode == 0, done.stderr[-3000:]
    calculator = E2IPCalculator.from_saved_model(trained / "best.ckpt")
    # the frame that `ase.io.read` gives without an index is the last one
    calculator.calculate(ase.io.read(frame))
    packaged = np.load(target)
    opened = E2IPCalculator.from_saved_model(package)
    opened.calculate(ase.io.read(frame))
    assert opened.results["uq_model"] == calculator.results["uq_model"]
    for name in ("forces", LEVERAGE.name, *(key.name for key in FAMILY.output_keys())):
        expected = calculator.results[name]
        assert np.allclose(packaged[name].reshape(expected.shape), expected, rtol=1e-5, atol=1e-9), name


def test_calculator_results_scale_with_units(package):
    from ase.build import molecule

    results = []
    for energy, length in ((1.0, 1.0), (2.0, 0.5)):
        calculator = E2IPCalculator.from_saved_model(package, energy_units_to_eV=energy, length_units_to_A=length)
        calculator.calculate(molecule("CH3OH"))
        results.append(calculator.results)
    power = {"eV²/Å²": 2, "eV/Å": 1, "1": 0}
    for key in FAMILY.output_keys():
        if key.name != "e2ip_log_sigma0":
            assert np.allclose(results[1][key.name], 4.0 ** power[key.unit] * results[0][key.name]), key.name
    difference = results[1]["e2ip_log_sigma0"] - results[0]["e2ip_log_sigma0"]
    assert np.allclose(difference, [2 * np.log(4.0)] * 3 + [0.0] * 3)
    assert results[0]["forces_cov"].shape == (6, 3, 3) and results[0]["uq_family"] == FAMILY.uq_family
    assert E2IPCalculator.implemented_properties[:2] == ["energy", "energies"]


def test_packaged_models_can_be_trained_on_and_wrapped(
    package, baseline, tmp_path_factory, train_files, command, environment
):
    """Fine-tuning: an evidential package as it is, a stock checkpoint with a readout added."""
    from nequip_ext import E2IPModel

    with pytest.raises(ValueError, match="already has an e2ip readout"):
        inner = {"_target_": "nequip.model.ModelFromPackage", "package_path": str(package)}
        E2IPModel(model=inner, seed=1)
    folder = tmp_path_factory.mktemp("run") / "tuned"
    model = {"_target_": "nequip.model.ModelFromCheckpoint", "checkpoint_path": str(baseline / "best.ckpt")}
    wrapped = E2IPModel(model=model, seed=1)["sole_model"]
    assert "forces_cov" in wrapped.irreps_out
    override = f"training_module.model={{_target_: nequip.model.ModelFromPackage, package_path: '{package}'}}"
    config = command("nequip_e2ip", folder, train_files, "max_epochs=1", "run=[train]")
    config = [argument for argument in config if "training_module.model." not in argument]
    done = run_command([*config, f"~{override.split('=')[0]}", f"+{override}"], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
