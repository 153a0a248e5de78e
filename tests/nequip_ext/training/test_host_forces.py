"""``forces: host``: a run is the stock run to the last bit, and the readout learns beside it."""

import pytest
import torch

from e2ip_plugins.errors import InputError
from nequip_ext import E2IPLoss, E2IPModel
from nequip_ext.model.readout import find_readout
from nequip_ext.training import checks


@pytest.mark.parametrize(
    "options",
    [("++trainer.gradient_clip_val=0.05",), pytest.param((), marks=pytest.mark.nightly)],
    ids=["clipped", "plain"],
)
def test_a_run_is_the_stock_run(tmp_path, train, train_files, logged, options):
    """Weights, EMA weights, and stock figures of every epoch, with shuffling."""
    common = ("run=[train]", "max_epochs=2", *options)
    stock = train("nequip_baseline", tmp_path / "stock", train_files, *common)
    ours = train("nequip_e2ip", tmp_path / "ours", train_files, *common, "forces=host", "evidence=leverage")
    for prefix in ("val0_epoch", "train_loss_epoch"):
        expected, got = logged(stock, prefix), logged(ours, prefix)
        assert expected.keys() == got.keys() == {0, 1}
        for epoch, figures in expected.items():
            for name, value in figures.items():
                assert got[epoch][name.replace("forces_mse", "forces_e2ip")] == value, name
    first, *_, last = logged(ours).values()
    assert last["val0_epoch/e2ip_nll"] != first["val0_epoch/e2ip_nll"], "the readout has learned nothing"
    expected, got = (torch.load(folder / "last.ckpt", weights_only=False)["state_dict"] for folder in (stock, ours))
    weights = [name for name, value in expected.items() if isinstance(value, torch.Tensor) and "metrics" not in name]
    assert sum(name.startswith("ema.") for name in weights) > 5
    for name in weights:
        assert torch.equal(got[name], expected[name]), name


def both(gnn_config, frames, to_data, **options):
    """A stock model and one with a readout that learns beside it, and a batch with references."""
    from nequip.data import AtomicDataDict
    from nequip.model import NequIPGNNModel

    inner = gnn_config(num_features=2, **options)
    stock = NequIPGNNModel(**{name: value for name, value in inner.items() if name != "_target_"})
    ours = E2IPModel(model=inner, seed=3, forces="host")
    data = AtomicDataDict.batched_from_list([to_data(atoms) for atoms in frames])
    generator = torch.Generator().manual_seed(0)
    target = {
        **data,
        "forces": torch.randn(data["pos"].shape, generator=generator),
        "total_energy": torch.randn(3, 1, generator=generator),
    }
    return stock.train(), ours.train(), data, target


def bound_loss(model, **options):
    loss = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 3.0}, **options)
    checks.bind(torch.nn.ModuleList([model, loss]))
    return loss


def test_gradients(gnn_config, frames, to_data):
    """The stock model's are the stock loss's, bit for bit; the readout's those of the likelihood at these forces."""
    from nequip.train import EnergyForceLoss

    stock, ours, data, target = both(gnn_config, frames, to_data)
    reference = EnergyForceLoss(coeffs={"total_energy": 1.0, "forces": 3.0})(stock(dict(data)), target)["weighted_sum"]
    loss = bound_loss(ours)
    value = loss(ours(dict(data)), target)["weighted_sum"]
    assert torch.equal(value, reference)
    reference.backward()
    value.backward()
    got = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        assert torch.equal(got.pop(name).grad, parameter.grad), name
    likelihood = E2IPModel(model=gnn_config(num_features=2), seed=3).train()
    alone = E2IPLoss(coeffs={"total_energy": 1.0, "forces": 3.0})(likelihood(dict(data)), target)
    alone["weighted_sum"].backward()
    expected = dict(likelihood.named_parameters())
    assert got and all("e2ip_readout" in name for name in got)
    for name, parameter in got.items():
        assert torch.allclose(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-15), name


def test_atoms_without_reference_are_left_out(gnn_config, frames, to_data):
    """Of the mean square error; infinite ones, too."""
    stock, ours, data, target = both(gnn_config, frames, to_data)
    output, others = stock(dict(data)), torch.arange(len(data["pos"])) != 2
    energies = (output["total_energy"] - target["total_energy"]) / data["num_atoms"].unsqueeze(-1)
    forces = (output["forces"] - target["forces"])[others]
    expected = 0.25 * energies.square().mean() + 0.75 * forces.square().mean()
    target["forces"][2] = float("nan")
    loss = bound_loss(ours)
    with pytest.warns(UserWarning, match="NaN or infinite reference forces"):
        assert torch.allclose(loss(ours(dict(data)), target)["weighted_sum"], expected, rtol=1e-12)
    target["forces"][2] = float("inf")
    assert torch.allclose(loss(ours(dict(data)), target)["weighted_sum"], expected, rtol=1e-12)


def test_traced_models(gnn_config, frames, to_data, monkeypatch):
    """``compile_mode: compile``: nothing but the readout learns from its loss there either."""
    monkeypatch.setattr(torch, "compile", lambda model, **k: model)
    _, eager, data, target = both(gnn_config, frames, to_data, l_max=1, num_layers=1)
    _, traced, *_ = both(gnn_config, frames, to_data, compile_mode="compile", l_max=1, num_layers=1)
    traced.eval()(dict(data))
    traced.train()
    for model in (eager, traced):
        output = model(dict(data))
        bound_loss(model)(output, target)["weighted_sum"].backward()
    expected = {name: parameter.grad for name, parameter in eager.named_parameters()}
    assert any("e2ip_readout" in name for name in expected)
    for name, parameter in traced.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-8, atol=1e-12), name


def test_gradients_are_clipped_apart(gnn_config):
    """By the norm of the stock model's, and the readout's by its own."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = E2IPModel(model=gnn_config(num_features=2), seed=3, forces="host")

        def configure_gradient_clipping(self):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    module = Module()
    own = list(find_readout(module).parameters())
    others = [parameter for parameter in module.parameters() if not any(parameter is p for p in own)]
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    others[0].grad = None
    checks.clip_apart(module)
    checks.clip_apart(module)
    module.configure_gradient_clipping()
    assert others[0].grad is None
    for part in (own, others[1:]):
        assert sum(p.grad.square().sum() for p in part).sqrt().item() == pytest.approx(1.0, rel=1e-5)


def test_what_trains_the_forces_is_one_of_two(gnn_config):
    with pytest.raises(InputError, match="forces is 'mine'; choose from: likelihood, host"):
        E2IPModel(model=gnn_config(), seed=1, forces="mine")
