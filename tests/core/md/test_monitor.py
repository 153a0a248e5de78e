"""`Monitor` on real dynamics with a calculator that is as uncertain as it is told to be."""

import warnings

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.nose_hoover_chain import NoseHooverChainNVT
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS, FIRE, BFGSLineSearch

from e2ip_plugins.errors import InputError
from e2ip_plugins.md import Monitor, MonitorStop, Quantile, UncertaintyWarning

STD, LEVERAGE, EXTENT = "forces_epistemic_std", "e2ip_leverage", "forces_conformal_extent"


def run(atoms, monitor, steps, interval=1):
    dynamics = VelocityVerlet(atoms, 1.0 * units.fs)
    dynamics.attach(monitor, interval=interval)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dynamics.run(steps)
    return [str(warning.message) for warning in caught]


# Actions


def test_one_warning_in_every_excursion(make_atoms):
    atoms = make_atoms(0.1, 0.1, 0.3, 0.4, 0.1, 0.1, 0.5, 0.1)
    monitor = Monitor(atoms, {STD: 0.2})
    found = run(atoms, monitor, 7)
    assert found == [
        f"check 2: {STD} of atom 3 (H) is 0.3 eV/Å, threshold 0.2 (1 of 4 atoms above)",
        f"check 6: {STD} of atom 3 (H) is 0.5 eV/Å, threshold 0.2 (1 of 4 atoms above)",
    ]
    assert (monitor.checks, monitor.excursions) == (8, 2)
    np.testing.assert_allclose(monitor.values[STD], [0.01, 0.01, 0.01, 0.1])
    # The evaluation of the monitor is that of the first step.
    assert atoms.calc.evaluations == 8
    atoms = make_atoms(0.1, 0.3, 0.1, 0.3, 0.4)
    monitor = Monitor(atoms, {STD: 0.2})
    assert [text[:8] for text in run(atoms, monitor, 4, interval=2)] == ["check 2:"] and monitor.checks == 3


def test_collect_keeps_every_frame_above(make_atoms):
    atoms = make_atoms(0.1, 0.3, 0.4, 0.1, 0.5)
    atoms.arrays["REF_forces"] = np.ones((4, 3))
    run(atoms, Monitor(atoms, {STD: 0.2}, action="collect", frames="found.xyz"), 4)
    frames = ase.io.read("found.xyz", ":")
    np.testing.assert_allclose([frame.arrays[STD][3] for frame in frames], [0.3, 0.4, 0.5])
    assert [frame.info["monitor_check"] for frame in frames] == [1, 2, 4]
    assert frames[0].info["monitor_reason"].startswith(f"{STD} of atom 3 (H) is 0.3 eV/Å")
    assert frames[2].info["uq_family"] == "niw" and frames[2].arrays["forces_cov"].shape == (4, 9)
    # The reference forces were those of the first geometry.
    assert "REF_forces" not in frames[0].arrays and "REF_forces" in atoms.arrays
    np.testing.assert_allclose(frames[2].positions, atoms.positions, atol=1e-8)


DYNAMICS = {
    "nve": lambda atoms: VelocityVerlet(atoms, units.fs),
    "langevin": lambda atoms: Langevin(atoms, units.fs, temperature_K=1.0, friction=0.01 / units.fs, fixcm=False),
    "nose-hoover": lambda atoms: NoseHooverChainNVT(atoms, units.fs, temperature_K=300.0, tdamp=100.0 * units.fs),
}


@pytest.mark.parametrize("make", DYNAMICS.values(), ids=DYNAMICS)
def test_stop_ends_every_dynamics(make_atoms, make):
    atoms = make_atoms(0.1, 0.1, 0.3)
    dynamics = make(atoms)
    monitor = Monitor(atoms, {STD: 0.2}, action="stop", frames="last.xyz")
    dynamics.attach(monitor)
    with warnings.catch_warnings(), pytest.raises(MonitorStop, match=r"check 2: .* is 0\.3 .* in last\.xyz") as stopped:
        warnings.simplefilter("error", UncertaintyWarning)
        dynamics.run(10)
    assert dynamics.nsteps == 2
    last = ase.io.read("last.xyz")
    np.testing.assert_allclose(last.positions, atoms.positions, atol=1e-8)
    assert last.info["monitor_reason"] == stopped.value.reason.removeprefix("check 2: ")
    np.testing.assert_array_equal(stopped.value.frame.positions, atoms.positions)
    dynamics.observers.clear()
    dynamics.run(4)
    assert dynamics.nsteps == 6, "a run that was stopped goes on"


@pytest.mark.parametrize("optimiser", [BFGS, FIRE, BFGSLineSearch])
def test_stop_ends_optimisers(make_atoms, optimiser):
    atoms = make_atoms(0.1, 0.1, 0.3, spring=0.5)
    dynamics = optimiser(atoms, logfile=None)
    dynamics.attach(Monitor(atoms, {STD: 0.2}, action="stop"))
    with pytest.raises(MonitorStop):
        dynamics.run(fmax=0.01, steps=10)
    assert dynamics.nsteps <= 2 and len(ase.io.read("monitor.xyz", ":")) == 1


