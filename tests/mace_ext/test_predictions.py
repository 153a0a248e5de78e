"""What `mace_eval_configs` writes is what `e2ip compare` reads, baseline or evidential."""

from argparse import Namespace

import ase.io
import numpy as np
import pytest

from e2ip_plugins.report.compare import compare, load_models
from e2ip_plugins.report.predictions import read_predictions


@pytest.mark.parametrize("prefix", ["MACE_", "mine_"])
def test_round_trip(tmp_path, model_files, data_files, prefix):
    from mace.cli import eval_configs

    paths = []
    for name in ("baseline", "e2ip"):
        paths.append(tmp_path / f"{name}.xyz")
        eval_configs.run(
            Namespace(
                configs=data_files["valid"],
                model=model_files[name],
                output=str(paths[-1]),
                device="cpu",
                default_dtype="float64",
                batch_size=3,
                info_prefix=prefix,
                compute_stress=False,
                compute_bec=False,
                return_contributions=False,
                return_descriptors=False,
                return_node_energies=False,
                enable_cueq=False,
                head=None,
            )
        )
    frames = ase.io.read(data_files["valid"], ":")
    p = read_predictions(paths[1])
    assert p.family == "niw" and len(p.sizes) == len(frames)
    np.testing.assert_allclose(p.reference_forces, np.concatenate([a.arrays["REF_forces"] for a in frames]), atol=1e-8)
    np.testing.assert_allclose(p.reference_energy, [a.info["REF_energy"] for a in frames], atol=1e-8)
    assert np.isfinite(p.energy).all()
    baseline, e2ip = compare(load_models(paths))["models"]
    assert (baseline["uq_family"], e2ip["uq_family"]) == (None, "niw")
    assert baseline["overall"]["force_mae"] == e2ip["overall"]["force_mae"]
