"""The one settings object: options, units, aliases, what is saved."""

import pickle

import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Option
from e2ip_plugins.keys import KCAL_PER_MOL
from e2ip_plugins.readout.settings import Settings, resolve_force_unit


def settings(**options):
    return Settings.of("e2ip", options, 0.05)


def test_what_is_saved_comes_back():
    saved = settings(evidence="independent", evidence_weight=0.2)
    again = Settings.from_dict(saved.to_dict(), "x.model")
    assert again == saved and again.differences(saved) == [] and again.build().evidence_weight == 0.2
    assert again.with_aliases(None, {"evidence": "independent"}, "E2IPLoss") == saved


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ({}, "was written before e2ip-plugins 0.2.0"),
        ({"version": 1}, "was written before e2ip-plugins 0.2.0"),
        ({"version": 99, "release": "0.9.0"}, "was written by e2ip-plugins 0.9.0 in format 99 of models"),
    ],
)
def test_what_another_format_has_is_refused(version, message):
    with pytest.raises(InputError, match=rf"x\.model {message}"):
        Settings.from_dict({"preset": "default", **version}, "x.model")


@pytest.mark.parametrize("pickled", [False, True])
def test_an_option_that_a_family_did_not_have_yet_gets_its_default(toy_family, monkeypatch, pickled):
    saved = Settings.of(toy_family.name, {}, 0.05)
    stored = pickle.dumps(saved) if pickled else saved.to_dict()
    monkeypatch.setattr(toy_family, "options", (Option("width", "", 1.5, float),))
    again = pickle.loads(stored) if pickled else Settings.from_dict(stored, "x.model")
    assert again.options == {"width": 1.5} and again.given == frozenset()
    assert again.differences(Settings.of(toy_family.name, {"width": "1.5"}, 0.05)) == []


def test_strings_become_what_the_option_is():
    assert settings(evidence="independent", evidence_weight="0.5").options["evidence_weight"] == 0.5
    with pytest.raises(InputError, match="evidence_weight must be a float, got 'much'"):
        settings(evidence="independent", evidence_weight="much")


def test_unknown_family():
    with pytest.raises(InputError, match="unknown readout 'bnn'"):
        Settings.of("bnn", {}, 0.05)


def test_aliases_must_match():
    model = settings(evidence="independent")
    assert model.with_aliases("e2ip", {"evidence": "independent", "preset": None}, "E2IPLoss").options == model.options
    weighted = settings(evidence="independent", evidence_weight=0.2)
    assert weighted.with_aliases(None, {"evidence_weight": "0.20"}, "E2IPLoss") == weighted
    with pytest.raises(InputError, match="E2IPLoss has evidence coupled, the model independent"):
        model.with_aliases(None, {"evidence": "coupled"}, "E2IPLoss")
    with pytest.raises(InputError, match="E2IPLoss has readout 'bnn', the model 'e2ip'"):
        model.with_aliases("bnn", {}, "E2IPLoss")
    with pytest.raises(InputError, match="wings is no option"):
        model.with_aliases(None, {"wings": 2}, "E2IPLoss")


def test_what_only_the_loss_reads_may_stand_there_alone():
    model = settings(evidence="independent")
    assert model.with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss").options["evidence_weight"] == 0.3
    given = settings(evidence="independent", evidence_weight=0.2)
    with pytest.raises(InputError, match=r"evidence_weight 0\.3, the model 0\.2"):
        given.with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss")
    with pytest.raises(InputError, match="coupled"):
        settings(evidence="coupled").with_aliases(None, {"evidence_weight": 0.3}, "E2IPLoss")


def test_differences(toy_family):
    a, b = settings(evidence="independent"), settings(evidence="independent", evidence_weight=0.2)
    assert a.differences(b) == ["evidence_weight"] and a.differences(b, weights_only=True) == []
    assert a.differences(a._replace(force_unit=0.06)) == ["force_unit"]
    assert a.differences(Settings.of(toy_family.name, {}, 0.05)) == ["readout"]
    assert [a.describe(name) for name in ("readout", "force_unit", "evidence")] == ["e2ip", 0.05, "independent"]


def test_coupled_and_leverage_are_the_same_weights():
    coupled, leverage, independent = (settings(evidence=e) for e in ("coupled", "leverage", "independent"))
    assert coupled.differences(leverage) == ["evidence"] and coupled.differences(leverage, weights_only=True) == []
    for other in (coupled, leverage):
        assert other.differences(independent, weights_only=True) == ["evidence"]
        assert independent.differences(other, weights_only=True) == ["evidence"]


def test_a_model_that_can_be_fitted_gets_evidence_mode_leverage(toy_family):
    coupled = settings(evidence="coupled", preset="default")._replace(force_unit=0.07)
    changed = coupled.with_leverage("x.model")
    assert changed.options["evidence"] == "leverage" and changed.force_unit == 0.07
    assert changed.build().takes_support and not coupled.build().takes_support
    assert changed.with_leverage("x.model") is changed
    with pytest.raises(InputError, match=r"x\.model was trained in evidence mode 'independent'.*train it anew"):
        settings(evidence="independent", evidence_weight=0.1).with_leverage("x.model")
    toy = Settings.of(toy_family.name, {}, 0.05)
    assert toy.with_leverage("x.model") is toy, "a family without evidence modes has its leverage as it is"


def test_what_trains_the_forces():
    host = Settings.of("e2ip", {}, 0.05, forces="host")
    assert Settings.from_dict(host.to_dict(), "x.model").forces == "host" != settings().forces
    assert host.differences(settings()) == ["forces"] and host.differences(settings(), weights_only=True) == []
    with pytest.raises(InputError, match="forces is 'mine'; choose from: likelihood, host"):
        Settings.of("e2ip", {}, 0.05, forces="mine")


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
