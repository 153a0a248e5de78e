"""`e2ip evaluate` with MACE models: what the calculator and `mace_eval_configs` give, in any batches, for any head."""

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins import cli, families
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.evaluation.evaluate import evaluate
from e2ip_plugins.evaluation.options import EvaluateOptions
from e2ip_plugins.predictions.labelled import Label, LabelledFrame
from mace_ext.fitting.passes import Graphs
from mace_ext.inference.batches import open_model
from mace_ext.inference.calculator import open_model as calculator_of
from mace_ext.model.files import open_file

KEYS = [key.name for key in families.get("e2ip").output_keys()]
#: Of numbers with eight decimals, and of sums in another order.
TOLERANCE = {"float64": dict(rtol=1e-10, atol=6e-9), "float32": dict(rtol=1e-6, atol=1e-6)}


@pytest.fixture
def run(model_files, source, tmp_path):
    """Function that evaluates the frames; returns those written."""

    def evaluated(name="e2ip", output="out.xyz", dtype=None, head=None, **options):
        model = open_model(model_files[name], dtype=dtype, head=head)
        evaluate(model, source, tmp_path / output, EvaluateOptions(**options), {})
        return ase.io.read(tmp_path / output, ":")

    return evaluated


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_results_are_the_calculator_s(run, check_written, model_files, dtype):
    calculator = MACECalculator(model_paths=str(model_files["e2ip"]), device="cpu", default_dtype=dtype)
    for written in run(dtype=dtype, stress=True):
        check_written(written, calculator, KEYS, **TOLERANCE[dtype])
        assert ("stress" in written.calc.results) == written.pbc.all()
    assert torch.get_default_dtype() == torch.float64


def test_batches_do_not_matter(run):
    for one, many in zip(run(batch_atoms=1), run(output="many.xyz"), strict=True):
        for name in KEYS:
            np.testing.assert_allclose(one.arrays[name], many.arrays[name], rtol=1e-9, atol=2e-8, err_msg=name)


def test_heads(run, model_files):
    found = {head: run("multihead", f"{head}.xyz", head=head) for head in ("one", "two")}
    for head, frames in found.items():
        calculator = MACECalculator(model_paths=str(model_files["multihead"]), device="cpu", head=head)
        calculator.calculate(frames[0])
        expected = calculator.results["e2ip_log_sigma0"]
        np.testing.assert_allclose(frames[0].arrays["e2ip_log_sigma0"], expected, atol=1e-8)
        assert frames[0].info["uq_model"] == calculator.results["uq_model"]
        assert frames[0].info["uq_model"].endswith(f"-{head}"), "what was calibrated for one is not for another"
    for head, message in ((None, "has 2 heads; give --head, one of: one, two"), ("three", "has no head 'three'")):
        with pytest.raises(InputError, match=message):
            run("multihead", head=head)


def test_a_run_that_was_stopped_ends_the_same(check_continuation, model_files, source):
    check_continuation(lambda: open_model(model_files["e2ip"], dtype="float32"), source)


def test_what_the_frame_brings_along_does_not_matter(run, model_files, source, tmp_path):
    """MACE reads weights, charges, heads and labels from frames."""
    labelled = ase.io.read(source, ":")
    for atoms in labelled:
        atoms.info.update(config_weight=0.0, head="two", charge=1.0, REF_energy=1.0, total_charge=2)
        atoms.arrays["REF_forces"] = np.full((len(atoms), 3), np.nan)
    ase.io.write(tmp_path / "labelled.xyz", labelled, format="extxyz")
    evaluate(open_model(model_files["e2ip"]), tmp_path / "labelled.xyz", tmp_path / "again.xyz", EvaluateOptions(), {})
    for first, second in zip(run(), ase.io.read(tmp_path / "again.xyz", ":"), strict=True):
        assert second.info["charge"] == 1.0 and second.get_potential_energy() == first.get_potential_energy()
        assert np.array_equal(second.arrays["forces_cov"], first.arrays["forces_cov"])


