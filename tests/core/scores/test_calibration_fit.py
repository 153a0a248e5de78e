"""The fit: constants that are known, and what is left to few atoms."""

import math

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.ensemble import Ensemble
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.scores.calibration_constants import FLOOR_LEVEL
from e2ip_plugins.scores.calibration_fit import calibrate, check
from e2ip_plugins.scores.conformal import conformal_radius
from e2ip_plugins.scores.metrics import calibration_error
from e2ip_plugins.scores.sample import Sample

E2IP = families.get("e2ip")


def hydrogen(family, parameters, error, atoms):
    """A sample of hydrogen in configurations of ``atoms``."""
    frame = np.repeat(np.arange(len(error) // atoms), atoms)
    return Sample(family, parameters, error, np.full(len(error), "H"), frame)


def gaussians(error, std, atoms):
    """Hydrogen with isotropic Gaussians of one standard deviation."""
    log_cov = np.tile([2.0 * math.log(std)] * 3 + [0.0] * 3, (len(error), 1))
    return hydrogen(families.get("mve"), {"gaussian_log_cov": log_cov}, error, atoms)


@pytest.fixture
def sample(draw):
    """Function that gives atoms whose errors are ``inflate`` times what their distributions say."""

    def make(configurations=200, atoms=12, inflate=1.0, species="CHHO", seed=0):
        n = configurations * atoms
        error, log_sigma0, nu, kappa = draw(n, seed=seed, inflate=inflate)
        symbols = np.resize(np.array(list(species)), n)
        parameters = {"e2ip_log_sigma0": log_sigma0, "e2ip_nu": nu, "e2ip_kappa": kappa}
        frame = np.repeat(np.arange(configurations), atoms)
        return Sample(E2IP, parameters, error, symbols, frame, "valid.xyz", ("aa",))

    return make


def pit_of(sample):
    return sample.law().pit(sample.error)


# Scale


@pytest.mark.parametrize("inflate", [0.03, 0.7, 1.0, 1.5, 20.0])
def test_scale_finds_the_factor(sample, inflate):
    found = calibrate(sample(inflate=inflate), ["scale"])
    for constant in found.factor.values():
        low, high = constant.interval
        assert low < inflate**2 < high and high / low < 1.25
        assert constant.value == pytest.approx(inflate**2, rel=0.08)
    assert found.floor.value == 0.0 and found.radii == {}
    assert len(found.notes) == (inflate == 1.0)
    assert calibration_error(pit_of(sample(inflate=inflate, seed=1).calibrated(found))) < 0.012
    assert found.scores["after"]["calibration_error"] < 0.01
    assert (found.uq_family, found.configurations, found.atoms) == ("niw", 200, 2400)
    assert (found.file, found.frames, found.species) == ("valid.xyz", ("aa",), ("C", "H", "O"))


def test_scale_has_the_least_calibration_error(sample):
    """Of 2400 atoms; no factor nearby is better than by what the table of factors resolves."""
    valid = sample(inflate=1.3)
    valid = valid._replace(error=valid.error * np.where(np.arange(2400) % 5, 1.0, 3.0)[:, None])
    factor = calibrate(valid, ["scale"]).factor["C"].value
    law = valid.law()
    errors = [calibration_error(law.pit(valid.error / math.sqrt(factor * x))) for x in np.linspace(0.8, 1.25, 201)]
    assert calibration_error(law.pit(valid.error / math.sqrt(factor))) < min(errors) + 2e-4


def test_a_factor_that_may_be_1_does_not_carry_noise(sample):
    """Right covariances: over many small validation sets, what is applied errs less than what is found."""
    applied, found = [], []
    for seed in range(12):
        calibration = calibrate(sample(configurations=20, atoms=6, seed=seed), ["scale"])
        constant = calibration.factor["C"]
        applied.append(abs(math.log(constant.value)))
        found.append(abs(0.5 * math.log(constant.interval[0] * constant.interval[1])))
        assert ("is not different from 1" in "".join(calibration.notes)) or applied[-1] > 0.0
    assert np.mean(applied) < 0.7 * np.mean(found)
    assert np.median(applied) == 0.0


def test_a_wrong_shape_is_told():
    """Gaussians for errors with heavy tails: right in the middle, the factor makes the tails worse."""
    n, rng = 3000, np.random.default_rng(0)
    error = 0.1 * rng.standard_normal((n, 3)) * np.where(rng.random((n, 1)) < 0.05, 10.0, 1.0)
    found = calibrate(gaussians(error, 0.3, 30), ["scale"])
    assert found.factor["H"].value == pytest.approx(1.0 / 9.0, rel=0.3)
    assert any("the mean NLL rises" in note for note in found.notes)


def test_intervals_know_that_atoms_of_a_configuration_go_together(sample):
    """Errors that share a factor within configurations: the interval widens, though there are as many atoms."""
    alone = sample()
    shared = alone._replace(
        error=alone.error * np.exp(0.5 * np.random.default_rng(0).normal(size=200))[alone.frame, None]
    )
    widths = []
    for valid in (shared, shared._replace(frame=np.arange(len(shared.frame)))):
        low, high = calibrate(valid, ["scale"]).factor["C"].interval
        widths.append(math.log(high / low))
    assert widths[0] > 1.5 * widths[1]


def test_intervals_are_as_wide_as_configurations_differ(sample):
    """Five of very different errors: none of the 5⁵ ways to draw them is cut off, and nothing is told from 1."""
    wanted = np.log([0.65, 185.0, 93.0, 0.12, 0.27])
    valid = sample(configurations=5, atoms=40)
    valid = valid._replace(error=valid.error * np.exp(0.5 * wanted)[valid.frame, None])
    found = calibrate(valid, ["scale"])
    low, high = np.log(found.factor["C"].interval)
    assert low < -1.5 and high > 4.3
    assert found.factor["C"].value == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("inflate", [1e-4, 1e4])
def test_scales_far_away_are_found(inflate):
    """Also for Gaussians, whose PIT is 0 or 1 to the last bit there."""
    error = 0.1 * inflate * np.random.default_rng(0).standard_normal((600, 3))
    assert calibrate(gaussians(error, 0.1, 10), ["scale"]).factor["H"].value == pytest.approx(inflate**2, rel=0.2)


def test_every_family_is_calibrated_through_its_law():
    """Every family of the table, its errors drawn from its own law, twice as large."""
    for name, family in families.table().items():
        generator = torch.Generator().manual_seed(0)
        parameters = {}
        for key in family.parameter_keys:
            values = torch.rand(2000, *key.shape, generator=generator, dtype=torch.float64)
            finite = key.above > -float("inf")
            parameters[key.name] = (values + key.above + 1.0 if finite else values - 5.0).numpy()
        law = law_of(family, parameters)
        error = law.mean() + 2.0 * (law.sample(np.random.default_rng(0), 1)[0] - law.mean())
        valid = hydrogen(family, parameters, error, 20)
        assert calibrate(valid, ["scale"]).factor["H"].value == pytest.approx(4.0, rel=0.2), name
        found = calibrate(valid, ["floor"])
        pit = pit_of(valid.calibrated(found))
        assert np.mean(pit <= FLOOR_LEVEL) == pytest.approx(FLOOR_LEVEL, abs=1e-3), name


# Species


def test_species_get_factors_of_their_own(sample):
    valid = sample()
    valid = valid._replace(error=valid.error * np.where(valid.species == "H", 2.0, 0.5)[:, None])
    found = calibrate(valid, ["species-scale"])
    assert {symbol: constant.value for symbol, constant in found.factor.items()} == {
        "H": pytest.approx(4.0, rel=0.15),
        "C": pytest.approx(0.25, rel=0.2),
        "O": pytest.approx(0.25, rel=0.2),
    }
    for constant in found.factor.values():
        assert constant.interval[0] < constant.value < constant.interval[1]


def test_species_with_few_atoms_are_drawn_to_the_common_factor(sample):
    valid = sample(configurations=40, species="HHHHHHHHHHHO", inflate=2.0)
    few = np.zeros(480, dtype=bool)
    few[:7] = True
    rare = (valid.species == "O") & ~few
    valid = valid._replace(species=np.where(few, "N", valid.species))
    # Seven nitrogens say nothing, forty oxygens hardly tell their factor from the common one.
    found = calibrate(valid, ["species-scale"])
    common = calibrate(valid, ["scale"]).factor["H"].value
    assert found.factor["N"].value == common
    alone = calibrate(valid.only(rare), ["scale"]).factor["O"].interval
    own = math.sqrt(alone[0] * alone[1])
    assert abs(math.log(found.factor["O"].value / common)) < 0.7 * abs(math.log(own / common))
    assert any(note.startswith("N: 7 atoms in 1 configurations: the factor is the common one") for note in found.notes)
    assert any(note.startswith(f"O: {rare.sum()} atoms want a factor of ") for note in found.notes)


# Floor


def test_floor_is_fitted_to_its_level(sample):
    """Covariances from which 0.01 eV²/Å² is missing."""
    valid = sample(configurations=500)
    extra = 0.1 * np.random.default_rng(1).normal(size=valid.error.shape)
    valid = valid._replace(error=0.01 * valid.error + extra)
    valid = valid._replace(parameters={**valid.parameters, "e2ip_nu": np.full(6000, 200.0)})
    found = calibrate(valid, ["floor"])
    assert found.floor.interval[0] < found.floor.value < found.floor.interval[1]
    assert all(constant.value == 1.0 for constant in found.factor.values())
    assert np.mean(pit_of(valid.calibrated(found)) <= FLOOR_LEVEL) == pytest.approx(FLOOR_LEVEL, abs=1e-4)
    # The least one.
    less = valid.widened(np.ones(6000), np.full(6000, 0.999 * found.floor.value))
    assert np.mean(pit_of(less) <= FLOOR_LEVEL) < FLOOR_LEVEL


def test_covariances_that_are_too_large_get_no_floor(sample):
    valid = sample(inflate=0.5)
    found = calibrate(valid, ["floor"])
    assert found.floor.value == 0.0 and "the covariance stays as it is" in found.notes[0]
    after = valid.calibrated(found)
    assert all(np.array_equal(after.parameters[name], values) for name, values in valid.parameters.items())


def test_floor_mends_covariances_without_full_rank():
    """As of two members: no variance across the line between their forces."""
    rng, n = np.random.default_rng(0), 600
    axes = np.linalg.qr(rng.normal(size=(n, 3, 3)))[0]
    deviation = 0.1 * rng.normal(size=n)
    logarithm = np.einsum("nij,nj,nkj->nik", axes, np.stack([np.log(deviation**2), *np.full((2, n), -60.0)], 1), axes)
    log_cov = logarithm[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    error = 0.3 * rng.normal(size=(n, 3))
    parameters = {"ensemble_log_cov": log_cov, "ensemble_epistemic_share": np.ones(n)}
    valid = hydrogen(Ensemble, parameters, error, 10)
    found = calibrate(valid, ["floor"])
    assert found.scores["before"]["coverage95"] == 0.0 and found.scores["after"]["coverage90"] == pytest.approx(0.9)
    assert math.sqrt(found.floor.value) == pytest.approx(0.3, rel=0.1)
    assert "method floor mends that" in calibrate(valid, ["scale"]).notes[0]


# Conformal radii


def test_radii_are_of_the_calibrated_covariance(sample):
    """A factor changes no region: the radius takes back what it gives."""
    valid = sample(inflate=3.0)
    alone = calibrate(valid, ["conformal"], [0.9])
    scaled = calibrate(valid, ["scale", "conformal"], [0.9])
    assert alone.methods == ("conformal",) and all(c.value == 1.0 for c in alone.factor.values())
    root = math.sqrt(scaled.factor["C"].value)
    assert alone.radii[0.9] == pytest.approx(root * scaled.radii[0.9], rel=1e-9)
    distance = np.linalg.norm(valid.law().z_scores(valid.error), axis=-1)
    assert np.mean(distance <= alone.radii[0.9]) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("method", ["floor", "species-scale"])
def test_radii_come_from_configurations_that_the_constants_have_not_seen(sample, method):
    valid = sample(inflate=2.0)
    found = calibrate(valid, ["conformal", method], [0.9])
    assert "every second configuration" in found.notes[0] and found.methods == (method, "conformal")
    odd = valid.frame % 2 == 1
    # Constants as from the even ones alone, radii of the odd ones.
    assert found.factor == calibrate(valid.only(~odd), [method]).factor
    wide = valid.only(odd).calibrated(found)
    distance = np.linalg.norm(wide.law().z_scores(wide.error), axis=-1)
    assert found.radii[0.9] == conformal_radius(distance, wide.frame, 0.9)


def test_species_that_only_the_radii_see_are_calibrated(sample):
    valid = sample(configurations=20, species="CH", inflate=2.0)
    valid.species[valid.frame == 3] = "O"
    found = calibrate(valid, ["conformal", "species-scale"])
    low, high = sorted(found.factor[symbol].value for symbol in "CH")
    assert low <= found.factor["O"].value <= high


def test_too_few_configurations_for_a_level_are_told(sample):
    found = calibrate(sample(configurations=12), ["conformal"], [0.5, 0.95, 0.99])
    assert math.isfinite(found.radii[0.5]) and math.isinf(found.radii[0.95])
    assert found.notes == [
        "no finite conformal radius for level 0.95, 0.99: 12 configurations allow levels up to 0.923; give more "
        "configurations"
    ]


# Input


@pytest.mark.parametrize(
    ("methods", "levels", "message"),
    [
        (["platt"], [0.9], "--method platt: choose from floor, scale"),
        (["floor", "scale"], [0.9], "floor and scale both set the size of the covariance"),
        (["conformal"], [0.9, 1.0], "--level 1: a level lies between 0 and 1"),
        (["conformal"], [90.0], "--level 90: a level lies between 0 and 1"),
    ],
)
def test_what_does_not_go_together(methods, levels, message):
    with pytest.raises(InputError, match=message):
        check(methods, levels)


def test_the_methods_that_go_together():
    assert check(["conformal", "scale"]) == check(["scale", "scale"]) == "scale"
    assert check(["conformal"]) == "none"


def test_what_is_left_out_or_says_little_is_told(sample):
    few = calibrate(sample(configurations=6)._replace(unlabelled=3), ["scale"]).notes
    assert few[0] == "3 atoms without finite reference forces left out" and few[1].startswith("6 configurations say")
    flat = sample(configurations=60)
    flat.parameters["e2ip_log_sigma0"][:, 0] -= 30.0  # as of too few members: no full rank
    assert any(note.startswith("a radius of ") for note in calibrate(flat, ["conformal"], [0.9]).notes)


def test_species_scales_that_make_the_whole_worse_are_told(sample):
    """Atoms of C have the large half of the errors that their distributions say, those of H the small half: together
    they have them all, and with factors of their own neither has the large or the small ones."""
    both, told = sample(species="CH", configurations=400), "the CE over all atoms rises"
    pit = pit_of(both)
    halves = both.only(np.where(both.species == "C", pit > 0.5, pit < 0.5))
    found = calibrate(halves, ["species-scale"])
    assert found.scores["after"]["calibration_error"] > found.scores["before"]["calibration_error"] + 0.02
    assert any(note.startswith(told) for note in found.notes)
    assert not any(note.startswith(told) for note in calibrate(both, ["species-scale"]).notes)


def test_validation_sets_that_say_nothing(sample):
    exact = sample()._replace(error=np.zeros((2400, 3)))
    for valid, methods, message in (
        (sample(configurations=1), ["scale"], "has 1 configuration with .*at least 2"),
        (sample(configurations=3), ["floor", "conformal"], "has 3 configurations .*at least 4"),
        (exact, ["scale"], "all errors are zero"),
    ):
        with pytest.raises(InputError, match=rf"valid\.xyz: {message}"):
            calibrate(valid, methods)
