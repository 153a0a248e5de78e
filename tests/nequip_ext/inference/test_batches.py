"""`e2ip evaluate` with NequIP models: what the calculator and NequIP's own test run give, in any batches."""

import warnings

import ase.io
import numpy as np
import pytest
from ase.build import molecule
from typer.testing import CliRunner

from e2ip_plugins import cli, families
from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.evaluate import evaluate
from e2ip_plugins.evaluation.options import EvaluateOptions
from nequip_ext import E2IPCalculator
from nequip_ext.inference.batches import of_model, open_model

KEYS = [key.name for key in families.get("e2ip").output_keys()]
#: Of numbers with eight decimals, and of sums in another order.
TOLERANCE = {"float64": dict(rtol=1e-10, atol=6e-9), "float32": dict(rtol=1e-6, atol=1e-6)}


@pytest.fixture(scope="module")
def saved(unpack):
    """Checkpoint and package of tests/fixtures, which know H, C, N, O, by name."""
    return {name: unpack("nequip", name) for name in ("best.ckpt", "model.nequip.zip")}


def written_by(model, source, output, **options):
    evaluate(model, source, output, EvaluateOptions(**options), {})
    return ase.io.read(output, ":")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_results_are_the_calculator_s(make_model, gnn_config, check_written, source, tmp_path, dtype):
    _, model = make_model(gnn_config(model_dtype=dtype))
    opened = of_model(model)
    assert opened.dtype == dtype and "never fitted" in opened.warning
    calculator = E2IPCalculator(model=opened.model, device="cpu", transforms=opened.transforms)
    written = written_by(opened, source, tmp_path / "out.xyz", stress=True)
    for frame in written:
        check_written(frame, calculator, KEYS, **TOLERANCE[dtype])
    assert ["stress" in frame.calc.results for frame in written] == [bool(frame.pbc.all()) for frame in written]
    one, many = (
        written_by(opened, source, tmp_path / f"{size}.xyz", batch_atoms=size, overwrite=True) for size in (1, 99)
    )
    for a, b in zip(one, many, strict=True):
        for name in KEYS:
            np.testing.assert_allclose(a.arrays[name], b.arrays[name], **TOLERANCE[dtype], err_msg=name)


@pytest.mark.parametrize("name", ["best.ckpt", "model.nequip.zip"])
def test_checkpoints_and_packages(saved, check_written, source, tmp_path, name):
    with warnings.catch_warnings():
        # Of the package's own code, which is older.
        warnings.simplefilter("ignore")
        opened = open_model(saved[name])
        calculator = E2IPCalculator.from_saved_model(saved[name])
    for frame in written_by(opened, source, tmp_path / "out.xyz"):
        check_written(frame, calculator, KEYS, **TOLERANCE["float64"])


def test_a_run_that_was_stopped_ends_the_same(make_model, gnn_config, check_continuation, source):
    check_continuation(lambda: of_model(make_model(gnn_config(model_dtype="float32"))[1]), source)


def test_what_the_frame_brings_along_does_not_matter(saved, source, tmp_path):
    """NequIP takes labels and whatever ASE has a name for into its batches, where all frames must have the same."""
    labelled = ase.io.read(source, ":")
    for i, atoms in enumerate(labelled[:-1]):
        atoms.info["REF_energy"] = 1.0
        atoms.set_initial_charges([0.5] * len(atoms))
        atoms.arrays["forces" if i else "dipole"] = np.full((len(atoms), 3), np.nan)
    ase.io.write(tmp_path / "labelled.xyz", labelled, format="extxyz")
    model = open_model(saved["best.ckpt"])
    first = written_by(model, source, tmp_path / "first.xyz")
    for one, two in zip(first, written_by(model, tmp_path / "labelled.xyz", tmp_path / "two.xyz"), strict=True):
        assert one.get_potential_energy() == two.get_potential_energy()
        assert np.array_equal(one.arrays["forces_cov"], two.arrays["forces_cov"])


def test_the_command_and_what_it_refuses(saved, make_model, source, tmp_path):
    def run(model, *options, frames=source):
        arguments = [model, frames, tmp_path / "out.xyz", *options]
        return CliRunner().invoke(cli.app, ["evaluate", *map(str, arguments)])

    for name in ("text.ckpt", "text.nequip.zip", "text.nequip.pt2"):
        (tmp_path / name).write_text("no model")
    ase.io.write(tmp_path / "sulphur.xyz", [molecule("H2O"), molecule("SH2")], format="extxyz")
    checkpoint = saved["best.ckpt"]
    for arguments, message in (
        ((tmp_path / "text.ckpt",), "text.ckpt: cannot be opened as a model of NequIP"),
        ((tmp_path / "text.nequip.zip",), "text.nequip.zip: cannot be opened as a model of NequIP"),
        ((tmp_path / "text.nequip.pt2",), "text.nequip.pt2: cannot be opened as a compiled model of NequIP"),
        ((checkpoint, "--head", "one"), "--head one: models of NequIP have no heads"),
        ((checkpoint, "--dtype", "float32"), "models of NequIP cannot be converted, and"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output
    result = run(checkpoint, frames=tmp_path / "sulphur.xyz")
    assert result.exit_code == 2 and "frame 1: has S, which the model does not know; it knows H, C" in result.stderr
    result = run(checkpoint, "--dtype", "float64")
    assert result.exit_code == 0 and "5 frames" in result.stdout, result.output
    stock, _ = make_model()
    with pytest.raises(InputError, match="has no readout, hence no uncertainties: e2ip fit gives"):
        written_by(of_model(stock), source, tmp_path / "stock.xyz")
