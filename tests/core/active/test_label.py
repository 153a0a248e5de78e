"""Labels from any calculator: what is there is kept, what fails is listed, and each frame is on its own."""

import sys

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import CalculationFailed, Calculator
from ase.calculators.emt import EMT
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.predictions.trajectories import read_trajectory


class Fussy(Calculator):
    """Fails where the first atom is below zero; gives no numbers far away from it."""

    implemented_properties = ("energy", "forces")
    made = 0

    def __init__(self, strength=1.0):
        super().__init__()
        self.strength = strength
        Fussy.made += 1

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        x = atoms.positions[0, 0]
        if x < 0.0:
            raise CalculationFailed("SCF did not converge\nmore")
        energy = np.inf if x > 50.0 else self.strength * x
        self.results = {"energy": energy, "forces": np.full((len(atoms), 3), x)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Function that labels frames with `Fussy`, as this module can be imported from anywhere."""
    import sys
    import types

    module = types.ModuleType("fussy")
    module.Fussy = Fussy
    monkeypatch.setitem(sys.modules, "fussy", module)

    def label(frames, *options, calculator="fussy:Fussy", output="labels.extxyz"):
        ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
        paths = [str(tmp_path / name) for name in ("frames.extxyz", output)]
        result = CliRunner().invoke(app, ["label", *paths, "--calculator", calculator, *options])
        return result, tmp_path / output

    return label


def frames(*places):
    found = []
    for place in places:
        atoms = molecule("H2O")
        atoms.positions[0] = [place, 1.0, 2.0]
        found.append(atoms)
    return found


def test_labels_and_what_fails(run):
    given = frames(1.0, -1.0, 2.0, 99.0)
    given[0].info.update(select_rank=3, MACE_energy=5.0)
    given[0].arrays["forces_cov"] = np.ones((3, 9))
    result, output = run(given, "--argument", "strength=2.5")
    assert result.exit_code == 1 and "2 labelled, 0 there already, 2 failed" in result.stdout
    assert "frame 1: CalculationFailed: SCF did not converge\n" in result.stderr
    assert "frame 3: ValueError: energy or forces are not finite" in result.stderr
    found, _ = read_trajectory(output)
    assert [atoms.info["REF_energy"] for atoms in found] == [2.5, 5.0]
    assert np.array_equal(found[1].arrays["REF_forces"], np.full((3, 3), 2.0)) and found[1].calc is None
    assert found[0].info.keys() == {"select_rank", "REF_energy", "label_method"} and "forces_cov" not in found[0].arrays


def test_states_of_a_structure_are_told_apart(run):
    neutral, charged, high, low = (frames(1.0)[0] for _ in range(4))
    charged.info["charge"] = 1
    high.set_initial_magnetic_moments([1.0, 0.0, 1.0])
    low.set_initial_magnetic_moments([0.0, 1.0, -1.0])
    given = [neutral, charged, high, low]
    result, path = run([*given, neutral])
    assert "4 labelled, 1 there already" in result.output
    assert [frame.info.get("charge") for frame in ase.io.read(path, ":")] == [None, 1, None, None]
    result, _ = run(given)
    assert "0 labelled, 4 there already" in result.output


def test_it_goes_on_where_it_was(run):
    result, output = run(frames(1.0, 2.0, 3.0))
    assert result.exit_code == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-10])
    made = Fussy.made
    result, _ = run(frames(1.0, 2.0, 3.0, 4.0))
    assert "2 labelled, 2 there already, 0 failed" in result.stdout and Fussy.made - made == 3
    assert output.read_bytes().startswith(whole)
    assert [atoms.info["REF_energy"] for atoms in read_trajectory(output)[0]] == [1.0, 2.0, 3.0, 4.0]
    output.write_bytes(whole[:20])
    assert "3 labelled" in run(frames(1.0, 2.0, 3.0))[0].stdout and output.read_bytes() == whole


def test_labels_of_another_method_are_not_mixed(run):
    _, output = run(frames(1.0))
    before = output.read_bytes()
    result, _ = run(frames(2.0), "--argument", "strength=2.5")
    assert result.exit_code == 2 and output.read_bytes() == before
    assert "labels of 'fussy:Fussy', new ones would be of 'fussy:Fussy strength=2.5'" in " ".join(result.stderr.split())


def test_labels_that_name_no_method_are_not_mixed_with_others(run, tmp_path):
    (frame,) = frames(1.0)
    frame.info["REF_energy"], frame.arrays["REF_forces"] = 1.0, np.zeros((3, 3))
    ase.io.write(tmp_path / "labels.extxyz", frame, format="extxyz")
    before = (tmp_path / "labels.extxyz").read_bytes()
    for same_or_other in (1.0, 2.0):
        result, output = run(frames(same_or_other))
        assert result.exit_code == 2 and output.read_bytes() == before
        assert "has labels that name no label_method: choose another name" in " ".join(result.stderr.split())


def test_no_frame_of_the_output_is_lost(run):
    _, output = run(frames(1.0, 2.0))
    whole = output.read_bytes()
    output.write_bytes(whole[:-1])
    result, _ = run(frames(3.0))
    assert result.exit_code == 2 and output.read_bytes() == whole[:-1]
    assert "the last line of its last frame has no end; if the frame is all there" in " ".join(result.stderr.split())
    # Columns are missing: cut off for certain, whoever wants it.
    output.write_bytes(whole[:-40])
    result, _ = run(frames(3.0))
    assert result.exit_code == 0 and "1 labelled, 0 there already" in result.stdout
    output.write_bytes(whole[:-1])
    # Frame 1 is among those that are wanted: it is made anew.
    result, _ = run(frames(2.0, 3.0))
    assert "2 labelled, 0 there already" in result.stdout and output.read_bytes().startswith(whole)
    assert "frame 1 is cut off and taken out of it" in " ".join(result.stderr.split())
    for others in (b"3\nand another\n", b"3\nProperties=species:S:1:pos:R:3\nO 1.0 2.0 0.1\nH 0."):
        output.write_bytes(whole + others)
        result, _ = run(frames(3.0))
        assert result.exit_code == 2 and output.read_bytes() == whole + others
        assert "last frame is cut off, and not of e2ip label" in " ".join(result.stderr.split())


def test_any_calculator_of_ase(run):
    cell = bulk("Cu", cubic=True)
    cell.rattle(0.1, seed=0)
    result, output = run([cell, molecule("N2")], calculator="ase.calculators.emt:EMT")
    assert result.exit_code == 0, result.output
    (found, other), _ = read_trajectory(output)
    cell.calc = EMT()
    assert found.info["REF_energy"] == pytest.approx(cell.get_potential_energy(), abs=1e-6)
    np.testing.assert_allclose(found.arrays["REF_forces"], cell.get_forces(), atol=1e-6)
    np.testing.assert_allclose(found.info["REF_stress"], cell.get_stress(voigt=False), atol=1e-6)
    assert "REF_stress" not in other.info


def test_a_calculator_in_a_file_of_ones_own(run, tmp_path, monkeypatch):
    """In the folder that the command is called in, which a console script has not on its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "my_own_settings.py").write_text("")
    (tmp_path / "my_own_method.py").write_text(
        "from ase.calculators.emt import EMT\n\nclass Mine(EMT):\n"
        "    def calculate(self, *args):\n        import my_own_settings\n\n        super().calculate(*args)\n"
    )
    result, output = run([molecule("N2")], calculator="my_own_method:Mine")
    assert result.exit_code == 0, result.output
    assert len(read_trajectory(output)[0]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calculator": "fussy"}, "--calculator fussy: a module and a class"),
        ({"calculator": "nowhere:Fussy"}, "cannot be imported"),
        ({"calculator": "ase.io:Nothing"}, "cannot be imported"),
        ({"calculator": "builtins:dict"}, "is a dict, no calculator of ASE"),
        ({"argument": "strength"}, "--argument strength: a name and a value"),
        ({"argument": "weakness=1"}, "--calculator fussy:Fussy: TypeError"),
        (
            {"argument": "epsilom=2.0", "calculator": "ase.calculators.lj:LennardJones"},
            "--argument epsilom: LennardJones has no such parameter; did you mean epsilon?",
        ),
        ({"output": "labels.json"}, "frames go into an extxyz file"),
        ({"output": "frames.extxyz"}, "is the file of frames itself"),
    ],
)
def test_refused(run, options, message):
    extra = ["--argument", options.pop("argument")] if "argument" in options else []
    result, _ = run(frames(1.0), *extra, **options)
    assert message in " ".join(result.stderr.split()) and result.exit_code == 2


def test_files_of_others_are_left_alone(run, tmp_path):
    ase.io.write(tmp_path / "labels.extxyz", Atoms("H"), format="extxyz")
    result, output = run(frames(1.0))
    assert result.exit_code == 2 and "its frame 0 has no REF_energy and REF_forces" in result.stderr
    assert len(read_trajectory(output)[0]) == 1
