"""``e2ip ensemble``: moments of mixtures, and files that every tool reads."""

import ase
import ase.io
import numpy as np
import pytest
import torch

from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import load_models
from e2ip_plugins.report.ensemble import moments

SIZES = (5, 7, 9)


@pytest.fixture
def members(write):
    """Function that writes files of models that err independently; of family niw if ``draw`` is given."""

    def made(count, draw=None, seed=0):
        rng, paths = np.random.default_rng(seed), []
        positions = [rng.normal(size=(n, 3)) for n in SIZES]
        references = [rng.normal(size=(n, 3)) for n in SIZES]
        for k in range(count):
            frames = []
            for i, n in enumerate(SIZES):
                atoms = ase.Atoms("C" * n, positions[i], cell=np.eye(3) * 9.0, pbc=True)
                atoms.info |= {"REF_energy": float(i), "MACE_energy": i + 0.1 * k}
                atoms.new_array("REF_forces", references[i])
                atoms.new_array("MACE_forces", references[i] + 0.1 * rng.normal(size=(n, 3)))
                if draw is not None:
                    _, log_sigma0, nu, kappa = draw(n, seed=10 * k + i)
                    for name, value in (("log_sigma0", log_sigma0), ("nu", nu), ("kappa", kappa)):
                        atoms.new_array(f"MACE_e2ip_{name}", value)
                    atoms.info["MACE_uq_family"] = "niw"
                    atoms.new_array("MACE_e2ip_leverage", np.full(n, 1.0 + k))
                frames.append(atoms)
            paths.append(write(f"member{seed}{k}.xyz", frames))
        return paths

    return made


@pytest.fixture
def combined(succeed):
    """Function that runs ``e2ip ensemble`` and gives its standard error and the ensemble's predictions."""

    def run(paths, *options):
        done = succeed("ensemble", *paths, "--output", "e.xyz", "--overwrite", *options)
        return done.stderr, read_predictions("e.xyz", required=False)

    return run


def forces(paths):
    return np.stack([read_predictions(path).forces for path in paths])


def spread_of(of_members):
    return np.stack([np.cov(of_members[:, i].T) for i in range(sum(SIZES))])


def covariance_of(p):
    return law_of(p.family, p.parameters).covariance()


def test_stock_members(members, combined):
    paths = members(5)
    told, found = combined(paths)
    assert told == ""
    of_members = forces(paths)
    np.testing.assert_allclose(found.forces, of_members.mean(0), atol=1e-8)
    np.testing.assert_allclose(found.energy, [0.2, 1.2, 2.2])
    np.testing.assert_allclose(found.reference_energy, [0, 1, 2])
    np.testing.assert_allclose(covariance_of(found), spread_of(of_members), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.parameters["ensemble_epistemic_share"], 1.0)
    for atoms, other in zip(ase.io.read("e.xyz", ":"), ase.io.read(paths[0], ":"), strict=True):
        np.testing.assert_allclose(atoms.positions, other.positions, atol=1e-8)
        assert np.allclose(atoms.cell, other.cell) and atoms.pbc.all() and atoms.info["uq_family"] == "ensemble"
        variances = atoms.arrays["forces_cov"][:, ::4]
        np.testing.assert_allclose(atoms.arrays["forces_uncertainty"] ** 2, variances, atol=1e-7)
    (model,) = load_models(["e.xyz"])
    assert np.isfinite(model.scores["nll"]).all()


def test_isotropic(members, combined):
    """One variance per atom, for which three members are enough."""
    paths = members(3)
    told, found = combined(paths, "--isotropic")
    assert told == "" and "--isotropic" in combined(paths)[0]
    variance = forces(paths).var(0, ddof=1).mean(-1)
    np.testing.assert_allclose(covariance_of(found), variance[:, None, None] * np.eye(3), rtol=1e-5, atol=1e-9)


