"""`mace_eval_configs`: uncertainty columns, MACE heads, stock files to the byte, errors."""

import os
import subprocess
import sys

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from forked_commands import run_command
from mace.calculators import MACECalculator
from mace.cli import eval_configs

from e2ip_plugins import families
from e2ip_plugins.readout.readout import model_name

OUTPUT_KEYS = families.get("e2ip").output_keys()


@pytest.fixture(scope="module")
def configs(tmp_path_factory, frames):
    path = tmp_path_factory.mktemp("configs") / "configs.xyz"
    ase.io.write(path, frames)
    return path


def command(*arguments, **environment):
    """The stock console script in a process of its own."""
    script = os.path.join(os.path.dirname(sys.executable), "mace_eval_configs")
    return run_command([script, *arguments], env={**os.environ, **environment})


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_columns_are_what_the_calculator_returns(predict, model_files, configs, frames, tmp_path, dtype):
    model = torch.load(model_files["e2ip"], weights_only=False).to(getattr(torch, dtype))
    torch.save(model, tmp_path / "e2ip.model")
    # In float32 a sum over other neighbours at the same time is another sum, of the host's own forces, too.
    of_dtype = {"default_dtype": dtype, "batch_size": 1 if dtype == "float32" else 2}
    written = predict(tmp_path / "e2ip.model", configs, tmp_path / "out.xyz", **of_dtype)
    assert len(written) == len(frames)
    calculator = MACECalculator(model_paths=str(tmp_path / "e2ip.model"), device="cpu", default_dtype=dtype)
    for atoms in written:
        calculator.calculate(atoms)
        for name in ("uq_family", "uq_model"):
            assert atoms.info[f"MACE_{name}"] == calculator.results[name]
        for key in OUTPUT_KEYS:
            column = atoms.arrays[f"MACE_{key.name}"]
            width = (int(np.prod(key.shape)),) if key.shape else ()
            assert column.shape == (len(atoms), *width)
            # extxyz keeps eight decimals, of positions, too.
            np.testing.assert_allclose(column.reshape(len(atoms), *key.shape), calculator.results[key.name], atol=1e-6)


def test_batches_and_other_outputs_do_not_matter(predict, model_files, configs, tmp_path):
    whole = predict(model_files["e2ip"], configs, tmp_path / "a.xyz", info_prefix="mine_")
    single = predict(
        model_files["e2ip"],
        configs,
        tmp_path / "b.xyz",
        info_prefix="mine_",
        batch_size=1,
        compute_stress=True,
    )
    for first, second in zip(whole, single, strict=True):
        assert first.info["mine_uq_family"] == second.info["mine_uq_family"] == "niw"
        assert "mine_stress" in second.info
        for key in OUTPUT_KEYS:
            column = first.arrays[f"mine_{key.name}"]
            np.testing.assert_allclose(second.arrays[f"mine_{key.name}"], column, rtol=1e-9, atol=2e-8)


def test_the_head_option_selects_the_readout(predict, model_files, configs, tmp_path, make_batch, capsys):
    model = torch.load(model_files["multihead"], weights_only=False)
    log_sigma0 = {}
    for head in ("one", "two"):
        written = predict(model_files["multihead"], configs, tmp_path / f"{head}.xyz", head=head)
        expected = model(make_batch(written, heads=["one", "two"], head=head))["e2ip_log_sigma0"].detach().numpy()
        log_sigma0[head] = np.concatenate([atoms.arrays["MACE_e2ip_log_sigma0"] for atoms in written])
        np.testing.assert_allclose(log_sigma0[head], expected, atol=1e-6)
        names = {atoms.info["MACE_uq_model"] for atoms in written}
        assert names == {f"{model_name(model.e2ip_readout)}-{head}"}
    assert "without --head" not in capsys.readouterr().err
    (other,) = {atoms.info["MACE_uq_model"] for atoms in predict(model_files["multihead"], configs, tmp_path / "n.xyz")}
    assert {other} == names, "the last one, as MACE takes without --head"
    assert "the model has the heads one, two; without --head MACE takes two" in capsys.readouterr().err
    assert np.abs(log_sigma0["one"] - log_sigma0["two"]).max() > 0.1


def test_a_head_that_the_release_does_not_heed_is_not_named(
    predict, model_files, configs, tmp_path, capsys, monkeypatch
):
    """As in 0.3.13 and 0.3.14."""
    monkeypatch.setattr("mace_ext.patches.eval_configs.heads_are_chosen", lambda run: False)
    names = {atoms.info["MACE_uq_model"] for atoms in predict(model_files["multihead"], configs, tmp_path / "one.xyz")}
    given = predict(model_files["multihead"], configs, tmp_path / "given.xyz", head="one")
    assert {atoms.info["MACE_uq_model"] for atoms in given} == names
    assert "--head one has no effect in this release of MACE" in capsys.readouterr().err


def test_a_run_leaves_nothing_behind_for_the_next(predict, model_files, configs, tmp_path):
    predict(model_files["e2ip"], configs, tmp_path / "e2ip.xyz")
    # Fails after the first batch: this class of model has no such output.
    with pytest.raises(KeyError):
        predict(model_files["e2ip"], configs, tmp_path / "fails.xyz", return_contributions=True)
    for atoms in predict(model_files["baseline"], configs, tmp_path / "baseline.xyz"):
        assert set(atoms.info) == {"MACE_energy"}
        assert set(atoms.arrays) == {"numbers", "positions", "MACE_forces"}
    assert eval_configs.ase is ase


