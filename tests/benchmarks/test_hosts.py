"""The benchmark inside MACE and NequIP: its systems, its tables, and one quick run. No time is asserted."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts.py"


@pytest.fixture(scope="module")
def hosts(load_script):
    """benchmarks/hosts.py as a module."""
    return load_script("benchmarks/hosts.py")


@pytest.mark.parametrize("molecules", [8, 64, 200])
def test_water_is_water(hosts, molecules):
    name, box = hosts.make_system(3 * molecules)
    assert name == f"water, {3 * molecules} atoms"
    grams_per_cm3 = box.get_masses().sum() / box.get_volume() / 0.602214
    assert grams_per_cm3 == pytest.approx(0.997, rel=1e-3)
    assert str(box.symbols) == "OH2" * molecules
    # Intact molecules: bonds of the right length and angle, not broken by the jitter.
    positions = box.positions.reshape(-1, 3, 3)
    arms = positions[:, 1:] - positions[:, :1]
    lengths = np.linalg.norm(arms, axis=-1)
    np.testing.assert_allclose(lengths, 0.9572, rtol=1e-9)
    cosines = (arms[:, 0] * arms[:, 1]).sum(-1) / lengths.prod(-1)
    np.testing.assert_allclose(np.degrees(np.arccos(cosines)), 104.52, rtol=1e-9)
    assert np.array_equal(hosts.make_system(3 * molecules)[1].positions, box.positions)


def test_the_molecule_without_data_is_water(hosts, monkeypatch):
    monkeypatch.delenv("E2IP_DATA", raising=False)
    name, frame = hosts.make_system(21)
    assert (name, len(frame), frame.pbc.any()) == ("7 water molecules", 21, False)


def test_every_round_times_every_call(hosts):
    names = []
    calls = {name: lambda name=name: names.append(name) for name in ("baseline", "e2ip")}
    times = hosts.alternate(calls, 20)
    assert names[:2] == ["baseline", "e2ip"]
    assert all(set(names[i : i + 2]) == set(calls) for i in range(0, 42, 2))
    assert all(len(values) == 20 for values in times.values())


def result(atoms, baseline, overhead, **changes):
    """A result as the measurement writes it, with times in seconds."""
    times = {"baseline": [baseline] * 15, "e2ip": [baseline + overhead] * 15, "committee": [5 * baseline] * 15}
    entry = {"system": f"water, {atoms} atoms", "atoms": atoms, "periodic": True, "mode": "eager", "task": "inference"}
    memory = {"baseline": [100, 101, 99], "e2ip": [104, 104, 104], "committee": [100, 100, 100]}
    return {**entry, "times": times, "memory": memory, **changes}


def test_table_and_plot(hosts, tmp_path):
    about = {"host": "mace", "device": "cpu", "size": "full", "kernel": "auto", "cutoff": 0.0}
    failed = {"system": "x", "mode": "script", "task": "inference", "failed": "the reason"}
    results = [result(192, 0.2, 0.01, inside=[0.01]), result(1920, 2, 0.1, inside=[0.1]), failed]
    del results[1]["times"]["committee"]
    (tmp_path / "a.json").write_text(json.dumps({"mace": about | {"results": results}, "other": {}}))
    options = ["--only", "mace", "--plot", f"{tmp_path}/a.png", "--out", f"{tmp_path}/a.md"]
    hosts.main(["--table", f"{tmp_path}/a.json", *options])
    text = (tmp_path / "a.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| water, 192 atoms"))
    cells = [cell.strip().split(" ")[0] for cell in row.strip("|").split("|")]
    assert cells[1:] == ["15", "200", "210", "1000", "1.04", "1.09", "5.21", "1.050", "4.762", "1.040"]
    assert "- x, script, inference: the reason" in text
    assert "over boxes of water: 1.00;" in text and "| 1920 | 100 (100–100) | 52.1 | 5.00% |" in text
    assert (tmp_path / "a.png").stat().st_size > 0


def test_rounds_of_several_processes_count_together(hosts):
    def processes():
        return [{"results": [result(21, 1.0, overhead)]} for overhead in (0.1, 0.2, 0.3)]

    assert "by_process" not in hosts.joined(processes()[:1])["results"][0]
    (joined,) = hosts.joined(processes())["results"]
    assert joined["by_process"] == pytest.approx([1.1, 1.2, 1.3])
    assert all(len(times) == 45 for times in joined["times"].values())
    assert hosts.ratio(joined["times"]) == pytest.approx(1.2)
    assert "processes 1.100 to 1.300" in hosts.summary(joined)
    dead = {"task": "inference", "failed": "the reason"}
    assert hosts.joined([*processes(), {"results": [dead]}])["results"][0]["failed"] == "the reason"


@pytest.mark.nightly
@pytest.mark.parametrize(("host", "package"), [("nequip", "nequip"), ("mace", "mace")])
def test_quick_run(host, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    out = tmp_path / "quick.json"
    command = [sys.executable, SCRIPT, "--host", host, "--quick", "--systems", "24", "--rounds", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    inference, training = json.loads(out.read_text())["quick"]["results"]
    assert (inference["task"], training["task"]) == ("inference", "training")
    for measured in (inference, training):
        assert "failed" not in measured, measured
        assert all(len(times) == 2 and min(times) > 0 for times in measured["times"].values())
        assert len(measured["times"]) == 3
        if sys.platform.startswith("linux"):
            assert all(len(peaks) == 3 and min(peaks) >= 0 for peaks in measured["memory"].values())
    assert len(inference["inside"]) == 2 and min(inference["inside"]) > 0
