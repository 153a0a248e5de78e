"""``--e2ip_forces host``: the stock run to the last bit, and a readout that learns beside it."""

import pytest
import torch

OURS = ("--readout=e2ip", "--e2ip_forces=host")
STOCK_FIGURES = ("loss", "mae_e", "rmse_e", "rmse_e_per_atom", "mae_f", "rmse_f", "rel_rmse_f", "q95_f")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--ema", "--swa", "--start_swa=1"), {"clip_grad": 0.1, "default_dtype": "float32"}),
        pytest.param((), {"loss": "universal", "clip_grad": None}, marks=pytest.mark.nightly),
    ],
    ids=["plain", "ema, stage two, tight clipping", "universal"],
)
def test_the_host_trains_as_if_there_were_no_readout(train, flags, settings):
    # The first training in a process may round otherwise than all later ones, stock MACE against itself, too.
    train(name="warm", max_num_epochs=1, default_dtype=settings.get("default_dtype", "float64"))
    baseline = train(*flags, name="baseline", **settings)
    ours = train(*flags, *OURS, name="ours", **settings)
    for ending in ("", "_stagetwo") if "--swa" in flags else ("",):
        expected, found = (
            torch.load(run.folder / f"{run.name}{ending}.model", weights_only=False).state_dict()
            for run in (baseline, ours)
        )
        assert {key for key in found if not key.startswith("e2ip_readout.")} == set(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
    for line, reference in zip(ours.validation, baseline.validation, strict=True):
        for key in STOCK_FIGURES:
            assert line[key] == reference[key], key
    # And the readout has learned.
    assert ours.validation[-1]["e2ip_nll"] < ours.validation[0]["e2ip_nll"]


def test_gradients_are_clipped_apart(make_model, make_batch, frames):
    """What the optimiser steps with: each part clipped to the norm by itself."""
    import sys

    from e2ip_plugins.readout.settings import Settings
    from mace_ext.model.model import add_readout

    model = make_model(readout=None)
    add_readout(model, Settings.of("e2ip", {}, 0.05, "host"))
    readout = list(model.e2ip_readout.parameters())
    host = [parameter for name, parameter in model.named_parameters() if not name.startswith("e2ip_readout.")]
    seen = {}

    class Optimizer(torch.optim.SGD):
        def step(self):
            for name, parameters in (("readout", readout), ("host", host)):
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                seen[name] = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients])).item()

    class Ready:
        """A batch on its device."""

        def to(self, _):
            return self

        def to_dict(self):
            return make_batch(frames)

    # `mace.tools.train` as an attribute is the function of that name.
    sys.modules["mace.tools.train"].take_step(
        model=model,
        loss_fn=lambda pred, ref: 1e3 * (pred["forces"].square().sum() + pred["e2ip_nu"].sum()),
        batch=Ready(),
        optimizer=Optimizer(model.parameters(), lr=0.0),
        ema=None,
        output_args={"forces": True, "virials": False, "stress": False},
        max_grad_norm=2.0,
        device="cpu",
    )
    assert seen == pytest.approx({"readout": 2.0, "host": 2.0}, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*OURS, "--lbfgs"), "--e2ip_forces host does not go with --lbfgs"),
        (("--readout=e2ip", "--e2ip_forces=mine"), "--e2ip_forces: forces is 'mine'; choose from: likelihood, host"),
        (("--e2ip_forces=host",), "--e2ip_forces has no effect without --readout"),
    ],
)
def test_what_is_refused(train, message_of, flags, words):
    assert words in message_of(train, *flags)
