"""The leverage of MACE models: fitted by a training and by `fit_file`, then in every place where models go."""

import copy
import logging
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.labelled import Frame, read_frames

ROOT = Path(__file__).resolve().parents[3]
IRREPS = ["8x0e", "8x0e+8x1o", "8x0e+8x1o+8x2e"]
LEVERAGE = (("evidence", "leverage"),)
FLAGS = ("--readout=e2ip", "--e2ip_evidence=leverage")
NAMES = [key.name for key in families.get("e2ip").output_keys()] + ["e2ip_leverage"]


def labelled(name, count, seed, width=0.1):
    """Rattled copies of a molecule with made-up forces of about 0.3 eV/Å."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(count):
        atoms = molecule(name)
        atoms.rattle(width, rng=rng)
        frames.append(Frame(atoms, rng.normal(scale=0.3, size=(len(atoms), 3)), f"{name} {i}"))
    return frames


@pytest.fixture(scope="session")
def training_frames():
    return [*labelled("CH3CH2OH", 12, 0), *labelled("H2O", 4, 1)]


@pytest.fixture(scope="session")
def validation_frames():
    return labelled("CH3CH2OH", 8, 2)


@pytest.fixture(scope="session")
def fit(training_frames, validation_frames):
    """Function that fits a model in place; returns its report."""
    from mace_ext.fitting.fit import Graphs, fit_model, in_order

    def run(model, head=None, batch_size=5, training=training_frames, validation=validation_frames, **settings):
        head = head or model.heads[0]
        loaders = [in_order(Graphs(frames, model, head), batch_size) for frames in (training, validation)]
        return fit_model(model, *loaders, "cpu", **settings)

    return run


@pytest.fixture(scope="session")
def make_fitted(make_model, fit):
    """Function from hidden irreps to a fitted model, a copy each."""
    import functools

    @functools.lru_cache
    def build(irreps):
        model = make_model(irreps, options=LEVERAGE)
        fit(model)
        return model

    return lambda irreps="8x0e+8x1o": copy.deepcopy(build(irreps))


def of_training_atoms(model, make_batch, data_files):
    frames = ase.io.read(data_files["train"], ":")
    species = [int(z) for z in model.atomic_numbers]
    # The cutoff of `training_options`; the molecules lie within it and that of `make_batch` alike.
    return model(make_batch(frames, species=species))["e2ip_leverage"]


# At the end of a training


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-4)])
def test_a_training_leaves_fitted_models(train, make_batch, data_files, predict, tmp_path, dtype, tolerance):
    from e2ip_plugins.report.compare import compare, load_models

    torch.set_default_dtype(getattr(torch, dtype))
    run = train(*FLAGS, "--ema", "--swa", "--start_swa=1", default_dtype=dtype, num_radial_basis=4)
    found = {}
    for path in (
        "run.model",
        "run_stagetwo.model",
        "checkpoints/run_run-1.model",
        "checkpoints/run_run-1_stagetwo.model",
    ):
        model = torch.load(run.folder / path, weights_only=False)
        assert model.e2ip_readout.leverage.fitted, path
        leverage = of_training_atoms(model, make_batch, data_files)
        assert leverage.mean().item() == pytest.approx(1.0, abs=tolerance)
        found[path] = leverage
    assert not torch.allclose(found["run.model"], found["run_stagetwo.model"])
    for stage in ("", "_stagetwo"):
        compiled = torch.jit.load(run.folder / f"run{stage}_compiled.model")
        of_compiled = of_training_atoms(compiled, make_batch, data_files)
        torch.testing.assert_close(of_compiled, found[f"run{stage}.model"], rtol=1e-2 * tolerance, atol=1e-6)
    assert run.text.count("Fitting the leverage") == run.text.count("leverage: growth") == 2
    # The last table is that of the fitted model.
    predict(run.folder / "run_stagetwo.model", data_files["valid"], tmp_path / "out.xyz", default_dtype=dtype)
    nll = compare(load_models([tmp_path / "out.xyz"]))["models"][0]["overall"]["nll"]
    table = run.text.split("Error-table on TRAIN and VALID")[2]
    cells = next(line for line in table.splitlines() if "valid_Default" in line).split("|")
    heading = next(line for line in table.splitlines() if "e2ip NLL" in line).split("|")
    column = next(i for i, cell in enumerate(heading) if "e2ip NLL" in cell)
    assert float(cells[column]) == pytest.approx(nll, abs=2e-4)


@pytest.mark.parametrize("evidence", ["coupled", "independent"])
def test_every_mode_has_a_leverage_and_else_predicts_as_it_was_trained(train, make_batch, data_files, evidence):
    model = train("--readout=e2ip", f"--e2ip_evidence={evidence}", max_num_epochs=1).model
    assert of_training_atoms(model, make_batch, data_files).mean().item() == pytest.approx(1.0, abs=1e-6)
    other = copy.deepcopy(model)
    other.e2ip_readout.leverage.reset()
    batch = make_batch([molecule("H2O")], species=(1, 8))
    found, expected = model({**batch}), other({**batch})
    assert all(torch.equal(found[name], expected[name]) for name in NAMES[:-1])
    assert (expected["e2ip_leverage"] == -1).all()


def test_a_restart_begins_unfitted_and_fits_again(train):
    train(*FLAGS, name="run", max_num_epochs=1)
    run = train(*FLAGS, "--restart_latest", name="run", max_num_epochs=2)
    assert run.model.e2ip_readout.leverage.fitted
    assert "Fitting the leverage" in run.text.split("Training complete")[1]
    assert "Fitting the leverage" not in run.text.split("Training complete")[0]
    (path,) = (run.folder / "checkpoints").glob("*.pt")
    state = torch.load(path, weights_only=False)["model"]
    assert not state["e2ip_readout.leverage.fitted"]


@pytest.mark.parametrize(
    "error, text",
    [
        (InputError("there is nothing to fit to"), "there is"),
        (MemoryError("full"), "MemoryError: full; what is wrong put right, fit it: e2ip"),
    ],
)
def test_a_fit_that_is_impossible_leaves_the_model_unfitted(train, monkeypatch, error, text):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("mace_ext.fitting.fit.fit_leverage", fail)
    run = train(*FLAGS, max_num_epochs=1)
    assert f"The leverage was not fitted: {text}" in run.text
    assert not run.model.e2ip_readout.leverage.fitted and (run.folder / "run_compiled.model").exists()


def test_every_head_of_a_training_is_fitted(train, data_files, make_batch):
    heads = {
        name: {"train_file": str(data_files["train"]), "valid_file": str(data_files["valid"]), "E0s": "average"}
        for name in ("one", "two")
    }
    run = train(*FLAGS, f"--heads={heads}", train_file=None, valid_file=None, max_num_epochs=1)
    assert "leverage (head one): growth" in run.text and "leverage (head two): growth" in run.text
    batches = [make_batch([molecule("H2O")], ["one", "two"], head, species=(1, 8)) for head in ("one", "two")]
    # The same data for both.
    one, two = (run.model(batch)["e2ip_leverage"] for batch in batches)
    torch.testing.assert_close(one, two)
    assert one.max() < 1e5


def test_two_processes_fit_what_one_does(train, tmp_path, start_two_processes, data_files, make_batch):
    """Seven training and three validation frames: each process has another number of them."""
    for name, count in (("train", 7), ("valid", 3)):
        ase.io.write(tmp_path / f"{name}.xyz", ase.io.read(data_files[name], f":{count}"))
    files = {f"{name}_file": tmp_path / f"{name}.xyz" for name in ("train", "valid")}
    # Nothing is learned, so that what is fitted does not depend on the share of the frames that was trained on.
    shared = {**files, "max_num_epochs": 1, "lr": 1e-30, "avg_num_neighbors": 2.0, "weight_decay": 0.0}
    flags = (*FLAGS, "--scaling=no_scaling", "--compute_avg_num_neighbors=False")
    process = start_two_processes(*flags, name="two", batch_size=2, valid_batch_size=1, **shared)
    one = train(*flags, name="one", batch_size=4, valid_batch_size=2, **shared)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text[-3000:]
    two = torch.load(tmp_path / "two.model", weights_only=False)
    assert two.e2ip_readout.leverage.fitted
    batch = make_batch([molecule("H2O"), molecule("H2")], species=(1, 8))
    found, expected = two({**batch}), one.model({**batch})
    torch.testing.assert_close(found["e2ip_leverage"], expected["e2ip_leverage"], rtol=1e-6, atol=1e-6)
    # The search for the constants stops within a tolerance.
    torch.testing.assert_close(found["forces_cov"], expected["forces_cov"], rtol=1e-3, atol=1e-6)


# The fit itself


def test_the_fit_depends_on_no_batch_size_and_touches_nothing_else(make_model, fit, make_batch, frames):
    first, second = make_model(options=LEVERAGE), make_model(options=LEVERAGE)
    weights = [parameter.detach().clone() for parameter in first.parameters()]
    first.products[0].linear.weight.requires_grad_(False)
    learning = [parameter.requires_grad for parameter in first.parameters()]
    second.eval()
    state = torch.random.get_rng_state()
    fit(first, batch_size=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    fit(second, batch_size=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), weights, strict=True))
    assert [parameter.requires_grad for parameter in first.parameters()] == learning
    assert first.training and not second.training
    found, expected = first(make_batch(frames)), second(make_batch(frames))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found["e2ip_leverage"], expected["e2ip_leverage"], rtol=1e-9, atol=1e-9)


def test_the_leverage_reads_every_layers_scalars_of_a_species(make_fitted, make_batch, frames):
    """8x0e+8x1o in the first layer, 8x0e in the last; what it makes of them is tested with the core."""
    model, seen = make_fitted(), {}

    def keep(_, inputs, __):
        seen.update(zip(("scalars", "species", "heads", "neighbours"), inputs, strict=True))

    model.e2ip_readout.leverage.register_forward_hook(keep)
    batch = make_batch(frames)
    features = model(batch)["node_feats"].detach()
    assert torch.equal(seen["scalars"], torch.cat([features[:, :8], features[:, 32:]], dim=1))
    numbers = np.concatenate([atoms.numbers for atoms in frames])
    assert model.atomic_numbers[seen["species"]].tolist() == numbers.tolist()
    index = batch["edge_index"]
    lengths = (batch["positions"][index[1]] - batch["positions"][index[0]] + batch["shifts"]).norm(dim=-1).detach()
    torch.testing.assert_close(seen["neighbours"].lengths, lengths)
    # A polynomial cutoff: 1 at 0, falling, 0 from 4 Å on.
    envelope = seen["neighbours"].envelope[lengths.argsort()]
    assert (envelope.diff() <= 1e-12).all() and 0 < envelope[0] < 1 and envelope[-1] < 0.05


def test_configurations_without_weight_or_finite_forces_do_not_count(make_model, fit, validation_frames):
    from mace_ext.fitting.fit import Graphs, fit_model, in_order

    class Weightless(Graphs):
        def __getitem__(self, index):
            graph = super().__getitem__(index)
            graph.forces_weight = graph.forces_weight * (index < len(validation_frames))
            return graph

    class Unused(Graphs):
        def __getitem__(self, index):
            graph = super().__getitem__(index)
            graph.weight = graph.weight * (index < 16)
            return graph

    lost = [frame._replace(forces=np.full_like(frame.forces, 1e3)) for frame in validation_frames]
    partly = [frame._replace(forces=np.full_like(frame.forces, np.nan)) for frame in lost]
    first, second = make_model(options=LEVERAGE), make_model(options=LEVERAGE)
    expected = fit(first)
    training = labelled("CH3CH2OH", 12, 0) + labelled("H2O", 4, 1) + labelled("CH3CH2OH", 3, 2, width=0.4)
    training = in_order(Unused(training, second, "Default"), 5)
    validation = in_order(Weightless([*validation_frames, *lost, *partly], second, "Default"), 5)
    found = fit_model(second, training, validation, "cpu")
    assert found.constants[0].atoms == expected.constants[0].atoms == 72
    assert found.constants[0].configurations == 8
    assert found.constants[0].growth == pytest.approx(expected.constants[0].growth, rel=1e-3)
    assert found.atoms == expected.atoms


def test_features_that_are_not_finite_are_an_error(make_model, fit):
    model = make_model(options=LEVERAGE)
    with torch.no_grad():
        model.node_embedding.linear.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="features of 120 training atoms are not finite"):
        fit(model)


# What the leverage is like


@pytest.mark.parametrize("irreps", IRREPS)
def test_invariances(make_fitted, make_batch, irreps):
    from scipy.spatial.transform import Rotation

    model, rng = make_fitted(irreps), np.random.default_rng(0)
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.15, seed=7)
    order = rng.permutation(len(atoms))
    others = [atoms.copy() for _ in range(4)]
    others[0].positions = atoms.positions @ Rotation.random(rng=rng).as_matrix().T
    others[1].positions = -atoms.positions
    others[2].positions += [3.0, -20.0, 7.0]
    others[3] = atoms[order]
    expected = model(make_batch([atoms]))
    # One batch: what else is in it does not matter.
    found = model(make_batch([*others, molecule("H2O")]))
    for name in ("e2ip_leverage", "forces_epistemic_std", "e2ip_kappa"):
        rows = found[name].detach()[: 4 * len(atoms)].reshape(4, len(atoms))
        for i, own in enumerate(rows):
            reference = expected[name].detach()[torch.from_numpy(order)] if i == 3 else expected[name].detach()
            assert ((own - reference).abs() / reference.abs()).max() < 1e-10, (name, i)


def test_a_supercell_has_the_leverage_of_its_cell(make_fitted, make_batch):
    model = make_fitted()
    for cell in (bulk("C", a=3.6), Atoms("C", cell=[2.5] * 3, pbc=True)):
        small, large = (model(make_batch([atoms])) for atoms in (cell, cell.repeat((2, 3, 1))))
        for name in ("e2ip_leverage", "forces_epistemic_std"):
            expected = small[name].detach().repeat(6)
            assert ((large[name].detach() - expected).abs() / expected).max() < 1e-10


def test_nonsense_is_less_certain_than_training_atoms(make_fitted, make_batch, training_frames):
    model = make_fitted()
    of_training = model(make_batch([frame.atoms for frame in training_frames]))
    nonsense = [Atoms("C"), Atoms("CH", [[0, 0, 0], [0, 0, 0.3]]), Atoms("C", cell=[2.5] * 3, pbc=True)]
    found = model(make_batch(nonsense))
    for name in ("e2ip_leverage", "forces_epistemic_std"):
        assert found[name].min() > torch.quantile(of_training[name], 0.99), name


def test_atoms_at_the_same_place_have_infinite_leverage_or_none(make_fitted, make_batch):
    found = make_fitted()(make_batch([Atoms("CHO", [[0, 0, 0], [0, 0, 0], [1.5, 0, 0]])]))["e2ip_leverage"]
    assert not torch.isfinite(found[:2]).any()


@pytest.mark.parametrize("irreps", IRREPS[:2])
def test_smooth_where_an_atom_leaves_the_cutoff(make_fitted, make_batch, irreps):
    from mace_ext import uncertainty_gradient

    model, cutoff = make_fitted(irreps), 4.0

    def at(distance):
        atoms = Atoms("CHHO", [[0, 0, 0], [-0.6, 0.8, 0.1], [-0.6, -0.3, 0.8], [distance, 0, 0]])
        value, slope = uncertainty_gradient(model, make_batch([atoms]), lambda o: o["e2ip_kappa"].log().sum())
        return value.item(), slope[3, 0].item()

    outside, slope_outside = at(cutoff + 1e-4)
    inside, slope_inside = at(cutoff - 1e-4)
    within, slope_within = at(0.75 * cutoff)
    assert slope_outside == 0.0 and abs(within - outside) > 1e-4 * abs(outside)
    assert abs(inside - outside) < 1e-6 * abs(within - outside)
    assert abs(slope_inside) < 1e-4 * abs(slope_within)


@pytest.mark.parametrize("name", ["forces_epistemic_std", "e2ip_leverage"])
def test_uncertainty_gradient_agrees_with_finite_differences(make_fitted, frames, name):
    from mace.calculators import MACECalculator

    calc, step = MACECalculator(models=[make_fitted()], device="cpu", default_dtype="float64"), 1e-5
    for seed, atoms in enumerate(frames):
        direction = np.random.default_rng(seed).normal(size=atoms.positions.shape)
        _, gradient = calc.uncertainty_gradient(atoms, name)
        sums = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions += sign * step * direction
            calc.calculate(moved)
            sums.append(calc.results[name].sum())
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-6)


# Where fitted models go


@pytest.mark.parametrize("irreps", IRREPS[:2])
def test_torchscript_equals_eager(make_fitted, make_batch, frames, tmp_path, irreps):
    from e3nn.util import jit

    model = make_fitted(irreps)
    torch.jit.save(jit.compile(copy.deepcopy(model)), tmp_path / "compiled.model")
    compiled, expected = torch.jit.load(tmp_path / "compiled.model"), model(make_batch(frames))
    for _ in range(2):
        output = compiled(make_batch(frames))
        for name in NAMES:
            torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_rebuilt_model_takes_the_leverage_over(make_fitted, make_model, make_batch, frames):
    """As MACE's conversions do it: tensors of the same name and shape are copied, the others forgotten."""
    from mace.tools.scripts_utils import extract_config_mace_model

    model = make_fitted()
    rebuilt = type(model)(**extract_config_mace_model(model))
    state, own = model.state_dict(), rebuilt.state_dict()
    rebuilt.load_state_dict({key: state[key] if state[key].shape == own[key].shape else own[key] for key in own})
    expected, found = model(make_batch(frames)), rebuilt(make_batch(frames))
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)
    # Fitted weights into an unfitted model, and back.
    fresh = make_model(options=LEVERAGE)
    unfitted = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(make_batch(frames))["e2ip_kappa"], expected["e2ip_kappa"])
    fresh.load_state_dict(unfitted)
    assert (fresh(make_batch(frames))["e2ip_leverage"] == -1).all()


