"""Calibrations in NequIP: ASE calculator and xyz writer."""

import functools

import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import read_predictions
from nequip_ext import E2IPXYZFileWriter
from nequip_ext.model.readout import find_name
from nequip_ext.training.writers import mend_writers


@pytest.fixture
def calculator(make_model, gnn_config, as_calculator):
    return functools.partial(as_calculator, make_model(gnn_config())[1])


def test_calibrated_results_and_gradients(calculator, frames, check_calibrated):
    check_calibrated(calculator, frames)


def test_calibrations_that_do_not_fit_are_refused(calculator, frames, check_refused_calibrations):
    check_refused_calibrations(calculator, frames[0])


# Writer


FIELDS = ["e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa", "forces_epistemic_std"]


@pytest.fixture
def writer(forget_fields_of_writers):
    def make(path, calibration, **settings):
        forget_fields_of_writers()
        settings = {"extra_fields": FIELDS, "chemical_symbols": ["H", "C", "O"], **settings}
        fields = ["total_energy", "forces"]
        return E2IPXYZFileWriter(
            out_file=str(path), output_fields_from_original_dataset=fields, calibration=calibration, **settings
        )

    return make


def test_calibrated_file(writer, make_batch, tmp_path, write_calibration):
    mend_writers()
    references, outputs = make_batch(torch.float64)
    before = {name: value.clone() for name, value in outputs.items()}
    made = writer(tmp_path / "out", write_calibration())
    for _ in range(2):
        made.on_test_batch_end(None, torch.nn.Identity(), {"test_0_output": outputs}, references, 0)
    assert all(torch.equal(outputs[name], value) for name, value in before.items()), "others see the model's own"
    frames = ase.io.read(tmp_path / "out_dataset0.xyz", ":")
    assert len(frames) == 4
    assert all(atoms.info["uq_calibration"] == "calibration.json" for atoms in frames)
    p = read_predictions(tmp_path / "out_dataset0.xyz")
    assert p.family.uq_family == "niw" and p.calibration == "calibration.json"
    factor = np.where(p.species == "H", 2.0, 0.5)
    added = p.parameters["e2ip_log_sigma0"][:6] - before["e2ip_log_sigma0"].numpy()
    np.testing.assert_allclose(added[:, :3], np.log(factor[:6, None]).repeat(3, 1), atol=1e-7)
    np.testing.assert_allclose(added[:, 3:], 0.0, atol=1e-7)
    views = p.family.derive({name: torch.from_numpy(values) for name, values in p.parameters.items()})
    std = np.concatenate([atoms.arrays["forces_epistemic_std"] for atoms in frames])
    np.testing.assert_allclose(std, views["forces_epistemic_std"], rtol=1e-5)


def test_writer_refuses_what_it_cannot_calibrate(writer, make_batch, tmp_path, write_calibration):
    with pytest.raises(InputError, match="needs chemical_symbols"):
        writer(tmp_path / "out", write_calibration(), chemical_symbols=None)
    with pytest.raises(InputError, match="what extra_fields name: has no predicted distribution"):
        writer(tmp_path / "out", write_calibration(), extra_fields=["forces_epistemic_std"])
    with pytest.raises(InputError, match="is for predictions of family 'gaussian'"):
        writer(tmp_path / "out", write_calibration(uq_family="gaussian"))
    references, outputs = make_batch(torch.float64)
    made = writer(tmp_path / "out", write_calibration(factors={"H": 2.0}))
    with pytest.raises(InputError, match="knows nothing of C, O"):
        made.on_test_batch_end(None, torch.nn.Identity(), {"test_0_output": outputs}, references, 0)
    assert not (tmp_path / "out_dataset0.xyz").exists()


def test_writer_refuses_the_calibration_of_another_model(writer, tmp_path, write_calibration, make_model, gnn_config):
    """Before the first frame, and before a training that would make another model."""
    _, model = make_model(gnn_config())
    name = find_name(model)
    writer(tmp_path / "out", write_calibration(uq_model=name)).on_test_start(None, model)
    other = writer(tmp_path / "out", write_calibration(uq_model="readout-1"))
    with pytest.raises(InputError, match=rf"another model \(readout-1\) than the one that is tested has \({name}\)"):
        other.on_test_start(None, model)
    with pytest.raises(InputError, match="not of the one that this training makes"):
        other.on_fit_start(None, model)
    # Of an earlier version.
    unknown = writer(tmp_path / "out", write_calibration())
    unknown.on_fit_start(None, model)
    unknown.on_test_start(None, model)
