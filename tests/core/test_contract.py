"""Contracts with hosts: what counts as missing, and what does not."""

import sys
from types import ModuleType

import pytest

from e2ip_plugins.contract import installed, problems, warn_if_untested

TERMS = {"fake_host": ("train(model, ..., device)", "Loss.update(batch, output)"), "fake_host.lora": ("inject(model)",)}
OPTIONAL = {"fake_host.lora": "since 2.0", "fake_host.hook": "since 2.0"}


def train(model, loader, device, *extra):
    """As a host has it."""


class Loss:
    def update(self, batch, output):
        """As a host has it."""


@pytest.fixture
def host(monkeypatch):
    """A package without the optional module."""
    made = ModuleType("fake_host")
    made.train, made.Loss, made.__path__ = train, Loss, []
    monkeypatch.setitem(sys.modules, "fake_host", made)
    return made


def test_a_host_that_has_everything(host):
    assert problems(TERMS, OPTIONAL) == []
    assert problems(TERMS) == ["there is no fake_host.lora"]


def test_each_thing_that_is_missing_is_named(host, monkeypatch):
    monkeypatch.delattr(host, "train")
    monkeypatch.setattr(host.Loss, "update", lambda self, batch: None)
    assert problems(TERMS, OPTIONAL) == [
        "fake_host has no train",
        "fake_host.Loss.update takes (batch), not (batch, output)",
    ]


def test_what_is_optional_must_be_right_where_it_is(host):
    terms = {"fake_host": ("hook(model)",)}
    assert problems(terms, OPTIONAL) == []
    host.hook = lambda data: None
    assert problems(terms, OPTIONAL) == ["fake_host.hook takes (data), not (model)"]


@pytest.mark.parametrize(
    ("term", "holds"),
    [
        ("train", True),
        ("train(model, loader, device)", True),
        ("train(model, loader)", False),
        ("train(loader, ...)", False),
        ("train(model, ..., gone)", False),
        ("train(..., device, model)", True),
    ],
)
def test_parameters(host, term, holds):
    assert (problems({"fake_host": (term,)}) == []) == holds


def test_what_the_host_itself_lacks_is_raised(host, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_dependency")
    host.__path__ = [str(tmp_path)]
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        problems({"fake_host.broken": ("x",)}, ["fake_host.broken"])


def test_releases():
    assert installed("no-such-distribution") is None and installed("torch")
    warn_if_untested("Host", "1.0", ("1.0",))
    with pytest.warns(match=r"Host 2\.0 was not tested with e2ip-plugins \(tested: 1\.0, 1\.1\)") as warned:
        for _ in range(2):
            warn_if_untested("Host", "2.0", ("1.0", "1.1"))
    assert len(warned) == 1
