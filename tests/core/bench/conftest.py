"""A plan of `e2ip bench` without data: rMD17's table for MACE, preset smoke."""

from dataclasses import replace

import pytest

from e2ip_plugins.bench import data, runs
from e2ip_plugins.bench.plan import Options, Plan


@pytest.fixture
def plan_of(tmp_path):
    """Makes a plan of some options, with a folder of its own; ``wanted`` are its runs."""

    def make(wanted=None, name="rmd17", **options):
        plan = Plan.of(Options(name, **{"host": "mace", "out": tmp_path, **options}))
        return plan if wanted is None else replace(plan, runs=tuple(wanted))

    return make


@pytest.fixture
def no_data(monkeypatch):
    for name in ("prepare", "fingerprints"):
        monkeypatch.setattr(data, name, lambda *arguments: {})


@pytest.fixture
def note_of():
    """Writes what `execute` notes of a run before its first stage is finished."""

    def write(run, plan, with_data=False):
        folder = plan.out / "runs" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(runs.json.dumps(runs.settings(run, plan, with_data)))
        return folder

    return write
