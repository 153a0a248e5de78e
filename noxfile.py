"""Environments, tests and the demo; needs Python 3.10 or newer and a network, nothing else.

    python3 noxfile.py -s demo     # train, evaluate and compare in both frameworks
    python3 noxfile.py -s tests    # lint, types, and the tests in both environments
    python3 noxfile.py -l          # every session

Without nox the file makes itself a small environment (.venv-nox) that has it; with nox, ``nox -s demo`` is the same.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv-nox"


def run_with_own_nox() -> None:
    """Run this file's sessions with the nox of ``.venv-nox``, made first where it is missing; does not return."""
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if subprocess.run([python, "-c", "import nox"], capture_output=True).returncode if python.exists() else True:
        print(f"nox is not installed: making {VENV.name} for it", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV])
        if made.returncode:
            sys.exit(
                "Python's venv module failed. On Debian and Ubuntu install the package python3-venv "
                "(or python3-virtualenv and pip's nox), then run the command again."
            )
        subprocess.run([python, "-m", "pip", "install", "--quiet", "nox>=2025.2.9"], check=True)
    sys.exit(subprocess.run([python, "-m", "nox", "-f", ROOT / "noxfile.py", *sys.argv[1:]]).returncode)


if sys.version_info < (3, 10):  # noqa: UP036 - nothing has checked it before
    sys.exit(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}: {sys.executable}")
try:
    import nox
    from packaging.requirements import Requirement  # comes with nox
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    run_with_own_nox()
if __name__ == "__main__":
    sys.exit(subprocess.run([sys.executable, "-m", "nox", "-f", ROOT / "noxfile.py", *sys.argv[1:]]).returncode)

nox.needs_version = ">=2025.2.9"
nox.options.reuse_venv = "yes"
# Not uv: pip's environment variables are how a machine chooses its torch build.
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests"]

CONSTRAINED = ("-c", "constraints.txt")
# Two processes with one thread each use two cores better than one process with two threads does on small molecules.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Examples in the docstrings of the installed core. Triton kernels cannot be imported without Triton.
EXAMPLES = ("--doctest-modules", "--ignore-glob=*/triton_*.py", "--pyargs", "e2ip_plugins")
HOSTS = ("nequip", "mace")
#: Releases that the session `matrix` tries, in the table of docs/reference/releases.md; the newest with more Pythons.
RELEASES = {
    "mace": ("0.3.13", "0.3.14", "0.3.15", "0.3.16"),
    "nequip": ("0.16.2", "0.17.1", "0.18.0", "0.19.0", "0.19.1"),
}
PYTHONS = ("3.10", "3.12", "3.13")
#: What else a release needs: nequip-allegro 0.8 wants NequIP 0.18.
WITH_RELEASE = {("nequip", "0.16.2"): ("nequip-allegro<0.8",), ("nequip", "0.17.1"): ("nequip-allegro<0.8",)}
MATRIX = [
    *(nox.param(None, host, release, id=f"{host}='{release}'") for host in RELEASES for release in RELEASES[host]),
    *(
        nox.param(python, host, releases[-1], id=f"{host}='{releases[-1]}', python='{python}'")
        for host, releases in RELEASES.items()
        for python in PYTHONS
    ),
]
#: The contract test of each host.
CONTRACT = {"mace": "tests/mace_ext/test_seams.py", "nequip": "tests/nequip_ext/test_contract.py"}
#: Tests that run in one environment: the core imports no host, and torch is the same in both.
CORE = ("tests/core", "tests/demo", "tests/benchmarks")
#: Those of them that use the host which is installed.
WITH_HOST = ("tests/benchmarks/test_bench.py", "tests/benchmarks/test_hosts.py")
#: Folder of each host environment's commands, known once its session has run.
COMMANDS: dict[str, Path] = {}


def install_host(session: nox.Session, host: str) -> None:
    """Install torch, then this project with the extra ``host``, into the session's environment.

    A wheel is built and installed, nothing editable: what is tested is what users get.
    """
    known = any(Path(session.virtualenv.location).glob("lib/python*/site-packages/torch"))
    if not known:
        session.log(f"First use of the {host} environment: downloading torch and {host} takes some minutes")
    session.install(*CONSTRAINED, "torch", silent=known)
    session.install(*CONSTRAINED, f".[{host}]", silent=known)
    COMMANDS[host] = Path(session.bin)


