"""What NequIP's own test callback writes is what `e2ip compare` reads."""

import ase.io  # noqa: F401  (nequip's writer uses ase.io without importing it)
import numpy as np
import pytest
import torch
from nequip.train.callbacks import TestTimeXYZFileWriter as Writer

import nequip_ext
from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import compare, load_models

FAMILY = families.get(families.DEFAULT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(make_batch, tmp_path, dtype):
    references, outputs = make_batch(dtype)
    paths = []
    for name, extra in (("baseline", []), ("e2ip", [k.name for k in FAMILY.parameter_keys])):
        writer = Writer(
            out_file=str(tmp_path / name),
            output_fields_from_original_dataset=["total_energy", "forces"],
            extra_fields=extra,
            chemical_symbols=["H", "C", "O"],
        )
        for _ in range(2):  # the callback appends batch after batch
            writer.on_test_batch_end(None, torch.nn.Identity(), {"test_0_output": outputs}, references, 0)
        paths.append(tmp_path / f"{name}_dataset0.xyz")
    p = read_predictions(paths[1])
    assert p.species.tolist() == ["H", "C", "O", "H", "H", "O"] * 2
    np.testing.assert_allclose(p.forces[:6], outputs["forces"], atol=1e-7)
    np.testing.assert_allclose(p.reference_forces[:6], references["forces"], atol=1e-7)
    np.testing.assert_allclose(p.energy - p.reference_energy, 0.3, atol=1e-6)
    for key in FAMILY.parameter_keys:
        expected = outputs[key.name].reshape(6, *key.shape)
        np.testing.assert_allclose(p.parameters[key.name][:6], expected, atol=1e-6)
    baseline, e2ip = compare(load_models(paths))["models"]
    assert (baseline["uq_family"], e2ip["uq_family"]) == (None, "niw")
    assert baseline["overall"]["force_mae"] == e2ip["overall"]["force_mae"]


def test_a_compiled_file_is_no_saved_model(tmp_path):
    with pytest.raises(InputError, match=r"my\.nequip\.pt2: is compiled; E2IPCalculator\.from_compiled_model opens it"):
        nequip_ext.E2IPCalculator.from_saved_model(tmp_path / "my.nequip.pt2")
