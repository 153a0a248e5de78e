"""Options that users write."""

import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.families import presets_tmp as presets


def test_paper_preset_is_the_paper():
    paper = presets.get_preset("paper")
    assert (paper.evidence, paper.evidence_weight) == ("independent", 0.1)
    assert paper.scalar_damper == (4.0, 5.0) == presets.TENSOR_DAMPER and not paper.mse_like


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "kcal", [1]])
def test_bad_force_units(bad):
    with pytest.raises(InputError, match="force_unit"):
        presets.resolve_force_unit(bad)


def test_force_units():
    assert presets.resolve_force_unit(None) == presets.KCAL_PER_MOL
    assert presets.resolve_force_unit("0.1") == 0.1
    assert presets.resolve_force_unit("auto", 2.0) == pytest.approx(0.06)
    with pytest.raises(InputError, match="auto"):
        presets.resolve_force_unit("auto")


def test_evidence_weight_defaults():
    default = presets.get_preset("default")
    mode = presets.resolve_evidence(default)
    assert presets.resolve_evidence_weight(default, mode) == default.evidence_weight
    assert presets.resolve_evidence_weight(default, "independent", 0.0) == 0.0
