"""`e2ip export-readout`, `e2ip attach` and `e2ip update` for NequIP's checkpoints and packages."""

import os
import subprocess
import sys

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.fitting.readout_file import ReadoutFile
from e2ip_plugins.predictions.labelled import Label
from e2ip_plugins.predictions.labelled_files import read_frames
from nequip_ext import E2IPCalculator
from nequip_ext.compat import IS_0_16, NequIPCalculator
from nequip_ext.export.strip import strip_file
from nequip_ext.fitting.file import fit_file, update_file
from nequip_ext.fitting.readouts import attach, readout_of


@pytest.fixture(scope="module")
def files(leverage_run, tmp_path_factory, train_files):
    """Paths of a model that was trained with its readout, of its base model, and of that one fitted by `e2ip fit`."""
    folder = tmp_path_factory.mktemp("readouts")
    paths = {"trained": leverage_run / "best.ckpt", "base": folder / "base.ckpt", "constant": folder / "constant.ckpt"}
    strip_file(paths["trained"], paths["base"])
    fit_file(paths["base"], *(read_frames([train_files[name]]) for name in ("train", "val")), paths["constant"])
    return paths


def results(path, train_files, calculator=E2IPCalculator.from_saved_model):
    opened, found = calculator(path), []
    for atoms in ase.io.read(train_files["test"], ":"):
        opened.calculate(atoms)
        found.append(dict(opened.results))
    return found


def stock_results(path, train_files):
    def calculator(path):
        return NequIPCalculator._from_saved_model(path, device="cpu", chemical_species_to_atom_type_map=True)

    return results(path, train_files, calculator)


def assert_same(one, two, names=None):
    for a, b in zip(one, two, strict=True):
        for name in a if names is None else names:
            np.testing.assert_array_equal(a[name], b[name], name)


def passed_on(fitted, base, folder, output="attached.ckpt"):
    """Export the readout of one model and attach it to the other; path of the result."""
    readout_of(fitted).write(folder / "out.e2ip")
    attach(base, ReadoutFile.read(folder / "out.e2ip"), folder / "out.e2ip", folder / output)
    return folder / output


@pytest.mark.parametrize("name", ["trained", "constant"])
def test_an_attached_readout_says_the_same_to_the_last_bit(files, name, tmp_path, train_files):
    attached = passed_on(files[name], files["base"], tmp_path)
    found = results(attached, train_files)
    assert_same(results(files[name], train_files), found)
    assert_same(stock_results(files["base"], train_files), found, ("energy", "forces"))
    assert (tmp_path / "out.e2ip").stat().st_size < attached.stat().st_size
    # Once more from there, and back.
    assert readout_of(attached).base == readout_of(files[name]).base
    strip_file(attached, tmp_path / "again.ckpt")
    assert_same(results(passed_on(attached, tmp_path / "again.ckpt", tmp_path, "b.ckpt"), train_files), found)


@pytest.mark.skipif(IS_0_16, reason="NequIP 0.16 cannot give a stock package a readout")
def test_packages_and_checkpoints_are_the_same_base(files, tmp_path, train_files, leverage_package):
    """A readout of either goes on either; a stock package becomes a checkpoint that reads it."""
    packed = leverage_package
    public = tmp_path / "public.nequip.zip"
    strip_file(packed, public)
    expected = results(files["trained"], train_files)
    assert readout_of(packed).base == readout_of(files["trained"]).base
    for i, (fitted, base) in enumerate(((packed, files["base"]), (packed, public), (files["trained"], public))):
        attached = passed_on(fitted, base, tmp_path, f"{i}.ckpt")
        assert_same(results(attached, train_files), expected)
    with pytest.raises(InputError, match=r"give it a name that ends with \.ckpt"):
        passed_on(packed, public, tmp_path, "x.nequip.zip")
    with pytest.raises(InputError, match="has a readout already; take it off"):
        passed_on(packed, packed, tmp_path)
    new = frames_of(train_files)
    update_file(packed, new, tmp_path / "updated.nequip.zip")
    update_file(files["trained"], new, tmp_path / "updated.ckpt")
    one, two = (results(tmp_path / f"updated.{ending}", train_files) for ending in ("nequip.zip", "ckpt"))
    assert_same(one, expected, ("energy", "forces", "e2ip_leverage"))
    for a, b, before in zip(one, two, expected, strict=True):
        np.testing.assert_allclose(a["forces_cov"], b["forces_cov"], rtol=1e-4)
        assert not np.allclose(a["forces_cov"], before["forces_cov"], rtol=0.1)


