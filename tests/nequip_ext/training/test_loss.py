"""E2IPLoss and E2IPMetrics inside NequIP's MetricsManager, on outputs of real readouts."""

import copy
import math
import warnings

import pytest
import torch
from nequip.train import EnergyForceLoss

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.families.laws import law_of
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings
from e2ip_plugins.scores import training
from nequip_ext import E2IPLoss, E2IPMetrics

UNIT = 0.05
LAYOUT = Layout(scalars=[(0, 4)], vectors=[(0, 3)], tensors=[(9, 2)])
OPTIONS = [
    {},
    {"preset": "paper"},
    {"evidence": "independent", "evidence_weight": 0.3},
    {"preset": "paper", "evidence": "coupled"},
]


@pytest.fixture(autouse=True)
def double_precision(default_dtype):
    """The folder's session fixture sets float64."""


def batch(number=12, seed=0, family="e2ip", **options):
    """(preds, target) of two frames as NequIP hands them to a MetricsManager, from a readout with strong weights."""
    torch.manual_seed(seed)
    readout = Readout(Settings.of(family, options, UNIT), LAYOUT, seed=seed)
    with torch.no_grad():
        for parameter in readout.parameters():
            parameter.copy_(torch.randn_like(parameter))
        outputs = readout(torch.randn(number, 4), torch.randn(number, 19), torch.zeros(number, dtype=torch.long))
    structure = {"num_atoms": torch.tensor([number // 2, number // 2]), "atom_types": torch.zeros(number).long()}
    target = {**structure, "forces": torch.randn(number, 3), "total_energy": torch.randn(2, 1)}
    preds = {
        **structure,
        "forces": target["forces"] + UNIT * torch.randn(number, 3),
        "total_energy": target["total_energy"] + 0.1,
        **{name: value.unsqueeze(-1) if value.dim() == 1 else value for name, value in outputs.items()},
    }
    return preds, target


def force_term(preds, target, **options):
    """Loss per atom (N,) of the family alone, whose formula is tested in the core."""
    family = Settings.of("e2ip", options, UNIT).build()
    outputs = {**preds, **{name: preds[name][:, 0] for name in ("e2ip_nu", "e2ip_kappa", "e2ip_force_unit")}}
    return family.force_loss(target["forces"] - preds["forces"], outputs)


def negative_log_likelihood(preds, target):
    parameters = {key.name: preds[key.name].reshape(-1, *key.shape).numpy() for key in E2IP.parameter_keys}
    return law_of(E2IP, parameters).negative_log_likelihood((target["forces"] - preds["forces"]).numpy())


def synchronised(manager):
    """A manager as NequIP's training module has it."""
    for metric in manager.values():
        for one in metric if isinstance(metric, torch.nn.ModuleList) else [metric]:
            one.dist_sync_on_step = True
    return manager


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_terms_and_weights(options):
    """With options or, bound to a model, without: a weight of the loss alone goes into the model's settings."""
    preds, target = batch(**options)
    loss = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 3.0}, **options)
    values = loss(preds, target)
    assert values["per_atom_energy_mse"].item() == pytest.approx((0.1 / 6) ** 2)
    expected = force_term(preds, target, **options).mean().item()
    assert values["forces_e2ip"].item() == pytest.approx(expected, rel=1e-12)
    total = 0.25 * values["per_atom_energy_mse"] + 0.75 * values["forces_e2ip"]
    assert values["weighted_sum"].item() == pytest.approx(total.item())
    settings, bound = Settings.of("e2ip", options, UNIT), E2IPLoss()["forces_e2ip"]
    assert not settings.differences(bound.bind(settings))
    assert bound(preds, target).item() == pytest.approx(expected, rel=1e-12)


def test_a_weight_of_the_loss_alone():
    settings = Settings.of("e2ip", {"evidence": "independent"}, UNIT)
    weighted = E2IPLoss(evidence_weight=0.7)["forces_e2ip"]
    resulting = weighted.bind(settings)
    assert resulting.options == {**settings.options, "evidence_weight": 0.7}
    assert not resulting.differences(weighted.bind(resulting)), "set-up comes once for every stage of a run"
    preds, target = batch(evidence="independent")
    expected = force_term(preds, target, evidence="independent", evidence_weight=0.7).mean().item()
    assert weighted(preds, target).item() == pytest.approx(expected, rel=1e-12)


def test_epoch_mean_is_over_atoms_not_batches():
    loss = synchronised(E2IPLoss())
    small, large = batch(number=4, seed=1), batch(number=20, seed=2)
    loss(*small), loss(*large)
    total = force_term(*small).sum() + force_term(*large).sum()
    assert loss.compute()["forces_e2ip"].item() == pytest.approx(total.item() / 24)


def test_step_value_carries_gradients_and_epoch_state_does_not():
    loss = synchronised(E2IPLoss(preset="paper"))
    preds, target = batch(preset="paper")
    preds["forces"].requires_grad_(True)
    loss(preds, target)["forces_e2ip"].backward()
    (expected,) = torch.autograd.grad(force_term(preds, target, preset="paper").mean(), preds["forces"])
    assert torch.allclose(preds["forces"].grad, expected, rtol=1e-12)
    assert not loss["forces_e2ip"].sum.requires_grad


def test_stress_term_and_energy_normalisation():
    loss = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 1.0, "stress": 2.0}, per_atom_energy=False)
    preds, target = batch()
    target["stress"] = torch.randn(2, 3, 3)
    preds["stress"] = target["stress"] + 0.5
    values = loss(preds, target)
    assert values["stress_mse"].item() == pytest.approx(0.25)
    assert values["total_energy_mse"].item() == pytest.approx(0.01)