def group(name: str) -> tuple[str, ...]:
    """Requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def run_demo(session: nox.Session, host: str) -> None:
    """Run one host's half of the demo; arguments after ``--`` go to demo/run.py."""
    session.run(COMMANDS[host] / "python", "demo/run.py", host, *session.posargs, external=True)


def run_pytest(session: nox.Session, commands: Path, chosen: list[str], *options: str) -> None:
    """Run tests and the core's docstring examples, two at a time, with the commands of an environment."""
    pytest = [commands / "pytest", "-n", "2", "--dist", "loadfile", "--durations", "10", *options]
    # Tests start the hosts' commands by name.
    path = os.pathsep.join((str(commands), os.environ["PATH"]))
    # A host may have no nightly test (5: none was selected).
    passes = [0, 5] if "nightly" in options else [0]
    session.run(*pytest, *chosen, env={**ONE_THREAD, "PATH": path}, external=True, success_codes=passes)


def run_tests(session: nox.Session, host: str, marked: str = "not nightly") -> None:
    """Run the host's tests in its environment, with MACE the core's, too; arguments after ``--`` replace the choice."""
    own = group(f"test-{host}")
    tools = ("-m", "pip", "install", "--quiet", *CONSTRAINED, *group("test"), *own)
    session.run_install(COMMANDS[host] / "python", *tools, external=True)
    of_core = [*EXAMPLES, *CORE] if host == "mace" else WITH_HOST
    run_pytest(session, COMMANDS[host], session.posargs or [*of_core, f"tests/{host}_ext"], "-m", marked)


@nox.session(venv_backend="none", requires=["demo_nequip", "demo_mace"])
def demo(session: nox.Session) -> None:
    """Train a baseline and an e²IP model in both frameworks, evaluate, compare (10 minutes on two idle cores)."""
    session.log("Tables and figures: runs/demo/nequip and runs/demo/mace")


@nox.session(venv_backend="none", requires=["lint", "types", "tests_nequip", "tests_mace", "docs"])
def tests(session: nox.Session) -> None:
    """Lint, types, all tests but the nightly ones in both environments, and the site without a warning."""


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, and which wing of the package imports from which (seconds)."""
    session.install(*CONSTRAINED, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")


@nox.session(requires=["mace"])
def types(session: nox.Session) -> None:
    """Check the types of core and adapters with mypy, against the torch of the MACE environment."""
    session.install(*CONSTRAINED, "mypy")
    session.run("mypy", "--python-executable", str(COMMANDS["mace"] / "python"))


@nox.session(default=False)
def nequip(session: nox.Session) -> None:
    """Make or refresh the NequIP environment, .nox/nequip."""
    install_host(session, "nequip")


@nox.session(default=False)
def mace(session: nox.Session) -> None:
    """Make or refresh the MACE environment, .nox/mace."""
    install_host(session, "mace")


@nox.session(venv_backend="none", requires=["nequip"])
def demo_nequip(session: nox.Session) -> None:
    """Run the NequIP half of the demo."""
    run_demo(session, "nequip")


@nox.session(venv_backend="none", requires=["mace"])
def demo_mace(session: nox.Session) -> None:
    """Run the MACE half of the demo."""
    run_demo(session, "mace")


@nox.session(venv_backend="none", requires=["nequip"])
def tests_nequip(session: nox.Session) -> None:
    """Run NequIP's tests in NequIP's environment; arguments after -- go to pytest."""
    run_tests(session, "nequip")


@nox.session(venv_backend="none", requires=["mace"])
def tests_mace(session: nox.Session) -> None:
    """Run core and MACE tests in the MACE environment; arguments after -- go to pytest."""
    run_tests(session, "mace")


@nox.session(venv_backend="none", default=False, requires=["nequip", "mace"])
@nox.parametrize("host", [nox.param(host, id=host) for host in HOSTS])
def nightly(session: nox.Session, host: str) -> None:
    """Run the tests marked as nightly: slow ones that guard little."""
    run_tests(session, host, "nightly")


def oldest_versions(host: str) -> list[str]:
    """Return the lower bounds of the dependencies in pyproject.toml, with the extra ``host``, as exact versions."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    requirements = map(Requirement, [*project["dependencies"], *project["optional-dependencies"][host]])
    return [f"{r.name}=={bound.version}" for r in requirements for bound in r.specifier if bound.operator == ">="]


