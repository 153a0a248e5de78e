"""What `mace_eval_configs` writes is what `e2ip compare` reads, baseline or evidential."""

import ase.io
import numpy as np
import pytest

from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import compare, load_models


@pytest.mark.parametrize("prefix", ["MACE_", "mine_"])
def test_round_trip(predict, tmp_path, model_files, data_files, prefix):
    paths = [tmp_path / f"{name}.xyz" for name in ("baseline", "e2ip")]
    for path in paths:
        predict(model_files[path.stem], data_files["valid"], path, batch_size=3, info_prefix=prefix)
    frames = ase.io.read(data_files["valid"], ":")
    p = read_predictions(paths[1])
    assert p.family.uq_family == "niw" and len(p.sizes) == len(frames)
    np.testing.assert_allclose(p.reference_forces, np.concatenate([a.arrays["REF_forces"] for a in frames]), atol=1e-8)
    np.testing.assert_allclose(p.reference_energy, [a.info["REF_energy"] for a in frames], atol=1e-8)
    assert np.isfinite(p.energy).all()
    baseline, e2ip = compare(load_models(paths))["models"]
    assert (baseline["uq_family"], e2ip["uq_family"]) == (None, "niw")
    assert baseline["overall"]["force_mae"] == e2ip["overall"]["force_mae"]
