"""The study of the leverage: the form of the package gives what a model was fitted to; the commands."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from e2ip_plugins.fitting.fit import fit_leverage
from e2ip_plugins.fitting.force_errors import ForceErrors
from e2ip_plugins.fitting.training_atoms import TrainingBatch
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

SIZE, ATOMS = 6, 10


@pytest.fixture(scope="module")
def study(load_script):
    """benchmarks/leverage.py as a module."""
    return load_script("benchmarks/leverage.py")


def make_atoms(frames, seed, width=1.0):
    """Two species; the first lives in two regions."""
    rng = np.random.default_rng(seed)
    count = frames * ATOMS
    species = rng.integers(2, size=count)
    features = (
        rng.normal(size=(count, SIZE)) * width + np.where(species, 1.0, 8.0 * rng.integers(2, size=count))[:, None]
    )
    senders, receivers = (x.ravel() for x in np.indices((ATOMS, ATOMS)))
    keep = senders != receivers
    pairs = np.stack([receivers[keep], senders[keep]])
    envelope = np.tile(rng.random(pairs.shape[1]), frames)
    pairs = np.concatenate([pairs + ATOMS * i for i in range(frames)], axis=1)
    residual = 0.05 * width * rng.normal(size=(count, 3))
    frame = np.repeat(np.arange(frames), ATOMS)
    return SimpleNamespace(
        features=features, species=species, frame=frame, pairs=pairs, envelope=envelope, residual=residual
    )


@pytest.fixture(scope="module")
def folder(study, tmp_path_factory):
    """Atoms as `atoms` writes them, of a readout that the package has fitted."""
    out = tmp_path_factory.mktemp("atoms")
    layout = Layout([(0, SIZE)], [], [(SIZE, 1)], num_species=2)
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), layout, seed=1).double()
    data = {
        "train": make_atoms(40, 0),
        "valid": make_atoms(20, 1),
        "test": make_atoms(20, 2),
        "ood": make_atoms(20, 3, 3),
    }

    def run(d):
        neighbours = Neighbours(
            torch.ones(len(d.envelope)), torch.from_numpy(d.envelope), *torch.from_numpy(d.pairs[::-1].copy())
        )
        equivariant = torch.from_numpy(np.concatenate([d.features, np.ones((len(d.features), 5))], axis=1))
        return readout(torch.from_numpy(d.features), equivariant, torch.from_numpy(d.species), neighbours)

    def labelled(d):
        run(d)
        # Reference forces are 20 times the errors: what a relative error adds is 0.
        yield ForceErrors(torch.from_numpy(d.residual), torch.from_numpy(d.frame), torch.from_numpy(19.0 * d.residual))

    # A network that errs less where it was trained.
    data["train"].residual *= 0.7
    training = (TrainingBatch(torch.from_numpy(data["train"].frame)) for _ in map(run, [data["train"]]))
    fit_leverage(readout, training, labelled(data["valid"]), training_errors=labelled(data["train"]))
    assert readout.leverage.regions().sum() > 2 and readout.leverage.surplus > 0.4
    for name, d in data.items():
        atoms = study.recorded(readout, lambda d=d: run(d))
        np.savez(out / f"{name}.npz", **{**vars(d), **atoms, "forces": 19.0 * d.residual})
    return out


def test_the_package_s_form_gives_what_the_model_was_fitted_to(study, folder):
    result = study.judge(folder, untrained=False, forms=["as shipped, here", "one region"])
    for test in ("test", "ood"):
        fitted, again = result["leverage"][test], result["alternatives"]["as shipped, here"][test]
        for name in study.FIGURES:
            assert again[name] == pytest.approx(fitted[name], rel=1e-6), name
        assert result["alternatives"]["one region"][test]["nll"] != pytest.approx(fitted["nll"], rel=1e-3)
    assert result["frame_auroc"]["mean leverage"] == 1.0


def test_commands_write_json(study, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["leverage.py", "judge", str(folder), "--untrained", "--out", str(tmp_path / "a.json")]
    )
    study.main()
    assert json.loads((tmp_path / "a.json").read_text())["leverage"]


def test_table_of_some_forms(study, folder, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "model.json")
    monkeypatch.setattr("sys.argv", ["leverage.py", "judge", str(folder), "--forms", "one region", "--out", out])
    study.main()
    assert list(json.loads(Path(out).read_text())["alternatives"]) == ["one region"]
    monkeypatch.setattr("sys.argv", ["leverage.py", "table", out, "--forms", "as trained", "one region"])
    study.main()
    (_, _, *rows), (_, _, *means) = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert [row.split(" | ")[:2] for row in rows] == [["| model", "as trained"], ["| model", "one region"]]
    scores = json.loads(Path(out).read_text())["alternatives"]["one region"]
    assert rows[1].split(" | ")[2] == f"{scores['test']['nll']:.3f}"
    # Of one model the means are its own.
    assert means[1].split(" | ")[:2] == ["| one region", f"{scores['test']['nll']:.3f}"]
    assert means[1].split(" | ")[5] == f"{scores['ood']['coverage95']:.3f}"


def test_errors_beside_distances_and_training_forces(study, folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["leverage.py", "errors", str(folder)])
    study.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert {row.split(" | ")[1] for row in rows} == {"ood", "test"}
    for row in rows:
        distance, error = map(float, row.strip("| ").split(" | ")[2:])
        assert distance > 0.0 and error > 0.0
