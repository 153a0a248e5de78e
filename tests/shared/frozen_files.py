"""Files of former releases (tests/fixtures): what holds of them in both hosts, as fixtures."""

import lzma
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"

#: Releases whose files are kept, of which the last one wrote what other tests open, too.
RELEASES = sorted(path.name for path in FIXTURES.iterdir() if path.name[0].isdigit())

#: Outputs that are compared.
COMPARED = ("energy", "energy_uncertainty", "energy_error_vector", "forces", "forces_cov", "e2ip_leverage")

#: Tolerance of numbers that files have with eight decimals, and of models in single precision.
ROUNDING = dict(rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="session")
def unpack(tmp_path_factory):
    """Function that unpacks a file of tests/fixtures by host, name and release; its path."""

    def write(host, name, release=RELEASES[-1]):
        path = tmp_path_factory.mktemp(host) / name
        path.write_bytes(lzma.decompress((FIXTURES / release / host / f"{name}.xz").read_bytes()))
        return path

    return write


@pytest.fixture(scope="session")
def unpack_all(tmp_path_factory):
    """Function that unpacks all files of a host and a release, and the frames of the release; their folder."""

    def write(host, release):
        folder = tmp_path_factory.mktemp(host)
        for packed in [*(FIXTURES / release).glob("*.xz"), *(FIXTURES / release / host).glob("*.xz")]:
            (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
        return folder

    return write


@pytest.fixture(scope="session")
def check_saved():
    """Function that compares a saved model behind ASE with what it predicted when it was saved, to all digits."""
    import ase.io
    import numpy as np

    def check(host, name, calculator, release=RELEASES[-1]):
        with lzma.open(FIXTURES / release / "valid.extxyz.xz", "rt") as frames:
            atoms = ase.io.read(frames, 0, format="extxyz")
        atoms.calc = calculator
        results = {"energy": atoms.get_potential_energy(), **calculator.results}
        with np.load(FIXTURES / release / host / f"{name}.npz") as expected:
            assert {*COMPARED} <= {*expected}
            for key in expected:
                np.testing.assert_allclose(results[key], expected[key], rtol=1e-7, atol=1e-10, err_msg=key)

    return check


@pytest.fixture(scope="session")
def check_predicted():
    """Function that compares what a model behind ASE predicts for the frames of a file with the columns there."""
    import ase.io
    import numpy as np

    def check(calculator, path, prefix=""):
        for frame in ase.io.read(path, ":"):
            atoms = frame.copy()
            atoms.calc = calculator
            results = {"energy": atoms.get_potential_energy(), **calculator.results}
            stored = {**frame.info, **frame.arrays, **({} if frame.calc is None else frame.calc.results)}
            for name in COMPARED:
                values = np.reshape(stored[prefix + name], np.shape(results[name]))
                np.testing.assert_allclose(results[name], values, **ROUNDING, err_msg=f"{path.name}: {name}")
            assert prefix or calculator.results["uq_model"] == stored["uq_model"]

    return check
