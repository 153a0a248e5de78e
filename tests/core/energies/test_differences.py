"""Differences of energies: values worked out by hand, limits, and the command."""

import json

import numpy as np
import pytest

from e2ip_plugins.energies import covariance, difference
from e2ip_plugins.errors import InputError, UncertaintyWarning


def test_adsorption_energy(adsorption):
    value, std = difference(adsorption, "slab+CO - slab - CO")
    assert isinstance(value, float) and value == pytest.approx(-0.75)
    assert std == pytest.approx(0.1)  # |(0.3, 0.2, 0) - (0.3, 0, 0) - (0, 0.2, 0.1)|
    assert difference(adsorption, [1, -1, -1]) == (value, std)
    values, stds = difference(adsorption, ["slab+CO - slab - CO", "slab - slab"])
    np.testing.assert_allclose(values, [value, 0.0])
    np.testing.assert_allclose(stds, [std, 0.0])


def test_covariance_of_sums(random_frames):
    frames = random_frames(3)
    vectors = [atoms.info["energy_error_vector"] for atoms in frames]
    found = covariance(frames, ["0 - 1", "0 - 2"])
    by_hand = np.stack([vectors[0] - vectors[1], vectors[0] - vectors[2]])
    np.testing.assert_allclose(found, by_hand @ by_hand.T)
    # As coefficients, and one sum alone.
    np.testing.assert_allclose(covariance(frames, np.array([[1, -1, 0], [1, 0, -1]])), found)
    np.testing.assert_allclose(covariance(frames, "0 - 1"), found[:1, :1])


def test_a_difference_vanishes_smoothly(make_frame):
    """The standard deviation falls in proportion to the distance of two frames on a path."""
    start, end = np.random.default_rng(0).normal(size=(2, 64))
    steps = 10.0 ** -np.arange(6)
    frames = [make_frame(-1.0, start), *(make_frame(-1.0, start + step * (end - start)) for step in steps)]
    stds = [difference(frames, f"0 - {number}")[1] for number in range(1, 7)]
    np.testing.assert_allclose(stds / steps, stds[0], rtol=1e-6)
    assert difference(frames, "3 - 3") == (0.0, 0.0)


def test_atoms_that_do_not_cancel(adsorption):
    with pytest.warns(UncertaintyWarning, match=r"slab\+CO - slab: atoms do not cancel \(C \+1, O \+1\)"):
        difference(adsorption, "slab+CO - slab")
    with pytest.warns(UncertaintyWarning, match=r"sum 1: atoms do not cancel \(Cu -2\)"):
        difference(adsorption, [[1, -1, -1], [0, -0.5, 0]])


@pytest.mark.parametrize("of", [[1, -1], [[1, -1]], 1.0, [1, np.nan, 0], [[[1, -1, -1]]]])
def test_other_coefficients_than_frames(adsorption, of):
    with pytest.raises(InputError, match="for 3 frames"):
        difference(adsorption, of)


@pytest.mark.parametrize("of", [{"slab": 1}, [[1, 2], [1]], ["slab", 1.0, None]])
def test_neither_text_nor_coefficients(adsorption, of):
    with pytest.raises(InputError, match="is no sum such as 'A - B', nor a list of coefficients"):
        difference(adsorption, of)


def test_command(write, adsorption, succeed):
    write("a.xyz", adsorption[:2])
    write("b.xyz", adsorption[2:])
    done = succeed("difference", "a.xyz", "b.xyz", "--of", "slab+CO - slab - CO", "--of", "0 - 1 - 2")
    assert done.stdout.splitlines() == [
        "E(slab+CO - slab - CO) = -0.750 +- 0.100 eV (one standard deviation)",
        "E(0 - 1 - 2) = -0.750 +- 0.100 eV (one standard deviation)",
    ]
    assert done.stderr == ""


def test_command_warns_and_writes_json(write, adsorption, succeed, refuse):
    write("a.xyz", adsorption)
    arguments = ("difference", "a.xyz", "--of", "slab", "--of", "slab - slab", "--output", "sums.json")
    done = succeed(*arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("e2ip: warning: E(slab): atoms do not cancel (Cu +4): ")
    assert done.stdout.splitlines()[0] == "E(slab) = -8.000 +- 0.300 eV (one standard deviation)"
    with open("sums.json") as file:
        written = json.load(file)
    assert written["uq_model"] == "e2ip-1" and written["unit"] == "eV"
    assert written["sums"][0] == {"of": "slab", "energy": -8.0, "energy_uncertainty": pytest.approx(0.3)}
    np.testing.assert_allclose(written["covariance"], [[0.09, 0.0], [0.0, 0.0]])
    assert "--overwrite" in refuse(*arguments)


def test_without_a_sum_all_energies_are_listed(write, adsorption, succeed):
    write("a.xyz", adsorption)
    done = succeed("difference", "a.xyz")
    assert done.stderr == "" and [line[:4] for line in done.stdout.splitlines()] == ["E(0)", "E(1)", "E(2)"]
    single = succeed("difference", "a.xyz", "--of", "1").stdout.splitlines()
    assert done.stdout.splitlines()[1] == single[0]


@pytest.mark.parametrize(
    ("std", "shown"), [(0.0123, "0.012"), (0.000456, "0.00046"), (1e-9, "0.000000"), (12.0, "12.000")]
)
def test_digits(write, make_frame, succeed, std, shown):
    write("a.xyz", [make_frame(-1.0, [std, 0.0]), make_frame(-2.0, [0.0, 0.0])])
    assert f" +- {shown} eV (" in succeed("difference", "a.xyz", "--of", "0 - 1").stdout


def test_command_refuses(write, adsorption, make_frame, refuse):
    assert "no such file" in refuse("difference", "none.xyz", "--of", "0 - 1")
    write("a.xyz", adsorption)
    write("other.xyz", [make_frame(-1.0, [0.1, 0.0, 0.0], uq_model="e2ip-2")])
    line = refuse("difference", "a.xyz", "other.xyz", "--of", "0 - 3")
    assert "other.xyz, frame 0: its model (uq_model) is e2ip-2, that of a.xyz, frame 0 is e2ip-1" in line
    assert "'slab - X': no frame has the name 'X'; there are: slab+CO, slab, CO" in refuse(
        "difference", "a.xyz", "--of", "slab - X"
    )
    del adsorption[1].info["energy_error_vector"]
    write("a.xyz", adsorption)
    assert "a.xyz, frame 1: has no energy_error_vector" in refuse("difference", "a.xyz", "--of", "0 - 2")
