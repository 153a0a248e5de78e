"""Cost of the evidential loss per atom: the fused paths against the paper's pipeline.

    python benchmarks/kernel.py                     # N = 10³ to 10⁶, float32 and float64, CPU; runs/kernel.json
    python benchmarks/kernel.py --device cuda       # adds the Triton kernels
    python benchmarks/kernel.py --quick             # a smoke test of half a minute
    python benchmarks/kernel.py --table             # tables of the results

Every pipeline does the same work in one process: ``map`` is dampers, SPD map and evidence, as in a prediction;
``forward`` the mean NLL, with all of that; ``forward+backward`` its gradients in all inputs, too. Rounds are
interleaved; figures are medians over rounds, ratios are medians of the ratios within a round. Under TRITON_INTERPRET=1
the Triton kernels run on the CPU, for a smoke test.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from common import RESULTS, ROOT, alternate, hardware, load, markdown, parser_of, save, seconds_of
from torch import Tensor

from e2ip_plugins.maths.kernels import distribution, nll_terms, paths, plain
from e2ip_plugins.maths.kernels.constants import Constants
from e2ip_plugins.maths.spd import sym6_to_matrix, tangent_to_sym6
from e2ip_plugins.maths.student import evidence, negative_log_likelihood

UNIT = 0.0433641
PAPER_DAMPER = (4.0, 5.0)
CONSTANTS = Constants(False, PAPER_DAMPER, PAPER_DAMPER)
PASSES = ("map", "forward", "forward+backward")


def draw(count: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return coefficients and residual as a model in training has them, a few atoms past the knees."""
    generator = torch.Generator().manual_seed(0)
    scales = (torch.tensor([2.0, 1.0, 1.0] + 5 * [1.2]), torch.full((3,), 2.0 * UNIT))
    inputs = [scale * torch.randn(count, len(scale), generator=generator) for scale in scales]
    return [x.to(dtype).to(device).requires_grad_() for x in inputs]


def paper_damp(x: Tensor) -> Tensor:
    knee, ceiling = PAPER_DAMPER
    past = (ceiling - knee) * torch.tanh((x.abs() - knee) / (ceiling - knee)) + knee
    return torch.where(x.abs() <= knee, x, x.sign() * past)


def paper_nll(mahalanobis: Tensor, half_log_det: Tensor, nu: Tensor, kappa: Tensor) -> Tensor:
    """Return the mean of Eq. 25, from the Mahalanobis distance in Σ0."""
    nll = torch.lgamma((nu - 2.0) / 2.0) - torch.lgamma((nu + 1.0) / 2.0) + half_log_det
    nll = nll + 1.5 * torch.log(math.pi * nu * (1.0 + kappa) / kappa)
    return (nll + 0.5 * (nu + 1.0) * torch.log1p(kappa * mahalanobis / (nu * (1.0 + kappa)))).mean()


