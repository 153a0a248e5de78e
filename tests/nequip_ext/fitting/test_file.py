"""The leverage in the files of ``nequip-train``, and ``e2ip fit`` for checkpoints and packages."""

import warnings
import zipfile
from types import SimpleNamespace

import ase.io
import nequip
import numpy as np
import pytest
import torch
from forked_commands import run_command

import e2ip_plugins
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled_files import read_frames
from nequip_ext import E2IPCalculator
from nequip_ext.compat import NequIPCalculator
from nequip_ext.fitting import after_training
from nequip_ext.fitting.file import fit_file
from nequip_ext.model.readout import find_readout

LEVERAGE = ".e2ip_readout.readout.leverage."


@pytest.fixture(scope="module")
def coupled(tmp_path_factory, train, train_files):
    folder = tmp_path_factory.mktemp("run") / "coupled"
    return train("nequip_e2ip", folder, train_files, "max_epochs=1", "run=[train]", "evidence=coupled")


@pytest.fixture(scope="module")
def stock(tmp_path_factory, train, train_files):
    folder = tmp_path_factory.mktemp("run") / "stock"
    return train("nequip_baseline", folder, train_files, "max_epochs=1", "run=[train]")


@pytest.fixture(scope="module")
def frames(train_files):
    """Training and validation frames as ``e2ip fit`` reads them."""
    return [read_frames([train_files[name]]) for name in ("train", "val")]


def load(path):
    return torch.load(path, map_location="cpu", weights_only=False)


def leverage_of(path):
    state = load(path)["state_dict"]
    return {name.partition(LEVERAGE)[2]: value for name, value in state.items() if LEVERAGE in name}


def predictions(path, files):
    calculator = E2IPCalculator.from_saved_model(path)
    found = []
    for atoms in ase.io.read(files["train"], ":"):
        calculator.calculate(atoms)
        found.append(dict(calculator.results))
    return found


def test_the_best_checkpoint_is_fitted_and_the_last_is_not(leverage_run, train_files):
    best, last = leverage_of(leverage_run / "best.ckpt"), leverage_of(leverage_run / "last.ckpt")
    assert best["fitted"] and not last["fitted"]
    found = predictions(leverage_run / "best.ckpt", train_files)
    h = np.concatenate([results["e2ip_leverage"] for results in found])
    species = np.concatenate([a.get_chemical_symbols() for a in ase.io.read(train_files["train"], ":")])
    for symbol in "HCO":  # EMA weights: with others it would be another number
        assert h[species == symbol].mean() == pytest.approx(1.0, rel=1e-4)
    lines = [line for line in (leverage_run / "train.log").read_text().splitlines() if "] leverage: " in line]
    assert (
        "fitting" in lines[0] and str(leverage_run / "best.ckpt") in lines[0] and "72 training atoms" in "".join(lines)
    )


