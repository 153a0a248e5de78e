"""A predictive family that nothing but its own file knows, through NequIP's and our commands."""

import json
import subprocess

import ase.io
import numpy as np
import pytest


def test_toy_family_from_training_to_comparison(tmp_path, train, train_files, toy_family_environment, run_tool, logged):
    env = {**toy_family_environment, "OMP_NUM_THREADS": "1"}
    columns = "trainer.callbacks.3.extra_fields=[isotropic_log_std,forces_cov]"
    options = ("readout=isotropic", "preset=null", columns, "max_epochs=1", "training_module.model.model.l_max=0")
    folder = train("nequip_e2ip", tmp_path / "run", train_files, *options, env=env)
    (figures,) = logged(folder).values()
    assert {"isotropic_nll", "isotropic_coverage95"} <= {name.split("/")[1] for name in figures}
    for frame in ase.io.read(folder / "test_dataset0.xyz", ":"):
        assert frame.info["uq_family"] == "isotropic"
        variance = np.exp(2.0 * frame.arrays["isotropic_log_std"])
        expected = variance[:, None, None] * np.eye(3)
        assert np.allclose(frame.arrays["forces_cov"].reshape(-1, 3, 3), expected, atol=1e-7)
    run_tool("e2ip", "compare", folder / "test_dataset0.xyz", env=env, cwd=tmp_path)
    (scores,) = json.loads((tmp_path / "e2ip_compare" / "compare.json").read_text())["models"]
    assert scores["uq_family"] == "isotropic" and np.isfinite(scores["overall"]["nll"])


def test_what_does_not_belong_to_the_readout_ends_before_training(tmp_path, failure, train_files):
    text = failure("nequip_e2ip", tmp_path / "run", train_files, "trainer.callbacks.3.extra_fields=[e2ip_nuu]")
    assert "names e2ip_nuu, which the model does not put out; readout 'e2ip' puts out: e2ip_log_sigma0" in text


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("default", "preset is no option of readout 'isotropic', whose own options are: none"),
        ("null", "extra_fields of the xyz writer names e2ip_log_sigma0, e2ip_nu, e2ip_kappa, which the model"),
    ],
)
def test_what_does_not_belong_to_the_family_ends_before_training(
    tmp_path, command, train_files, toy_family_environment, preset, message
):
    run = command("nequip_e2ip", tmp_path / "run", train_files, "readout=isotropic", f"preset={preset}")
    done = subprocess.run(run, env=toy_family_environment, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr.strip().splitlines()[-1], done.stderr[-3000:]
    assert not list((tmp_path / "run").glob("*.ckpt"))
