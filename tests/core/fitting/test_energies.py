"""The fit of lengths and factors, on errors that are drawn from them."""

import math

import pytest
import torch

from e2ip_plugins.fitting.energies import EnergyResiduals, fit_energies
from e2ip_plugins.fitting.report import FitReport
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings, resolve_force_unit

F64 = torch.float64
SPECIES = ("H", "O")


@pytest.fixture
def readout():
    torch.manual_seed(0)
    layout = Layout([(0, 5)], [(5, 3)], [(14, 2)], num_species=2)
    made = Readout(Settings.of("e2ip", {}, resolve_force_unit(None)), layout, num_heads=2).double()
    leverage = made.leverage
    leverage.whitening = torch.eye(5, dtype=F64)[:, None, :].repeat(1, 1, 1)
    leverage.region_stretch.fill_(1.0)
    leverage.region_offsets.zero_()
    leverage.fitted.fill_(True)
    return made


def batches(readout, residual_of, count=200, atoms=6, heads=None, stress=False, seed=0):
    """Yield batches of five frames whose errors ``residual_of`` makes of the standard deviation at length 1."""
    draws = torch.Generator().manual_seed(seed)
    energies = readout.leverage.energies
    for first in range(0, count, 5):
        features = torch.randn(5 * atoms, 24, dtype=F64, generator=draws)
        species = torch.randint(0, 2, (5 * atoms,), generator=draws)
        frames = torch.arange(5).repeat_interleave(atoms)
        node_heads = torch.full((5 * atoms,), 0 if heads is None else heads(first))
        for head in (0, 1):
            energies.set_head(head, 1.0, float(energies.floors[head]))
        with torch.no_grad():
            out = readout(features, features, species, node_heads=node_heads, frames=frames, num_frames=5)
        energies.lengths.zero_()
        std = out["energy_uncertainty"]
        composition = torch.stack([torch.bincount(frames[species == s], minlength=5) for s in (0, 1)], 1).double()
        noise = torch.randn(5, dtype=F64, generator=draws)
        errors = EnergyResiduals(residual_of(std, noise, composition), frames)
        if stress:
            volumes = torch.full((5,), 50.0, dtype=F64)
            errors = errors._replace(stress=stress(std / volumes, draws), volumes=volumes)
        yield errors


def fit(readout, *args, heads=("one", "two"), present=((0, 0), (0, 1)), **kwargs):
    report = FitReport(atoms=dict.fromkeys(present, 100), heads=heads)
    fit_energies(readout, batches(readout, *args, **kwargs), report, SPECIES)
    return report


def test_length_that_the_errors_were_drawn_with_is_found(readout):
    report = fit(readout, lambda std, noise, _: 0.25 * std * noise, count=1000)
    fitted = report.energies[0]
    # The floor, which was 0 when the errors were drawn, makes it a little smaller.
    assert 0.25 * 0.85 < fitted.length < 0.25 and fitted.frames == 1000
    assert fitted.error == pytest.approx(fitted.length / math.sqrt(2 * 1000), rel=0.2)
    energies = readout.leverage.energies
    torch.testing.assert_close(energies.lengths.sum(0)[:2], torch.full((2,), fitted.length / 32**0.5, dtype=F64))
    assert not energies.lengths[:, 2:].any() and energies.floors[0] > 0
    assert not report.warnings and any("0.2" in line and "Å" in line for line in report.lines())


def test_standardised_errors_have_variance_one_afterwards(readout):
    residuals, squares = [], []

    def errors(std, noise, _):
        residuals.append(0.25 * std * noise)
        return residuals[-1]

    fit(readout, errors)
    length = 32**0.5 * readout.leverage.energies.lengths.max()

    def standardised(std, *_):
        squares.append((residuals[len(squares)] / (length * std)).square())
        return std

    list(batches(readout, standardised))
    assert torch.cat(squares).mean().item() == pytest.approx(1.0, rel=1e-9)


def test_each_head_has_its_length_and_one_without_energies_has_none(readout):
    report = fit(
        readout,
        lambda std, noise, _: 0.25 * std * noise,
        present=((0, 0), (0, 1), (1, 0), (1, 1)),
        heads=("one", "two"),
    )
    assert list(report.energies) == [0] and not readout.leverage.energies.lengths[:, 2:].any()
    (warning,) = report.warnings
    assert "head two" in warning and "has no energies" in warning


