"""i-PI's MACE driver: a calculator that calls the models itself, and an ASE calculator in its releases before 3.3."""

import json
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from e3nn.util import jit
from mace.calculators import MACECalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, PLATEAU_KEY

INTERNAL = {COEFFICIENTS_KEY, FORCE_UNIT_KEY, PLATEAU_KEY}
SETTINGS_FILE = Path(__file__).parents[3] / "configs" / "mace_ipi.json"
SETTINGS = json.loads(SETTINGS_FILE.read_text())


class Batched(MACECalculator):
    """What i-PI 3.3's class asks of models: names and shapes of every output that is not ignored."""

    def __init__(self, instructions=None, ase_like_properties=None, **kwargs):
        self.instructions = {} if instructions is None else instructions
        self.ase_like_properties = {"energy": (), "forces": ("natoms", 3), **(ase_like_properties or {})}
        super().__init__(**kwargs)

    def outputs(self, atoms):
        ignored = {"node_feats", "node_energy", "interaction_energy", *self.instructions.get("ignore", ())}
        found = [model(self._atoms_to_batch(atoms).to_dict(), training=False) for model in self.models]
        return [
            {
                name: value.detach().numpy()
                for name, value in output.items()
                if value is not None and name not in ignored
            }
            for output in found
        ]


def batched(*models, **settings):
    return Batched(models=list(models), device="cpu", default_dtype="float64", **settings)


def test_the_documentation_shows_the_shipped_file():
    page = (SETTINGS_FILE.parents[1] / "docs" / "howto" / "other-tools.md").read_text()
    assert json.loads(page.partition("```json")[2].partition("```")[0]) == SETTINGS


@pytest.mark.parametrize("readout", ["e2ip", "mve", "shallow"])
def test_outputs_that_nobody_named_are_ignored(make_model, frames, readout):
    model = make_model(readout=readout)
    stock = batched(make_model(readout=None)).outputs(frames[0])[0]
    found = batched(model).outputs(frames[0])[0]
    assert set(found) == set(stock) and np.allclose(found["forces"], stock["forces"], atol=1e-12)
    # Two calculators of one set of instructions, which i-PI's users share.
    instructions = {"ignore": ["displacement"]}
    for _ in range(2):
        assert "displacement" not in batched(model, instructions=instructions).outputs(frames[0])[0]
    named = batched(model, **SETTINGS).outputs(frames[0])[0]
    assert set(named) - set(stock) == set(SETTINGS["ase_like_properties"])
    calculator = MACECalculator(models=model, device="cpu", default_dtype="float64")
    np.testing.assert_allclose(named["forces_cov"], calculator.get_property("forces_cov", frames[0]), rtol=1e-12)


def test_what_the_loss_alone_reads_is_no_output_of_an_evaluation(make_model, make_batch, frames):
    from mace_ext.model.model import for_loss

    model, batch = make_model(), make_batch(frames)
    assert not INTERNAL & set(model(batch)) and not INTERNAL & set(jit.compile(model)(batch))
    assert set(model(batch, training=True)) >= INTERNAL
    with for_loss(model):
        assert set(model(batch)) >= INTERNAL
    assert "returns_loss_inputs" not in vars(model)


def test_what_would_be_wrong_is_refused(make_model, write_calibration):
    models = make_model(seed=1), make_model(seed=2)
    assert set(SETTINGS["ase_like_properties"]) <= set(batched(*models).instructions["ignore"])
    with pytest.raises(InputError, match=r"forces_cov, .*i-PI averages the outputs of the 2 models"):
        batched(*models, **SETTINGS)
    with pytest.raises(InputError, match=r"calibration\.json: i-PI .* applies no calibration"):
        batched(models[0], calibration=write_calibration())


def test_i_pi_itself(make_model, frames, tmp_path):
    """One structure and two, in whichever release is installed."""
    pytest.importorskip("ipi", reason="i-PI is not installed (pip install ipi)")
    from ipi.utils.units import unit_to_internal

    try:
        from ipi.pes._mace import MACE_driver
    except ImportError:
        from ipi.pes.mace import MACE_driver
    atoms = frames[2]
    ase.io.write(tmp_path / "start.xyz", atoms)
    cell = unit_to_internal("length", "angstrom", atoms.cell.array.T)
    positions = unit_to_internal("length", "angstrom", atoms.positions)
    found = {}
    for name, readout in (("stock", None), ("readout", "e2ip")):
        torch.save(make_model(readout=readout), tmp_path / f"{name}.model")
        driver = MACE_driver(str(tmp_path / "start.xyz"), str(tmp_path / f"{name}.model"))
        found[name] = driver(cell, positions)
    for ours, stock in zip(found["readout"][:3], found["stock"][:3], strict=True):
        np.testing.assert_array_equal(ours, stock)
    assert found["readout"][3] == found["stock"][3]
    if "ipi.pes._mace" not in sys.modules:
        return  # before 3.3 it passes on energy, forces and stress alone
    driver = MACE_driver(str(tmp_path / "start.xyz"), str(tmp_path / "readout.model"), mace_kwargs=str(SETTINGS_FILE))
    both = driver.compute([cell.copy(), cell.copy()], [positions.copy(), positions.copy()])
    for result in both:
        extras = json.loads(result[3])
        assert set(extras) == {*json.loads(found["stock"][3]), *SETTINGS["ase_like_properties"]}
        assert np.shape(extras["forces_cov"]) == (len(atoms), 3, 3)
