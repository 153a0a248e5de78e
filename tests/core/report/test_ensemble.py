"""``e2ip ensemble``: moments of mixtures, and files that every tool reads."""

import ase
import ase.io
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.predictions.prediction_files import read_predictions
from e2ip_plugins.report.compare import load_models
from e2ip_plugins.report.ensemble import moments

SIZES = (5, 7, 9)


def members(folder, count, draw=None, seed=0):
    """Files of models that err independently; of family niw if ``draw`` is given."""
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
        paths.append(folder / f"member{k}.xyz")
        ase.io.write(paths[-1], frames, format="extxyz")
    return paths


def run(*arguments):
    return CliRunner().invoke(app, ["ensemble", *map(str, arguments)])


def forces(paths):
    return np.stack([read_predictions(path).forces for path in paths])


def test_stock_members(tmp_path):
    paths = members(tmp_path, 5)
    result = run(*paths, "--output", tmp_path / "e.xyz")
    assert result.exit_code == 0 and "warning" not in result.output
    found, of_members = read_predictions(tmp_path / "e.xyz"), forces(paths)
    np.testing.assert_allclose(found.forces, of_members.mean(0), atol=1e-8)
    np.testing.assert_allclose(found.energy, [0.2, 1.2, 2.2])
    np.testing.assert_allclose(found.reference_energy, [0, 1, 2])
    covariance = law_of(found.family, found.parameters).covariance()
    expected = np.stack([np.cov(of_members[:, i].T) for i in range(sum(SIZES))])
    np.testing.assert_allclose(covariance, expected, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.parameters["ensemble_epistemic_share"], 1.0)
    frames, members_frames = ase.io.read(tmp_path / "e.xyz", ":"), ase.io.read(paths[0], ":")
    for atoms, other in zip(frames, members_frames, strict=True):
        np.testing.assert_allclose(atoms.positions, other.positions, atol=1e-8)
        assert np.allclose(atoms.cell, other.cell) and atoms.pbc.all() and atoms.info["uq_family"] == "ensemble"
        np.testing.assert_allclose(
            atoms.arrays["forces_uncertainty"] ** 2, atoms.arrays["forces_cov"][:, ::4], atol=1e-7
        )
    (model,) = load_models([tmp_path / "e.xyz"])
    assert np.isfinite(model.scores["nll"]).all()


def test_isotropic(tmp_path):
    """One variance per atom, for which three members are enough."""
    paths = members(tmp_path, 3)
    result = run(*paths, "--output", tmp_path / "e.xyz", "--isotropic")
    assert result.exit_code == 0 and "warning" not in result.output
    found = read_predictions(tmp_path / "e.xyz")
    variance = forces(paths).var(0, ddof=1).mean(-1)
    covariance = law_of(found.family, found.parameters).covariance()
    np.testing.assert_allclose(covariance, variance[:, None, None] * np.eye(3), rtol=1e-5, atol=1e-9)
    assert "--isotropic" in run(*paths, "--output", tmp_path / "f.xyz").output


