"""The benchmark inside the hosts: its systems, its report, and one quick run per host. No time is asserted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts.py"


@pytest.fixture(scope="module")
def hosts(load_script):
    """benchmarks/hosts.py as a module; its package `host_cost` can be imported with it."""
    return load_script("benchmarks/hosts.py")


@pytest.mark.parametrize("molecules", [8, 64, 200])
def test_water_is_water(hosts, molecules):
    from host_cost.systems import water_box

    box = water_box(molecules)
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
    assert np.array_equal(water_box(molecules).positions, box.positions)


def test_the_molecule_without_data_is_water(hosts, monkeypatch):
    from host_cost.systems import make_system

    monkeypatch.delenv("E2IP_DATA", raising=False)
    name, frame = make_system(21)
    assert (name, len(frame), frame.pbc.any()) == ("7 water molecules", 21, False)


def test_every_round_times_every_function_and_messages_are_rare(hosts):
    from host_cost.measure import time_interleaved

    calls, messages = [], []
    functions = {name: lambda name=name: calls.append(name) for name in ("baseline", "e2ip")}
    times = time_interleaved(functions, 20, 600.0, "cpu", warm_up=1, progress=messages.append)
    assert calls[:2] == ["baseline", "e2ip"]
    assert all(set(calls[i : i + 2]) == set(functions) for i in range(0, 42, 2))
    assert all(len(times[name][clock]) == 20 for name in functions for clock in ("wall", "cpu"))
    assert 1 <= len(messages) < 42


def result(atoms, baseline, overhead, noise, rounds=15, **changes):
    """A result as the measurement writes it, with times in seconds."""
    rng = np.random.default_rng(atoms)
    jitter = noise * rng.normal(size=(3, rounds))
    times = {"baseline": baseline + jitter[0], "e2ip": baseline + overhead + jitter[1], "committee": 5 * baseline}
    times["committee"] += jitter[2]
    entry = {"system": f"water, {atoms} atoms", "atoms": atoms, "periodic": True, "mode": "eager", "task": "inference"}
    entry["times"] = {name: {"wall": list(t), "cpu": list(t)} for name, t in times.items()}
    entry["memory"] = {"baseline": [100, 101, 99], "e2ip": [104, 104, 104], "committee": [100, 100, 100]}
    return {**entry, **changes}


def test_exponent_and_its_interval(hosts):
    from host_cost.report import exponent

    sizes = (192, 600, 1500, 3000)
    found = exponent([result(n, 1e-3 * n, 2e-5 * n**1.1, 1e-5 * n) for n in sizes], "wall")
    assert found["interval"][0] < 1.1 < found["interval"][1]
    assert found["exponent"] == pytest.approx(1.1, abs=0.1)


def test_overhead_within_noise_is_not_fitted(hosts):
    from host_cost.report import exponent

    results = [result(192, 0.2, 0.01, 1e-4), result(600, 0.6, 0.03, 1e-4), result(1500, 1.5, 0.0, 0.1)]
    found = exponent(results, "wall")
    assert "from 192, 600 atoms. Within noise: 1500 atoms." in found["text"]
    assert "exponent" not in exponent(results[1:], "wall")


def test_table_and_plot(hosts, tmp_path):
    report = {
        "host": "mace",
        "versions": {"torch": "2"},
        "hardware": "a machine",
        "device": "cpu",
        "threads": 1,
        "kernel": "auto",
    }
    failed = {"system": "x", "mode": "script", "task": "inference", "failed": "the reason"}
    results = [result(192, 0.2, 0.01, 1e-6, inside=[0.01]), result(1920, 2, 0.1, 1e-6, inside=[0.1]), failed]
    del results[1]["times"]["committee"]
    (tmp_path / "a.json").write_text(json.dumps(report | {"dtype": "float32", "results": results}))
    hosts.main(["--table", f"{tmp_path}/a.json", "--plot", f"{tmp_path}/a.png", "--out", f"{tmp_path}/a.md"])
    text = (tmp_path / "a.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| water, 192 atoms"))
    cells = [cell.strip().split(" ")[0] for cell in row.strip("|").split("|")]
    assert cells[1:] == ["15", "200", "210", "1000", "1.04", "1.09", "5.21", "1.050", "4.762", "1.040"]
    assert "- x, script, inference: the reason" in text
    assert "over boxes of water: 1.00;" in text and "| 1920 | 100 (100–100) | 52.1 | 5.00% |" in text
    assert (tmp_path / "a.png").stat().st_size > 0


def test_rounds_of_several_processes_count_together(hosts):
    from host_cost.report import _table

    runs = [{"results": [result(21, 1.0, overhead, 0.0)]} for overhead in (0.1, 0.2, 0.3)]
    rounds = len(runs[0]["results"][0]["times"]["e2ip"]["wall"])
    (found,) = hosts.joined([runs[0]])["results"]
    assert "by_process" not in found and "processes" not in _table([found], "wall")
    (found,) = hosts.joined(runs)["results"]
    assert found["by_process"] == pytest.approx([1.1, 1.2, 1.3])
    assert all(len(clocks["wall"]) == 3 * rounds for clocks in found["times"].values())
    assert hosts.ratio(found["times"]) == pytest.approx(1.2)
    assert "; processes 1.100–1.300 |" in _table([found], "wall") and "processes 1.100 to 1.300" in hosts.summary(found)
    dead = {"task": "inference", "failed": "the reason"}
    assert hosts.joined([*runs, {"results": [dead]}])["results"][0]["failed"] == "the reason"


def test_systems_that_would_not_fit_are_foreseen(hosts):
    from host_cost.settings import Settings

    settings = Settings("mace", "eager", atoms=1920)
    assert hosts.expected_memory([result(192, 1, 0, 0)], settings, "inference") == pytest.approx(1040)
    assert hosts.expected_memory([], settings, "inference") == 0


@pytest.mark.parametrize(("host", "package", "missing"), [("nequip", "nequip", "script"), ("mace", "mace", "aoti")])
def test_quick_run(host, package, missing, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    out = tmp_path / "result.json"
    command = [sys.executable, SCRIPT, "--host", host, "--quick", "--systems", "24", "--out", out]
    done = subprocess.run(
        [*command, "--modes", f"eager,{missing}", "--profile", "--rounds", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    inference, training, unavailable = report["results"]
    assert (inference["task"], training["task"], inference["same_forces"]) == ("inference", "training", True)
    assert "failed" in unavailable
    assert len(inference["inside"]) == 2
    # Of the same calls, whatever else the machine does.
    assert all(0 < part < whole for part, whole in zip(inference["inside"], inference["inside_of"], strict=True))
    for measured in (inference, training):
        assert "failed" not in measured, measured
        assert all(len(times["wall"]) == 2 and min(times["wall"]) > 0 for times in measured["times"].values())
        if sys.platform.startswith("linux"):
            assert all(len(peaks) == 3 and min(peaks) >= 0 for peaks in measured["memory"].values())
        parts = {"e2ip, map to Σ0, ν, κ", "e2ip, trunk", "e2ip, derived keys", "e2ip, all", "baseline, all"}
        assert parts <= set(measured["profile"]["parts"])
    assert training["profile"]["parts"]["e2ip, force loss"]["backward_ops"] > 0