def test_functions_are_called_with_the_frame(make_atoms):
    atoms, called = make_atoms(0.1, 0.3, 0.4, 0.1), []
    monitor = Monitor(atoms, {STD: 0.2}, action=[called.append, "collect"])
    run(atoms, monitor, 3)
    assert [frame.arrays[STD][3] for frame in called] == pytest.approx([0.3, 0.4])
    assert len(ase.io.read("monitor.xyz", ":")) == 2


# Thresholds


def test_thresholds_by_species(make_atoms):
    atoms = make_atoms(0.3)
    monitor = Monitor(atoms, {STD: {"H": 0.4, "O": 0.005, "C": np.inf}, LEVERAGE: 50.0})
    (text,) = run(atoms, monitor, 2)
    assert text == f"check 0: {STD} of atom 1 (O) is 0.01 eV/Å, threshold 0.005 (2 of 4 atoms above)"
    np.testing.assert_array_equal(monitor.thresholds[STD], [np.inf, 0.005, 0.005, 0.4])
    monitor = Monitor(atoms, {STD: 0.4, LEVERAGE: 20.0, "forces_principal_std": 0.4})
    (text,) = run(atoms, monitor, 0)
    assert "e2ip_leverage of atom 3 (H) is 30, threshold 20 (1 of 4" in text and "; forces_principal_std of" in text
    # forces_cov = (1 + κ) forces_epistemic_cov, κ = 1
    np.testing.assert_allclose(monitor.values["forces_principal_std"], np.sqrt(2.0) * monitor.values[STD])
    atoms = make_atoms(extra={LEVERAGE: np.array([0.1, np.inf, 0.1, np.inf])})
    (text,) = run(atoms, Monitor(atoms, {LEVERAGE: {"H": np.inf, "O": 9.0, "C": 9.0}}), 0)
    assert "of atom 1 (O) is inf, threshold 9 (1 of 4" in text


def test_the_median_ignores_single_frames(make_atoms):
    spikes = (0.1, 9.0, 0.1, 0.1, 9.0, 0.1, 0.3, 0.3, 0.1)
    atoms = make_atoms(*spikes)
    monitor = Monitor(atoms, {STD: 0.2}, window=3)
    (text,) = run(atoms, monitor, len(spikes) - 1)
    assert text.startswith("check 6:") and "is 0.3 eV/Å" in text and "median of 3 checks" in text


def test_a_monitor_prints_what_it_watches(make_atoms):
    monitor = Monitor(make_atoms(), {STD: {"H": 0.4, "O": 0.05, "C": 0.4}, LEVERAGE: 9.0}, window=3, action=["stop"])
    watched = "forces_epistemic_std > 0.05 to 0.4 eV/Å; e2ip_leverage > 9"
    assert repr(monitor) == f"<Monitor: {watched}; median of 3 checks; stop>"


@pytest.mark.parametrize("window", [1, 2, 3])
def test_nothing_is_above_before_the_window_is_full(make_atoms, window):
    atoms = make_atoms(0.3)
    monitor = Monitor(atoms, {STD: 0.2}, window=window)
    (text,) = run(atoms, monitor, 3)
    assert text.startswith(f"check {window - 1}:")
    np.testing.assert_allclose(monitor.values[STD][3], 0.3)


@pytest.mark.parametrize(
    "thresholds, message",
    [
        ({}, "thresholds: a dictionary"),
        (0.2, "thresholds: a dictionary"),
        (
            {"forces_uncertainty": 0.2},
            r"'forces_uncertainty' cannot be watched; choose from forces_epistemic_std \(eV/Å\)",
        ),
        ({STD: 0.0}, r"threshold 0\.0 of forces_epistemic_std: a number above 0 \(eV/Å\)"),
        ({STD: -1}, "a number above 0"),
        ({STD: float("nan")}, "a number above 0"),
        ({STD: "0.1"}, "a number above 0"),
        ({STD: True}, "a number above 0"),
        ({STD: None}, "a number above 0"),
        ({STD: np.inf}, "all are infinite"),
        ({STD: {"H": 0.1, "C": 0.1, "O": 0.1, "N": 0.1}}, "species N are not in the structure"),
        ({STD: {"H": 0.1}}, "species C, O are missing"),
        ({STD: {}}, "are missing"),
        ({STD: Quantile(0.9)}, "give held_out"),
        ({EXTENT: 0.1}, "give held_out"),
    ],
)
def test_thresholds_that_mean_nothing(make_atoms, thresholds, message, refused):
    refused(message, Monitor, make_atoms(), thresholds)


@pytest.mark.parametrize("level", [0.0, -0.1, 1.1, 99, True, "0.9"])
def test_levels_that_mean_nothing(level, refused):
    refused("a level lies above 0", Quantile, level)


