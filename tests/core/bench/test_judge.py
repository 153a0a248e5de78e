"""Judging what `e2ip bench` has predicted."""

import ase.io
import numpy as np
from ase import Atoms

from e2ip_plugins.bench import data, judge


def test_rotations_of_a_test_set_that_has_a_frame_twice(tmp_path):
    """Its copies are turned each in its own way, and all of them count."""
    rng = np.random.default_rng(0)
    frames = [Atoms("H2O", rng.normal(size=(3, 3)) * 2) for _ in range(4)]
    frames[1] = frames[0].copy()
    for atoms in frames:
        atoms.arrays["REF_forces"] = np.zeros((3, 3))
    ase.io.write(tmp_path / "source.xyz", frames)
    data._rotate(tmp_path / "source.xyz", tmp_path / "turned.xyz")
    for source, name in (("source", "test"), ("turned", "rotated")):
        predicted = ase.io.read(tmp_path / f"{source}.xyz", ":")
        for atoms in predicted:
            # An isotropic covariance, and forces that turn with the structure.
            atoms.arrays["forces"] = 0.1 * atoms.positions
            atoms.arrays["gaussian_log_cov"] = np.tile([-4.0, -4.0, -4.0, 0.0, 0.0, 0.0], (3, 1))
            atoms.info["uq_family"] = "gaussian"
        ase.io.write(tmp_path / f"{name}.xyz", predicted)
    files = {name: tmp_path / f"{name}.xyz" for name in ("test", "rotated")}
    found = judge.rotation(judge.Case(tmp_path, files))
    assert found["covariance_largest"] < 1e-6 and found["forces"] < 1e-6 and found["nll"] < 1e-5
