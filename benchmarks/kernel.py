"""Cost of the evidential loss per atom: the fused paths against the paper's pipeline.

    python benchmarks/kernel.py                     # N = 10³ to 10⁶, float32 and float64, CPU
    python benchmarks/kernel.py --device cuda       # adds the Triton kernels and what limits them
    python benchmarks/kernel.py --quick             # a smoke test of half a minute

Every pipeline does the same work in one process: ``map`` is dampers, SPD map and evidence, as in a prediction;
``forward`` the mean NLL, with all of that; ``forward+backward`` its gradients in all inputs, too. Rounds are
interleaved in an order drawn anew, so that what else runs on the machine hits all alike; figures are medians over
rounds, spread is half the interquartile range, ratios are medians of the ratios within a round. On a GPU the limit is
the larger of the memory floor, a copy of as many bytes, and the issue bound. ``kernel.json`` and ``kernel.md`` go to
``--out``. Under TRITON_INTERPRET=1 the Triton kernels run on the CPU, for a smoke test.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from e2ip_plugins.maths.kernels import distribution, nll_terms, paths, plain
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.spd import sym6_to_matrix, tangent_to_sym6
from e2ip_plugins.maths.student import evidence, negative_log_likelihood

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `host_cost` where this file is not the script

from host_cost.measure import hardware

UNIT = 0.0433641
PAPER_DAMPER = (4.0, 5.0)
#: Mode and dampers.
CONSTANTS = Constants(False, PAPER_DAMPER, PAPER_DAMPER)
#: Numbers per atom that the kernels must move: 8 inputs and 15 results; 11 inputs and 2 results; 11 inputs,
#: 2 weights and 11 gradients as well.
FLOATS = {"map": 23, "forward": 13, "forward+backward": 37}

FLOOR = "memory floor (copy)"

PIPELINES = ("paper", "eigh", "composition", "eager", "triton")


def draw(count: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Coefficients and residual: what a model in training has, a few atoms past the knees."""
    gen = torch.Generator().manual_seed(0)
    scales = (torch.tensor([2.0, 1.0, 1.0] + 5 * [1.2]), torch.full((3,), 2.0 * UNIT))
    inputs = [scale * torch.randn(count, len(scale), generator=gen) for scale in scales]
    return [x.to(dtype).to(device).requires_grad_() for x in inputs]


def paper_damp(x: Tensor) -> Tensor:
    knee, ceiling = PAPER_DAMPER
    past = (ceiling - knee) * torch.tanh((x.abs() - knee) / (ceiling - knee)) + knee
    return torch.where(x.abs() <= knee, x, x.sign() * past)


class Paper:
    """As the paper describes it (Eq. 10, 25): basis times coefficients, matrix exponential, Cholesky, log-gamma.

    The basis is cached; formed anew on every call it would cost several times the rest.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        eye = torch.eye(6, dtype=torch.float64)
        basis = sym6_to_matrix(tangent_to_sym6(eye[:, 0], eye[:, 1:]))
        self.basis = basis.reshape(6, 9).to(dtype).to(device)

    def log_matrix(self, s: Tensor, t: Tensor) -> Tensor:
        norm = t.norm(dim=-1, keepdim=True)
        # φ(‖t‖)/(‖t‖ + ε), the paper's form.
        t = t * paper_damp(norm) / (norm + 1e-8)
        return (torch.cat([paper_damp(s).unsqueeze(-1), t], -1) @ self.basis).view(-1, 3, 3)

    def exponential(self, log: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(log)

    def map(self, coefficients: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        s, t, raw_nu, raw_kappa = plain.split(coefficients, False)
        sigma0 = UNIT**2 * self.exponential(self.log_matrix(s, t))
        nu = torch.nn.functional.softplus(raw_nu) + 5.0
        return sigma0, nu, torch.nn.functional.softplus(raw_kappa) + 1e-6

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        sigma0, nu, kappa = self.map(coefficients, residual)
        factor = torch.linalg.cholesky(sigma0)
        white = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
        mahalanobis = white.square().sum(-1)
        half_log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        nll = (
            torch.lgamma((nu - 2.0) / 2.0)
            - torch.lgamma((nu + 1.0) / 2.0)
            + 1.5 * torch.log(math.pi * nu * (1.0 + kappa) / kappa)
            + half_log_det
            + 0.5 * (nu + 1.0) * torch.log1p(kappa * mahalanobis / (nu * (1.0 + kappa)))
        )
        return nll.mean()


class Eigh(Paper):
    """The same with an eigendecomposition for the exponential, its determinant and its inverse."""

    def exponential(self, log: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(log)
        return (vectors * torch.exp(values).unsqueeze(-2)) @ vectors.mT

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        s, t, raw_nu, raw_kappa = plain.split(coefficients, False)
        values, vectors = torch.linalg.eigh(self.log_matrix(s, t))
        along = (vectors.mT @ (residual / UNIT).unsqueeze(-1)).squeeze(-1)
        mahalanobis = (along.square() * torch.exp(-values)).sum(-1)
        nu, kappa = evidence(raw_nu, raw_kappa)
        nll = torch.lgamma((nu - 2.0) / 2.0) - torch.lgamma((nu + 1.0) / 2.0) + 0.5 * values.sum(-1)
        nll = nll + 1.5 * torch.log(math.pi * nu * (1.0 + kappa) / kappa)
        nll = nll + 0.5 * (nu + 1.0) * torch.log1p(kappa * mahalanobis / (nu * (1.0 + kappa)))
        return nll.mean()


def composition(coefficients: Tensor, residual: Tensor) -> Tensor:
    """The project's modules under autograd."""
    s, t, raw_nu, raw_kappa = plain.split(coefficients, False)
    unit = torch.full((), UNIT, dtype=s.dtype, device=s.device)
    log_sigma0 = plain.log_sigma0_of(s, t, unit, CONSTANTS)
    return negative_log_likelihood(log_sigma0, *evidence(raw_nu, raw_kappa), residual).mean()


