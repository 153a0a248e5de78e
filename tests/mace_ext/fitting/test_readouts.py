"""`e2ip export-readout`, `e2ip attach` and `e2ip update` for MACE models: the last bit, heads, bad input."""

import os
import subprocess
import sys

import ase.io
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from e2ip_plugins import cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.readout_file import ReadoutFile
from e2ip_plugins.predictions.labelled import Label
from mace_ext.export.strip import strip_file
from mace_ext.fitting.file import fit_file, update_file
from mace_ext.fitting.readouts import attach, readout_of

LEVERAGE = (("evidence", "leverage"),)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, training_frames, validation_frames):
    """Function that saves a model, fits it, strips it; paths of base and fitted model, in a folder of their own."""

    def run(model, **settings):
        folder = tmp_path_factory.mktemp("readouts")
        torch.save(model, folder / "first.model")
        fit_file(folder / "first.model", training_frames, validation_frames, folder / "fitted.model", **settings)
        strip_file(folder / "fitted.model", folder / "base.model")
        return folder / "base.model", folder / "fitted.model"

    return run


@pytest.fixture(scope="session")
def stock(saved, make_model):
    """Base and fitted model of what was stock MACE."""
    return saved(make_model(readout=None))


def passed_on(fitted, base):
    """Export the readout of one model and attach it to the other; path of the result."""
    path, output = fitted.with_name("out.e2ip"), fitted.with_name("attached.model")
    readout_of(fitted).write(path)
    attach(base, ReadoutFile.read(path), path, output)
    return output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("readout", [None, "e2ip"])
def test_an_attached_readout_says_the_same_to_the_last_bit(make_model, make_batch, frames, saved, dtype, readout):
    """Of a stock model, and of one whose network was trained with its readout."""
    base, fitted = saved(make_model(readout=readout, dtype=dtype, options=() if readout is None else LEVERAGE))
    if readout is None:
        base = fitted.with_name("first.model")  # the public model itself
    torch.set_default_dtype(torch.float64)
    attached = passed_on(fitted, base)
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(dtype)
    models = [torch.load(path, weights_only=False) for path in (base, fitted, attached)]
    batch = make_batch(frames)
    for _ in range(3):  # the first evaluations in a process may round otherwise than all later ones
        stock, expected, found = (model(dict(batch)) for model in models)
    for name in ("energy", "forces"):
        assert torch.equal(found[name], stock[name])
    assert found.keys() == expected.keys() and "forces_cov" in found
    for name, values in expected.items():
        assert values is None or torch.equal(found[name], values), name
    state, other = (model.state_dict() for model in models[1:])
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_every_head_comes_along(make_model, make_batch, frames, saved):
    heads = ["one", "two"]
    base, fitted = saved(make_model(heads=("one", "two"), options=LEVERAGE), head="two")
    attached = passed_on(fitted, base)
    notes = readout_of(fitted).notes()
    assert len(notes) == 1 and notes[0].startswith("no training atoms of H, C, O in head one: their leverage is 1e+06")
    models = [torch.load(path, weights_only=False) for path in (fitted, attached)]
    for head in heads:
        for _ in range(3):
            expected, found = (model(make_batch(frames, heads=heads, head=head)) for model in models)
        assert all(torch.equal(found[name], expected[name]) for name in ("forces_cov", "e2ip_leverage"))


FRESH = """
import sys
from pathlib import Path
import ase.io, numpy as np
from mace.calculators import MACECalculator
from e2ip_plugins.fitting.readout_file import ReadoutFile
from mace_ext.fitting.readouts import attach

base, file, frames, output = map(Path, sys.argv[1:])
attach(base, ReadoutFile.read(file), file, base.with_name("fresh.model"))
results = {}
for name in ("fresh", "fitted", "base"):
    calculator = MACECalculator(base.with_name(f"{name}.model"), default_dtype="float64")
    for _ in range(3):
        for i, atoms in enumerate(ase.io.read(frames, ":")):
            calculator.calculate(atoms)
            results.update({f"{name} {i} {key}": value for key, value in calculator.results.items()})
np.savez(output, **results)
"""


def test_in_a_fresh_process(stock, frames, tmp_path):
    base, fitted = stock
    readout_of(fitted).write(tmp_path / "out.e2ip")
    ase.io.write(tmp_path / "in.xyz", frames[:1])
    command = [sys.executable, "-c", FRESH, base, tmp_path / "out.e2ip", tmp_path / "in.xyz", tmp_path / "found.npz"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "found.npz", allow_pickle=False) as found:
        names = [name.partition(" ")[2] for name in found if name.startswith("fresh")]
        assert {"0 forces_cov", "0 e2ip_leverage", "0 uq_model"} <= set(names)
        for name in names:
            assert np.array_equal(found[f"fresh {name}"], found[f"fitted {name}"]), name
        assert np.array_equal(found["fresh 0 forces"], found["base 0 forces"])


