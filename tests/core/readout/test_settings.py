"""The one settings object: options, units, aliases, what is saved."""

import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.readout.settings import Settings, resolve_force_unit


def settings(**options):
    return Settings.of("e2ip", options, 0.05)


def test_what_is_saved_comes_back():
    saved = settings(evidence="independent", evidence_weight=0.2)
    again = Settings.from_dict(saved.to_dict(), "x.model")
    assert again == saved and again.differences(saved) == [] and again.build().evidence_weight == 0.2
    assert again.with_aliases(None, {"evidence": "independent"}, "E2IPLoss") == saved


@pytest.mark.parametrize("saved", [{"version": 1, "preset": "default"}, {"preset": "default"}])
def test_what_was_saved_before_names_the_commit_that_reads_it(saved):
    with pytest.raises(InputError, match=r"x\.model was saved by an early version .* commit e824b4f"):
        Settings.from_dict(saved, "x.model")


def test_what_a_later_version_saved_is_refused():
    with pytest.raises(InputError, match=r"readout version 99, this installation reads"):
        Settings.from_dict({**settings().to_dict(), "version": 99}, "x.model")


def test_strings_become_what_the_option_is():
    assert settings(evidence="independent", evidence_weight="0.5").options["evidence_weight"] == 0.5
    with pytest.raises(InputError, match="evidence_weight must be a float, got 'much'"):
        settings(evidence="independent", evidence_weight="much")


def test_unknown_family():
    with pytest.raises(InputError, match="unknown readout 'mve'"):
        Settings.of("mve", {}, 0.05)


def test_aliases_must_match():
    model = settings(evidence="independent")
    assert model.with_aliases("e2ip", {"evidence": "independent", "preset": None}, "E2IPLoss").options == model.options
    with pytest.raises(InputError, match="E2IPLoss has evidence coupled, the model independent"):
        model.with_aliases(None, {"evidence": "coupled"}, "E2IPLoss")
    with pytest.raises(InputError, match="E2IPLoss has readout 'mve', the model 'e2ip'"):
        model.with_aliases("mve", {}, "E2IPLoss")
    with pytest.raises(InputError, match="wings is no option"):
        model.with_aliases(None, {"wings": 2}, "E2IPLoss")


def test_what_only_the_loss_reads_may_stand_there_alone():
    model = settings(evidence="independent")
    assert model.with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss").options["evidence_weight"] == 0.3
    given = settings(evidence="independent", evidence_weight=0.2)
    with pytest.raises(InputError, match=r"evidence_weight 0\.3, the model 0\.2"):
        given.with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss")
    with pytest.raises(InputError, match="coupled"):
        settings().with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss")


def test_differences(toy_family):
    a, b = settings(evidence="independent"), settings(evidence="independent", evidence_weight=0.2)
    assert a.differences(b) == ["evidence_weight"] and a.differences(b, weights_only=True) == []
    assert a.differences(a._replace(force_unit=0.06)) == ["force_unit"]
    assert a.differences(Settings.of(toy_family.name, {}, 0.05)) == ["readout"]
    assert [a.describe(name) for name in ("readout", "force_unit", "evidence")] == ["e2ip", 0.05, "independent"]


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "kcal", [1]])
def test_bad_force_units(bad):
    with pytest.raises(InputError, match="force_unit"):
        resolve_force_unit(bad)


def test_force_units():
    assert resolve_force_unit(None) == KCAL_PER_MOL
    assert resolve_force_unit("0.1") == 0.1
    assert resolve_force_unit(" Auto ", 2.0) == pytest.approx(0.06)
    with pytest.raises(InputError, match="auto"):
        resolve_force_unit("auto")