def composed_map(coefficients: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    unit = torch.full((), UNIT, dtype=coefficients.dtype, device=coefficients.device)
    return plain.distribution(coefficients, unit, CONSTANTS)


def fused(path: str):
    def loss(*inputs: Tensor) -> Tensor:
        return nll_terms(*inputs, UNIT, *CONSTANTS, path=path)[0].mean()

    return loss


def fused_map(path: str):
    return lambda coefficients, residual: distribution(coefficients, UNIT, *CONSTANTS[:3], path=path)


def pipelines(inputs: list[Tensor], device: str, kind: str, wanted: list[str]) -> dict:
    """Name: function without arguments, for a key of `FLOATS`."""
    dtype, backward = inputs[0].dtype, kind == "forward+backward"
    paper, eigh, ours = Paper(dtype, device), Eigh(dtype, device), ("eager", "triton")
    if kind == "map":
        functions = {"paper": paper.map, "eigh": eigh.map, "composition": composed_map}
        functions |= {name: fused_map(name) for name in ours}
    else:
        functions = {"paper": paper.loss, "eigh": eigh.loss, "composition": composition}
        functions |= {name: fused(name) for name in ours}

    def call(function):
        def run() -> None:
            if backward:
                torch.autograd.grad(function(*inputs), inputs)
            else:
                with torch.no_grad():
                    function(*inputs)

        return run

    calls = {name: call(function) for name, function in functions.items() if name in wanted}
    if device == "cuda":
        count = inputs[0].shape[0] * FLOATS[kind] // 2
        source, target = (torch.empty(count, dtype=dtype, device=device) for _ in range(2))
        calls[FLOOR] = lambda: target.copy_(source)
    return calls


def seconds(call, repeats: int, device: str) -> float:
    """Mean time of a call."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def issue_bound(kind: str, dtype: torch.dtype) -> float:
    """ns/atom that the GPU needs to start the Triton kernels' instructions at its highest clock; 0 if unknown."""
    properties = torch.cuda.get_device_properties(0)
    if not paths.has_triton() or not hasattr(properties, "clock_rate"):
        return 0.0
    from triton_build import issue_bound

    capability, hertz = 10 * properties.major + properties.minor, 1e3 * properties.clock_rate
    double = dtype == torch.float64
    return 1e9 * issue_bound(kind, double, CONSTANTS, capability, properties.multi_processor_count, hertz)


def measure(calls: dict, count: int, rounds: int, budget: float, device: str, bound: float = 0.0) -> dict:
    """ns/atom (median, spread) and speed-up over the paper's pipeline of every call; ``bound`` in ns/atom."""
    repeats = {}
    baseline = "paper" if "paper" in calls else next(iter(calls))
    for name, call in calls.items():
        call()
        call()
        repeats[name] = max(1, min(200, int(budget / max(seconds(call, 1, device), 1e-9))))
    times = {name: [] for name in calls}
    order, rng = list(calls), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            times[name].append(seconds(calls[name], repeats[name], device) * 1e9 / count)
    results = {}
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4)
        ratios = [a / b for a, b in zip(times[baseline], values, strict=True)]
        results[name] = {
            "ns_per_atom": statistics.median(values),
            "spread": 0.5 * (quartiles[2] - quartiles[0]),
            "best": min(values),
            "speedup_over_paper": statistics.median(ratios),
            "rounds": len(values),
        }
        if FLOOR in times:
            of_limit = [a / max(b, bound) for a, b in zip(values, times[FLOOR], strict=True)]
            results[name]["times_the_limit"] = statistics.median(of_limit)
    return results


