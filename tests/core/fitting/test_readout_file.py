"""Readout files: written, read as data alone, and refused where they do not belong."""

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.readout_file import Base, ReadoutFile, fitted_readout, hash_of, refuse_readout
from e2ip_plugins.leverage.form import FORM
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout, model_name
from e2ip_plugins.readout.settings import Settings

LAYOUT = Layout([(0, 3)], [(3, 2)], [(9, 1)], num_species=2)
BASE = Base("mace", "a" * 64, "float64", ("H", "O"), ("one", "two"))


def make_readout(seed=0):
    return Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), LAYOUT, num_heads=2, seed=seed).double()


@pytest.fixture
def readout():
    """With a leverage of a fit's shapes; head two has no training atoms of O."""
    made = make_readout(seed=1)
    made.leverage.resize(3, 2)
    made.leverage.region_stretch[:3, 0] = 1.0
    made.leverage.growth.fill_(2.0)
    made.leverage.energies.make_stress_factors()
    made.leverage.fitted.fill_(True)
    return made


@pytest.fixture
def path(readout, tmp_path):
    ReadoutFile.of(readout, readout.settings, BASE, "0.3.16").write(tmp_path / "out.e2ip")
    return tmp_path / "out.e2ip"


def test_what_was_written_comes_back_to_the_last_bit(readout, path):
    file = ReadoutFile.read(path)
    assert file.base == BASE and file.settings == readout.settings and file.versions["mace"] == "0.3.16"
    other = make_readout()
    assert model_name(other) != model_name(readout)
    file.put_on(other, path)
    mine, theirs = readout.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert model_name(other) == file.name == model_name(readout)


def test_species_without_training_atoms_are_named_by_head(path):
    assert ReadoutFile.read(path).notes() == [
        f"no training atoms of O in head two: their leverage is {FORM.max_leverage:g}, their epistemic variance at its "
        "ceiling"
    ]


class Intruder:
    """A pickle that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_in_a_file_is_executed(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as MACE sets it
    content = torch.load(path, weights_only=True)
    torch.save({**content, "name": Intruder(tmp_path / "made")}, path)
    with pytest.raises(InputError, match=r"out.e2ip: is no readout file"):
        ReadoutFile.read(path)
    assert not (tmp_path / "made").exists()


def test_files_that_cannot_be_read(path, tmp_path, readout):
    with pytest.raises(InputError, match=r"nowhere.e2ip: no such file"):
        ReadoutFile.read(tmp_path / "nowhere.e2ip")
    content = torch.load(path, weights_only=True)
    torch.save({**content, "e2ip_readout": 4}, path)
    with pytest.raises(InputError, match=r"out\.e2ip: was written before e2ip-plugins 0\.2\.0"):
        ReadoutFile.read(path)
    torch.save({name: value for name, value in content.items() if name != "base"}, path)
    with pytest.raises(InputError, match=r"out.e2ip: is damaged"):
        ReadoutFile.read(path)
    torch.save({**content, "state": {**content["state"], "leverage.growth": torch.zeros(2)}}, path)
    with pytest.raises(InputError, match=r"out.e2ip: is damaged: its tensors are not those of readout-"):
        ReadoutFile.read(path).put_on(make_readout(), path)
    torch.save({**content, "state": {"leverage.growth": torch.zeros(2)}}, path)
    with pytest.raises(InputError, match=r"out.e2ip: is damaged: its tensors do not fit"):
        ReadoutFile.read(path).put_on(make_readout(), path)
    path.write_text("text")
    with pytest.raises(InputError, match=r"out.e2ip: is no readout file"):
        ReadoutFile.read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": "b" * 64},
            "of the mace model aaaaaaaaaaaa, and my.model is the mace model bbbbbbbbbbbb, with",
        ),
        (
            {"dtype": "float32", "weights": "b" * 64},
            "are float64, and those of my.model are float32: give the",
        ),
        ({"species": ("O", "H")}, "whose types are H, O, and those of my.model are O, H: give"),
        ({"heads": ("one", "three")}, "whose heads are one, two, and those of my.model are one, three: give"),
    ],
)
def test_another_base_model_is_refused(path, changes, message):
    file = ReadoutFile.read(path)
    file.check_base(path, "my.model", BASE)
    with pytest.raises(InputError, match=message):
        file.check_base(path, "my.model", BASE._replace(**changes))


def test_a_model_of_the_other_framework_is_refused(path):
    file = ReadoutFile.read(path)
    file.check_host(path, "my.model", "mace")
    with pytest.raises(InputError, match=r"readout of a mace model, and my.ckpt is a model of nequip: give"):
        file.check_host(path, "my.ckpt", "nequip")


def test_the_hash_sees_every_bit_name_shape_and_type():
    state = {"a": torch.tensor([0.0, 1.0], dtype=torch.float32), "b": torch.tensor(3)}
    changed = [
        {**state, "a": torch.tensor([-0.0, 1.0], dtype=torch.float32)},
        {**state, "a": state["a"].reshape(2, 1)},
        {**state, "a": state["a"].double()},
        {"c": state["a"], "b": state["b"]},
        {"a": state["a"]},
    ]
    assert len({hash_of(other) for other in [state, *changed]}) == 6
    # However the numbers lie in memory.
    matrix = torch.arange(6.0).reshape(2, 3)
    assert hash_of({"a": matrix.t()}) == hash_of({"a": matrix.t().contiguous()})


def test_models_that_have_nothing_to_export_or_no_place_for_it(readout):
    assert fitted_readout(readout, "my.model", "to export") is readout
    with pytest.raises(InputError, match=r"my.model: has no readout to export; fit it: e2ip fit"):
        fitted_readout(None, "my.model", "to export")
    with pytest.raises(InputError, match=r"my.model: the leverage of its readout was never fitted, and"):
        fitted_readout(make_readout(), "my.model", "to export")
    refuse_readout(None, "my.model")
    with pytest.raises(InputError, match=r"my.model: has a readout already; take it off with e2ip strip"):
        refuse_readout(readout, "my.model")
