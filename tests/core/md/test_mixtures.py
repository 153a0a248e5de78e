"""Models mixed with other calculators by ASE: the uncertainties are the model's, and never a sum of several models'."""

import ase.io
import numpy as np
import pytest
from ase.calculators.lj import LennardJones
from ase.calculators.mixing import AverageCalculator, LinearCombinationCalculator, SumCalculator

from e2ip_plugins.errors import UncertaintyWarning
from e2ip_plugins.md import Monitor, combined_force, with_results

STD, LEVERAGE = "forces_epistemic_std", "e2ip_leverage"

#: Every output of the family is among the properties that ASE sees: the worst case, of another project's calculator.
PARAMETERS = ["e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa"]
PROPERTIES = ["energy", "free_energy", "forces", "forces_cov", *PARAMETERS, STD, LEVERAGE]


@pytest.fixture
def make(make_atoms):
    """Function that makes atoms with an `Uncertain` calculator, a spring, and a Lennard-Jones one."""

    def made(*stds):
        atoms = make_atoms(*stds, spring=1.0)
        atoms.calc.implemented_properties = PROPERTIES
        return atoms, atoms.calc, LennardJones(sigma=1.0, epsilon=0.1)

    return made


def test_a_dispersion_correction_leaves_the_uncertainties_as_they_are(make, refused):
    atoms, model, correction = make(0.1, 0.3, 0.1)
    atoms.calc = SumCalculator([model, correction])
    monitor = Monitor(atoms, {STD: 0.2, LEVERAGE: 100.0})
    atoms.positions[0] += 0.01
    with pytest.warns(UncertaintyWarning, match=f"check 0: {STD} of atom 3 .H. is 0.3 eV/Å, threshold 0.2"):
        monitor()
    frame = with_results(atoms)
    ase.io.write("frame.xyz", frame, format="extxyz")
    frame = ase.io.read("frame.xyz")
    assert frame.info["uq_family"] == "niw" and frame.arrays["e2ip_nu"].tolist() == [8.0] * 4
    np.testing.assert_allclose(frame.arrays["forces_cov"], model.results["forces_cov"].reshape(4, 9), atol=1e-8)
    both = model.results["forces"] + correction.results["forces"]
    np.testing.assert_allclose(frame.get_forces(), both, atol=1e-8)
    assert frame.get_potential_energy() == pytest.approx(model.results["energy"] + correction.results["energy"])
    derived = combined_force(atoms, np.eye(4, 3))
    assert derived.value == pytest.approx(np.sum(np.eye(4, 3) * both))
    # A mixture in a mixture is one, too.
    atoms.calc = SumCalculator([SumCalculator([model, correction]), LennardJones()])
    assert Monitor(atoms, {STD: 0.2})._first()[STD].tolist() == model.results[STD].tolist()
    # Without a readout anywhere the words are the usual ones.
    atoms.calc = SumCalculator([correction, LennardJones()])
    refused(f"the calculator gives no {STD}: it needs a model with a readout", Monitor, atoms, {STD: 0.2})
    assert set(with_results(atoms).arrays) == {"numbers", "positions", "momenta"}


def test_a_part_that_was_evaluated_for_another_structure_is_evaluated_again(make):
    atoms, model, correction = make(0.1, 0.2, 0.3)
    atoms.calc = SumCalculator([model, correction])
    atoms.get_forces()
    other = atoms.copy()
    other.positions += 0.1 * np.eye(4, 3)
    model.get_property("forces", other)
    assert [model.results[STD][-1], with_results(atoms).arrays[STD][-1]] == pytest.approx([0.2, 0.3])
    np.testing.assert_allclose(model.results["forces"], atoms.positions.mean(0) - atoms.positions)


@pytest.mark.parametrize("mixture", ["sum", "average", "weight", "nested"])
def test_mixtures_of_several_models_are_refused(make, mixture, refused):
    """Their ν and deviations would be added up."""
    (atoms, model, correction), (_, second, _) = make(0.1), make(0.2)
    atoms.calc = {
        "sum": lambda: SumCalculator([model, second]),
        "average": lambda: AverageCalculator([model, second]),
        "weight": lambda: LinearCombinationCalculator([model, correction], [0.5, 1.0]),
        "nested": lambda: SumCalculator([SumCalculator([model, correction]), second]),
    }[mixture]()
    atoms.get_forces()
    for function in (with_results, lambda atoms: Monitor(atoms, {STD: 0.2}), lambda a: combined_force(a, np.eye(4, 3))):
        refused("mixes .*Uncertain|mixes .*SumCalculator and 1 × Uncertain", function, atoms)