def test_members_with_uncertainties(members, combined, draw):
    """The law of total variance."""
    paths = members(3, draw)
    _, found = combined(paths)
    read, spread = [read_predictions(path) for path in paths], spread_of(forces(paths))
    within = np.mean([covariance_of(member) for member in read], 0)
    np.testing.assert_allclose(covariance_of(found), spread + within, rtol=1e-5, atol=1e-9)
    laws = [law_of(E2IP, member.parameters) for member in read]
    epistemic = np.mean([law.epistemic_std() ** 2 for law in laws], 0) + np.trace(spread, axis1=1, axis2=2) / 3
    np.testing.assert_allclose(
        law_of(found.family, found.parameters).epistemic_std() ** 2, epistemic, rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(found.leverage, 2.0)
    # In the file each part has its own shape, not that of the whole.
    parts = [E2IP.derive({name: torch.from_numpy(x) for name, x in member.parameters.items()}) for member in read]
    frames = ase.io.read("e.xyz", ":")
    for name, more in (("forces_aleatoric_cov", 0.0), ("forces_epistemic_cov", spread)):
        column = np.concatenate([atoms.arrays[name] for atoms in frames]).reshape(-1, 3, 3)
        expected = np.mean([part[name].numpy() for part in parts], 0) + more
        np.testing.assert_allclose(column, expected, rtol=1e-5, atol=1e-7)
    column = np.concatenate([atoms.arrays["forces_epistemic_std"] for atoms in frames])
    np.testing.assert_allclose(column**2, epistemic, rtol=1e-5, atol=1e-7)


def test_members_whose_distributions_are_not_around_their_forces(members, combined, change):
    """Family eip: the mixture's mean is the mean of the members' means."""
    paths = members(4)
    for k, path in enumerate(paths):

        def add_family(atoms, shift=0.1 * k):
            atoms.info["MACE_uq_family"] = "nig"
            columns = {"shift": shift, "log_scale2": 2 * np.log(0.14), "dof": 6.0, "epistemic_share": 0.5}
            for name, value in columns.items():
                atoms.new_array(f"MACE_eip_{name}", np.full((len(atoms), 3), value))

        change(path, add_family)
    _, found = combined(paths)
    of_members = forces(paths) + 0.1 * np.arange(4)[:, None, None]
    np.testing.assert_allclose(found.forces, of_members.mean(0), atol=1e-7)
    expected = spread_of(of_members) + 0.14**2 * 6 / 4 * np.eye(3)
    np.testing.assert_allclose(covariance_of(found), expected, rtol=1e-5, atol=1e-8)


def test_copies_of_a_frame_are_written_once(members, combined, folder):
    """NequIP's writer appends where a test is run twice."""
    paths = members(5)
    combined(paths)
    once = (folder / "e.xyz").read_text()
    for path in paths[:3]:
        path.write_text(path.read_text() * 2)
    told, _ = combined(paths)
    assert "member00.xyz: 3 frames are there more than once" in told
    assert (folder / "e.xyz").read_text() == once


def test_an_ensemble_has_a_name_by_its_members(members, combined, change, refuse, draw):
    def name(paths):
        return combined(paths)[1].uq_model

    paths = members(3, draw)
    assert name(paths) is None
    for k, path in enumerate(paths[:2]):
        change(path, lambda atoms, k=k: atoms.info.update(MACE_uq_model=f"readout-{k}"))

    def other_digits(atoms):  # as another tool writes
        atoms.arrays["MACE_forces"] += 1e-6

    copy = change(paths[0], other_digits, "copy.xyz")
    assert "copy.xyz are of one model, readout-0" in refuse("ensemble", *paths, copy, "--output", "f.xyz")
    first = name(paths)
    assert first.startswith("ensemble-") and first == name(paths[::-1]) != name(paths[:2])
    change(paths[0], lambda atoms: atoms.info.update(MACE_uq_calibration="one.json"))
    assert name(paths) != first and f"{paths[0]}: calibrated, while other" in combined(paths)[0]


def test_moments_are_those_of_draws():
    rng = np.random.default_rng(0)
    forces = rng.normal(size=(4, 1, 3))
    roots = rng.normal(size=(4, 1, 3, 3))
    covariances = roots @ roots.swapaxes(-1, -2)
    aleatoric, epistemic = moments(forces, covariances, 0.25 * covariances)
    covariance = aleatoric + epistemic
    picked = rng.integers(4, size=400_000)
    draws = forces[picked, 0] + np.einsum("nij,nj->ni", roots[picked, 0], rng.normal(size=(len(picked), 3)))
    # Draws are of these members, the K - 1 is of those that training might have given.
    excess = np.cov(forces[:, 0].T) * (1 - 3 / 4)
    np.testing.assert_allclose(np.cov(draws.T), covariance[0] - excess, atol=0.05)
    np.testing.assert_allclose(aleatoric, 0.75 * covariances.mean(0))


@pytest.mark.parametrize("count", [2, 3])
def test_few_members_are_told(members, combined, count):
    assert f"covariances of {count} members have no full rank" in combined(members(count))[0]
    (model,) = load_models(["e.xyz"])
    assert np.isfinite(model.scores["nll"]).all()


@pytest.mark.parametrize("rounding", [0.0, 1e-8])
def test_isolated_atoms_are_certain(members, combined, write, rounding):
    """Every model predicts their force, zero to rounding."""
    paths = members(5)
    for path in paths:
        alone = ase.Atoms("C", cell=np.eye(3) * 9.0, pbc=True, info={"REF_energy": -1.0, "MACE_energy": -1.0})
        alone.arrays |= {"REF_forces": np.zeros((1, 3)), "MACE_forces": np.full((1, 3), rounding)}
        write(path.name, [alone, *ase.io.read(path, ":")])
    told, found = combined(paths)
    assert "1 atoms whose force vanishes by symmetry" in told
    std = law_of(found.family, found.parameters).total_std()
    assert std[0] == pytest.approx(1e-3 * np.sqrt(np.square(std[1:]).mean()), rel=1e-3)


def test_frames_keep_their_charge(members, combined, change):
    """Else the states of one geometry are one frame with several predictions."""
    paths = members(4)
    for path in paths:
        change(path, lambda atoms: atoms.info.update(charge=len(atoms) - 5))
    combined(paths)
    assert [atoms.info.get("charge") for atoms in ase.io.read("e.xyz", ":")] == [0, 2, 4]


def test_members_that_lack_what_others_have(members, combined, change, draw):
    """A leverage that was never fitted is none, and a model without uncertainties has none."""
    paths = members(3, draw)
    change(paths[1], lambda atoms: atoms.arrays["MACE_e2ip_leverage"].fill(-1.0))
    told, found = combined(paths)
    assert f"{paths[1]}: leverage never fitted" in told
    np.testing.assert_allclose(found.leverage, 2.0)

    def stock(atoms):
        for name in [name for name in atoms.arrays if "e2ip" in name]:
            del atoms.arrays[name]
        del atoms.info["MACE_uq_family"]

    change(paths[2], stock)
    told, _ = combined(paths)
    assert "member02.xyz: no uncertainties; counted as covariances of zero" in told


def test_members_need_no_references(members, combined, change, write, refuse):
    """The same except for them; positions then tell whether frames are the same, wherever the origin is."""
    paths = members(4)
    combined(paths)
    labelled = ase.io.read("e.xyz", ":")
    for i, path in enumerate(paths):

        def bare(atoms, i=i):
            del atoms.arrays["REF_forces"]
            atoms.positions += i

        change(path, bare)
    combined(paths)
    for a, b in zip(labelled, ase.io.read("e.xyz", ":"), strict=True):
        assert "REF_forces" in a.arrays and "REF_forces" not in b.arrays
        np.testing.assert_array_equal(a.arrays["forces_cov"], b.arrays["forces_cov"])
    frames = ase.io.read(paths[3], ":")
    frames[1].positions[0] += 0.1
    write(paths[3].name, frames)
    assert "the positions of frame 1 differ" in refuse("ensemble", *paths, "--output", "wrong.xyz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("member00.xyz", "at least two members, got 1"),
        ("member00.xyz member01.xyz member00.xyz", "is given twice"),
        ("member00.xyz none.xyz", "no such file"),
        ("member00.xyz member01.xyz --output member01.xyz --overwrite", "is a file that this command reads"),
        ("member00.xyz member01.xyz --output e.traj", "frames go into an extxyz file"),
        ("member00.xyz member01.xyz --output nowhere/e.xyz", "there is no folder"),
        ("member00.xyz member10.xyz", "the reference forces of frame 0 differ"),
        ("member00.xyz member01.xyz copy.xyz", "have the same forces, all of them"),
        ("member01.xyz alike.xyz", "the same forces for 7 atoms, first in frame 1"),
        ("member00.xyz member01.xyz --output mine.xyz", "is there already"),
    ],
)
def test_bad_input(members, folder, write, refuse, arguments, message):
    paths = members(2)
    members(1, seed=1)
    (folder / "copy.xyz").write_text(paths[0].read_text())
    (folder / "mine.xyz").write_text("mine")
    alike = ase.io.read(paths[0], ":")
    alike[1].arrays["MACE_forces"] = ase.io.read(paths[1], 1).arrays["MACE_forces"]
    write("alike.xyz", alike)
    assert message in refuse("ensemble", *arguments.split())
    assert not (folder / "ensemble.xyz").exists() and (folder / "mine.xyz").read_text() == "mine"
