"""The table of families: found by their files, told apart by names."""

import pytest

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Family
from e2ip_plugins.keys import FORCE_VIEWS


def test_every_family_fills_the_interface():
    assert families.DEFAULT in families.table()
    parameters = {}
    for name, family in families.table().items():
        assert issubclass(family, Family) and family.name == name and family.uq_family
        assert family.num_scalars > 0 and family.num_tensors in (0, 1)
        assert family.output_keys()[-len(family.own_views) - len(FORCE_VIEWS) :][: len(FORCE_VIEWS)] == FORCE_VIEWS
        assert len({key.name for key in family.output_keys()}) == len(family.output_keys())
        # A file without a family's name is told by its parameters: the same ones must mean the same.
        names = frozenset(key.name for key in family.parameter_keys)
        assert parameters.setdefault(names, family.uq_family) == family.uq_family


def test_options_have_names_of_their_own():
    """Not those of arguments that every readout has in NequIP or MACE."""
    taken = {"model", "seed", "readout", "force_unit", "forces_rms", "model_dtype", "compile_mode", "coeffs"}
    taken |= {"per_atom_energy", "type_names", "ignore_nan", "extra_metrics", "forces"}
    for family in families.table().values():
        assert not taken & {option.name for option in family.options}
        assert all(option.help.isascii() for option in family.options)


def test_one_file_more_is_one_family_more(toy_family):
    assert set(families.table()) >= {toy_family.name, families.DEFAULT}
    assert families.of_file("isotropic", "x.xyz") is toy_family
    assert families.of_outputs({"forces", "isotropic_log_std"}) is toy_family
    assert families.of_outputs({"forces", "energy"}) is None


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(InputError, match=r"unknown readout 'bnn'; choose from: .*e2ip"):
        families.get("bnn")
    with pytest.raises(InputError, match=r"x\.xyz: uq_family 'bnn' is not known .*known: niw"):
        families.of_file("bnn", "x.xyz")