def test_members_with_uncertainties(tmp_path, draw):
    """Law of total variance, against draws from the mixture."""
    paths = members(tmp_path, 3, draw)
    assert run(*paths, "--output", tmp_path / "e.xyz").exit_code == 0
    found, read = read_predictions(tmp_path / "e.xyz"), [read_predictions(path) for path in paths]
    laws = [law_of(E2IP, member.parameters) for member in read]
    spread = np.stack([np.cov(forces(paths)[:, i].T) for i in range(sum(SIZES))])
    covariance = law_of(found.family, found.parameters).covariance()
    np.testing.assert_allclose(
        covariance, spread + np.mean([law.covariance() for law in laws], 0), rtol=1e-5, atol=1e-9
    )
    epistemic = np.mean([law.epistemic_std() ** 2 for law in laws], 0) + np.trace(spread, axis1=1, axis2=2) / 3
    np.testing.assert_allclose(
        law_of(found.family, found.parameters).epistemic_std() ** 2, epistemic, rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(found.leverage, 2.0)
    # In the file each part has the shape that it has, not that of the whole.
    columns = {
        name: np.concatenate([atoms.arrays[name] for atoms in ase.io.read(tmp_path / "e.xyz", ":")])
        for name in ("forces_aleatoric_cov", "forces_epistemic_cov", "forces_epistemic_std")
    }
    parts = [E2IP.derive({name: torch.from_numpy(x) for name, x in member.parameters.items()}) for member in read]
    means = [np.mean([part[f"forces_{kind}_cov"].numpy() for part in parts], 0) for kind in ("aleatoric", "epistemic")]
    aleatoric, disagreement = (columns[name].reshape(-1, 3, 3) for name in list(columns)[:2])
    np.testing.assert_allclose(aleatoric, means[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(disagreement, means[1] + spread, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(columns["forces_epistemic_std"] ** 2, epistemic, rtol=1e-5, atol=1e-7)


def test_members_whose_distributions_are_not_around_their_forces(tmp_path):
    """Family eip: the mixture's mean is the mean of the members' means."""
    paths = members(tmp_path, 4)
    for k, path in enumerate(paths):
        frames = ase.io.read(path, ":")
        for atoms in frames:
            atoms.info["MACE_uq_family"] = "nig"
            columns = {"shift": 0.1 * k, "log_scale2": 2 * np.log(0.14), "dof": 6.0, "epistemic_share": 0.5}
            for name, value in columns.items():
                atoms.new_array(f"MACE_eip_{name}", np.full((len(atoms), 3), value))
        ase.io.write(path, frames, format="extxyz")
    assert run(*paths, "--output", tmp_path / "e.xyz").exit_code == 0
    found, of_members = read_predictions(tmp_path / "e.xyz"), forces(paths) + 0.1 * np.arange(4)[:, None, None]
    np.testing.assert_allclose(found.forces, of_members.mean(0), atol=1e-7)
    spread = np.stack([np.cov(of_members[:, i].T) for i in range(sum(SIZES))])
    covariance = law_of(found.family, found.parameters).covariance()
    np.testing.assert_allclose(covariance, spread + 0.14**2 * 6 / 4 * np.eye(3), rtol=1e-5, atol=1e-8)


def test_copies_of_a_frame_are_written_once(tmp_path):
    """NequIP's writer appends where a test is run twice."""
    paths = members(tmp_path, 5)
    run(*paths, "--output", tmp_path / "once.xyz")
    for path in paths[:3]:
        path.write_text(path.read_text() * 2)
    result = run(*paths, "--output", tmp_path / "e.xyz")
    assert result.exit_code == 0 and "member0.xyz: 3 frames are there more than once" in result.output
    assert (tmp_path / "e.xyz").read_text() == (tmp_path / "once.xyz").read_text()


def test_an_ensemble_has_a_name_by_its_members(tmp_path, draw):
    def name(paths):
        assert run(*paths, "--output", tmp_path / "e.xyz", "--overwrite").exit_code == 0
        return read_predictions(tmp_path / "e.xyz").uq_model

    paths = members(tmp_path, 3, draw)
    assert name(paths) is None
    for k, path in enumerate(paths[:2]):
        frames = ase.io.read(path, ":")
        for atoms in frames:
            atoms.info["MACE_uq_model"] = f"readout-{k}"
        ase.io.write(path, frames, format="extxyz")
    copy = tmp_path / "copy.xyz"
    frames = ase.io.read(paths[0], ":")
    for atoms in frames:  # written by another tool, with other digits
        atoms.arrays["MACE_forces"] += 1e-6
    ase.io.write(copy, frames, format="extxyz")
    result = run(*paths, copy, "--output", tmp_path / "f.xyz")
    assert result.exit_code == 2 and "copy.xyz are of one model, readout-0" in " ".join(result.output.split())
    first = name(paths)
    assert first.startswith("ensemble-") and first == name(paths[::-1]) != name(paths[:2])
    frames = ase.io.read(paths[0], ":")
    for atoms in frames:
        atoms.info["MACE_uq_calibration"] = "one.json"
    ase.io.write(paths[0], frames, format="extxyz")
    assert name(paths) != first


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
def test_few_members_are_told(tmp_path, count):
    result = run(*members(tmp_path, count), "--output", tmp_path / "e.xyz")
    assert result.exit_code == 0 and f"covariances of {count} members have no full rank" in result.output
    (model,) = load_models([tmp_path / "e.xyz"])
    assert np.isfinite(model.scores["nll"]).all()


def test_isolated_atoms_are_certain(tmp_path):
    """Every model has their force."""
    paths = members(tmp_path, 5)
    for path in paths:
        alone = ase.Atoms("C", cell=np.eye(3) * 9.0, pbc=True, info={"REF_energy": -1.0, "MACE_energy": -1.0})
        alone.arrays |= {"REF_forces": np.zeros((1, 3)), "MACE_forces": np.zeros((1, 3))}
        ase.io.write(path, [alone, *ase.io.read(path, ":")], format="extxyz")
    result = run(*paths, "--output", tmp_path / "e.xyz")
    assert result.exit_code == 0 and "1 atoms whose force vanishes by symmetry" in result.output
    found = read_predictions(tmp_path / "e.xyz")
    std = law_of(found.family, found.parameters).total_std()
    assert std[0] == pytest.approx(1e-3 * np.sqrt(np.square(std[1:]).mean()), rel=1e-3)


def test_frames_keep_their_charge(tmp_path):
    """Else the states of one geometry are one frame with several predictions."""
    paths = members(tmp_path, 4)
    for path in paths:
        frames = ase.io.read(path, ":")
        for charge, atoms in enumerate(frames[:2]):
            atoms.info["charge"] = charge
        ase.io.write(path, frames, format="extxyz")
    assert run(*paths, "--output", tmp_path / "e.xyz").exit_code == 0
    assert [atoms.info.get("charge") for atoms in ase.io.read(tmp_path / "e.xyz", ":")] == [0, 1, None]


def test_a_member_whose_leverage_was_never_fitted_has_none(tmp_path, draw):
    paths = members(tmp_path, 3, draw)
    frames = ase.io.read(paths[1], ":")
    for atoms in frames:
        atoms.arrays["MACE_e2ip_leverage"][:] = -1.0
    ase.io.write(paths[1], frames, format="extxyz")
    result = run(*paths, "--output", tmp_path / "e.xyz")
    assert result.exit_code == 0 and "leverage never fitted" in " ".join(result.output.split())
    np.testing.assert_allclose(read_predictions(tmp_path / "e.xyz").leverage, 2.0)


def test_members_need_no_references(tmp_path):
    """The same but for them; what tells whether frames are the same is then positions, wherever the origin is."""
    paths = members(tmp_path, 4)
    assert run(*paths, "--output", tmp_path / "labelled.xyz").exit_code == 0
    for i, path in enumerate(paths):
        frames = ase.io.read(path, ":")
        for atoms in frames:
            del atoms.arrays["REF_forces"]
            atoms.positions += i
        ase.io.write(path, frames, format="extxyz")
    assert run(*paths, "--output", tmp_path / "bare.xyz").exit_code == 0
    labelled, bare = (ase.io.read(tmp_path / name, ":") for name in ("labelled.xyz", "bare.xyz"))
    for a, b in zip(labelled, bare, strict=True):
        assert "REF_forces" in a.arrays and "REF_forces" not in b.arrays
        np.testing.assert_array_equal(a.arrays["forces_cov"], b.arrays["forces_cov"])
    frames[1].positions[0] += 0.1
    ase.io.write(paths[3], frames, format="extxyz")
    result = run(*paths, "--output", tmp_path / "wrong.xyz")
    assert result.exit_code == 2 and "the positions of frame 1 differ" in result.output.replace("\n", " ")


def test_bad_input(tmp_path):
    paths = members(tmp_path, 4)
    output = tmp_path / "e.xyz"

    def message(*arguments):
        result = run(*arguments)
        assert result.exit_code == 2 and not output.exists()
        return result.output.replace("\n", " ")

    assert "at least two members, got 1" in message(paths[0], "--output", output)
    assert "is given twice" in message(paths[0], paths[1], paths[0], "--output", output)
    assert "no such file" in message(paths[0], tmp_path / "none.xyz", "--output", output)
    assert "is a file that this command reads" in message(*paths, "--output", paths[1], "--overwrite")
    assert "frames go into an extxyz file" in message(*paths, "--output", tmp_path / "e.traj")
    assert "there is no folder" in message(*paths, "--output", tmp_path / "nowhere" / "e.xyz")
    (tmp_path / "other").mkdir()
    other = members(tmp_path / "other", 1, seed=1)
    assert "the reference forces of frame 0 differ" in message(paths[0], *other, "--output", output)
    copy = tmp_path / "copy.xyz"
    copy.write_text(paths[0].read_text())
    assert "have the same forces, all of them" in message(*paths, copy, "--output", output)
    alike = ase.io.read(paths[0], ":")
    alike[1].arrays["MACE_forces"] = ase.io.read(paths[1], 1).arrays["MACE_forces"]
    ase.io.write(copy, alike, format="extxyz")
    assert "the same forces for 7 atoms, first in frame 1" in message(paths[1], copy, "--output", output)
    output.write_text("mine")
    result = run(*paths, "--output", output)
    assert result.exit_code == 2 and "is there already" in result.output and output.read_text() == "mine"
    assert run(*paths, "--output", output, "--overwrite").exit_code == 0