def test_as_commands(stock, tmp_path, monkeypatch):
    base, fitted = stock
    functions = {"export_readout": readout_of, "attach": attach}
    monkeypatch.setattr(cli.checks, "entry_point", lambda group, host, why: functions[group])

    def run(*arguments):
        return CliRunner().invoke(cli.app, list(map(str, arguments)))

    out = tmp_path / "out.e2ip"
    result = run("export-readout", fitted, out)
    assert result.exit_code == 0, result.output
    assert f"Written: {out}, 0.0" in result.output and "of the mace model" in result.output
    assert out.stat().st_size < fitted.stat().st_size
    result = run("attach", base, out)
    assert result.exit_code == 0 and "base-e2ip.model, with readout-" in result.output.replace("\n", "")
    for arguments, message in (
        (("export-readout", fitted, out), "out.e2ip: is there already; choose another name, or --overwrite"),
        (("export-readout", fitted, tmp_path / "out.zip"), "the name of a readout file ends with .e2ip"),
        (("attach", base, tmp_path / "no.e2ip", "--overwrite"), "no.e2ip: no such file"),
        (("attach", base, base, "--overwrite"), "base.model: is no readout file"),
        (("attach", base, out, "--output", tmp_path / "b.zip"), "the name of such a model ends with .model"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_models_that_it_does_not_belong_to(stock, make_model, tmp_path, saved):
    base, fitted = stock
    file, output = readout_of(fitted), tmp_path / "out.model"

    def refused(model, message):
        torch.save(model, tmp_path / "other.model")
        with pytest.raises(InputError, match=message):
            attach(tmp_path / "other.model", file, "out.e2ip", output)

    refused(
        make_model(readout=None, seed=1), r"out.e2ip has the readout of the mace model \w{12}, and .*other.model is"
    )
    single = torch.load(base, weights_only=False).float()
    refused(single, r"whose weights are float64, and those of .*other.model are float32")
    refused(make_model(readout=None, heads=("Other",)), "whose heads are Default, and those of .* are Other")
    refused(make_model(), "has a readout already; take it off with e2ip strip")
    with pytest.raises(InputError, match="has no readout to export"):
        readout_of(base)
    with pytest.raises(InputError, match="the leverage of its readout was never fitted"):
        readout_of(tmp_path / "other.model")
    assert not output.exists()


@pytest.fixture(scope="session")
def new_frames(labelled):
    """Errors three times as large as those of the validation frames."""
    return [f._replace(forces=Label(3.0 * f.forces.values)) for f in labelled("CH3CH2OH", 20, 7)]


@pytest.mark.parametrize("readout", [None, "e2ip"])
def test_an_update_changes_uncertainties_alone(make_model, make_batch, frames, saved, new_frames, stock, readout):
    _, fitted = stock if readout is None else saved(make_model(options=LEVERAGE))
    output = fitted.with_name("updated.model")
    report = update_file(fitted, new_frames, output)
    assert report.constants[0].configurations == 20
    models = [torch.load(path, weights_only=False) for path in (fitted, output)]
    for _ in range(3):
        before, after = (model(make_batch(frames)) for model in models)
    for name in ("energy", "forces", "e2ip_leverage"):
        assert torch.equal(before[name], after[name])
    ratio = after["forces_uncertainty"][:9] / before["forces_uncertainty"][:9]
    assert 1.5 < ratio.median() < 4.0
    state, new_state = (model.state_dict() for model in models)
    changed = {name for name, values in state.items() if not torch.equal(values, new_state[name])}
    assert changed == {f"e2ip_readout.leverage.{name}" for name in ("growth", "log_factor")}


def test_an_update_of_one_head_leaves_the_others(make_model, saved, new_frames):
    _, fitted = saved(make_model(heads=("one", "two"), options=LEVERAGE), head="two")
    output = fitted.with_name("updated.model")
    with pytest.raises(InputError, match="has 2 heads; give --head"):
        update_file(fitted, new_frames, output)
    update_file(fitted, new_frames, output, head="two")
    one, two = (torch.load(path, weights_only=False).e2ip_readout.leverage.growth for path in (fitted, output))
    assert one[0] == two[0] and one[1] != two[1]


def test_what_cannot_be_updated(stock, make_model, new_frames, tmp_path):
    base, fitted = stock
    output = tmp_path / "out.model"
    with pytest.raises(InputError, match=r"base.model: has no readout to update; fit it"):
        update_file(base, new_frames, output)
    torch.save(make_model(), tmp_path / "unfitted.model")
    with pytest.raises(InputError, match=r"unfitted.model: the leverage of its readout was never fitted, and there is"):
        update_file(tmp_path / "unfitted.model", new_frames, output)
    with pytest.raises(InputError, match="--frames: 9 frames with reference forces; an update needs 10"):
        update_file(fitted, new_frames[:9], output)
    strange = [frame._replace(atoms=frame.atoms.copy(), where="new.xyz, frame 3") for frame in new_frames]
    strange[3].atoms.symbols[0] = "Si"
    with pytest.raises(InputError, match=r"new.xyz, frame 3: has Si, which the model does not know"):
        update_file(fitted, strange, output)
    assert not output.exists()
