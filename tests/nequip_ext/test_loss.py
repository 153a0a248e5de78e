"""E2IPLoss and E2IPMetrics inside NequIP's MetricsManager."""

import math
import warnings

import pytest
import torch

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import derive_niw
from e2ip_plugins.maths.student import evidence, negative_log_likelihood
from e2ip_plugins.readout.loss import force_loss, force_loss_settings
from nequip_ext import E2IPLoss, E2IPMetrics

UNIT = 0.05


@pytest.fixture(autouse=True)
def double_precision(default_dtype):
    """The folder's session fixture sets float64."""


def batch(mode="coupled", number=12, seed=0):
    """(preds, target) of two frames as NequIP hands them to a MetricsManager."""
    torch.manual_seed(seed)
    nu, kappa = evidence(torch.randn(number), None if mode == "coupled" else torch.randn(number))
    log_sigma0 = torch.randn(number, 6) * 0.5
    log_sigma0[:, :3] += 2 * math.log(UNIT)
    structure = {"num_atoms": torch.tensor([number // 2, number // 2]), "atom_types": torch.zeros(number).long()}
    target = {**structure, "forces": torch.randn(number, 3), "total_energy": torch.randn(2, 1)}
    preds = {
        **structure,
        "forces": target["forces"] + UNIT * torch.randn(number, 3),
        "total_energy": target["total_energy"] + 0.1,
        "e2ip_log_sigma0": log_sigma0,
        "e2ip_nu": nu.unsqueeze(-1),
        "e2ip_kappa": kappa.unsqueeze(-1),
        "e2ip_force_unit": torch.full((number, 1), UNIT),
        "e2ip_plateau": torch.zeros(number, 1),
    }
    return preds, target


def expected_force_loss(preds, target, settings, atoms=slice(None)):
    loss, _ = force_loss(
        target["forces"][atoms],
        preds["forces"][atoms],
        preds["e2ip_log_sigma0"][atoms],
        preds["e2ip_nu"][atoms, 0],
        preds["e2ip_kappa"][atoms, 0],
        preds["e2ip_force_unit"][atoms, 0],
        settings,
    )
    return loss.mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "paper"},
        {"evidence": "independent", "evidence_weight": 0.3},
        {"preset": "paper", "evidence": "coupled"},
    ],
    ids=str,
)
def test_terms_and_weights(options):
    loss = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 3.0}, **options)
    settings = force_loss_settings(**options)
    preds, target = batch(settings.evidence)
    values = loss(preds, target)
    assert values["per_atom_energy_mse"].item() == pytest.approx((0.1 / 6) ** 2)
    assert values["forces_e2ip"].item() == pytest.approx(expected_force_loss(preds, target, settings).item())
    total = 0.25 * values["per_atom_energy_mse"] + 0.75 * values["forces_e2ip"]
    assert values["weighted_sum"].item() == pytest.approx(total.item())


def test_epoch_mean_is_over_atoms_not_batches():
    loss, settings = E2IPLoss(), force_loss_settings()
    for metric in loss.values():
        metric.dist_sync_on_step = True  # as NequIP's training module does
    small, large = batch(number=4, seed=1), batch(number=20, seed=2)
    loss(*small), loss(*large)
    sums = 4 * expected_force_loss(*small, settings) + 20 * expected_force_loss(*large, settings)
    assert loss.compute()["forces_e2ip"].item() == pytest.approx(sums.item() / 24)


def test_step_value_carries_gradients_and_epoch_state_does_not():
    loss = E2IPLoss()
    for metric in loss.values():
        metric.dist_sync_on_step = True
    preds, target = batch()
    preds["forces"].requires_grad_(True)
    loss(preds, target)["weighted_sum"].backward()
    assert torch.isfinite(preds["forces"].grad).all() and preds["forces"].grad.abs().sum() > 0
    assert not loss["forces_e2ip"].sum.requires_grad


