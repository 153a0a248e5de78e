"""The import hook: there for the stock commands, invisible to everything else."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

START_UP = "import sys; started = set(sys.modules); "


def python(code, *options, **environment):
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_start_up_loads_the_standard_library_only():
    loaded = python(START_UP + "print(*started)")
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"__main__"}
    # Other packages may have start-up files of their own; ours brings these modules.
    assert "mace_ext" in foreign
    ours = {"mace_ext", "mace_ext._hook", "mace_ext.switch"}
    assert {name for name in loaded if name.startswith(("mace_ext", "e2ip", "mace"))} == ours
    assert not foreign & {"torch", "numpy", "ase", "e3nn", "mace"}


def test_the_hook_adds_no_module_to_start_up_but_itself():
    with_hook = set(python(START_UP + "print(*started)"))
    without = set(python(START_UP + "print(*started)", E2IP_DISABLE="1"))
    assert with_hook == without


def test_disabled_by_environment():
    names = "print(*(type(f).__module__ for f in sys.meta_path))"
    assert "mace_ext._hook" in python("import sys; " + names)
    assert "mace_ext._hook" not in python("import sys; " + names, E2IP_DISABLE="1")


def test_installing_twice_adds_one_finder():
    code = "import sys, mace_ext._hook as h; h.install(); h.install(); "
    assert python(code + "print(sum(type(f) is h._Finder for f in sys.meta_path))") == ["1"]


def test_start_up_files_are_installed_at_the_root():
    installed = {str(path): path.locate() for path in metadata.files("e2ip-plugins")}
    assert Path(installed["e2ip_plugins_mace.start"]).read_text().splitlines()[-1] == "mace_ext._hook:install"
    lines = Path(installed["e2ip_plugins_mace.pth"]).read_text().splitlines()
    # site executes lines that begin with "import ", one at a time.
    assert len(lines) == 1 and lines[0].startswith("import ")


def test_start_up_line_is_silent_without_the_package(tmp_path):
    line = Path(metadata.distribution("e2ip-plugins").locate_file("e2ip_plugins_mace.pth")).read_text()
    script = tmp_path / "line.py"
    script.write_text(line)
    done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_modules_get_their_own_loader_back():
    from importlib.machinery import SourceFileLoader

    from mace.tools import checkpoint

    assert type(checkpoint.__loader__) is type(checkpoint.__spec__.loader) is SourceFileLoader


def test_python_dash_m_runs_the_patched_command(tmp_path):
    """`python -m` executes code as __main__, which no import hook could patch: it runs the imported module."""
    command = [sys.executable, "-m", "mace.cli.eval_configs", "--configs=none", "--model=none"]
    done = subprocess.run([*command, f"--output={tmp_path}/no/x.xyz"], capture_output=True, text=True)
    # Our message, not the stock traceback.
    assert done.returncode == 2
    assert "mace_eval_configs: error:" in done.stderr


def test_fallback_command_works_without_start_up_files():
    """Where .pth files are not read, `python -m mace_ext.run` installs the hook itself."""
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert "mace_ext._hook" not in python("import sys; print(*sys.modules)", "-S", **path)
    command = [sys.executable, "-S", "-m", "mace_ext.run", "mace_run_train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path})
    assert done.returncode == 0, done.stderr
    assert "--e2ip_preset" in done.stdout
