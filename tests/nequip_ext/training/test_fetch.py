"""Published data sets as extxyz files, from raw files like those that NequIP's data modules download."""

import ase.io
import numpy as np
from ase.calculators.singlepoint import SinglePointCalculator
from nequip.data.datamodule import MD22DataModule
from typer.testing import CliRunner

from e2ip_plugins.bench import catalogue
from e2ip_plugins.cli import app
from nequip_ext.training import fetch

KCAL_PER_MOL = 0.0433641
RNG = np.random.default_rng(0)


def raw_arrays(count, names):
    values = (RNG.normal(size=(count, 3, 3)), np.array([8, 1, 1]), -1e4 + RNG.normal(size=count))
    return dict(zip(names, (*values, RNG.normal(size=(count, 3, 3))), strict=True))


def all_frames(folder, name):
    return [ase.io.read(folder / name / f"{name}_{label}.extxyz", ":") for label in ("train", "valid", "test")]


def test_rmd17_comes_in_electronvolts_and_every_frame_once(tmp_path):
    raw = raw_arrays(2000, ("coords", "nuclear_charges", "energies", "forces"))
    (tmp_path / "rmd17_aspirin" / "raw" / "rmd17" / "npz_data").mkdir(parents=True)
    np.savez(tmp_path / "rmd17_aspirin" / "raw" / "rmd17" / "npz_data" / "rmd17_aspirin.npz", **raw)
    result = CliRunner().invoke(app, ["fetch", "rmd17_aspirin", "--to", str(tmp_path)])
    assert result.exit_code == 0, result.output
    splits = all_frames(tmp_path, "rmd17_aspirin")
    assert [len(frames) for frames in splits] == [950, 50, 1000]
    energies = np.array([atoms.info["REF_energy"] for frames in splits for atoms in frames])
    np.testing.assert_allclose(np.sort(energies), np.sort(raw["energies"] * KCAL_PER_MOL), rtol=1e-12)
    first = splits[0][0]
    (row,) = np.flatnonzero(np.isclose(raw["energies"] * KCAL_PER_MOL, first.info["REF_energy"], rtol=0, atol=1e-9))
    np.testing.assert_allclose(first.positions, raw["coords"][row], atol=1e-7)
    np.testing.assert_allclose(first.arrays["REF_forces"], raw["forces"][row] * KCAL_PER_MOL, atol=1e-7)
    assert not first.pbc.any() and list(first.numbers) == [8, 1, 1]
    again = CliRunner().invoke(app, ["fetch", "rmd17_aspirin", "--to", str(tmp_path)])
    assert again.exit_code == 2 and "is there already" in " ".join(again.output.split())


def test_md22_is_split_as_published(tmp_path, monkeypatch):
    monkeypatch.setitem(MD22DataModule.dataset_map, "buckyball_catcher", ["raw.npz", 8, 30])
    source = fetch.SOURCES["buckyball"]
    arguments = {**source.arguments, "train_val_split": [6, 2]}
    monkeypatch.setitem(fetch.SOURCES, "buckyball", source._replace(arguments=arguments, test_frames=10))
    (tmp_path / "buckyball" / "raw").mkdir(parents=True)
    np.savez(tmp_path / "buckyball" / "raw" / "raw.npz", **raw_arrays(30, "RzEF"))
    fetch.fetch("buckyball", tmp_path)
    assert [len(frames) for frames in all_frames(tmp_path, "buckyball")] == [6, 2, 10]


def test_water_keeps_its_cell(tmp_path):
    frames = []
    for i in range(20):
        atoms = ase.Atoms("OHH", RNG.normal(size=(3, 3)), cell=np.diag([10.0, 11.0, 12.0]), pbc=True)
        atoms.calc = SinglePointCalculator(atoms)
        atoms.info["TotEnergy"] = -400.0 - i
        atoms.new_array("force", RNG.normal(size=(3, 3)))
        frames.append(atoms)
    (tmp_path / "fullwater" / "raw").mkdir(parents=True)
    ase.io.write(tmp_path / "fullwater" / "raw" / "dataset_1593_eVAng.xyz", frames, format="extxyz")
    fetch.fetch("fullwater", tmp_path, seed=1)
    splits = all_frames(tmp_path, "fullwater")
    assert [len(frames) for frames in splits] == [16, 2, 2]
    assert splits[0][0].pbc.all() and np.allclose(splits[0][0].cell.lengths(), [10, 11, 12])
    assert sorted(atoms.info["REF_energy"] for s in splits for atoms in s) == [-400.0 - i for i in reversed(range(20))]
    assert [a.info["REF_energy"] for a in splits[1]] != [
        a.info["REF_energy"] for a in ase.io.read(fetch.fetch("fullwater", tmp_path, seed=2)[1], ":")
    ]


def test_bad_input(tmp_path, monkeypatch):
    def message(*arguments):
        result = CliRunner().invoke(app, ["fetch", *arguments], env={"E2IP_DATA": None})
        assert result.exit_code == 2
        return " ".join(result.output.split())

    assert "unknown data set 'waters'; choose from: fullwater, buckyball" in message("waters", "--to", str(tmp_path))

    def no_network(self):
        raise OSError("no route to host")

    monkeypatch.setattr(MD22DataModule, "prepare_data", no_network)
    said = message("nanotube", "--to", str(tmp_path))
    assert "cannot be downloaded" in said and "no route to host" in said and "by hand" in said


def test_the_benchmarks_data_sets_can_be_fetched():
    for name in catalogue.FETCHED:
        assert name in fetch.SOURCES
        dataset = catalogue.dataset(name)
        files = {dataset.train, dataset.valid, *dataset.tests.values()}
        assert files == {f"{name}/{name}_{label}.extxyz" for label in ("train", "valid", "test")}