def check(inputs: list[Tensor], device: str, wanted: list[str]) -> list[str]:
    """All pipelines compute one number; those of them that can, for libraries do not take every size on a GPU."""
    dtype, ours = inputs[0].dtype, ("composition", "eager", "triton")
    losses = {"composition": composition, "paper": Paper(dtype, device).loss, "eigh": Eigh(dtype, device).loss}
    losses |= {path: fused(path) for path in ours[1:]}
    values = {}
    for name in dict.fromkeys(["composition", *wanted]):
        try:
            with torch.no_grad():
                values[name] = float(losses[name](*inputs))
        except RuntimeError as error:
            if name in ours:
                raise
            print(f"{name} fails with {len(inputs[0])} atoms: {str(error).splitlines()[0]}", flush=True)
    if "eigh" in values:
        # In force units: log-determinants differ by 6 ln σ_ref.
        values["eigh"] += 3.0 * math.log(UNIT)
    reference = values["composition"]
    assert all(abs(x - reference) < 1e-4 * max(1.0, abs(reference)) for x in values.values()), values
    return [name for name in wanted if name in values]


def markdown(report: dict) -> str:
    lines = [f"# Loss kernel on {report['machine']}", "", f"torch {report['torch']}, {report['threads']} thread(s)."]
    for block in report["blocks"]:
        lines += ["", f"## {block['dtype']}, N = {block['atoms']}, {block['pass']}", ""]
        if block["issue_bound"]:
            lines += [f"Issue bound of the Triton kernels: {block['issue_bound']:.4f} ns/atom", ""]
        lines += ["| pipeline | ns/atom | spread | best | times faster than the paper's | times the limit |"]
        lines += ["|---|---|---|---|---|---|"]
        for name, row in block["results"].items():
            lines.append(
                f"| {name} | {row['ns_per_atom']:.1f} | {row['spread']:.1f} | {row['best']:.1f} "
                f"| {row['speedup_over_paper']:.1f} | {row.get('times_the_limit', math.nan):.2f} |".replace("nan", "")
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--atoms", type=int, nargs="+", help="from 2 on; default: 10³ to 10⁶, or 10³ if --quick")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float64"], help="default: both; --quick: float32")
    parser.add_argument("--passes", nargs="+", default=list(FLOATS), choices=list(FLOATS))
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, help="default: all that this device can run")
    parser.add_argument("--rounds", type=int, help="from 2 on; default: 9, or 3 if --quick")
    parser.add_argument("--budget", type=float, help="seconds per pipeline and round; default: 0.2, or 0.02 if --quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="other defaults: shows in a minute that everything runs")
    parser.add_argument("--out", type=Path, default=Path("runs/kernel"), help="folder for kernel.json and kernel.md")
    options = parser.parse_args()
    options.atoms = options.atoms or ([10**3] if options.quick else [10**3, 10**4, 10**5, 10**6])
    options.dtypes = options.dtypes or (["float32"] if options.quick else ["float32", "float64"])
    options.rounds = options.rounds or (3 if options.quick else 9)
    options.budget = options.budget or (0.02 if options.quick else 0.2)
    if min(options.atoms) < 2 or options.rounds < 2:
        parser.error("--atoms and --rounds must be at least 2")
    if options.threads < 1 or options.budget <= 0:
        parser.error("--threads must be at least 1 and --budget greater than 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    wanted = options.pipelines or list(PIPELINES)
    if not (paths.has_triton() and (options.device == "cuda" or paths.interpreted())):
        wanted = [name for name in wanted if name != "triton"]
        if not wanted:
            parser.error("--pipelines triton needs Triton and --device cuda, or TRITON_INTERPRET=1")
    torch.set_num_threads(options.threads)
    machine = hardware(options.device)
    report = {"machine": machine, "torch": torch.__version__, "threads": options.threads, "blocks": []}
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"results: {options.out}/kernel.json, {options.out}/kernel.md", flush=True)
    for dtype in options.dtypes:
        for atoms in options.atoms:
            inputs = draw(atoms, getattr(torch, dtype), options.device)
            able = check(inputs, options.device, wanted)
            for kind in options.passes:
                calls = pipelines(inputs, options.device, kind, able)
                bound = issue_bound(kind, inputs[0].dtype) if options.device == "cuda" else 0.0
                results = measure(calls, atoms, options.rounds, options.budget, options.device, bound)
                block = {"dtype": dtype, "atoms": atoms, "pass": kind, "issue_bound": bound, "results": results}
                report["blocks"].append(block)
                row = ", ".join(f"{k} {v['ns_per_atom']:.0f}" for k, v in results.items())
                print(f"{dtype} N={atoms} {kind}, ns/atom: {row}", flush=True)
            # After every size, so that an interrupted run leaves what it has.
            (options.out / "kernel.json").write_text(json.dumps(report, indent=1))
            (options.out / "kernel.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