@pytest.mark.parametrize("forces", ["likelihood", "host"])
def test_weights_by_type(forces):
    """As NequIP's own, whose mean square error the value is to the last bit with ``forces: host``."""
    coeffs, names = {"O": 1.0, "H": 5.0, "S": 2.0}, ["H", "O", "S"]
    loss = synchronised(E2IPLoss(per_type_forces_coeffs=coeffs, type_names=names))
    host = synchronised(EnergyForceLoss(per_type_forces_coeffs=coeffs, type_names=names))
    loss["forces_e2ip"].bind(Settings.of("e2ip", {}, UNIT, forces))
    sums, counts = torch.zeros(3), torch.zeros(3)
    for seed, types in enumerate(([0, 1] * 6, [0, 1, 2] * 4)):
        preds, target = batch(seed=seed)
        preds["atom_types"] = target["atom_types"] = torch.tensor(types)
        preds["forces"].requires_grad_(True)
        values, expected = loss(preds, target), host(preds, target)["forces_mse"]
        if forces == "likelihood":
            terms = force_term(preds, target).detach()
            batch_sums = torch.zeros(3).index_add(0, preds["atom_types"], terms)
            batch_counts = torch.bincount(preds["atom_types"], minlength=3)
            sums, counts = sums + batch_sums, counts + batch_counts
            means = batch_sums / batch_counts
            there = (5.0 * means[0] + means[1]) / 6.0 if seed == 0 else means @ torch.tensor([5.0, 1.0, 2.0]) / 8.0
            assert values["forces_e2ip"].item() == pytest.approx(there.item())
        else:
            assert torch.equal(values["forces_e2ip"], expected)
            gradients = [torch.autograd.grad(x, preds["forces"])[0] for x in (values["forces_e2ip"], expected)]
            assert torch.equal(*gradients)
    found = loss.compute()["forces_e2ip"]
    if forces == "host":
        assert torch.equal(found, host.compute()["forces_mse"])
    else:
        assert found.item() == pytest.approx(((sums / counts) @ torch.tensor([5.0, 1.0, 2.0]) / 8.0).item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_references_are_masked_and_counted(bad):
    loss = E2IPLoss()
    preds, target = batch()
    good = [i for i in range(12) if i not in (2, 7)]
    expected = force_term(preds, target)[good].mean().item()
    target["forces"][2, 1] = bad
    target["forces"][7] = bad
    preds["forces"].requires_grad_(True)
    with pytest.warns(UserWarning, match="2 of 12 atoms"):
        values = loss(preds, target)
    assert values["forces_e2ip"].item() == pytest.approx(expected)
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
        ({"preset": "other"}, "unknown preset"),
        ({"readout": "other"}, "unknown readout 'other'; choose from: e2ip"),
        ({"temperature": 1.0}, "temperature is no option of readout 'e2ip'.*; E2IPLoss itself takes coeffs, "),
        ({"coeffs": {"forces": 1.0}}, "must have total_energy and forces"),
        ({"coeffs": {"total_energy": 1.0, "forces": 1.0, "dipole": 1.0}}, "nothing else"),
        ({"coeffs": {"total_energy": 1.0, "forces": 0.0}}, "must be > 0"),
        ({"coeffs": {"total_energy": 1.0, "forces": None}}, "forces coefficient of E2IPLoss is null, but must be > 0"),
        ({"coeffs": {"total_energy": 1.0, "forces": "1,0"}}, "finite numbers, or null .*; got forces: 1,0"),
        ({"coeffs": {"total_energy": math.nan, "forces": 1.0}}, "finite numbers, or null .*; got total_energy: nan"),
        ({"coeffs": None}, "finite numbers, or null .*; got coeffs: null"),
        ({"per_type_forces_coeffs": {"H": 1.0}}, "which are not known"),
        *(
            ({"per_type_forces_coeffs": coeffs, "type_names": ["H", "O"]}, "give a number > 0.* which are H, O")
            for coeffs in ({"H": 1.0}, {"H": 1.0, "O": 0.0}, {"H": 1.0, "O": "much"}, {"H": 1.0, "O": math.inf})
        ),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        E2IPLoss(**options)
    if "coeffs" in options:
        with pytest.raises(InputError, match="unknown metrics"):
            E2IPMetrics(coeffs={"dipole_rmse": 1.0})
        with pytest.raises(InputError, match=r"E2IPMetrics must be finite numbers, or null .*; got forces_rmse: much"):
            E2IPMetrics(coeffs={"forces_rmse": "much", "forces_mae": None})
    if "readout" in options:
        with pytest.raises(InputError, match=message):
            E2IPMetrics(readout=options["readout"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evidence": "independent", "evidence_weight": -0.1}, "evidence_weight must be"),
        ({"evidence": "independent", "evidence_weight": math.nan}, "evidence_weight must be"),
        ({"evidence_weight": 0.1}, "no regulariser"),
    ],
    ids=str,
)
def test_weights_that_need_the_other_options(options, message):
    """Of the model, or in a loss without one the defaults: an error at set-up, or with the first batch."""
    loss = E2IPLoss(**options)
    with pytest.raises(InputError, match=message):
        loss(*batch())
    with pytest.raises(InputError, match=message):
        loss["forces_e2ip"].bind(Settings.of("e2ip", {"evidence": options.get("evidence")}, UNIT))


def test_another_readout(toy_family):
    """Names, values and errors of a family of which nothing here knows."""
    preds, target = batch(family="isotropic")
    assert E2IPLoss(readout="isotropic")(preds, target)["forces_isotropic"].item() > 0
    values = E2IPMetrics(readout="isotropic")(preds, target)
    std = preds["isotropic_log_std"].exp()
    normal = torch.distributions.Normal(preds["forces"], std.expand(-1, 3))
    assert values["isotropic_nll"].item() == pytest.approx(-normal.log_prob(target["forces"]).sum(-1).mean().item())
    with pytest.raises(InputError, match=r"not those of a readout 'e2ip'.*the same readout"):
        E2IPLoss()(preds, target)
    with pytest.raises(InputError, match="evidence is no option of readout 'isotropic'"):
        E2IPLoss(readout="isotropic", evidence="coupled")


@pytest.mark.parametrize("make", [E2IPLoss, E2IPMetrics])
def test_what_is_missing_is_named(make):
    preds, target = batch()
    stock = {name: value for name, value in preds.items() if not name.startswith("e2ip")}
    with pytest.raises(InputError, match=r"nequip_ext\.E2IPModel"):
        make()(stock, target)
    del target["forces"]
    with pytest.raises(InputError, match="key_mapping"):
        make()(preds, target)


def test_metrics_of_uncertainty():
    metrics = E2IPMetrics(coeffs={"forces_rmse": 1.0, "e2ip_nll": 1.0})
    batches = [batch(seed=1), batch(seed=2)]
    for preds, target in batches:
        expected = negative_log_likelihood(preds, target).mean()
        assert metrics(preds, target)["e2ip_nll"].item() == pytest.approx(expected)
    values = metrics.compute()
    preds, target = ({k: torch.cat([b[side][k] for b in batches]) for k in batches[0][side]} for side in (0, 1))
    residual = target["forces"] - preds["forces"]
    assert values["e2ip_nll"].item() == pytest.approx(negative_log_likelihood(preds, target).mean())
    assert values["forces_rmse"].item() == pytest.approx(residual.square().mean().sqrt().item())
    assert values["weighted_sum"].item() == pytest.approx(0.5 * (values["e2ip_nll"] + values["forces_rmse"]).item())
    assert 0.0 <= values["e2ip_coverage95"] <= 1.0 and -1.0 <= values["e2ip_spearman"] <= 1.0
    assert values["e2ip_plateau"] == preds["e2ip_plateau"].mean()
    assert "stress_rmse" not in values


def test_figures_share_their_atoms(monkeypatch):
    """One state and one evaluation for the four of them, also after copying, and apart for every manager."""
    judged = []
    judge = training.figures
    monkeypatch.setattr(training, "figures", lambda *arguments: judged.append(1) or judge(*arguments))
    names = [f"e2ip_{figure.name}" for figure in training.FIGURES]
    original = E2IPMetrics()
    preds, target = batch()
    original(preds, target)
    copied = copy.deepcopy(original)
    assert copied["e2ip_nll"].shared is not original["e2ip_nll"].shared
    for metrics in (original, copied):
        shared = metrics["e2ip_nll"].shared
        assert all(metrics[name].shared is shared for name in names)
        assert sum(isinstance(module, training.ForceUncertainty) for module in metrics.modules()) == 1
        before = len(judged)
        step = metrics(preds, target)
        assert len(judged) == before + 1
        epoch = metrics.compute()
        assert len(judged) == before + 2
        assert len(shared.rows) == 2
        for name in names:  # the same batch twice
            assert step[name].item() == pytest.approx(epoch[name].item())
        metrics.to("cpu").reset()
        assert len(shared.rows) == 0
    assert original["e2ip_nll"].shared is not E2IPMetrics()["e2ip_nll"].shared


def test_energies_of_models_without_error_bars_have_no_figures():
    preds, target = batch()
    metrics = E2IPMetrics()
    for known, extra in ((False, {}), (True, {"energy_uncertainty": torch.full((len(target["total_energy"]),), 0.1)})):
        values = [metrics({**preds, **extra}, target), metrics.compute()]
        assert all(("e2ip_energy_nll" in v) is ("e2ip_energy_coverage95" in v) is known for v in values)
        metrics.reset()
    E2IPMetrics({"forces_rmse": 1.0, "e2ip_energy_nll": None})
    with pytest.raises(InputError, match="e2ip_energy_nll cannot have a weight"):
        E2IPMetrics({"forces_rmse": 1.0, "e2ip_energy_nll": 1.0})
