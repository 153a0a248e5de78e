"""Saved models: they come back whole, and say what to install where the plugin is missing."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from e2ip_plugins.errors import InputError


def test_opening_a_model_without_the_plugin_says_what_to_install(model_files, without_plugin):
    run = without_plugin(
        "import mace.calculators; mace.calculators.MACECalculator(model_paths=sys.argv[1], device='cpu')",
        model_files["e2ip"],
    )
    assert run.returncode != 0
    assert "install e2ip-plugins to open it (pip install" in run.stderr.strip().splitlines()[-1]


def test_saved_and_copied_models_are_whole(model_files, make_model, make_batch, frames):
    model = make_model()
    batch = make_batch(frames)
    model({**batch})  # TorchScript optimises after the first call, and rounds differently from then on.
    expected = model({**batch})
    for other in (torch.load(model_files["e2ip"], weights_only=False), copy.deepcopy(model), copy.copy(model)):
        assert type(other) is type(model) and other.__class__.__name__ == "ScaleShiftMACE"
        other({**batch})
        output = other({**batch})
        for key in ("energy", "forces", "forces_cov", "e2ip_log_sigma0"):
            assert torch.equal(output[key], expected[key])
    assert copy.deepcopy(model).e2ip_readout.trunks[0].out.weight is not model.e2ip_readout.trunks[0].out.weight


def test_opening_a_model_where_mace_is_not_patched_warns(model_files):
    code = "import mace.calculators.mace, sys, torch; torch.load(sys.argv[1], weights_only=False)"
    command = [sys.executable, "-c", code, str(model_files["e2ip"])]
    for disable, warned in (("1", True), ("0", False)):
        done = subprocess.run(command, env={**os.environ, "E2IP_DISABLE": disable}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("predicts uncertainties" in done.stderr) == warned


OUTDATED = "saved by an early version of e2ip-plugins, before its first release: commit [0-9a-f]{7} .* reads it"


class _OfVersion1:
    """What a ``.model`` file of version 1 begins with."""

    def __reduce__(self):
        from mace_ext.model.pickling import constructor

        return constructor("model", "empty_model"), (), {"e2ip_config": {"version": 1}}


def test_model_files_of_version_1_name_the_commit_that_reads_them(tmp_path):
    torch.save(_OfVersion1(), tmp_path / "old.model")
    with pytest.raises(InputError, match=f"this model was {OUTDATED}"):
        torch.load(tmp_path / "old.model", weights_only=False)


def test_torchscript_files_of_version_1_are_no_stock_models(make_model):
    """They are told by the name of their readout, wherever one is looked for."""
    from mace.calculators import MACECalculator

    model = make_model(readout=None)
    model.e2ip_head = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match=f"this model was {OUTDATED}"):
        MACECalculator(models=model, device="cpu", default_dtype="float64")


def test_model_files_of_a_later_version_are_refused_before_anything_else(make_model, tmp_path):
    model = make_model()
    model.e2ip_readout.settings = model.e2ip_readout.settings._replace(version=99)
    torch.save(model, tmp_path / "new.model")
    with pytest.raises(InputError, match=r"another version of e2ip-plugins \(readout version 99, .*: install"):
        torch.load(tmp_path / "new.model", weights_only=False)