def test_the_command_and_what_it_refuses(model_files, source, tmp_path):
    def run(model, frames=source):
        return CliRunner().invoke(cli.app, ["evaluate", str(model), str(frames), str(tmp_path / "out.xyz")])

    (tmp_path / "text.model").write_text("no model")
    ase.io.write(tmp_path / "sulphur.xyz", [molecule("H2O"), molecule("SH2")], format="extxyz")
    for arguments, message in (
        ((model_files["baseline"],), "has no readout, hence no uncertainties: e2ip fit gives a trained model one"),
        ((tmp_path / "text.model",), "is not a model file of mace_run_train"),
        ((model_files["e2ip"], tmp_path / "sulphur.xyz"), "frame 1: has S, which the model does not know; it knows H"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output
    result = run(model_files["e2ip"])
    assert result.exit_code == 0 and "5 frames" in result.stdout, result.output


def test_two_atoms_on_each_other(model_files, tmp_path):
    source = tmp_path / "in.xyz"
    ase.io.write(source, [molecule("H2O"), Atoms("HH", np.zeros((2, 3)))], format="extxyz")
    with pytest.raises(InputError, match=r"frame 1: the model's prediction is not finite"):
        evaluate(open_model(model_files["e2ip"]), source, tmp_path / "out.xyz", EvaluateOptions(), {})
    # With stresses, MACE's forces on all frames of the batch are NaN.
    ase.io.write(source, [molecule("H2O"), Atoms("HH", np.zeros((2, 3))), molecule("CH4")], format="extxyz")
    options = EvaluateOptions(stress=True, skip_bad=True)
    state = evaluate(open_model(model_files["e2ip"]), source, tmp_path / "stress.xyz", options, {})
    assert [number for number, _ in state.skipped] == [1]
    assert [str(atoms.symbols) for atoms in ase.io.read(tmp_path / "stress.xyz", ":")] == ["OH2", "CH4"]


class Specs(dict):
    """As arguments of `make_model` must be."""

    __hash__ = object.__hash__


@pytest.fixture
def charged(make_model, tmp_path):
    """A model that was told charge and spin of every frame, under a name of its own and under MACE's, and frames."""
    charge = {"type": "categorical", "per": "graph", "emb_dim": 4, "num_classes": 5, "offset": 2, "key": "q"}
    spin = {"type": "continuous", "per": "graph", "in_dim": 1, "emb_dim": 4}
    torch.save(make_model(embedding_specs=Specs(total_charge=charge, total_spin=spin)), tmp_path / "charged.model")
    frames = []
    for q, total_spin in ((0, 1), (1, 2), (-1, 2)):
        frames.append(molecule("CH3OH"))
        frames[-1].rattle(0.1, seed=1)
        frames[-1].info.update(q=q, total_spin=total_spin)
        frames[-1].arrays["REF_forces"] = np.random.default_rng(q + 1).normal(size=(6, 3))
    return tmp_path / "charged.model", frames


def test_what_a_model_embeds_is_read_from_the_frames(charged, tmp_path, predict, capsys):
    path, frames = charged
    ase.io.write(tmp_path / "in.xyz", frames, format="extxyz")
    evaluate(open_model(path), tmp_path / "in.xyz", tmp_path / "out.xyz", EvaluateOptions(), {})
    stock = MACECalculator(
        model_paths=str(path), device="cpu", info_keys={"total_charge": "q", "total_spin": "total_spin"}
    )
    ours = calculator_of(path)
    for atoms, written in zip(frames, ase.io.read(tmp_path / "out.xyz", ":"), strict=True):
        stock.calculate(atoms)
        ours.calculate(atoms)
        np.testing.assert_array_equal(ours.results["forces_cov"], stock.results["forces_cov"])
        for name in ("forces", *KEYS):
            found = written.get_forces() if name == "forces" else written.arrays[name]
            expected = stock.results[name]
            np.testing.assert_allclose(found.reshape(np.shape(expected)), expected, **TOLERANCE["float64"])
    predict(path, tmp_path / "in.xyz", tmp_path / "theirs.xyz")
    assert "trained with q, total_spin of every frame, of which MACE's command reads" in capsys.readouterr().err
    # The same structure three times.
    assert np.ptp([atoms.get_potential_energy() for atoms in ase.io.read(tmp_path / "out.xyz", ":")]) > 1e-6


def test_what_has_no_default_must_be_there(make_model, tmp_path):
    temperature = {"type": "continuous", "per": "graph", "in_dim": 1, "emb_dim": 4}
    torch.save(make_model(embedding_specs=Specs(temperature=temperature)), tmp_path / "hot.model")
    frames = [molecule("H2O"), molecule("CH3OH")]
    frames[0].info["temperature"] = 300.0
    ase.io.write(tmp_path / "in.xyz", frames, format="extxyz")
    with pytest.raises(InputError, match=r"in\.xyz, frame 1: has no temperature, which the model was trained with"):
        evaluate(open_model(tmp_path / "hot.model"), tmp_path / "in.xyz", tmp_path / "out.xyz", EvaluateOptions(), {})
    graphs = Graphs([LabelledFrame(frames[1], "train.xyz, frame 7")], open_file(tmp_path / "hot.model"), "Default")
    with pytest.raises(InputError, match=r"train\.xyz, frame 7: has no temperature"):
        graphs[0]


def test_the_fit_sees_what_a_model_embeds(charged):
    path, frames = charged
    net = open_file(path)
    graphs = Graphs(
        [LabelledFrame(atoms, "here", Label(atoms.arrays["REF_forces"])) for atoms in frames], net, "Default"
    )
    assert [(float(g.total_charge), float(g.total_spin)) for g in graphs] == [(0, 1), (1, 2), (-1, 2)]
    del frames[0].info["q"]
    with pytest.warns(UncertaintyWarning, match="trained with q of every frame, which some frames lack"):
        assert float(graphs[0].total_charge) == 0.0
