"""What NequIP's own test callback writes is what `e2ip compare` reads."""

import ase.io  # noqa: F401  (nequip's writer uses ase.io without importing it)
import numpy as np
import pytest
import torch
from nequip.train.callbacks import TestTimeXYZFileWriter as Writer

import nequip_ext
from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.report.compare import compare, load_models
from e2ip_plugins.report.predictions import read_predictions

FAMILY = families.get(families.DEFAULT)


def batch(dtype):
    """Two frames of three atoms, references and model outputs in NequIP's shapes."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    references = {
        "pos": random(6, 3),
        "atom_types": torch.tensor([0, 1, 2, 0, 0, 2]),
        "batch": torch.tensor([0, 0, 0, 1, 1, 1]),
        "num_atoms": torch.tensor([3, 3]),
        "total_energy": random(2, 1),
        "forces": random(6, 3),
    }
    outputs = {
        **references,
        "total_energy": references["total_energy"] + 0.3,
        "forces": references["forces"] + 0.1 * random(6, 3),
        "e2ip_log_sigma0": random(6, 6) - 5.0,
        "e2ip_nu": 5.0 + random(6, 1).square(),
        "e2ip_kappa": 0.1 + random(6, 1).square(),
    }
    return references, outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(tmp_path, dtype):
    references, outputs = batch(dtype)
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