class Paper:
    """The pipeline of the paper (Eq. 10, 25): basis times coefficients, matrix exponential, Cholesky, log-gamma.

    The basis is cached; formed anew on every call it would cost several times the rest.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        eye = torch.eye(6, dtype=torch.float64)
        basis = sym6_to_matrix(tangent_to_sym6(eye[:, 0], eye[:, 1:]))
        self.basis = basis.reshape(6, 9).to(inputs[0])

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
        softplus = torch.nn.functional.softplus
        return sigma0, softplus(raw_nu) + 5.0, softplus(raw_kappa) + 1e-6

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        sigma0, nu, kappa = self.map(coefficients, residual)
        factor = torch.linalg.cholesky(sigma0)
        white = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
        half_log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return paper_nll(white.square().sum(-1), half_log_det, nu, kappa)


class Eigh(Paper):
    """The same with an eigendecomposition for the exponential, its determinant and its inverse."""

    def exponential(self, log: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(log)
        return (vectors * torch.exp(values).unsqueeze(-2)) @ vectors.mT

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        s, t, raw_nu, raw_kappa = plain.split(coefficients, False)
        values, vectors = torch.linalg.eigh(self.log_matrix(s, t))
        along = (vectors.mT @ (residual / UNIT).unsqueeze(-1)).squeeze(-1)
        half_log_det = 0.5 * values.sum(-1) + 3.0 * math.log(UNIT)
        return paper_nll((along.square() * torch.exp(-values)).sum(-1), half_log_det, *evidence(raw_nu, raw_kappa))


class Composition:
    """The project's modules under autograd."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.unit = torch.full((), UNIT).to(inputs[0])

    def map(self, coefficients: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return plain.distribution(coefficients, self.unit.new_zeros(()).expand(len(coefficients)), self.unit, CONSTANTS)

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        s, t, raw_nu, raw_kappa = plain.split(coefficients, False)
        log_sigma0 = plain.log_sigma0_of(s, t, self.unit, CONSTANTS)
        return negative_log_likelihood(log_sigma0, *evidence(raw_nu, raw_kappa), residual).mean()


class Fused:
    """The project's kernels on a path, ``eager`` or ``triton``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def map(self, coefficients: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return distribution(coefficients, UNIT, *CONSTANTS[:3], path=self.path)

    def loss(self, coefficients: Tensor, residual: Tensor) -> Tensor:
        return nll_terms(coefficients, residual, UNIT, *CONSTANTS, path=self.path)[0].mean()


def able(pipelines: dict[str, Paper | Composition | Fused], inputs: list[Tensor]) -> list[str]:
    """Return the pipelines that can compute so many atoms; all of them must compute one number.

    Libraries do not take every size on a GPU.
    """
    values = {}
    for name, pipeline in pipelines.items():
        try:
            with torch.no_grad():
                values[name] = float(pipeline.loss(*inputs))
        except RuntimeError as error:
            if name not in ("paper", "eigh"):
                raise
            print(f"{name} fails with {len(inputs[0])} atoms: {str(error).splitlines()[0]}", flush=True)
    reference = next(reversed(values.values()))
    assert all(abs(x - reference) < 1e-4 * max(1.0, abs(reference)) for x in values.values()), values
    return list(values)


def call_of(pipeline: Paper | Composition | Fused, kind: str, inputs: list[Tensor]) -> Callable[[], None]:
    """Return a function without arguments that does one of `PASSES`."""
    function = pipeline.map if kind == "map" else pipeline.loss

    def run() -> None:
        if kind == "forward+backward":
            torch.autograd.grad(function(*inputs), inputs)
        else:
            with torch.no_grad():
                function(*inputs)

    return run


def measure(calls: dict[str, Callable], count: int, rounds: int, budget: float, device: str) -> dict:
    """Return median and half the interquartile range of every call in ns/atom, and its speed-up over the first."""

    def clock(call: Callable[[], None], repeats: int = 1) -> float:
        def run() -> None:
            for _ in range(repeats):
                call()
            if device == "cuda":
                torch.cuda.synchronize()

        return seconds_of(run) / repeats

    repeats = {}
    for call in calls.values():
        clock(call)
        repeats[call] = max(1, min(200, int(budget / clock(call))))
    times = alternate(calls, rounds, clock=lambda call: clock(call, repeats[call]) / count)
    first, results = next(iter(times.values())), {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        speedup = statistics.median(a / b for a, b in zip(first, values, strict=True))
        results[name] = {"ns_per_atom": 1e9 * middle, "spread": 5e8 * (high - low), "speedup": speedup}
    return results


def tables(report: dict) -> str:
    """Return a Markdown table for every type, size and pass."""
    blocks = [f"# Loss kernel on {report['machine']}, torch {report['torch']}"]
    for block in report["blocks"]:
        rows = []
        for name, result in block["results"].items():
            rows.append([name, *(f"{result[key]:.3g}" for key in ("ns_per_atom", "spread", "speedup"))])
        columns = ["pipeline", "ns/atom", "half the interquartile range", "times faster than the paper's"]
        blocks += [f"## {block['dtype']}, N = {block['atoms']}, {block['pass']}", markdown(columns, rows)]
    return "\n\n".join(blocks)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--atoms", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float64"], default=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=9, help="from 2 on")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds per pipeline and round")
    parser.add_argument("--quick", action="store_true", help="10³ atoms, float32, 3 rounds: shows that everything runs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "kernel.json", help="results")
    parser.add_argument("--table", nargs="?", type=Path, const=RESULTS / "kernel.json", help="run nothing")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(map(tables, load(options.table).values())))
        return
    if options.quick:
        options.atoms, options.dtypes, options.rounds, options.budget = [10**3], ["float32"], 3, 0.02
    torch.set_num_threads(1)
    triton = paths.has_triton() and (options.device == "cuda" or paths.interpreted())
    report = {"machine": hardware(options.device), "torch": torch.__version__, "blocks": []}
    for dtype in options.dtypes:
        for count in options.atoms:
            inputs = draw(count, getattr(torch, dtype), options.device)
            pipelines = {"paper": Paper(inputs), "eigh": Eigh(inputs), "composition": Composition(inputs)}
            pipelines |= {path: Fused(path) for path in ("eager", "triton") if triton or path == "eager"}
            names = able(pipelines, inputs)
            for kind in PASSES:
                calls = {name: call_of(pipelines[name], kind, inputs) for name in names}
                results = measure(calls, count, options.rounds, options.budget, options.device)
                report["blocks"].append({"dtype": dtype, "atoms": count, "pass": kind, "results": results})
                print(
                    dtype, count, kind, {name: round(row["ns_per_atom"]) for name, row in results.items()}, flush=True
                )
            # After every size, so that an interrupted run leaves what it has.
            save(options.out, {options.device: report})
    print(tables(report))


if __name__ == "__main__":
    main()
