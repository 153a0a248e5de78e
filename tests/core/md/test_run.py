"""`e2ip md`: what is run is what was asked for, again and again; the monitor ends it."""

import errno
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.constraints import FixAtoms
from typer.testing import CliRunner

from e2ip_plugins import cli
from e2ip_plugins.errors import InputError
from e2ip_plugins.md import UncertaintyWarning
from e2ip_plugins.md.dynamics import RunOptions, draw_velocities, make_dynamics, moving_modes, parse_temperature
from e2ip_plugins.md.run import run
from e2ip_plugins.md.thresholds import Quantile
from e2ip_plugins.md.watch import Watch, parse_watch
from e2ip_plugins.predictions import trajectories
from e2ip_plugins.predictions.checks import check_structure

STD = "forces_epistemic_std"


@pytest.mark.parametrize("thermostat", ["nve", "langevin", "bussi"])
def test_a_seed_is_a_run(make_atoms, tmp_path, thermostat):
    found = []
    for i, seed in enumerate((3, 3, 4)):
        outcome = run(
            make_atoms(0.2, spring=5.0),
            RunOptions(21, thermostat=thermostat, seed=seed, interval=10),
            tmp_path / f"{i}.xyz",
        )
        assert (outcome.steps, outcome.frames, outcome.checks, outcome.stopped) == (21, 4, 0, "")
        found.append(ase.io.read(tmp_path / f"{i}.xyz", ":"))
    first, again, other = ([frame.positions for frame in frames] for frames in found)
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.subtract(first, other)[2]).max() > 1e-3
    assert [frame.info["md_step"] for frame in found[0]] == [0, 10, 20, 21]  # the last one always
    assert found[0][2].arrays[STD][-1] == pytest.approx(0.2) and found[0][0].arrays["forces_cov"].shape == (4, 9)


@pytest.mark.parametrize(
    ("thermostat", "coupling"), [("langevin", {"friction": 0.2}), ("bussi", {"time_constant": 5.0})]
)
def test_a_ramp_heats(tmp_path, thermostat, coupling):
    """Free atoms, many of them: the temperature of the thermostat is theirs."""
    from ase.calculators.calculator import Calculator

    class Free(Calculator):
        implemented_properties = ("energy", "forces")

        def calculate(self, atoms=None, properties=("energy",), system_changes=()):
            self.results = {"energy": 0.0, "forces": np.zeros((len(atoms), 3))}

    atoms = Atoms("He400", np.random.default_rng(0).normal(scale=50.0, size=(400, 3)), calculator=Free())
    settings = RunOptions(200, 300.0, 1500.0, thermostat=thermostat, interval=100, **coupling)
    run(atoms, settings, tmp_path / "ramp.xyz")
    frames = ase.io.read(tmp_path / "ramp.xyz", ":")
    assert [frame.info["md_temperature"] for frame in frames] == [300.0, 900.0, 1500.0]
    for frame in frames:
        # Some 5 fs behind; of 1200 components 4 %.
        assert frame.get_temperature() == pytest.approx(frame.info["md_temperature"], rel=0.15)


@pytest.mark.parametrize(("atoms", "modes"), [
    (Atoms("H2O", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]), 3),
    (Atoms("CO2", [[0, 0, 0], [1.16, 0, 0], [-1.16, 0, 0]]), 4),
    (Atoms("N2", [[0, 0, 0], [0, 0, 1.1]]), 1),
    (Atoms("Ar2", [[0, 0, 0], [0, 0, 4.0]], cell=np.eye(3) * 8.0, pbc=True), 3),
])  # fmt: skip
def test_modes_at_rest_are_not_heated(atoms, modes):
    """Velocities have the temperature in the modes that move; so does a thermostat that rescales them."""
    settings, energies = RunOptions(1, 300.0, thermostat="bussi"), []
    for seed in range(400):
        draw_velocities(atoms, settings, np.random.default_rng(seed))
        energies.append(atoms.get_kinetic_energy())
        assert moving_modes(atoms) == modes
    thermal = 0.5 * modes * 300.0 * units.kB
    assert np.mean(energies) == pytest.approx(thermal, rel=0.2)
    dynamics = make_dynamics(atoms, settings, np.random.default_rng(0))
    assert dynamics.ndof == modes and dynamics.target_kinetic_energy == pytest.approx(thermal)


