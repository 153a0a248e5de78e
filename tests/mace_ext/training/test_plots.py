"""`mace_plot_train` reads the logs of baseline and evidential runs side by side."""

import argparse

import matplotlib.pyplot as plt
import pytest


@pytest.mark.parametrize(
    ("keys", "heads"),
    [pytest.param("rmse_e,rmse_f", None, marks=pytest.mark.nightly), ("rmse_f,e2ip_nll,e2ip_coverage95", "Default")],
)
def test_training_plots(train, tmp_path, monkeypatch, keys, heads):
    plt.switch_backend("Agg")
    from mace.cli import plot_train

    evidential = "e2ip" in keys
    run = train(name="e2ip", max_num_epochs=3, readout="e2ip")
    if not evidential:
        train(name="baseline", max_num_epochs=3)
    monkeypatch.chdir(tmp_path)
    plot_train.run(
        argparse.Namespace(
            path=str(run.folder / "results"),
            keys=keys,
            heads=heads,
            min_epoch=0,
            output_format="png",
            linear=evidential,
            start_swa=None,
            error_bars=True,
        )
    )
    expected = {"e2ip"} if evidential else {"e2ip", "baseline"}
    assert {figure.name for figure in tmp_path.glob("*.png")} == {
        f"{name}_{heads or 'default'}.png" for name in expected
    }