@pytest.mark.parametrize("kept", ["one", "two"])
def test_the_kept_head_keeps_its_leverage(make_model, make_batch, frames, kept):
    from mace.tools.scripts_utils import remove_pt_head

    from mace_ext.fitting.fit import Graphs, fit_model, in_order

    heads = ["one", "two"]
    model = make_model(heads=tuple(heads), options=LEVERAGE)
    data = {
        "one": (labelled("CH3CH2OH", 8, 0), labelled("CH3CH2OH", 4, 1)),
        "two": (labelled("CH3OH", 8, 2, 0.2), labelled("CH3OH", 4, 3, 0.2)),
    }
    sets = [torch.utils.data.ConcatDataset([Graphs(data[h][i], model, h) for h in heads]) for i in (0, 1)]
    report = fit_model(model, *(in_order(s, 4) for s in sets), "cpu")
    assert set(report.constants) == {0, 1}
    expected = model(make_batch(frames, heads=heads, head=kept))
    other = model(make_batch(frames, heads=heads, head=heads[kept == "one"]))
    assert not torch.allclose(expected["e2ip_leverage"], other["e2ip_leverage"])
    single = remove_pt_head(model, kept)
    found = single(make_batch(frames, heads=[kept], head=kept))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-13)
    assert single.e2ip_readout.leverage.growth.shape == (1,)