@nox.session(default=False, python="3.10")
@nox.parametrize("host", [nox.param(host, id=host) for host in HOSTS])
def oldest(session: nox.Session, host: str) -> None:
    """Run the tests with the oldest Python and dependencies that pyproject.toml allows (gigabytes per host)."""
    tools = [tool for tool in group("test") if not tool.startswith("triton")]
    session.install(*oldest_versions(host), f".[{host}]", *tools)
    # CUDA builds pin a Triton that our kernels do not compile with (3.2; 3.3 neither): there users get the eager path.
    session.run_install("python", "-m", "pip", "uninstall", "--yes", "--quiet", "triton")
    # Other releases of torch than the other host's.
    run_pytest(session, Path(session.bin), session.posargs or [*CORE, f"tests/{host}_ext"], "-m", "not nightly")


@nox.session(default=False)
@nox.parametrize("python,host,release", MATRIX)
def matrix(session: nox.Session, host: str, release: str) -> None:
    """Try releases of the hosts: contract tests, trainings of one epoch, predictions (gigabytes for each).

    One of them is ``-s "matrix(mace='0.3.14')"``. Results and models stay in runs/releases, where each release opens
    the models of the others; docs/reference/releases.md has the table. A Python that is not installed is skipped.
    """
    session.install(*CONSTRAINED, "torch")
    requirement = {"mace": "mace-torch", "nequip": "nequip"}[host]
    further = (*group("test"), *(group("test-nequip") if host == "nequip" else ()))
    pinned = WITH_RELEASE.get((host, release))
    further = tuple(tool for tool in further if not (pinned and tool.startswith("nequip-allegro")))
    session.install(*CONSTRAINED, f"{requirement}=={release}", f".[{host}]", *further, *(pinned or ()))
    pytest = ("pytest", "-q", "-m", "not nightly", CONTRACT[host])
    session.run(*pytest, *session.posargs, env=ONE_THREAD)
    session.run("python", "benchmarks/releases.py", host, env=ONE_THREAD)


@nox.session(venv_backend="none", default=False, requires=["nequip", "mace"])
def calibration(session: nox.Session) -> None:
    """Train what benchmarks/results still lacks for docs/evidence/calibration.md and write the tables.

    Takes hours, resumes what was interrupted; data from E2IP_DATA. Arguments after -- go to `e2ip bench`.
    """
    out = ROOT / "runs" / "bench"
    for host, folder in COMMANDS.items():
        tools = ("-m", "pip", "install", "--quiet", *CONSTRAINED, *group("active-learning"))
        session.run(folder / "python", *tools, external=True)
        for table, name in (("forces", "forces"), ("calibration", "calibration"), ("leverage", "calibration")):
            bench = (folder / "e2ip", "bench", table, "--host", host, "--preset", "calibration", "--out", out)
            results = ("--results", ROOT / "benchmarks" / "results" / f"{name}.json")
            session.run(*bench, *results, *session.posargs, external=True)
        models = [p.parent for kind in ("e2ip", "e2ip-fit") for p in out.glob(f"runs/*_{host}_{kind}_s*/finished")]
        session.run(folder / "python", "benchmarks/leverage_tables.py", *models, external=True)


@nox.session(venv_backend="none", default=False, requires=["nequip", "mace"])
def cost(session: nox.Session) -> None:
    """Measure what the readout costs, alone and in both hosts (hours); arguments after -- go to benchmarks/hosts.py."""
    out = ROOT / "runs"
    kernel = ("benchmarks/kernel.py", "--out", out / "kernel.json")
    session.run(COMMANDS["mace"] / "python", *kernel, env=ONE_THREAD, external=True)
    results = {host: out / f"hosts_{host}.json" for host in COMMANDS}
    modes = {"nequip": "eager,compile,aoti", "mace": "eager,script"}
    for host, path in results.items():
        hosts = ("benchmarks/hosts.py", "--host", host, "--modes", modes[host], "--out", path)
        session.run(COMMANDS[host] / "python", *hosts, *session.posargs, external=True)
    table = ("--table", *results.values(), "--out", out / "hosts.md", "--plot", out / "hosts.png")
    session.run(COMMANDS["mace"] / "python", "benchmarks/hosts.py", *table, external=True)