@pytest.mark.parametrize(
    ("residual", "count", "said"),
    [
        (lambda std, noise, c: torch.full_like(std, math.nan), 20, "has no energies"),
        (lambda std, noise, c: torch.where(torch.arange(5) == 0, std, math.nan), 5, "a single energy"),
        (lambda std, noise, c: 0.0 * std, 20, "are they predictions of this model"),
        (
            lambda std, noise, c: c @ torch.tensor([-13.6, -430.0], dtype=F64) + 1e-3 * std * noise,
            50,
            "H -13.6, O -430 eV)",
        ),
        # Frames of one composition do not tell which species has it.
        (
            lambda std, noise, c: torch.where(c[:, 0] == 3, 12.0 + 1e-3 * std * noise, math.nan),
            50,
            "2 eV an atom on average",
        ),
    ],
)
def test_energies_that_say_nothing_are_named_and_leave_no_length(readout, residual, count, said):
    report = fit(readout, residual, count=count)
    (warning,) = report.warnings
    assert said in warning and not report.energies
    assert not readout.leverage.energies.lengths.any()


@pytest.mark.parametrize(("offset", "refused"), [(0.2, False), (2.0, True)])
def test_a_few_errors_that_are_alike_are_an_offset_only_where_they_are_large(readout, offset, refused):
    """Two frames of one composition, say, err alike by chance."""

    def two_of(std, noise, c):
        residual = offset * c.sum(1) + 1e-3 * noise
        return torch.where(torch.arange(5) < 2, residual, math.nan)

    report = fit(readout, two_of, count=5)
    assert bool(report.energies) is not refused
    assert any("of another reference" in text for text in report.warnings) is refused


def test_a_bias_of_the_size_of_the_errors_is_an_error_and_no_offset(readout):
    report = fit(readout, lambda std, noise, c: 0.2 * std * (noise + 1.0), count=50)
    assert report.energies and not report.warnings


@pytest.mark.parametrize(("bias", "named"), [(0.0, False), (0.5, False), (2.0, True)])
def test_a_bias_larger_than_the_scatter_is_named(readout, bias, named):
    report = fit(readout, lambda std, noise, c: 1e-3 * c.sum(1) * (noise + bias), count=200)
    report.warn_of_energies()
    assert report.energies[0].offset == pytest.approx(1e-3 * bias, abs=3e-4)
    assert report.energies[0].spread == pytest.approx(1e-3, rel=0.2)
    said = ["reference minus predicted energy is 0.002 +- " in text for text in report.warnings]
    assert said == [True] * named


def test_few_energies_are_named(readout):
    report = fit(readout, lambda std, noise, c: 0.2 * std * noise, count=5)
    report.warn_of_energies()
    (warning,) = report.warnings
    assert warning.startswith("5 validation energies") and "several times too narrow: give some dozens" in warning


def symmetric(scale, draws, hydrostatic, deviatoric, offset=0.0):
    pressure = hydrostatic * scale * torch.randn(len(scale), dtype=F64, generator=draws) + offset
    noise = torch.randn(len(scale), 3, 3, dtype=F64, generator=draws)
    noise = (noise + noise.mT) / 2
    noise -= noise.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] * torch.eye(3, dtype=F64) / 3
    return pressure[:, None, None] * torch.eye(3, dtype=F64) + deviatoric * scale[:, None, None] * noise


def test_factors_of_stresses_and_an_offset_that_they_do_not_explain(readout):
    """Factors times the length are what the errors were drawn with, a tenth less for the floor."""
    report = fit(
        readout,
        lambda std, noise, _: 0.25 * std * noise,
        count=1000,
        stress=lambda scale, draws: symmetric(scale, draws, 2.0, 0.5, offset=3.0),
    )
    report.warn_of_energies()
    fitted, length = report.stresses[0], report.energies[0].length
    assert fitted.factors[0] * length == pytest.approx(2.0 * 0.9, rel=0.12)
    assert fitted.factors[1] * length == pytest.approx(0.5 * 0.9, rel=0.12)
    assert fitted.offset == pytest.approx(3.0, abs=4 * fitted.offset_error)
    (warning,) = report.warnings
    assert "hydrostatic" in warning and "GPa" in warning
    torch.testing.assert_close(
        readout.leverage.energies.stress_factors[0], torch.tensor(fitted.factors, dtype=F64), rtol=1e-12, atol=0
    )
