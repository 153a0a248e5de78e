"""The fused kernels of the readout: when they predict, and in Triton's interpreter, what they predict."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from e2ip_plugins.errors import InputError
from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.maths.kernels import check, paths
from e2ip_plugins.readout.kernels import fused, trial
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

ROOT = Path(__file__).parents[4]
F32, F64, CPU = torch.float32, torch.float64, torch.device("cpu")
interpreted = pytest.mark.skipif(not paths.interpreted(), reason="runs in Triton's interpreter")


def both(case, monkeypatch, **changes):
    """The outputs of the plain form and of the kernels."""
    arguments = case.arguments | changes
    with torch.no_grad():
        monkeypatch.setenv("E2IP_KERNEL", "eager")
        plain = case.readout(**arguments)
        monkeypatch.setenv("E2IP_KERNEL", "triton")
        return plain, case.readout(**arguments)


def assert_same(found, expected, tolerance, to_largest=False):
    """``to_largest``: relative to the largest number of an output."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape and found[name].dtype == values.dtype, name
        atol = tolerance * (values[values.isfinite()].abs().max().item() if to_largest else 1.0)
        torch.testing.assert_close(
            found[name], values, rtol=tolerance, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(paths.interpreted(), reason="is in the interpreter")
def test_in_the_interpreter():
    # In a process of its own: Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "interpreter"]
    done = subprocess.run([*command, __file__], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "8 passed" in done.stdout


@pytest.fixture
def passed(monkeypatch):
    """As after the trial, which is a test of its own here."""
    kernels = ("predict", "predict_pooled", "envelope")
    monkeypatch.setattr(check, "_outcomes", {(k, CPU, dtype): None for k in kernels for dtype in (F32, F64)})


@interpreted
@pytest.mark.parametrize("pooled", [False, True])
def test_interpreter_predictions_of_two_heads(passed, pooled, monkeypatch):
    """1o and 2e features or an edge pool, three regions, two frames, two atoms at one place, one without features."""
    case = trial.make_case(pooled, atoms=5, pairs=14)
    case.arguments["invariant"][4, 3] = float("nan")
    frames = {"frames": torch.tensor([0, 0, 0, 1, 1]), "num_frames": 2}
    plain, found = both(case, monkeypatch, **frames)
    assert_same(found, plain, 1e-12)
    leverage = found["e2ip_leverage"]
    assert leverage.isinf().sum() >= 2 and leverage.isfinite().any()


@interpreted
def test_interpreter_float32_with_double_outputs(passed, monkeypatch):
    """One head, as in NequIP."""
    case = trial.make_case(False, heads=1, atoms=4, pairs=8)
    case = case._replace(arguments=case.arguments | {"node_heads": None}).to(CPU, F32)
    case.readout.double_outputs = True
    plain, found = both(case, monkeypatch)
    assert found["forces_cov"].dtype == F64
    assert_same(found, plain, 2e-5, to_largest=True)


@interpreted
def test_interpreter_unfitted(passed, monkeypatch):
    case = trial.make_case(True, heads=1, atoms=3, pairs=4, fitted=False)
    plain, found = both(case, monkeypatch, num_frames=0)
    assert_same(found, plain, 1e-12)
    assert (found["e2ip_leverage"] == -1).all() and "energy_uncertainty" not in found


@interpreted
def test_interpreter_one_atom_alone_strictly_local(passed, monkeypatch):
    """Evidence mode ``independent``: nothing grows with the leverage."""
    settings = Settings.of("e2ip", {"evidence": "independent"}, 0.5)
    readout = Readout(settings, Layout([(0, 5)], [(5, 1)], [(8, 2)], strictly_local=True)).double()
    generator = torch.Generator().manual_seed(3)
    trial.fill(readout, 1, lambda *shape: torch.randn(*shape, generator=generator, dtype=F64))
    readout.leverage.region_stretch.fill_(1.0)
    readout.leverage.fitted.fill_(True)
    none = torch.zeros(0, dtype=torch.long)
    features = torch.randn(1, 18, generator=generator, dtype=F64)
    neighbours = Neighbours(torch.zeros(0, dtype=F64), torch.zeros(0, dtype=F64), none, none)
    arguments = {"invariant": features, "equivariant": features, "species": none.new_zeros(1), "neighbours": neighbours}
    plain, found = both(trial.Case(readout, arguments), monkeypatch, num_frames=1)
    assert_same(found, plain, 1e-12)


@interpreted
@pytest.mark.parametrize("kernel", ["predict", "predict_pooled", "envelope"])
def test_interpreter_trial(kernel):
    assert trial.failure(fused._launchers(), kernel, CPU, F32) is None


class Launchers:
    """What stands for `triton_launch`, for tests without kernels."""

    calls = 0

    def columns(self, *_):
        return torch.zeros(1, dtype=torch.int32)

    def predict(self, tensors, flags):
        self.calls += 1
        n = len(tensors["invariant"])
        return {"e2ip_nu": torch.full((n,), 7.0), "weights": torch.zeros(3, n), "whitened": torch.zeros(n, 24)}

    predict_pooled = predict


@pytest.fixture
def launchers(monkeypatch):
    """``auto`` takes them on the CPU."""
    stand_in = Launchers()
    paths._log_once.cache_clear()
    monkeypatch.delenv("E2IP_KERNEL", raising=False)
    monkeypatch.setattr(check, "_outcomes", {})
    monkeypatch.setattr(paths, "has_triton", lambda: True)
    monkeypatch.setattr(paths, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(fused, "_launchers", lambda: stand_in)
    return stand_in


@pytest.fixture
def case():
    made = trial.make_case(False, atoms=6, pairs=20)
    return made._replace(arguments=made.arguments | {"num_frames": 0})


@pytest.fixture
def passes(monkeypatch):
    monkeypatch.setattr(trial, "_trial", lambda *_: None)


def test_used_where_nothing_is_recorded(launchers, passes, case):
    assert (case.readout(**case.arguments)["e2ip_nu"] == 7.0).all()
    for weights in case.readout.parameters():
        weights.requires_grad_(True)
    with torch.no_grad():
        case.readout(**case.arguments)
    assert launchers.calls == 2
    case.readout(**case.arguments)["forces_cov"].sum().backward()
    assert launchers.calls == 2


@pytest.mark.parametrize("why", ["eager", "deterministic", "scripted", "traced", "family", "ghosts", "hook", "graph"])
def test_plain_otherwise(launchers, passes, case, why, monkeypatch):
    readout, arguments = case
    if why == "eager":
        monkeypatch.setenv("E2IP_KERNEL", "eager")
    elif why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif why == "scripted":
        readout = torch.jit.script(readout)
    elif why == "traced":
        others = {name: value for name, value in arguments.items() if name != "invariant"}
        graph = make_fx(lambda x: case.readout(x, **others)["forces_cov"])(arguments["invariant"])
        readout = lambda invariant, **_: {"forces_cov": graph(invariant)}  # noqa: E731
    elif why == "family":
        readout.family_name = "mve"
    elif why == "hook":
        readout.leverage.register_forward_hook(lambda *_: None)
    elif why == "ghosts":
        arguments["neighbours"] = None
    else:
        arguments["create_graph"] = True
    assert readout(**arguments)["forces_cov"].isfinite().any()
    assert launchers.calls == 0


@pytest.mark.parametrize("kernel", [None, "triton"])
def test_a_failed_trial(launchers, case, monkeypatch, caplog, kernel):
    """One warning and the plain form; an error where the kernels were asked for."""
    monkeypatch.setattr(trial, "_trial", lambda *_: ArithmeticError("forces_cov is off by 1.0e+00"))
    if kernel is None:
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                fused.predict(case.readout, *list(case.arguments.values())[:2], **{
                    "species": case.arguments["species"], "neighbours": case.arguments["neighbours"], "edges": None,
                    "node_heads": case.arguments["node_heads"], "energies": False,
                })  # fmt: skip
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert warned == [
            "e2ip kernel on cpu: Triton's predict kernel fails its check, continuing with eager "
            "(forces_cov is off by 1.0e+00)"
        ]
    else:
        monkeypatch.setenv("E2IP_KERNEL", kernel)
        with pytest.raises(InputError, match="predict kernel fails its check on cpu"):
            case.readout(**case.arguments)
    assert launchers.calls == 0


def test_the_trial_finds_wrong_results(case):
    def launcher(tensors, flags):
        outputs, _ = case.readout._plain(**case.arguments | {"num_frames": 1})
        outputs["forces_cov"] = outputs["forces_cov"] * (1 + 1e-3)
        return {**outputs, "weights": torch.zeros(3, 4, dtype=F64), "whitened": torch.zeros(4, 24, dtype=F64)}

    case = trial.make_case(False, atoms=4, pairs=12).to(CPU, F64)
    error = trial._trial(launcher, "predict", CPU, F64)
    assert "is off by" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(paths.interpreted(), reason="builds for a GPU")
@pytest.mark.parametrize(
    ("name", "double", "pooled"),
    [
        ("pair_kernel", False, True),
        ("neighbour_kernel", True, False),
        ("envelope_kernel", False, False),
        # Seconds each; the interpreter tests above have the same code.
        *(pytest.param(name, double, pooled, marks=pytest.mark.nightly)
          for name in ("atom_kernel", "output_kernel") for double in (False, True) for pooled in (False, True)),
    ],
)  # fmt: skip
def test_builds_for_a_gpu(load_script, name, double, pooled, tmp_path):
    """Compute capability 9.0, without a GPU; nothing is spilled to the stack."""
    script = load_script("benchmarks/triton_build.py")
    assert script.spilled_bytes(script.build_readout(name, double, pooled), tmp_path) in (0, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("kernel", ["predict", "predict_pooled", "envelope"])
def test_passes_its_trial_on_a_gpu(kernel, dtype):
    assert trial.failure(fused._launchers(), kernel, torch.device("cuda", 0), dtype) is None
