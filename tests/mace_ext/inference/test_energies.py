"""Error bars of energies and stresses in MACE: the fit from files, calculators, committees, MACE's own evaluation."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from e3nn.util import jit
from mace.calculators import MACECalculator

from mace_ext.fitting.file import fit_file


def fitted(energy_checks, tmp_path_factory, make_model, atoms, **options):
    """Return the path of a model whose energies have error bars, and the report."""
    folder = tmp_path_factory.mktemp("energies")
    torch.save(make_model(dtype=torch.float64), folder / "fresh.model")
    sets = (energy_checks.labelled_frames(atoms, count, seed, **options) for count, seed in ((12, 0), (8, 1)))
    report = fit_file(folder / "fresh.model", *sets, folder / "fitted.model", batch_size=3)
    return folder / "fitted.model", report


@pytest.fixture(scope="module")
def of_molecule(energy_checks, tmp_path_factory, make_model):
    return fitted(energy_checks, tmp_path_factory, make_model, molecule("CH3OH"))


@pytest.fixture(scope="module")
def calculator(of_molecule):
    return MACECalculator(model_paths=str(of_molecule[0]), device="cpu", default_dtype="float64")


def test_error_bars_of_a_molecule(energy_checks, calculator):
    oxide = molecule("CO")
    oxide.rattle(0.03, seed=4)
    energy_checks.check_molecule(calculator, oxide, unlike=molecule("H2"))


def test_error_bars_of_a_crystal(energy_checks, tmp_path_factory, make_model):
    crystal = bulk("C", "diamond", cubic=True)
    crystal.rattle(0.03, seed=5)
    path, report = fitted(energy_checks, tmp_path_factory, make_model, crystal, stress=True)
    assert "deviatoric" in " ".join(report.lines())
    calculator = MACECalculator(model_paths=str(path), device="cpu", default_dtype="float64")
    energy_checks.check_crystal(calculator, crystal)
    # The file that MACE compiles has them, too.
    torch.set_default_dtype(torch.float64)
    compiled = path.with_name("compiled.model")
    torch.jit.save(jit.compile(torch.load(path, weights_only=False)), compiled)
    expected = energy_checks.results(calculator, crystal)
    found = energy_checks.results(MACECalculator(model_paths=str(compiled), device="cpu"), crystal)
    for name in ("energy_uncertainty", "energy_error_vector", "stress_uncertainty", "stress_cov"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_molecule_has_no_stress_error(energy_checks, calculator):
    assert "stress_cov" not in energy_checks.results(calculator, molecule("CH3OH"))


def test_mace_eval_configs_writes_what_the_calculator_gives(energy_checks, of_molecule, calculator, predict, tmp_path):
    frames = [frame.atoms for frame in energy_checks.labelled_frames(molecule("CH3OH"), 3, 7)]
    ase.io.write(tmp_path / "in.xyz", frames, format="extxyz")
    written = predict(of_molecule[0], tmp_path / "in.xyz", tmp_path / "out.xyz", default_dtype="float64")
    for frame, atoms in zip(written, frames, strict=True):
        found = energy_checks.results(calculator, atoms)
        assert frame.info["MACE_energy_uncertainty"] == pytest.approx(found["energy_uncertainty"], rel=1e-6)
        np.testing.assert_allclose(frame.info["MACE_energy_error_vector"], found["energy_error_vector"], atol=1e-7)


def test_a_committee_has_the_spread_of_its_members_and_their_own(energy_checks, of_molecule, tmp_path):
    model = torch.load(of_molecule[0], weights_only=False)
    model.scale_shift.shift = model.scale_shift.shift + 0.1
    torch.save(model, tmp_path / "other.model")
    paths = [str(of_molecule[0]), str(tmp_path / "other.model")]
    atoms = molecule("CH3OH")
    one = energy_checks.results(MACECalculator(model_paths=paths[0], device="cpu", default_dtype="float64"), atoms)
    both = energy_checks.results(MACECalculator(model_paths=paths, device="cpu", default_dtype="float64"), atoms)
    spread = 0.1 * len(atoms) / np.sqrt(2)
    assert both["energy_uncertainty"] == pytest.approx(np.hypot(one["energy_uncertainty"], spread), rel=1e-6)
    assert "energy_error_vector" not in both


def test_without_energies_there_is_no_error_bar_and_the_report_says_so(energy_checks, tmp_path, make_model, labelled):
    torch.save(make_model(dtype=torch.float64), tmp_path / "fresh.model")
    sets = labelled("CH3OH", 6, 0), labelled("CH3OH", 6, 1)
    report = fit_file(tmp_path / "fresh.model", *sets, tmp_path / "fitted.model")
    assert any("no error bars of energies" in text and "has no energies" in text for text in report.warnings)
    calculator = MACECalculator(model_paths=str(tmp_path / "fitted.model"), device="cpu", default_dtype="float64")
    found = energy_checks.results(calculator, molecule("CH3OH"))
    assert "forces_cov" in found and not {"energy_uncertainty", "energy_error_vector", "stress_cov"} & set(found)
    assert "energy_uncertainty" not in calculator.implemented_properties


def test_energies_and_forces_stay_what_they_were(energy_checks, of_molecule, make_model):
    torch.set_default_dtype(torch.float64)
    stock = make_model(readout=None, dtype=torch.float64)
    found = energy_checks.results(MACECalculator(model_paths=str(of_molecule[0]), device="cpu"), molecule("CH3OH"))
    expected = energy_checks.results(MACECalculator(models=[stock], device="cpu"), molecule("CH3OH"))
    assert found["energy"] == expected["energy"] and np.array_equal(found["forces"], expected["forces"])