def test_a_batch_without_some_of_the_keys_is_an_error(predict, model_files, configs, tmp_path, monkeypatch):
    """Columns that only some frames have would be read as another model's."""
    from e2ip_plugins.errors import InputError
    from mace_ext.model.model import ScaleShiftMACE

    stock, calls = ScaleShiftMACE._outputs, []

    def outputs(*args):
        calls.append(args)
        found = stock(*args)
        return found if len(calls) < 2 else {key: value for key, value in found.items() if key != "forces_cov"}

    monkeypatch.setattr(ScaleShiftMACE, "_outputs", outputs)
    with pytest.raises(InputError, match="missing: forces_cov"):
        predict(model_files["e2ip"], configs, tmp_path / "out.xyz", batch_size=1)
    assert not (tmp_path / "out.xyz").exists()


def test_calibrated_columns(predict, model_files, configs, write_calibration, tmp_path):
    raw = predict(model_files["e2ip"], configs, tmp_path / "raw.xyz")
    arguments = ("--model", model_files["e2ip"], "--configs", configs, "--batch_size", 2)
    calibration = write_calibration(factors=dict.fromkeys("HCO", 4.0))
    done = command(*arguments, "--output", tmp_path / "out.xyz", "--e2ip_calibration", calibration)
    assert done.returncode == 0, done.stderr
    written = ase.io.read(tmp_path / "out.xyz", ":")
    for before, after in zip(raw, written, strict=True):
        assert after.info["MACE_uq_calibration"] == "calibration.json" and "MACE_uq_calibration" not in before.info
        assert set(after.arrays) == set(before.arrays)
        for name, power in (("MACE_forces_cov", 2), ("MACE_forces_epistemic_std", 1), ("MACE_e2ip_nu", 0)):
            np.testing.assert_allclose(after.arrays[name], 2.0**power * before.arrays[name], rtol=1e-6, atol=5e-8)
        np.testing.assert_allclose(after.arrays["MACE_forces"], before.arrays["MACE_forces"], atol=2e-8)
    # The next run has none.
    assert "MACE_uq_calibration" not in predict(model_files["e2ip"], configs, tmp_path / "raw.xyz")[0].info


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Function that runs the command in this process; returns the message with which it ends."""

    def run(**options):
        arguments = [f"--{key}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", ["mace_eval_configs", *arguments])
        with pytest.raises(SystemExit) as ended:
            eval_configs.main()
        assert ended.value.code == 2 and not os.path.exists(options["output"])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("mace_eval_configs: error: ")
        return error.removeprefix("mace_eval_configs: error: ")

    return run


@pytest.mark.parametrize(
    ("model", "wrong", "message"),
    [
        ("e2ip", {"factors": {"H": 4.0}}, "was fitted to H and knows nothing of C, O"),
        ("e2ip", {"uq_family": "gaussian"}, "is for predictions of family 'gaussian', but the model has family 'niw'"),
        (
            "e2ip",
            {"uq_model": "readout-1"},
            "fitted to predictions of another model (readout-1) than the model has",
        ),
        ("baseline", {}, "the model: has no predicted distribution"),
    ],
)
def test_calibrations_of_something_else_are_refused(
    model_files, configs, write_calibration, tmp_path, refusal, model, wrong, message
):
    files = {"model": model_files[model], "configs": configs, "output": tmp_path / "out.xyz"}
    error = refusal(**files, e2ip_calibration=write_calibration(**wrong))
    assert error.startswith("--e2ip_calibration: ") and message in error


def test_the_option_is_in_the_help():
    assert "--e2ip_calibration" in command("--help").stdout
    assert "--e2ip_calibration" not in command("--help", E2IP_DISABLE="1").stdout


def test_files_of_stock_models_are_stock_to_the_byte(model_files, configs, tmp_path):
    paths = [tmp_path / name for name in ("plugin.xyz", "stock.xyz")]
    arguments = ("--model", model_files["baseline"], "--configs", configs, "--compute_stress", "--output")
    for path, change in zip(paths, ({}, {"E2IP_DISABLE": "1"}), strict=True):
        assert command(*arguments, path, **change).returncode == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_running_the_module_equals_the_script(model_files, configs, tmp_path):
    arguments = ["--model", str(model_files["e2ip"]), "--configs", str(configs), "--output"]
    assert command(*arguments, tmp_path / "script.xyz").returncode == 0
    subprocess.run(
        [sys.executable, "-m", "mace.cli.eval_configs", *arguments, str(tmp_path / "module.xyz")], check=True
    )
    assert "MACE_forces_cov" in (tmp_path / "module.xyz").read_text()
    assert (tmp_path / "script.xyz").read_bytes() == (tmp_path / "module.xyz").read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "missing.model"}, "missing.model"),
        ({"configs": "missing.xyz"}, "missing.xyz"),
        ({"output": "missing/out.xyz"}, "missing/out.xyz"),
        ({"model": "data.xyz"}, "not a model file"),
        ({"head": "three"}, "one, two"),
        ({"configs": "data.xyz"}, "data.xyz, frame 0: has Si, which the model does not know; it knows H, C, O"),
        ({"configs": "empty.xyz", "head": "one"}, "--configs empty.xyz, frame 1: has no atoms"),
        ({"configs": "broken.xyz"}, "--configs broken.xyz, frame 1: the position of atom 0 is not finite"),
    ],
)
def test_bad_input_ends_with_one_message(
    model_files, configs, frames, tmp_path, monkeypatch, refusal, changed, message
):
    monkeypatch.chdir(tmp_path)
    ase.io.write("data.xyz", bulk("Si"))
    ase.io.write("empty.xyz", [frames[1], Atoms()], format="extxyz")
    broken = frames[1].copy()
    broken.positions[0] = np.nan
    ase.io.write("broken.xyz", [frames[1], broken])
    files = {"model": model_files["multihead"], "configs": configs, "output": "out.xyz"}
    assert message in refusal(**{**files, **changed})