def test_stress_term_and_energy_normalisation():
    loss = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 1.0, "stress": 2.0}, per_atom_energy=False)
    preds, target = batch()
    target["stress"] = torch.randn(2, 3, 3)
    preds["stress"] = target["stress"] + 0.5
    values = loss(preds, target)
    assert values["stress_mse"].item() == pytest.approx(0.25)
    assert values["total_energy_mse"].item() == pytest.approx(0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_references_are_masked_and_counted(bad):
    loss, settings = E2IPLoss(), force_loss_settings()
    preds, target = batch()
    good = [i for i in range(12) if i not in (2, 7)]
    target["forces"][2, 1] = bad
    target["forces"][7] = bad
    preds["forces"].requires_grad_(True)
    with pytest.warns(UserWarning, match="2 of 12 atoms"):
        values = loss(preds, target)
    expected = expected_force_loss(preds, target, settings, good)
    assert values["forces_e2ip"].item() == pytest.approx(expected.item())
    values["weighted_sum"].backward()
    gradient = preds["forces"].grad
    assert torch.isfinite(gradient).all() and (gradient[[2, 7]] == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(preds, target)  # once is enough
    metrics = E2IPMetrics()
    results = metrics({k: v.detach() for k, v in preds.items()}, target)
    assert all(math.isfinite(value) for value in results.values())
    error = (preds["forces"] - target["forces"])[good].square().mean().sqrt()
    assert results["forces_rmse"].item() == pytest.approx(error.item())


def test_a_batch_without_any_reference():
    preds, target = batch()
    target["forces"][:] = math.nan
    with pytest.warns(UserWarning, match="12 of 12"):
        assert E2IPLoss()(preds, target)["forces_e2ip"].item() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evidence": "both"}, "unknown evidence mode"),
        ({"evidence": "independent", "evidence_weight": -0.1}, "evidence_weight must be"),
        ({"evidence": "independent", "evidence_weight": math.nan}, "evidence_weight must be"),
        ({"evidence": "coupled", "evidence_weight": 0.1}, "no regulariser"),
        ({"preset": "other"}, "unknown e2ip preset"),
        ({"coeffs": {"forces": 1.0}}, "must have total_energy and forces"),
        ({"coeffs": {"total_energy": 1.0, "forces": 1.0, "dipole": 1.0}}, "nothing else"),
        ({"coeffs": {"total_energy": 1.0, "forces": 0.0}}, "must be > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        E2IPLoss(**options)
    if "coeffs" in options:
        with pytest.raises(InputError, match="unknown metrics"):
            E2IPMetrics(coeffs={"dipole_rmse": 1.0})


@pytest.mark.parametrize(("model", "loss"), [("coupled", "independent"), ("independent", "coupled")])
def test_evidence_modes_must_agree(model, loss):
    with pytest.raises(InputError, match=f"model's evidence mode is '{model}', that of E2IPLoss '{loss}'"):
        E2IPLoss(evidence=loss)(*batch(model))


def test_mode_is_recognised_in_float32():
    preds, target = batch()
    nu, kappa = evidence(torch.linspace(-12.0, 3e5, 12, dtype=torch.float32), None)
    preds["e2ip_nu"], preds["e2ip_kappa"] = nu.double().unsqueeze(-1), kappa.double().unsqueeze(-1)
    E2IPLoss(evidence="coupled")(preds, target)


@pytest.mark.parametrize("atoms", [3, slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("mode", ["independent", "coupled"])
def test_atoms_without_evidence_say_nothing_about_the_mode(mode, atoms):
    preds, target = batch(mode)
    preds["e2ip_nu"][atoms] = preds["e2ip_kappa"][atoms] = preds["e2ip_log_sigma0"][atoms] = math.nan
    assert torch.isnan(E2IPLoss(evidence=mode)(preds, target)["weighted_sum"])


def test_a_model_without_readout_is_named():
    preds, target = batch()
    stock = {k: v for k, v in preds.items() if not k.startswith("e2ip")}
    for manager in (E2IPLoss(), E2IPMetrics()):
        with pytest.raises(InputError, match=r"nequip_ext\.E2IPModel"):
            manager(stock, target)


def test_data_without_forces_is_named():
    preds, target = batch()
    del target["forces"]
    for manager in (E2IPLoss(), E2IPMetrics()):
        with pytest.raises(InputError, match="key_mapping"):
            manager(preds, target)


def test_metrics_of_uncertainty():
    metrics = E2IPMetrics(coeffs={"forces_rmse": 1.0, "e2ip_nll": 1.0})
    batches = [batch(seed=1), batch(seed=2)]
    for preds, target in batches:
        metrics(preds, target)
    values = metrics.compute()
    preds = {k: torch.cat([b[0][k] for b in batches]) for k in batches[0][0]}
    residual = torch.cat([b[1]["forces"] for b in batches]) - preds["forces"]
    nll = negative_log_likelihood(preds["e2ip_log_sigma0"], preds["e2ip_nu"][:, 0], preds["e2ip_kappa"][:, 0], residual)
    assert values["e2ip_nll"].item() == pytest.approx(nll.mean().item())
    assert values["forces_rmse"].item() == pytest.approx(residual.square().mean().sqrt().item())
    assert values["weighted_sum"].item() == pytest.approx(0.5 * (values["e2ip_nll"] + values["forces_rmse"]).item())
    assert 0.0 <= values["e2ip_coverage95"] <= 1.0 and -1.0 <= values["e2ip_spearman"] <= 1.0
    assert values["e2ip_plateau"] == 0.0
    assert "stress_rmse" not in values
    assert derive_niw({k: preds[k].squeeze(-1) for k in preds if k.startswith("e2ip")})["forces_cov"].shape == (
        24,
        3,
        3,
    )
