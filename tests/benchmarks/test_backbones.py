"""Training of the backbones' learning curves."""

import functools
import json
from argparse import Namespace

import numpy as np
import pytest
from ase import Atoms

pytest.importorskip("nequip")
pytest.importorskip("torch_geometric")


@pytest.fixture(scope="module")
def backbones(load_script):
    """benchmarks/backbones.py as a module."""
    return load_script("benchmarks/backbones.py")


@pytest.fixture
def short(backbones, monkeypatch, tmp_path):
    """Function that trains a small network for two epochs in a folder, or is killed after the first: its result."""
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(14):
        frame = Atoms("CHHO", rng.normal(scale=1.5, size=(4, 3)))
        frame.info["REF_energy"], frame.arrays["REF_forces"] = rng.normal(), rng.normal(size=(4, 3))
        frames.append(frame)
    network = {**backbones.NETWORKS["painn"], "num_features": 8, "num_layers": 1}
    monkeypatch.setattr(backbones, "NETWORKS", {"painn": network})
    monkeypatch.setattr(backbones, "Ours", functools.partial(backbones.Ours, compile_mode="eager"))
    monkeypatch.setattr(backbones, "read", lambda: dict(train=frames[:8], valid=frames[8:11], test=frames[11:]))
    monkeypatch.setattr(backbones, "BATCH", 4)
    monkeypatch.setattr(backbones, "TRAIN", 8)

    save = backbones.save_state

    def killed(state, path):
        save(state, path)
        raise KeyboardInterrupt

    def run(name, kill=False):
        monkeypatch.setattr(backbones, "save_state", killed if kill else save)
        backbones.train(Namespace(what="painn", seed=1, epochs=2, work=tmp_path / name))
        return json.loads((tmp_path / name / "painn_2_s1.json").read_text())

    return run


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(backbones, short):
    whole = short("whole")
    with pytest.raises(KeyboardInterrupt):
        short("parts", kill=True)
    parts = short("parts")
    for key in ("forces", "energy"):
        assert [point[key] for point in parts["curve"]] == [point[key] for point in whole["curve"]]
        assert parts["test"][key] == whole["test"][key]
    assert len(whole["curve"]) == 2 and whole["curve"][0]["forces"] != whole["curve"][1]["forces"]
    assert whole["weights"] == sum(w.numel() for w in backbones.Ours("painn", 1).model.parameters())
