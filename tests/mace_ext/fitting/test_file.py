"""`e2ip fit` for MACE models: stock and e²IP ones, their heads, bad input."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import LabelledFrame
from e2ip_plugins.predictions.labelled_files import read_frames
from mace_ext.fitting.file import fit_file

LEVERAGE = (("evidence", "leverage"),)
FLAGS = ("--readout=e2ip", "--e2ip_evidence=leverage")


@pytest.fixture(scope="session")
def fit_saved(tmp_path_factory, training_frames, validation_frames):
    """Function that saves a model, fits the file, and returns the report and the path of the fitted file."""

    def run(model, training=training_frames, validation=validation_frames, **settings):
        folder = tmp_path_factory.mktemp("fit")
        torch.save(model, folder / "in.model")
        report = fit_file(folder / "in.model", training, validation, folder / "out.model", **settings)
        assert [path.name for path in sorted(folder.iterdir())] == ["in.model", "out.model"]
        return report, folder / "out.model"

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_stock_model_gets_error_bars_and_keeps_its_forces(
    make_model, make_batch, frames, validation_frames, fit_saved, predict, tmp_path, dtype
):
    stock = make_model(readout=None, dtype=dtype)
    torch.set_default_dtype(torch.float64)
    report, path = fit_saved(stock)
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(dtype)
    model = torch.load(path, weights_only=False)
    stock(make_batch(frames))  # which may round otherwise than all later ones, see below
    expected, found = stock(make_batch(frames)), model(make_batch(frames))
    for name in ("energy", "forces"):
        assert found[name].dtype == dtype and torch.equal(found[name], expected[name])
    # Isotropic, and a factor of the leverage alone for each species.
    cov = found["forces_cov"].detach()
    assert torch.allclose(cov, cov[:, :1, :1] * torch.eye(3), rtol=1e-4)
    # About as large as the errors.
    atoms = [frame.atoms for frame in validation_frames]
    found_there = model(make_batch(atoms))
    residual = found_there["forces"].detach() - torch.tensor(
        np.concatenate([f.counted_forces for f in validation_frames])
    )
    predicted = found_there["forces_cov"].diagonal(dim1=-2, dim2=-1).mean().sqrt().item()
    assert predicted == pytest.approx(residual.square().mean().sqrt().item(), rel=0.3)
    assert report.constants[0].configurations == 8
    assert model.e2ip_readout.settings.options["evidence"] == "leverage"
    ase.io.write(tmp_path / "in.xyz", frames)
    written = predict(path, tmp_path / "in.xyz", tmp_path / "out.xyz", default_dtype=str(dtype)[6:])
    leverage = np.concatenate([atoms.arrays["MACE_e2ip_leverage"] for atoms in written])
    np.testing.assert_allclose(leverage, found["e2ip_leverage"].detach(), rtol=1e-4)


def test_a_fitted_model_is_fitted_again(make_model, make_batch, frames, labelled, fit_saved):
    """In mode `leverage` and from `coupled` alike; a constant readout stays one."""
    for start in (
        make_model(options=(("evidence", "coupled"),)),
        make_model(options=LEVERAGE),
        make_model(readout=None),
    ):
        _, once = fit_saved(start)
        first = torch.load(once, weights_only=False)
        _, twice = fit_saved(first)
        second = torch.load(twice, weights_only=False)
        found, expected = second(make_batch(frames)), first(make_batch(frames))
        for name in ("e2ip_leverage", "forces_cov"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6)
        report, _ = fit_saved(first, training=labelled("H2O", 20, 0), validation=labelled("H2O", 4, 1))
        assert "no training atoms of C" in " ".join(report.warnings)


def test_training_goes_on_from_a_fitted_file(train, fit_saved, data_files):
    baseline = train(name="baseline", max_num_epochs=1)
    frames = {name: read_frames([data_files[name]]) for name in ("train", "valid")}
    _, path = fit_saved(baseline.model, frames["train"], frames["valid"])
    run = train(*FLAGS, f"--foundation_model={path}", name="fine", E0s="average", max_num_epochs=2)
    assert "readout taken over from the foundation model" in run.text
    assert run.model.e2ip_readout.leverage.fitted
    trunk = run.model.e2ip_readout.trunks[0]
    assert trunk.out.weight.abs().max() > 0


def test_a_model_from_before_there_were_heads(make_model, make_batch, frames, fit_saved):
    stock = make_model(readout=None)
    del stock.heads
    # The first evaluation in a process may round otherwise than all later ones, stock MACE against itself, too.
    _, expected = (stock(make_batch(frames)) for _ in range(2))
    _, path = fit_saved(stock)
    found = torch.load(path, weights_only=False)(make_batch(frames))
    assert torch.equal(found["forces"], expected["forces"]) and torch.isfinite(found["e2ip_leverage"]).all()


def test_a_head_is_chosen(make_model, make_batch, frames, fit_saved):
    model = make_model(heads=("one", "two"), options=LEVERAGE)
    with pytest.raises(InputError, match="has 2 heads; give --head, one of: one, two"):
        fit_saved(model)
    with pytest.raises(InputError, match="has no head 'three'; give --head"):
        fit_saved(model, head="three")
    report, path = fit_saved(model, head="two")
    assert "for head two alone, not for one" in report.warnings[-1]
    fitted = torch.load(path, weights_only=False)
    of_two = fitted(make_batch(frames, heads=["one", "two"], head="two"))["e2ip_leverage"]
    of_one = fitted(make_batch(frames, heads=["one", "two"], head="one"))["e2ip_leverage"]
    assert of_two.max() < 1e5 and of_one.min() > 9e5


def test_bad_input(make_model, fit_saved, tmp_path, training_frames, validation_frames):
    with pytest.raises(InputError, match=r"was trained in evidence mode 'independent'"):
        fit_saved(make_model(options=(("evidence", "independent"),)))
    strange = [LabelledFrame(molecule("SH2"), "new.xyz, frame 3")]
    with pytest.raises(InputError, match=r"new.xyz, frame 3: has S, which the model does not know; it knows"):
        fit_saved(make_model(), training=strange)
    nan = [frame._replace(forces=None) for frame in validation_frames]
    with pytest.raises(InputError, match="no configuration with finite reference forces"):
        fit_saved(make_model(), validation=nan)
    path = tmp_path / "x.model"
    path.write_text("no model")
    arguments = (training_frames, validation_frames)
    with pytest.raises(InputError, match=r"x.model: is not a model file of mace_run_train"):
        fit_file(path, *arguments, tmp_path / "y.model")
    torch.save(torch.nn.Linear(1, 1), path)
    with pytest.raises(InputError, match=r"x.model: is a Linear; only ScaleShiftMACE models"):
        fit_file(path, *arguments, tmp_path / "y.model")
