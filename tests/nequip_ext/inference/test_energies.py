"""Error bars of energies and stresses in NequIP: the fit of a model, calculators, files of ``nequip-train``."""

import ase.io
import numpy as np
import pytest
from ase.build import bulk, molecule

from nequip_ext import E2IPCalculator
from nequip_ext.fitting.passes import fit_frames


@pytest.fixture
def fitted(energy_checks, make_model, as_calculator):
    """Function that fits a model to labelled copies of a structure; the calculator and the report."""

    def fit(atoms, **options):
        model = make_model(evidence="leverage")[1].eval()
        sets = [
            energy_checks.labelled_frames(atoms, count, seed, spread=30.0, **options)
            for count, seed in ((12, 0), (8, 1))
        ]
        report = fit_frames(model, *sets, 3, True, lambda text: None)
        return as_calculator(model), report

    return fit


def test_error_bars_of_a_molecule(energy_checks, fitted):
    calculator, _ = fitted(molecule("CH3OH"))
    oxide = molecule("CO")
    oxide.rattle(0.03, seed=4)
    energy_checks.check_molecule(calculator, oxide, unlike=molecule("H2"))
    energy_checks.check_accepted_by_ase(calculator, oxide)
    assert "stress_cov" not in energy_checks.results(calculator, oxide)


def test_error_bars_of_a_crystal(energy_checks, fitted):
    crystal = bulk("C", "diamond", cubic=True)
    crystal.rattle(0.03, seed=5)
    calculator, report = fitted(crystal, stress=True)
    assert "deviatoric" in " ".join(report.lines())
    energy_checks.check_crystal(calculator, crystal)


def test_the_files_of_a_training_have_them(energy_checks, leverage_run):
    """The best checkpoint is fitted before it is tested."""
    written = ase.io.read(leverage_run / "test_dataset0.xyz", ":")
    calculator = E2IPCalculator.from_saved_model(str(leverage_run / "best.ckpt"))
    for frame in written:
        found = energy_checks.results(calculator, frame)
        assert frame.info["energy_uncertainty"] == pytest.approx(found["energy_uncertainty"], rel=1e-4)
        np.testing.assert_allclose(
            frame.info["energy_error_vector"], found["energy_error_vector"], atol=1e-4 * found["energy_uncertainty"]
        )
    log = (leverage_run / "train.log").read_text()
    assert "energies: their errors are those of forces times" in log and "by 4 validation energies" in log
