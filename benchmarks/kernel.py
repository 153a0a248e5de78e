"""Cost of the evidential loss per atom: the fused paths against the paper's pipeline.

    python benchmarks/kernel.py                     # N = 10³ to 10⁶, float32 and float64, CPU
    python benchmarks/kernel.py --device cuda       # adds the Triton kernels and the memory floor
    python benchmarks/kernel.py --quick             # a smoke test of half a minute

Every pipeline does the same work in one process: dampers, SPD map, evidence, NLL (its mean, with λ·regulariser
where the pipeline has it for free), and with ``forward+backward`` the gradients in all inputs. The rounds are
interleaved, so that what else runs on the machine hits all alike; figures are medians over rounds, spread is
half the interquartile range, ratios are medians of the ratios within a round. ``kernel.json`` and ``kernel.md`` go
to ``--out``. Under TRITON_INTERPRET=1 the Triton kernels run on the CPU, for a smoke test.
"""

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from e2ip_plugins.fused import compiled, nll_terms, paths, plain
from e2ip_plugins.fused.settings import Constants
from e2ip_plugins.niw import evidence, negative_log_likelihood
from e2ip_plugins.spd import sym6_to_matrix, tangent_to_sym6

UNIT = 0.0433641
PAPER_DAMPER = (4.0, 5.0)
CONSTANTS = Constants(*PAPER_DAMPER, *PAPER_DAMPER)
#: Numbers per atom that the kernels must move: 11 inputs and 2 results; 11 inputs, 2 weights and 11 gradients.
FLOATS = {"forward": 13, "forward+backward": 37}

PIPELINES = ("paper", "eigh", "composition", "eager", "compiled", "triton")


def draw(count: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """s, t, raw ν, raw κ, residual: what a model in training has, a few atoms past the knees."""
    gen = torch.Generator().manual_seed(0)
    shapes, scales = ((count,), (count, 5), (count,), (count,), (count, 3)), (2.0, 1.2, 1.0, 1.0, 2.0 * UNIT)
    pairs = zip(shapes, scales, strict=True)
    return [(scale * torch.randn(shape, generator=gen)).to(dtype).to(device).requires_grad_() for shape, scale in pairs]


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

    def loss(self, s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Tensor, residual: Tensor) -> Tensor:
        sigma0 = UNIT**2 * self.exponential(self.log_matrix(s, t))
        nu = torch.nn.functional.softplus(raw_nu) + 5.0
        kappa = torch.nn.functional.softplus(raw_kappa) + 1e-6
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

    def loss(self, s: Tensor, t: Tensor, raw_nu: Tensor, raw_kappa: Tensor, residual: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.log_matrix(s, t))
        along = (vectors.mT @ (residual / UNIT).unsqueeze(-1)).squeeze(-1)
        mahalanobis = (along.square() * torch.exp(-values)).sum(-1)
        nu, kappa = evidence(raw_nu, raw_kappa)
        nll = torch.lgamma((nu - 2.0) / 2.0) - torch.lgamma((nu + 1.0) / 2.0) + 0.5 * values.sum(-1)
        nll = nll + 1.5 * torch.log(math.pi * nu * (1.0 + kappa) / kappa)
        nll = nll + 0.5 * (nu + 1.0) * torch.log1p(kappa * mahalanobis / (nu * (1.0 + kappa)))
        return nll.mean()


def composition(*inputs: Tensor) -> Tensor:
    """The project's modules under autograd."""
    s, t, raw_nu, raw_kappa, residual = inputs
    unit = torch.full((), UNIT, dtype=s.dtype, device=s.device)
    log_sigma0 = plain.log_sigma0_of(s, t, unit, PAPER_DAMPER, PAPER_DAMPER)
    return negative_log_likelihood(log_sigma0, *evidence(raw_nu, raw_kappa), residual).mean()


def fused(path: str):
    def loss(*inputs: Tensor) -> Tensor:
        return nll_terms(*inputs, UNIT, PAPER_DAMPER, PAPER_DAMPER, path=path)[0].mean()

    return loss


class ReadySoA:
    """The compiled loop alone, on transposed inputs: value and gradients are its one pass."""

    def __init__(self, inputs: list[Tensor]) -> None:
        s, t, nu, kappa, residual = (x.detach() for x in inputs)
        unit = torch.full((), UNIT, dtype=s.dtype, device=s.device)
        self.inputs = (s, t.t().contiguous(), nu, kappa, residual.t().contiguous(), unit)
        self.kernel = compiled.kernel("loss_and_gradients", CONSTANTS, s.dtype, False)

    def __call__(self) -> Tensor:
        with torch.no_grad():
            rows = self.kernel(*self.inputs)
            # As a backward pass would: times the gradient of the mean.
            rows[0].mean()
            return rows[2:].mul_(1.0 / rows.shape[1])


def pipelines(inputs: list[Tensor], device: str, backward: bool, wanted: list[str]) -> dict:
    """Name: function without arguments."""
    dtype = inputs[0].dtype
    losses = {"paper": Paper(dtype, device).loss, "eigh": Eigh(dtype, device).loss, "composition": composition}
    losses |= {"eager": fused("eager"), "compiled": fused("compiled")}
    losses["triton"] = fused("triton")

    def call(loss):
        def run() -> None:
            if backward:
                torch.autograd.grad(loss(*inputs), inputs)
            else:
                with torch.no_grad():
                    loss(*inputs)

        return run

    calls = {name: call(loss) for name, loss in losses.items() if name in wanted}
    if backward and "compiled" in wanted:
        calls["compiled, SoA ready"] = ReadySoA(inputs)
    if device == "cuda":
        count = inputs[0].shape[0] * FLOATS["forward+backward" if backward else "forward"] // 2
        source, target = (torch.empty(count, dtype=dtype, device=device) for _ in range(2))
        calls["memory floor (copy)"] = lambda: target.copy_(source)
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


def measure(calls: dict, count: int, rounds: int, budget: float, device: str) -> dict:
    """ns/atom (median, spread) and speed-up over the paper's pipeline of every call."""
    repeats = {}
    baseline = "paper" if "paper" in calls else next(iter(calls))
    for name, call in calls.items():
        call()
        call()
        repeats[name] = max(1, min(200, int(budget / max(seconds(call, 1, device), 1e-9))))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name], device) * 1e9 / count)
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
    return results