def test_modes_of_a_moving_or_constrained_structure():
    atoms = Atoms("H2O", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    atoms.set_momenta(np.random.default_rng(0).normal(size=(3, 3)))
    assert moving_modes(atoms) == 9
    atoms.set_constraint(FixAtoms([0]))
    draw_velocities(atoms, RunOptions(1, thermostat="bussi"), np.random.default_rng(0))
    assert moving_modes(atoms) == 6


def test_velocities_are_drawn_and_energy_is_kept(make_atoms, tmp_path):
    atoms = make_atoms(spring=5.0)
    run(atoms, RunOptions(100, 600.0, thermostat="nve", timestep=0.125, interval=1), tmp_path / "nve.xyz")
    frames = ase.io.read(tmp_path / "nve.xyz", ":")
    energies = [frame.get_total_energy() for frame in frames]
    assert np.ptp(energies) < 0.01 * frames[0].get_kinetic_energy() and frames[0].get_kinetic_energy() > 0.01
    np.testing.assert_allclose(frames[-1].get_momenta().sum(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(frames[-1].get_angular_momentum(), 0.0, atol=1e-3)
    assert frames[0].get_kinetic_energy() < 20 * 600.0 * units.kB


def test_a_run_goes_on(make_atoms, tmp_path):
    whole, first, rest = (tmp_path / f"{name}.xyz" for name in ("whole", "first", "rest"))
    given = {"thermostat": "nve", "interval": 20}
    run(make_atoms(0.1, spring=5.0), RunOptions(40, **given), whole)
    run(make_atoms(0.1, spring=5.0), RunOptions(20, **given), first)
    atoms = ase.io.read(first)
    atoms.calc = make_atoms(0.1, spring=5.0).calc
    run(atoms, RunOptions(20, **given, keep_velocities=True), rest)
    # Files have eight digits.
    np.testing.assert_allclose(ase.io.read(rest).positions, ase.io.read(whole).positions, atol=1e-6)
    assert "md_temperature" in ase.io.read(first).info and "md_temperature" not in ase.io.read(rest).info
    with pytest.raises(InputError, match="--keep-velocities: the structure has none"):
        atoms = make_atoms(0.1)
        atoms.arrays.pop("momenta", None)
        run(atoms, RunOptions(1, keep_velocities=True), tmp_path / "none.xyz")


def test_the_monitor_ends_it_and_counts(make_atoms, tmp_path):
    watch = Watch({STD: 0.5}, frames=tmp_path / "last.xyz", interval=5)
    outcome = run(make_atoms(*[0.1] * 25, 0.9), RunOptions(100), tmp_path / "run.xyz", watch)
    assert outcome.steps == 25 and outcome.checks == 6 and outcome.frames == 3
    assert STD in outcome.stopped and ase.io.read(tmp_path / "last.xyz").info["monitor_check"] == 5
    assert outcome.lines()[-1].startswith("stopped: check 5: forces_epistemic_std of atom 3 (H) is 0.9")
    watch = Watch({STD: 0.5}, ["collect"], frames=tmp_path / "all.xyz", interval=1)
    with pytest.warns(UserWarning, match=STD):
        outcome = run(make_atoms(0.1, 0.1, 0.9, 0.9, 0.1, 0.9), RunOptions(6), tmp_path / "b.xyz", watch)
    assert (outcome.alarms, outcome.checks, outcome.steps) == (2, 7, 6)
    assert len(ase.io.read(tmp_path / "all.xyz", ":")) == 4


def test_what_is_no_number_ends_a_run_that_nobody_watches(make_atoms, tmp_path):
    atoms = make_atoms()
    calculate = atoms.calc.calculate

    def broken(*args, **kwargs):
        calculate(*args, **kwargs)
        if (tmp_path / "run.xyz").exists():
            atoms.calc.results["forces"][0] = np.nan

    atoms.calc.calculate = broken
    outcome = run(atoms, RunOptions(100, interval=1), tmp_path / "run.xyz")
    assert outcome.stopped == "forces of 1 atoms are not finite, first of atom 0 (C), at step 1" and outcome.frames == 1


def test_positions_that_a_calculator_refuses_end_a_run(make_atoms, tmp_path):
    """As the hosts' calculators do; between two frames that are written."""
    atoms = make_atoms(spring=1.0)
    stock = atoms.calc.calculate

    def calculate(moved=None, *rest):
        check_structure(moved, "the structure")
        stock(moved, *rest)
        if atoms.calc.evaluations == 4:
            atoms.calc.results["forces"][1] = np.nan

    atoms.calc.calculate = calculate
    outcome = run(atoms, RunOptions(100, thermostat="nve", interval=50), tmp_path / "run.xyz")
    assert outcome.stopped.startswith("positions are not finite at step") and 0 < outcome.steps < 10
    assert len(ase.io.read(tmp_path / "run.xyz", ":")) == outcome.frames == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "--steps 0: a number above 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"final_temperature": -5.0}, r"--temperature \(its end\) -5.0"),
        ({"timestep": 0.0}, "--timestep"),
        ({"thermostat": "hoover"}, "--thermostat hoover: choose from nve, langevin, bussi"),
        ({"thermostat": "nve", "final_temperature": 900.0}, "a ramp needs a thermostat"),
    ],
)
def test_settings_that_do_not_go(given, message, refused):
    refused(message, RunOptions, **{"steps": 10, **given})


def test_structures_and_files_that_do_not_go(make_atoms, tmp_path, refused):
    atoms = make_atoms()
    (tmp_path / "there.xyz").write_text("")
    for path, message in (("there.xyz", "is there already"), ("nowhere/run.xyz", "there is no folder")):
        refused(message, run, atoms, RunOptions(1), tmp_path / path)
    atoms.positions[1, 2] = np.inf
    refused("position of atom 1 is not finite", run, atoms, RunOptions(1), tmp_path / "run.xyz")
    refused("has no atoms", run, Atoms(), RunOptions(1), tmp_path / "run.xyz")
    with pytest.raises(InputError, match=r"start\.xyz, frame 3: the predicted forces of .* first of atom 0 .* do two"):
        run(make_atoms(spring=np.nan), RunOptions(100), tmp_path / "run.xyz", where="start.xyz, frame 3")
    assert not (tmp_path / "run.xyz").exists()


def test_words(refused):
    assert parse_watch(["e2ip_leverage=q0.99"], held_out="valid.xyz").thresholds == {"e2ip_leverage": Quantile(0.99)}
    assert parse_watch([f"{STD}=0.5"]).thresholds == {STD: 0.5}
    for given in (["e2ip_leverage=q0.99"], ["forces_conformal_extent=0.1"]):
        refused("give --held-out", parse_watch, given)
    refused(f"{STD} has a threshold already", parse_watch, [f"{STD}=0.5", "e2ip_leverage=2", f"{STD}=60"])
    with pytest.raises(
        InputError, match=r"--watch forces_std=0\.5: 'forces_std' cannot be watched; choose from forces_"
    ):
        parse_watch(["forces_std=0.5"])
    assert parse_temperature("300") == (300.0, None) and parse_temperature("300:1500") == (300.0, 1500.0)
    assert parse_watch([STD], held_out="valid.xyz").thresholds == {STD: Quantile()}
    refused(f"--watch {STD}: without a number .* comes from held-out frames; give --held-out", parse_watch, [STD])
    for text in ("leverage", "e2ip_leverage=", "e2ip_leverage=high", "e2ip_leverage=q"):
        refused("--watch", parse_watch, [text])
    for text in ("hot", "300:", "300:x"):
        refused("--temperature", parse_temperature, text)


@pytest.fixture
def command(make_atoms, tmp_path, monkeypatch):
    """Function that runs the command on CO₂H, with a host whose calculator is `Uncertain`."""
    ase.io.write("start.xyz", [make_atoms(0.1), make_atoms(0.1)], format="extxyz")
    (tmp_path / "my.model").write_bytes(b"")

    def call(*options, stds=(0.1,)):
        monkeypatch.setattr(
            cli.checks, "entry_point", lambda group, host, why: lambda path, **_: make_atoms(*stds).calc
        )
        words = ["md", "my.model", "start.xyz", "out.xyz", "--steps", "20", *map(str, options)]
        return CliRunner().invoke(cli.app, words)

    return call


def test_a_name_alone_takes_the_advised_quantile(command, held_out):
    """The largest values of its 40 frames are 0.002, 0.003, …, 0.04 eV/Å, or so: 0.95 is the second largest."""
    result = command("--watch", STD, "--held-out", held_out, "--action", "warn")
    assert result.exit_code == 0, result.output
    text = (
        f"monitor: {STD}: threshold 0.039 eV/Å, the quantile 0.95 of 40 held-out frames; expect 5 false alarms in 100 "
        "checks of frames like these, fewer with "
    )
    assert f"{text}a window" in result.stdout.splitlines()
    Path("out.xyz").unlink()
    smoothed = command("--watch", STD, "--held-out", held_out, "--action", "warn", "--window", "3")
    assert f"{text}the window of 3 checks" in smoothed.stdout.splitlines()


def test_the_command(command, held_out):
    result = command("--watch", f"{STD}=q0.9", "--held-out", held_out, "--temperature", "300:400", "--interval", 5)
    assert result.exit_code == 0, result.output
    assert "stopped: check 0" in result.stdout and "1 of 4 atoms above" in result.stdout
    assert ase.io.read("out-monitor.xyz").info["monitor_check"] == 0
    assert "out.xyz: is there already" in command().stderr


def test_ctrl_c_ends_it_with_whole_frames(make_atoms, tmp_path, command, monkeypatch):
    kind = type(make_atoms().calc)
    calculate = kind.calculate

    def tired(self, *args, **more):
        if self.evaluations == 13:
            raise KeyboardInterrupt
        calculate(self, *args, **more)

    monkeypatch.setattr(kind, "calculate", tired)
    outcome = run(make_atoms(0.1, spring=5.0), RunOptions(100), tmp_path / "run.xyz")
    assert outcome.interrupted and outcome.lines()[-1] == f"stopped: interrupted at step {outcome.steps}"
    assert outcome.frames == len(ase.io.read(tmp_path / "run.xyz", ":")) == 2
    result = command("--timestep", 0.3)
    assert result.exit_code == 130 and "stopped: interrupted" in result.stdout and "Written: out.xyz" in result.stdout


def test_a_full_disk_leaves_whole_frames(command, monkeypatch):
    append, written = trajectories.append, []

    def full(path, text):
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, text)

    monkeypatch.setattr(trajectories, "append", full)
    result = command("--interval", 5)
    assert result.exit_code == 2
    assert "out.xyz: cannot be written at step 10 (No space left on device); 2 whole frames of" in result.stderr
    assert len(ase.io.read("out.xyz", ":")) == 2