def test_test_predictions_carry_it(leverage_run):
    calculator = E2IPCalculator.from_saved_model(leverage_run / "best.ckpt")
    for atoms in ase.io.read(leverage_run / "test_dataset0.xyz", ":"):
        written = {name: atoms.arrays[name] for name in ("e2ip_leverage", "e2ip_kappa", "e2ip_log_sigma0")}
        calculator.calculate(atoms)
        for name, value in written.items():
            np.testing.assert_allclose(value, calculator.results[name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_an_unfitted_model_says_so_once(leverage_run, train_files):
    with pytest.warns(UserWarning, match="never fitted.*as in mode 'coupled'"):
        calculator = E2IPCalculator.from_saved_model(leverage_run / "last.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        calculator.calculate(ase.io.read(train_files["test"], 0))
        E2IPCalculator.from_saved_model(leverage_run / "best.ckpt")
    assert (calculator.results["e2ip_leverage"] == -1).all()
    assert np.allclose(calculator.results["e2ip_kappa"], calculator.results["e2ip_nu"] - 5.0, atol=1e-5)


def test_a_fit_that_fails_costs_neither_checkpoint_nor_tests(coupled, monkeypatch):
    """Of a full disk, say: the file stays as it was, and the warning says what to do."""
    best, warnings_given = coupled / "best.ckpt", []
    before = best.read_bytes()
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(train_dataset=[]),
        checkpoint_callback=SimpleNamespace(best_model_path=str(best)),
        is_global_zero=True,
        fast_dev_run=False,
        world_size=1,
        strategy=SimpleNamespace(barrier=lambda: None),
        state=SimpleNamespace(fn="fit"),
    )

    def full(*_):
        raise OSError(28, "No space left on device")

    def clash(*_):
        raise AssertionError("EMA module loaded in a state")

    changed = {"acts": True, "leverages": {"leverage": None}, "_forget_compiled": None, "_fit": {}}
    for name, value in changed.items():
        monkeypatch.setattr(after_training, name, lambda *_, value=value: value)
    monkeypatch.setattr(after_training.logger, "warning", warnings_given.append)
    monkeypatch.setattr(after_training, "store", full)
    callback, module = after_training.E2IPFit(), torch.nn.Linear(1, 1)
    callback.on_fit_end(trainer, module)
    monkeypatch.setattr(after_training, "_fit", clash)
    callback.on_fit_end(trainer, module)
    callback.on_exception(trainer, module, KeyboardInterrupt())
    assert best.read_bytes() == before
    for text, reason in zip(warnings_given, ("No space left", "AssertionError: EMA", "is not fitted"), strict=True):
        assert str(best) in text and reason in text and "e2ip fit MODEL --train" in text
    trainer.world_size = 2
    with pytest.raises(AssertionError, match="EMA module"):
        callback.on_fit_end(trainer, module)
    trainer.fast_dev_run = 1
    callback.on_fit_end(trainer, module)


def test_a_restart_from_a_fitted_checkpoint(leverage_run, tmp_path, train, train_files):
    """Trains unfitted, and is fitted anew at its end."""
    restart = (f"++ckpt_path={leverage_run / 'best.ckpt'}", "max_epochs=4", "run=[train,test]", "evidence=leverage")
    again = train("nequip_e2ip", tmp_path / "again", train_files, *restart)
    assert not leverage_of(again / "last.ckpt")["fitted"]
    before, after = leverage_of(leverage_run / "best.ckpt"), leverage_of(again / "best.ckpt")
    assert after["fitted"] and not torch.equal(before["centres"], after["centres"])


@pytest.mark.nightly
def test_fine_tuning_fits_anew(leverage_run, tmp_path, command, environment, train_files):
    """With the fitted checkpoint as the model; its readout comes along."""
    config = command("nequip_e2ip", tmp_path / "tuned", train_files, "max_epochs=1", "run=[train]")
    config = [argument for argument in config if "training_module.model." not in argument]
    model = f"{{_target_: nequip.model.ModelFromCheckpoint, checkpoint_path: '{leverage_run / 'best.ckpt'}'}}"
    config += ["~training_module.model", f"+training_module.model={model}"]
    done = run_command(config, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = leverage_of(leverage_run / "best.ckpt"), leverage_of(tmp_path / "tuned" / "best.ckpt")
    assert after["fitted"] and not torch.equal(before["centres"], after["centres"])


def test_fit_of_a_coupled_checkpoint(coupled, tmp_path, frames, train_files):
    """Becomes one in mode ``leverage``, in its config as well; the same numbers as at the end of a training."""
    moments = leverage_of(coupled / "best.ckpt")
    report = fit_file(coupled / "best.ckpt", *frames, tmp_path / "fitted.ckpt", batch_size=5)
    assert report.constants[0].configurations == 4 and report.constants[0].atoms == 24
    fitted = leverage_of(tmp_path / "fitted.ckpt")
    for name in ("centres", "region_norms"):
        assert torch.allclose(fitted[name], moments[name], rtol=1e-4, atol=1e-6), name
    expected, got = (predictions(path, train_files) for path in (coupled / "best.ckpt", tmp_path / "fitted.ckpt"))
    for one, other in zip(expected, got, strict=True):
        assert one["energy"] == other["energy"] and np.array_equal(one["forces"], other["forces"])
        assert np.allclose(one["e2ip_leverage"], other["e2ip_leverage"], rtol=1e-3)
        assert not np.allclose(one["e2ip_kappa"], other["e2ip_kappa"])
    saved = load(tmp_path / "fitted.ckpt")
    for section in (saved["hyper_parameters"], saved["hyper_parameters"]["info_dict"]["training_module"]):
        assert section["model"]["evidence"] == "leverage"
    original = load(coupled / "best.ckpt")
    assert saved.keys() == original.keys() and original["hyper_parameters"]["model"]["evidence"] == "coupled"
    for name, value in original["state_dict"].items():
        if LEVERAGE not in name and isinstance(value, torch.Tensor):
            assert torch.equal(saved["state_dict"][name], value), name
    # once more, from a fitted one
    again = fit_file(tmp_path / "fitted.ckpt", *frames, tmp_path / "again.ckpt")
    assert again.constants[0].growth == pytest.approx(report.constants[0].growth, rel=1e-3)


def test_fit_of_a_stock_checkpoint(stock, tmp_path, frames, train_files):
    """One Σ0 per species and the leverage; forces to the last bit; a checkpoint like any other."""
    path = tmp_path / "fitted.ckpt"
    # As where it was trained without this package.
    checkpoint = torch.load(stock / "best.ckpt", weights_only=False)
    checkpoint["hyper_parameters"]["info_dict"]["versions"].pop("e2ip_plugins")
    torch.save(checkpoint, tmp_path / "stock.ckpt")
    report = fit_file(tmp_path / "stock.ckpt", *frames, path)
    assert report.constants[0].nll[1] < np.inf
    fitted = torch.load(path, weights_only=False)["hyper_parameters"]["info_dict"]["versions"]
    assert fitted["e2ip_plugins"] == e2ip_plugins.__version__ and fitted["nequip"] == nequip.__version__
    plain = NequIPCalculator._from_saved_model(stock / "best.ckpt", chemical_species_to_atom_type_map=True)
    ours = E2IPCalculator.from_saved_model(path)
    for atoms in ase.io.read(train_files["test"], ":"):
        plain.calculate(atoms)
        ours.calculate(atoms)
        for name in ("energy", "forces"):
            assert np.array_equal(plain.results[name], ours.results[name])
        excess = 1.0 / ours.results["e2ip_kappa"]
        scale = np.trace(ours.results["e2ip_sigma0"], axis1=1, axis2=2)
        assert np.ptp(scale[atoms.numbers == 1]) < 1e-6 * scale[0] and np.ptp(excess[atoms.numbers == 1]) > 1e-3
        assert np.allclose(ours.results["e2ip_log_sigma0"][:, 3:], 0.0)
    again = fit_file(path, *frames, tmp_path / "again.ckpt")
    assert again.species_std == report.species_std, "the species keep standard deviations of their own"
    same(path, tmp_path / "again.ckpt", train_files, ("forces_cov", "e2ip_kappa", "e2ip_leverage"), 1e-5)


def same(first, second, files, names, rtol):
    expected, got = (predictions(path, files) for path in (first, second))
    for one, other in zip(expected, got, strict=True):
        for name in names:
            np.testing.assert_allclose(other[name], one[name], rtol=rtol, atol=1e-7, err_msg=name)


def test_fit_of_a_package(coupled, tmp_path, frames, train_files, package):
    """The new package predicts what the fitted checkpoint does, in both of its models, and needs no plugin either."""
    old = package(coupled / "best.ckpt", tmp_path / "old.nequip.zip")
    new = tmp_path / "new.nequip.zip"
    with pytest.raises(InputError, match=r"must end with \.nequip\.zip"):
        fit_file(old, *frames, tmp_path / "new.ckpt")
    fit_file(old, *frames, new)
    fit_file(coupled / "best.ckpt", *frames, tmp_path / "fitted.ckpt")
    same(tmp_path / "fitted.ckpt", new, train_files, ("forces", "forces_cov", "e2ip_kappa", "e2ip_leverage"), 1e-4)
    same(old, new, train_files, ("energy", "forces"), 0.0)
    listed = []
    for path in (old, new):
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/") for name in archive.namelist()}
            assert {first for first, _, _ in names} == {path.name.removesuffix(".zip")}
            # NequIP's dummy of Matplotlib is made anew.
            listed.append({name for _, _, name in names if not name.startswith((".data", "matplotlib"))})
    assert listed[0] == listed[1]
    for name in ("eager", "compile"):
        importer = torch.package.PackageImporter(str(new))
        assert find_readout(importer.load_pickle("model", f"{name}_model.pkl")).leverage.fitted


@pytest.mark.nightly
def test_stock_packages_and_packages_of_what_was_stock(stock, tmp_path, frames, train_files, package):
    """A fitted stock checkpoint can be packaged; a fitted stock package is a checkpoint, which can be packaged."""
    fit_file(stock / "best.ckpt", *frames, tmp_path / "one.ckpt")
    plain = package(stock / "best.ckpt", tmp_path / "plain.nequip.zip")
    fit_file(plain, *frames, tmp_path / "two.ckpt")
    keys = ("forces", "forces_cov", "e2ip_leverage")
    same(tmp_path / "one.ckpt", tmp_path / "two.ckpt", train_files, keys, 1e-4)
    for name in ("one", "two"):
        packed = package(tmp_path / f"{name}.ckpt", tmp_path / f"{name}.nequip.zip")
        same(tmp_path / f"{name}.ckpt", packed, train_files, keys, 1e-5)
    fit_file(packed, *frames, tmp_path / "again.nequip.zip")
    same(packed, tmp_path / "again.nequip.zip", train_files, keys, 1e-5)


def test_what_cannot_be_fitted(coupled, tmp_path, frames):
    output = tmp_path / "out.ckpt"
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(InputError, match="is no checkpoint of nequip-train"):
        fit_file(tmp_path / "text.ckpt", *frames, output)
    with pytest.raises(InputError, match="no heads"):
        fit_file(coupled / "best.ckpt", *frames, output, head="default")
    strange = [frames[0][0]._replace(atoms=frames[0][0].atoms.copy(), where="strange.xyz, frame 3")]
    strange[0].atoms.symbols[0] = "Si"
    with pytest.raises(InputError, match=r"strange\.xyz, frame 3: has Si, which .* it knows H, C, O"):
        fit_file(coupled / "best.ckpt", strange, frames[1], output)
    none = [frame._replace(forces=None) for frame in frames[1]]
    with pytest.raises(InputError, match="no configuration with finite reference forces"):
        fit_file(coupled / "best.ckpt", frames[0], none, output)
    broken = load(coupled / "best.ckpt")
    for section in (broken["hyper_parameters"], broken["hyper_parameters"]["info_dict"]["training_module"]):
        section["model"] = {**section["model"], "evidence": "independent"}
    torch.save(broken, tmp_path / "independent.ckpt")
    with pytest.raises(InputError, match=r"independent\.ckpt was trained in evidence mode 'independent'"):
        fit_file(tmp_path / "independent.ckpt", *frames, output)
    assert not output.exists() and not list(tmp_path.glob(".*"))