def check(inputs: list[Tensor], device: str, wanted: list[str]) -> None:
    """All pipelines compute one number."""
    dtype = inputs[0].dtype
    losses = {"paper": Paper(dtype, device).loss, "eigh": Eigh(dtype, device).loss, "composition": composition}
    losses |= {path: fused(path) for path in ("eager", "compiled", "triton") if path in wanted}
    with torch.no_grad():
        values = {name: float(loss(*inputs)) for name, loss in losses.items()}
    # In force units for eigh: log-determinants differ by 6 ln σ_ref.
    values["eigh"] += 3.0 * math.log(UNIT)
    reference = values["composition"]
    assert all(abs(x - reference) < 1e-4 * max(1.0, abs(reference)) for x in values.values()), values


def markdown(report: dict) -> str:
    lines = [f"# Loss kernel on {report['machine']}", "", f"torch {report['torch']}, {report['threads']} thread(s)."]
    for block in report["blocks"]:
        lines += ["", f"## {block['dtype']}, N = {block['atoms']}, {block['pass']}", ""]
        lines += ["| pipeline | ns/atom | spread | best | times faster than the paper's |", "|---|---|---|---|---|"]
        for name, row in block["results"].items():
            lines.append(
                f"| {name} | {row['ns_per_atom']:.1f} | {row['spread']:.1f} | {row['best']:.1f} "
                f"| {row['speedup_over_paper']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--atoms", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"], choices=["float32", "float64"])
    parser.add_argument("--passes", nargs="+", default=list(FLOATS), choices=list(FLOATS))
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, help="default: all that this device can run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.2, help="seconds per pipeline and round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="float32, few atoms, three short rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmark-kernel"))
    options = parser.parse_args()
    wanted = options.pipelines or list(PIPELINES)
    if not (paths.has_triton() and (options.device == "cuda" or paths.interpreted())):
        wanted = [name for name in wanted if name != "triton"]
    if options.quick:
        options.atoms, options.dtypes, options.rounds, options.budget = [1000], ["float32"], 3, 0.02
    torch.set_num_threads(options.threads)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    report = {"machine": machine, "torch": torch.__version__, "threads": options.threads, "blocks": []}
    options.out.mkdir(parents=True, exist_ok=True)
    for dtype in options.dtypes:
        for atoms in options.atoms:
            inputs = draw(atoms, getattr(torch, dtype), options.device)
            check(inputs, options.device, wanted)
            for kind in options.passes:
                calls = pipelines(inputs, options.device, kind == "forward+backward", wanted)
                results = measure(calls, atoms, options.rounds, options.budget, options.device)
                report["blocks"].append({"dtype": dtype, "atoms": atoms, "pass": kind, "results": results})
                row = ", ".join(f"{k} {v['ns_per_atom']:.0f}" for k, v in results.items())
                print(f"{dtype} N={atoms} {kind}, ns/atom: {row}", flush=True)
            # After every size, so that an interrupted run leaves what it has.
            (options.out / "kernel.json").write_text(json.dumps(report, indent=1))
            (options.out / "kernel.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
