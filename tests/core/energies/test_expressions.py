"""Sums of energies as text."""

import ase
import numpy as np
import pytest

from e2ip_plugins.energies.expressions import coefficients_of
from e2ip_plugins.errors import InputError

NAMES = ("slab+CO", "slab", "CO", "Pt*CO", "path - 3", "two words", False)


@pytest.fixture(scope="module")
def frames():
    frames = [ase.Atoms("H", info={"name": name, "label": "all alike", "step": 10 * i}) for i, name in enumerate(NAMES)]
    return [*frames, ase.Atoms("H", info={"name": "CH4-2"}), ase.Atoms("H", info={"name": "twice"}), ase.Atoms("H")]


def expected(**coefficients):
    row = np.zeros(10)
    for number, coefficient in coefficients.items():
        row[int(number[1:])] = coefficient
    return row


@pytest.mark.parametrize(
    ("text", "coefficients"),
    [
        ("0 - 1", {"_0": 1, "_1": -1}),
        ("  slab+CO   -  slab - CO ", {"_0": 1, "_1": -1, "_2": -1}),
        ("2*CO - 0.5 * slab + .25*9", {"_2": 2, "_1": -0.5, "_9": 0.25}),
        ("1/2*3 - 3/4 * 4", {"_3": 0.5, "_4": -0.75}),
        ("- Pt*CO + 2*Pt*CO", {"_3": 1}),
        ("+ two words - F", {"_5": 1, "_6": -1}),  # ASE reads F for False
        ("CH4-2", {"_7": 1}),
        ("slab - slab", {}),
    ],
)
def test_sums(frames, text, coefficients):
    np.testing.assert_array_equal(coefficients_of(text, frames), expected(**coefficients))


def test_with_a_key_numbers_are_names(frames):
    np.testing.assert_array_equal(coefficients_of("20 - 10", frames, "step"), expected(_2=1, _1=-1))


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", None, "'': it is empty"),
        ("A -", None, "'A -': a term is missing.*put a space before and after every"),
        ("- ", None, "a term is missing"),
        ("A - + B", None, "a term is missing"),
        ("1/0*CO", None, "divides by zero"),
        ("10", None, "no such frame: frames are 0 to 9, got 10"),
        ("CO-slab", None, r"no frame has the name 'CO-slab'; there are: slab\+CO, .*; put a space before"),
        ("slab slab", None, "no frame has the name 'slab slab'; there are: [^;]*$"),
        ("2*", None, r"no frame has the name '2\*'"),
        ("all alike", "label", r"7 frames have the label 'all alike' \(0, 1, .*\); choose another key"),
        ("A", "structure", r"no frame has 'structure' in its info; .* another key \(--key\): name, label"),
        ("A-B", "structure", r"no frame has 'structure' in its info; .*; put a space before and after every"),
        ("1", "step", "no frame has the step '1'; there are: 0, 10"),
    ],
)
def test_refused(frames, text, key, message):
    with pytest.raises(InputError, match=message):
        coefficients_of(text, frames, key)


def test_a_name_of_two_frames(frames):
    with pytest.raises(InputError, match=r"2 frames have the name 'twice' \(8, 9\); choose one by its number"):
        coefficients_of("twice", [*frames[:9], frames[8]])
    with pytest.raises(InputError, match="the only frame is 0, got 1"):
        coefficients_of("1", frames[:1])
    with pytest.raises(InputError, match=r"no frame has 'name'.* \(--key\): none"):
        coefficients_of("A", frames[9:])