def test_what_the_model_does_not_know(make_atoms, tmp_path, refused):
    """Hosts' calculators raise what they like for such an element."""

    class Narrow(type(make_atoms().calc)):
        def calculate(self, *args, **more):
            raise ValueError("np.int64(6) is not in list")

    atoms = make_atoms()
    atoms.calc = Narrow()
    refused("does it know C, H, O", run, atoms, RunOptions(steps=2, temperature=300.0), tmp_path / "out.xyz")
    with pytest.warns(UncertaintyWarning, match="no readout"):
        run(make_atoms(uncertain=False), RunOptions(steps=2, temperature=300.0), tmp_path / "out.xyz")


def test_warnings_of_the_monitor_are_lines(command):
    result = command("--watch", f"{STD}=0.5", "--action", "warn", "--action", "collect", stds=(0.1,) * 5 + (0.9,))
    assert result.exit_code == 0, result.output
    assert "e2ip: warning: check 1: forces_epistemic_std of atom 3 (H) is 0.9 eV/Å" in result.stderr
    assert f"monitor: {STD}: at most 0.9 eV/Å, threshold 0.5" in result.stdout
    assert "monitor: 1 alarm in 3 checks" in result.stdout and "20 steps, 3 frames written" in result.stdout
    assert len(ase.io.read("out-monitor.xyz", ":")) == 2
    for name in ("out.xyz", "out-monitor.xyz"):
        Path(name).unlink()
    # A threshold in meV/Å, as it seems.
    assert "all values of the first frame are below it by a factor" in command("--watch", f"{STD}=500").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--action", "stop"), "--action: for --watch"),
        (("--watch", "e2ip_leverage=2", "--action", "collect,halt"), "--action halt: choose from warn, collect, stop;"),
        (("--frame", 2), "--frame 2: start.xyz has 2 frames"),
        (("--watch", f"{STD}=q0.9"), "give --held-out"),
        (("--watch", "uncertainty=1"), "'uncertainty' cannot be watched"),
        (("--watch", f"{STD}=q2"), f"--watch {STD}=q2: Quantile(2.0): a level lies above 0"),
        (("--temperature", "hot"), "--temperature hot"),
        (("--thermostat", "nve", "--friction", 5), "--friction is for --thermostat langevin, not nve"),
        (("--thermostat", "langevin", "--time-constant", 5), "--time-constant is for --thermostat bussi, not langevin"),
        (("--window", 5, "--check-interval", 3), "--check-interval, --window: for --watch"),
        (("--watch", "e2ip_leverage=2", "--window", 0), "'--window'"),
        (("--watch", "e2ip_leverage=2", "--collected", "out.xyz"), "--collected out.xyz: is where all frames go"),
        (("--watch", "e2ip_leverage=2", "--collected", "start.xyz"), "--collected start.xyz: is there already"),
        (("--seed", -1), "'--seed'"),
        (
            ("--thermostat", "nve", "--keep-velocities", "--temperature", 700),
            "--temperature: nve with --keep-velocities",
        ),
        (("--watch", "e2ip_leverage=2", "--level", 0.5), "--level: for --watch forces_conformal_extent"),
    ],
)
def test_the_command_refuses(command, options, message):
    result = command(*options)
    assert result.exit_code == 2 and message in result.stderr
    assert not Path("out.xyz").exists()


def test_the_level_of_the_conformal_region(command, calibrated):
    path = calibrated("conformal")
    words = ("--watch", "forces_conformal_extent=100", "--held-out", path, "--calibration", path, "--level")
    assert "no conformal radius for level 0.33; it has radii for: " in command(*words, 0.33).stderr
    assert command(*words, 0.8).exit_code == 0


def test_a_start_that_was_cut_off_is_told(command, tmp_path):
    text = (tmp_path / "start.xyz").read_bytes()
    (tmp_path / "start.xyz").write_bytes(text[:-5])
    result = command()
    assert result.exit_code == 0 and "start.xyz: frame 1 is cut off and left out" in result.stderr