def test_in_results_committees_and_padding(make_fitted, make_batch, frames, caplog):
    from mace.calculators import MACECalculator

    fitted, other = make_fitted(), make_fitted("8x0e")
    expected = [model(make_batch(frames[:1]))["e2ip_leverage"].detach().numpy() for model in (fitted, other)]

    def results(*models, **settings):
        calc = MACECalculator(models=list(models), device="cpu", default_dtype="float64", **settings)
        assert "e2ip_leverage" in calc.implemented_properties
        calc.calculate(frames[0])
        return calc.results["e2ip_leverage"]

    np.testing.assert_allclose(results(fitted), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, energy_units_to_eV=2.0), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, pad_num_atoms=16, pad_num_edges=256), expected[0], rtol=1e-10)
    np.testing.assert_allclose(results(fitted, other), np.mean(expected, axis=0), rtol=1e-10)
    assert "never fitted" not in caplog.text


def test_an_unfitted_model_says_so_and_gives_no_leverage(make_model, frames, predict, tmp_path, caplog, capsys):
    from mace.calculators import MACECalculator

    model, coupled = make_model(options=LEVERAGE), make_model(options=(("evidence", "coupled"),))
    with caplog.at_level(logging.WARNING):
        calc = MACECalculator(models=[model], device="cpu", default_dtype="float64")
    assert "was never fitted" in caplog.text and "e2ip fit" in caplog.text
    calc.calculate(frames[0])
    assert "e2ip_leverage" not in calc.results and "e2ip_leverage" not in calc.implemented_properties
    expected = MACECalculator(models=[coupled], device="cpu", default_dtype="float64")
    expected.calculate(frames[0])
    np.testing.assert_array_equal(calc.results["forces_cov"], expected.results["forces_cov"])
    with pytest.raises(InputError, match="unknown uncertainty 'e2ip_leverage'"):
        calc.uncertainty_gradient(frames[0], "e2ip_leverage")
    torch.save(model, tmp_path / "unfitted.model")
    ase.io.write(tmp_path / "in.xyz", frames)
    written = predict(tmp_path / "unfitted.model", tmp_path / "in.xyz", tmp_path / "out.xyz", batch_size=1)
    assert "MACE_e2ip_leverage" not in written[0].arrays
    assert capsys.readouterr().err.count("was never fitted") == 1