@nox.session(venv_backend="none", default=False, requires=["mace"])
def active_learning(session: nox.Session) -> None:
    """Three rounds of active learning on the demo's molecule with GFN2-xTB (hours; goes on where it was)."""
    python = COMMANDS["mace"] / "python"
    session.run(python, "-m", "pip", "install", "--quiet", *CONSTRAINED, *group("active-learning"), external=True)
    session.run(python, "benchmarks/active_learning.py", *session.posargs, external=True)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Try other people's tools (docs/howto/other-tools.md) in an environment of their own; gigabytes.

    Arguments after -- go to benchmarks/clients.py.
    """
    session.install(*CONSTRAINED, "torch")
    session.install(*CONSTRAINED, ".[mace]", *group("clients"))
    session.run("python", "benchmarks/clients.py", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
@nox.parametrize("host", [nox.param(host, id=host) for host in HOSTS])
def package(session: nox.Session, host: str) -> None:
    """Build wheel and sdist, check both, and use the wheel as users do in an environment without anything else."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    folder.mkdir()
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", folder / "dist", silent=True)
    files = sorted((folder / "dist").iterdir())
    session.run("twine", "check", "--strict", *files)
    (wheel,) = (folder / "dist").glob("*.whl")
    session.run("python", "-m", "venv", folder / "empty")
    python = folder / "empty" / "bin" / "python"
    session.run(python, "-m", "pip", "install", "--quiet", *CONSTRAINED, f"{wheel}[{host}]", external=True)
    # Nothing of the repository may be imported, nor installed for the user.
    session.chdir(folder)
    tour = (python, "-I", ROOT / "demo" / "first_steps.py", host, ROOT / "demo" / "data", folder / "first_steps")
    session.run(*tour, env={**ONE_THREAD, "PYTHONNOUSERSITE": "1"}, external=True)


@nox.session(venv_backend="none", default=False, requires=["nequip"])
def docs(session: nox.Session) -> None:
    """Build docs/_build/html with the kept results of the tutorials (a minute)."""
    build = ROOT / "docs" / "_build"
    pip = ("-m", "pip", "install", "--quiet", *CONSTRAINED, *group("docs"))
    session.run_install(COMMANDS["nequip"] / "python", *pip, external=True)
    # Everything is read again, so that every warning shows, and is an error.
    site = ("-m", "sphinx", "-E", "-W", "--keep-going", "-q", "docs", build / "html")
    session.run(COMMANDS["nequip"] / "python", *site, env=ONE_THREAD, external=True)
    session.log(f"The site: {build / 'html' / 'index.html'}")


@nox.session(venv_backend="none", default=False, requires=["nequip", "mace"])
def tutorials(session: nox.Session) -> None:
    """Execute the tutorials anew and keep their results (half an hour); -- --check compares with the kept ones."""
    build = ROOT / "docs" / "_build"
    for host, commands in COMMANDS.items():
        wanted = [*group("kernel"), *group("docs" if host == "nequip" else "active-learning")]
        pip = ("-m", "pip", "install", "--quiet", *CONSTRAINED, *wanted)
        session.run_install(commands / "python", *pip, external=True)
        # Cells run the host's commands by name.
        path = os.pathsep.join((str(commands), os.environ["PATH"]))
        kernel = ("--prefix", build, "--name", f"e2ip-{host}", "--env", "PATH", path)
        session.run(commands / "python", "-m", "ipykernel", "install", *kernel, external=True, silent=True)
    env = {**ONE_THREAD, "JUPYTER_PATH": str(build / "share" / "jupyter")}
    session.run(COMMANDS["nequip"] / "python", "docs/run_tutorials.py", *session.posargs, env=env, external=True)


@nox.session(default=False)
def make_data(session: nox.Session) -> None:
    """Make the demo's data anew with GFN2-xTB (6 minutes); arguments after -- go to demo/make_data.py."""
    session.install("tblite==0.8.0", "ase==3.29.0")
    session.run("python", "demo/make_data.py", *session.posargs, env=ONE_THREAD)
