"""The metrics that hosts log: against SciPy, over batches, with masked atoms and under DDP."""

import json
import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from scipy.stats import f as f_distribution
from scipy.stats import multivariate_t, norm, spearmanr

from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.maths.spd import sym6_to_matrix
from e2ip_plugins.scores.training import FIGURES, EnergyUncertainty, ForceUncertainty, columns

KEYS = {"nll", "coverage95", "spearman", "condition", "condition_max", "plateau"}


def add(metric, b):
    """Hand a batch to a metric; returns what ``forward`` does."""
    outputs = {name: value for name, value in b.items() if name not in ("reference", "forces")}
    return metric(b["reference"], b["forces"], outputs)


def figures_of(*batches):
    metric = ForceUncertainty(E2IP)
    for b in batches:
        add(metric, b)
    return metric.compute()


def batch(n, seed=0):
    options = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    normal, uniform = partial(torch.randn, **options), partial(torch.rand, **options)
    forces = normal(n, 3)
    return {
        "forces": forces,
        "e2ip_log_sigma0": normal(n, 6) - 4.0,
        "reference": forces + 0.3 * normal(n, 3),
        "e2ip_nu": 5.0 + 10.0 * uniform(n),
        "e2ip_kappa": 0.1 + 5.0 * uniform(n),
        "e2ip_plateau": (uniform(n) < 0.25).double(),
    }


def part_of(b, part):
    return {name: values[part] for name, values in b.items()}


def expected(b):
    sigma0 = np.stack([expm(L) for L in sym6_to_matrix(b["e2ip_log_sigma0"]).numpy()])
    nu, kappa = b["e2ip_nu"].numpy(), b["e2ip_kappa"].numpy()
    error = (b["reference"] - b["forces"]).numpy()
    nll, inside = [], []
    for i in range(len(nu)):
        scale = nu[i] * (kappa[i] + 1) / (kappa[i] * (nu[i] - 2)) * sigma0[i]
        nll.append(-multivariate_t(np.zeros(3), scale, df=nu[i] - 2).logpdf(error[i]))
        radius = error[i] @ np.linalg.solve(scale, error[i]) / 3
        inside.append(f_distribution.cdf(radius, 3, nu[i] - 2) <= 0.95)
    epistemic = np.sqrt(nu / (kappa * (nu - 4)) * np.trace(sigma0, axis1=1, axis2=2) / 3)
    return {
        "nll": np.mean(nll),
        "coverage95": np.mean(inside),
        "spearman": spearmanr(epistemic, np.linalg.norm(error, axis=1)).statistic,
        "condition": np.median(np.linalg.cond(sigma0)),
        "condition_max": np.linalg.cond(sigma0).max(),
        "plateau": b["e2ip_plateau"].mean().item(),
    }


def test_agrees_with_scipy():
    b = batch(60)
    assert figures_of(b) == pytest.approx(expected(b), rel=1e-6)


def test_batches_and_single_columns_add_up():
    """NequIP's (N, 1) columns, two updates and forward() all see the same atoms."""
    b = batch(50)
    pieces = [part_of(b, part) for part in (slice(0, 20), slice(20, 50))]
    metric = ForceUncertainty(E2IP)
    for piece in pieces:
        columned = {name: v.unsqueeze(-1) if v.ndim == 1 else v for name, v in piece.items()}
        assert add(metric, columned) == pytest.approx(expected(piece), rel=1e-6)
    assert metric.compute() == pytest.approx(figures_of(b), rel=1e-12)


def test_named_columns():
    where = columns(E2IP)
    assert list(where) == ["counts", "error", "e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa", "plateau"]
    assert [(part.start, part.stop) for part in where.values()] == [
        (0, 1),
        (1, 4),
        (4, 10),
        (10, 11),
        (11, 12),
        (12, 13),
    ]
    assert {figure.name for figure in FIGURES} == KEYS


def test_reset_forgets():
    metric = ForceUncertainty(E2IP)
    add(metric, batch(10))
    metric.reset()
    add(metric, batch(10, seed=1))
    assert metric.compute() == pytest.approx(expected(batch(10, seed=1)), rel=1e-6)


def test_atoms_without_reference_are_left_out():
    b = batch(30)
    whole = figures_of(part_of(b, slice(2, None)))
    b["reference"][0, 1] = float("nan")
    b["reference"][1, 2] = float("inf")
    assert figures_of(b) == pytest.approx(whole, rel=1e-12)


def test_non_finite_prediction_shows():
    b = batch(30)
    b["forces"][3, 0] = float("nan")
    result = figures_of(b)
    assert math.isnan(result["nll"]) and math.isnan(result["coverage95"])


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_empty_is_nan():
    for result in (figures_of(), figures_of(batch(0))):
        assert set(result) == KEYS
        assert all(math.isnan(v) for v in result.values())


def test_leaves_no_graph():
    b = batch(5)
    for value in b.values():
        value.requires_grad_()
    metric = ForceUncertainty(E2IP)
    add(metric, b)
    assert not any(t.requires_grad for t in metric.rows)


def energies(part=slice(None)):
    """Reference, prediction and error bar of 40 energies; one lacks the first, one the last."""
    normal = torch.Generator().manual_seed(7)
    reference, std = torch.randn(40, generator=normal), 0.5 + torch.rand(40, generator=normal)
    reference[3], std[5] = float("nan"), 0.0
    return reference[part], torch.zeros(40)[part], std[part]


def energy_figures_of(*parts):
    metric = EnergyUncertainty()
    for part in parts:
        metric(*energies(part))
    return metric.compute()


def test_energies_agree_with_scipy_and_batches_add_up():
    error, _, std = (values.double().numpy() for values in energies())
    keep = np.isfinite(error) & (std > 0)
    assert keep.sum() == 38
    result = energy_figures_of(slice(None))
    assert result["energy_nll"] == pytest.approx(-norm(scale=std[keep]).logpdf(error[keep]).mean(), rel=1e-6)
    low, high = norm(scale=std[keep]).interval(0.95)
    assert result["energy_coverage95"] == np.mean((low <= error[keep]) & (error[keep] <= high))
    assert energy_figures_of(slice(0, 7), slice(7, 40)) == pytest.approx(result, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_energies_without_error_bars_have_no_figures():
    for part in (None, slice(0, 0), slice(5, 6)):
        values = energy_figures_of(*([] if part is None else [part])).values()
        assert len(values) == 2 and all(math.isnan(value) for value in values)


def two_ranks(rank, store):
    """One of two processes: what it computes from its share of the atoms and frames."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shared, lonely = ForceUncertainty(E2IP), ForceUncertainty(E2IP)
    add(shared, part_of(batch(40), slice(30 * rank, 30 + 10 * rank)))
    if rank == 0:
        add(lonely, batch(40))
    of_energies = EnergyUncertainty()
    of_energies(*energies(slice(30 * rank, 30 + 10 * rank)))
    results = [shared.compute(), lonely.compute(), of_energies.compute()]
    torch.distributed.destroy_process_group()
    return results


def test_two_processes_see_all_atoms(tmp_path):
    """Unequal shares, and a rank that has no atom at all."""
    # Not torch.multiprocessing: its children cannot import a test module of pytest's importlib mode.
    command = [sys.executable, __file__, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        *forces, of_energies = json.loads(output)
        for result in forces:
            assert result == pytest.approx(figures_of(batch(40)), rel=1e-6)
        assert of_energies == pytest.approx(energy_figures_of(slice(None)), rel=1e-6)


if __name__ == "__main__":
    print(json.dumps(two_ranks(int(sys.argv[2]), sys.argv[1])))