# Files


@pytest.fixture(scope="session")
def fit_saved(tmp_path_factory, training_frames, validation_frames):
    """Function that saves a model, fits the file, and returns the report and the path of the fitted file."""
    from mace_ext.fitting.fit import fit_file

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
    residual = found_there["forces"].detach() - torch.tensor(np.concatenate([f.forces for f in validation_frames]))
    predicted = found_there["forces_cov"].diagonal(dim1=-2, dim2=-1).mean().sqrt().item()
    assert predicted == pytest.approx(residual.square().mean().sqrt().item(), rel=0.3)
    assert report.constants[0].configurations == 8
    assert model.e2ip_readout.settings.options["evidence"] == "leverage"
    ase.io.write(tmp_path / "in.xyz", frames)
    written = predict(path, tmp_path / "in.xyz", tmp_path / "out.xyz", default_dtype=str(dtype)[6:])
    leverage = np.concatenate([atoms.arrays["MACE_e2ip_leverage"] for atoms in written])
    np.testing.assert_allclose(leverage, found["e2ip_leverage"].detach(), rtol=1e-4)


def test_a_fitted_model_is_fitted_again(make_model, make_batch, frames, fit_saved):
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


def test_long_passes_say_how_far_they_are(make_model, fit, monkeypatch):
    monkeypatch.setattr("mace_ext.fitting.fit.PATIENCE", -1.0)
    said = []
    fit(make_model(options=LEVERAGE), batch_size=4, say=said.append)
    assert said == [f"leverage: training set {share} %" for share in (20, 50, 70, 100)] + [
        f"leverage: validation set {share} %" for share in (50, 100)
    ]


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
    from mace_ext.fitting.fit import fit_file

    with pytest.raises(InputError, match=r"was trained in evidence mode 'independent'"):
        fit_saved(make_model(options=(("evidence", "independent"),)))
    strange = [Frame(molecule("SH2"), np.zeros((3, 3)), "new.xyz, frame 3")]
    with pytest.raises(InputError, match=r"new.xyz, frame 3: has S, which the model does not know; it knows"):
        fit_saved(make_model(), training=strange)
    nan = [frame._replace(forces=np.full_like(frame.forces, np.nan)) for frame in validation_frames]
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
    with pytest.raises(InputError, match="is the model itself"):
        fit_file(path, *arguments, path)
    with pytest.raises(InputError, match="the folder does not exist"):
        fit_file(path, *arguments, tmp_path / "none" / "y.model")
    assert [found.name for found in tmp_path.iterdir()] == ["x.model"]