FRESH = """
import sys
from pathlib import Path
import ase.io, numpy as np
from e2ip_plugins.fitting.readout_file import ReadoutFile
from nequip_ext import E2IPCalculator
from nequip_ext.fitting.readouts import attach

base, file, frames, output = map(Path, sys.argv[1:])
attach(base, ReadoutFile.read(file), file, output.with_name("fresh.ckpt"))
calculator, results = E2IPCalculator.from_saved_model(output.with_name("fresh.ckpt")), {}
for i, atoms in enumerate(ase.io.read(frames, ":")):
    calculator.calculate(atoms)
    results.update({f"{i} {key}": value for key, value in calculator.results.items()})
np.savez(output, **results)
"""


def test_in_a_fresh_process(files, tmp_path, train_files):
    readout_of(files["trained"]).write(tmp_path / "out.e2ip")
    arguments = (files["base"], tmp_path / "out.e2ip", train_files["test"], tmp_path / "found.npz")
    command = [sys.executable, "-c", FRESH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "found.npz") as found:
        for i, expected in enumerate(results(files["trained"], train_files)):
            for name, values in expected.items():
                np.testing.assert_array_equal(found[f"{i} {name}"], values, name)


def test_models_that_it_does_not_belong_to(files, tmp_path):
    other = torch.load(files["base"], weights_only=False)
    name = next(name for name in other["state_dict"] if name.endswith("edge_mlp.mlp.0.weight"))
    for key in other["state_dict"]:
        if key == name or key.startswith("ema.ema_weight"):
            other["state_dict"][key] = other["state_dict"][key] * 1.5
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(
        InputError, match=r"readout of the nequip model \w{12}, and .*other.ckpt is the nequip model \w{12},"
    ):
        passed_on(files["trained"], tmp_path / "other.ckpt", tmp_path)
    with pytest.raises(InputError, match="has a readout already; take it off"):
        passed_on(files["trained"], files["constant"], tmp_path)
    with pytest.raises(InputError, match="has no readout to export"):
        readout_of(files["base"])
    with pytest.raises(InputError, match="the leverage of its readout was never fitted"):
        readout_of(files["trained"].with_name("last.ckpt"))
    assert not (tmp_path / "attached.ckpt").exists()


def frames_of(train_files):
    """New frames whose errors are larger."""
    frames = [frame for name in ("train", "val") for frame in read_frames([train_files[name]])]
    return [f._replace(forces=Label(f.forces.values + np.random.default_rng(0).normal(size=(6, 3)))) for f in frames]


@pytest.mark.parametrize("name", ["trained", "constant"])
def test_an_update_changes_uncertainties_alone(files, name, tmp_path, train_files):
    report = update_file(files[name], frames_of(train_files), tmp_path / "updated.ckpt")
    assert report.constants[0].configurations == 16
    before, after = (results(path, train_files) for path in (files[name], tmp_path / "updated.ckpt"))
    assert_same(before, after, ("energy", "forces", "e2ip_leverage"))
    for one, two in zip(before, after, strict=True):
        assert (two["forces_uncertainty"] > 1.2 * one["forces_uncertainty"]).all()
    states = [torch.load(path, weights_only=False)["state_dict"] for path in (files[name], tmp_path / "updated.ckpt")]
    changed = [
        key for key, value in states[0].items() if torch.is_tensor(value) and not torch.equal(value, states[1][key])
    ]
    assert {key.rpartition("readout.leverage.")[2] for key in changed} <= {
        *("growth", "log_factor", "energies.lengths", "energies.floors")
    }


def test_what_cannot_be_updated(files, tmp_path, train_files):
    new, output = frames_of(train_files), tmp_path / "out.ckpt"
    with pytest.raises(InputError, match=r"base.ckpt: has no readout to update; fit it"):
        update_file(files["base"], new, output)
    with pytest.raises(InputError, match=r"last.ckpt: the leverage of its readout was never fitted"):
        update_file(files["trained"].with_name("last.ckpt"), new, output)
    with pytest.raises(InputError, match="--frames: 9 frames with reference forces; an update needs 10"):
        update_file(files["trained"], new[:9], output)
    with pytest.raises(InputError, match="no heads"):
        update_file(files["trained"], new, output, head="default")
    new[3].atoms.symbols[0] = "Si"
    with pytest.raises(InputError, match=r"frame 3: has Si, which .* it knows H, C, O"):
        update_file(files["trained"], new, output)
    assert not output.exists()