@pytest.mark.parametrize("number, text", [(1e-5, "above it by a factor of 1e"), (200.0, "below it by a factor of 2e")])
def test_a_number_far_from_the_first_frame_is_doubted(make_atoms, number, text):
    with pytest.warns(UncertaintyWarning, match=rf"threshold of forces_epistemic_std \(eV/Å\): .*{text}") as caught:
        Monitor(make_atoms(), {STD: number})
    assert caught[0].filename == __file__


# Calculators, frames and files that do not go


def test_calculators_that_cannot_be_watched(make_atoms, refused):
    with pytest.raises(InputError, match=r"gives no forces_epistemic_std: it needs a model with a readout"):
        Monitor(make_atoms(uncertain=False), {STD: 0.1})
    refused("leverage has not been fitted", Monitor, make_atoms(fitted=False), {LEVERAGE: 9.0})
    atoms = make_atoms()
    atoms.calc = None
    refused("no calculator", Monitor, atoms, {STD: 0.1})
    refused("the structure has no atoms", Monitor, Atoms(calculator=make_atoms().calc), {STD: 0.2})
    with pytest.raises(InputError, match=r"the first frame: forces of 4 atoms are not finite, first of atom 0 \(C\)"):
        Monitor(make_atoms(extra={"forces": np.full((4, 3), np.nan)}), {STD: 0.1})
    # Families without an epistemic part have zeros there, which no threshold can catch.
    with pytest.raises(InputError, match="forces_epistemic_std is 0 for every atom: this model's readout has no such"):
        Monitor(make_atoms(extra={STD: np.zeros(4)}), {STD: 0.5})
    atoms = make_atoms()
    monitor = Monitor(atoms, {STD: 0.2})
    del atoms[0]
    refused("make a new Monitor", monitor)


@pytest.mark.parametrize("action", ["warn", "stop"])
@pytest.mark.parametrize("what", ["positions", "cell", "forces", STD, "forces_cov"])
def test_what_is_not_a_number_ends_the_run(make_atoms, action, what):
    atoms = make_atoms()
    atoms.cell = np.eye(3) * 9.0
    watched = "forces_principal_std" if what == "forces_cov" else STD
    dynamics = VelocityVerlet(atoms, units.fs)
    monitor = Monitor(atoms, {watched: 0.2}, action=action, window=3)

    def break_it():
        if dynamics.nsteps == 3:
            if what in ("positions", "cell"):
                getattr(atoms, what)[1, 0] = np.nan
            else:
                broken = atoms.calc.results[what].copy()
                broken[1] = np.nan
                atoms.calc.results[what] = broken

    dynamics.attach(break_it)
    dynamics.attach(monitor)
    expected = "the cell is not finite" if what == "cell" else r"of 1 atoms are not finite, first of atom 1 \(O\)"
    with pytest.raises(MonitorStop, match=f"check 3: .*{expected}"):
        dynamics.run(10)
    last = ase.io.read("monitor.xyz")
    assert "not finite" in last.info["monitor_reason"]
    # Results of other positions are not written with these.
    assert (last.calc is None) == (what in ("positions", "cell"))


def test_files_are_never_replaced(make_atoms, tmp_path, refused):
    atoms = make_atoms(0.3)
    ase.io.write("monitor.xyz", atoms, format="extxyz")
    with pytest.raises(InputError, match=r"frames=monitor\.xyz: is there already; choose another name, or append=True"):
        Monitor(atoms, {STD: 0.2}, action="collect")
    run(atoms, Monitor(atoms, {STD: 0.2}, action="collect", append=True), 1)
    assert len(ase.io.read("monitor.xyz", ":")) == 3
    refused("there is no folder nowhere", Monitor, atoms, {STD: 0.2}, frames="nowhere/monitor.xyz")
    for cut in (1, 100):
        torn = (tmp_path / "monitor.xyz").read_bytes()[:-cut]
        (tmp_path / "torn.xyz").write_bytes(torn)
        with pytest.raises(InputError, match=r"frames=torn\.xyz: its last frame is cut off; take it out or"):
            Monitor(atoms, {STD: 0.2}, action="collect", frames="torn.xyz", append=True)
        assert (tmp_path / "torn.xyz").read_bytes() == torn
    # Written by somebody else after the monitor was made.
    late = Monitor(atoms, {STD: 0.2}, action="collect", frames="late.xyz")
    (tmp_path / "late.xyz").write_text("mine")
    with pytest.warns(UncertaintyWarning, match=r"frames go into late-2\.xyz"):
        late()
    assert (tmp_path / "late.xyz").read_text() == "mine" and len(ase.io.read("late-2.xyz", ":")) == 1
    other = Monitor(atoms, {STD: 0.2}, action="stop", frames="third.xyz")
    (tmp_path / "third.xyz").write_text("mine")
    with pytest.warns(UncertaintyWarning), pytest.raises(MonitorStop, match=r"the frame is in third-2\.xyz"):
        other()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"action": "halt"}, r"action='halt': choose from warn, collect, stop"),
        ({"action": ["stop", 3]}, "action=3"),
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, r"window=2\.5"),
    ],
)
def test_settings_that_mean_nothing(make_atoms, settings, message, refused):
    refused(message, Monitor, make_atoms(), {STD: 0.2}, **settings)
