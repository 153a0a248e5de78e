"""The reader of labels: what a training counts as a reference is what MACE has read, with its weights."""

from contextlib import contextmanager

import ase.io
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from mace import data
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric import Batch
from mace.tools.torch_geometric.dataloader import DataLoader

from e2ip_plugins.readout.settings import Settings
from mace_ext.training import labels
from mace_ext.training.data_sets import _tell_of_labels

E2IP = "--readout=e2ip"
ENERGIES = "{1: -3.0, 8: -2.0}"


@pytest.fixture
def with_calculators(data_files, tmp_path):
    """Function that writes the training frames with ASE's calculator, every second without ``lacking``."""

    def write(lacking):
        frames = ase.io.read(data_files["train"], ":")
        for i, atoms in enumerate(frames):
            results = {"energy": atoms.info.pop("REF_energy"), "forces": atoms.arrays.pop("REF_forces")}
            if i % 2:
                del results[lacking]
            atoms.calc = SinglePointCalculator(atoms, **results)
        path = tmp_path / f"no_{lacking}.xyz"
        ase.io.write(path, frames, format="extxyz")
        return path

    return write


@pytest.fixture
def make_atoms_with_weights(frames):
    """Function that gives a labelled frame as MACE has read it, with MACE's weights in its info."""

    def make(**weights):
        atoms = frames[1].copy()
        atoms.info.update(REF_energy=-1.0, **weights)
        atoms.arrays["REF_forces"] = 0.1 * atoms.positions
        specification = data.KeySpecification.from_defaults()
        return labels.labelled_frame(data.config_from_atoms(atoms, key_specification=specification))

    return make


@contextmanager
def without_missing(reading):
    """What a training with a readout says before it reads data."""
    labels.weigh_missing_labels(not reading)
    try:
        yield
    finally:
        labels.weigh_missing_labels(True)


def batch_of(path, reading=True):
    """MACE's batch of a file under ``--forces_key forces --energy_key energy``."""
    keys = data.KeySpecification.from_defaults()
    keys.update(info_keys={"energy": "energy"}, arrays_keys={"forces": "forces"})
    _, configs = data.load_from_xyz(str(path), keys)
    with without_missing(reading):
        graphs = [data.AtomicData.from_config(config, AtomicNumberTable([1, 6, 8]), 4.0) for config in configs]
    return Batch.from_data_list(graphs)


@pytest.mark.parametrize("lacking", ["forces", "energy"])
def test_labels_that_a_frame_does_not_have_weigh_nothing(with_calculators, lacking):
    """MACE itself reads zeros of full weight where ASE's names are the keys."""
    path = with_calculators(lacking)
    batch, stock = batch_of(path), batch_of(path, reading=False)
    assert batch[f"{lacking}_weight"].tolist() == [1.0, 0.0] * 6
    assert stock[f"{lacking}_weight"].tolist() == [1.0] * 12
    other = "energy" if lacking == "forces" else "forces"
    assert batch[f"{other}_weight"].tolist() == [1.0] * 12
    counted = torch.isfinite(labels.reference_forces(batch)).all(-1)
    assert counted.tolist() == ([True] * 3 + [lacking == "energy"] * 3) * 6
    assert labels.learned_atoms(batch).all()


@pytest.mark.parametrize("forces", ["likelihood", "host"])
def test_loss_of_frames_that_lack_forces(make_model, with_calculators, forces):
    """The force term is that of the other frames, and the energy term what it was."""
    from mace import modules

    from mace_ext.training.loss import E2IPLoss

    batch = batch_of(with_calculators("forces"))
    output = make_model()(batch.to_dict(), training=True)
    settings = Settings.of("e2ip", {}, 0.05, forces)
    values = {}
    for name, weights in (("both", (1.0, 10.0)), ("energy", (1.0, 0.0)), ("forces", (0.0, 10.0))):
        stock = modules.WeightedEnergyForcesLoss(energy_weight=weights[0], forces_weight=weights[1])
        values[name] = E2IPLoss(stock, settings)(ref=batch, pred=output).item()
        if name == "energy":
            assert values[name] == pytest.approx(stock(ref=batch, pred=output).item(), rel=1e-12)
    labelled = batch.clone()
    alone = E2IPLoss(modules.WeightedEnergyForcesLoss(energy_weight=0.0, forces_weight=10.0), settings)
    labelled.forces = torch.where(torch.arange(36)[:, None] % 6 < 3, batch.forces, torch.full_like(batch.forces, 7.0))
    assert values["forces"] == pytest.approx(alone(ref=labelled, pred=output).item(), rel=1e-12)
    assert values["both"] == pytest.approx(values["energy"] + values["forces"], rel=1e-12)
    # The batch of a file without these frames. MACE's own term, which is the value with `host`, counts them as zeros.
    path = with_calculators("forces")
    ase.io.write(path, ase.io.read(path, "::2"))
    others = batch_of(path)
    atoms, tensors = torch.arange(36) % 6 < 3, {k: v for k, v in output.items() if torch.is_tensor(v)}
    output = {k: v[atoms] if len(v) == 36 else v[::2] for k, v in tensors.items() if len(v) in (36, 12)}
    value = alone(ref=others, pred=output).item()
    assert values["forces"] == pytest.approx(value * (0.5 if forces == "host" else 1.0), rel=1e-12)


@pytest.mark.parametrize("lacking", ["forces", "energy"])
def test_training_with_frames_that_lack_a_label(train, with_calculators, lacking):
    """Validation, tables and fit read the same: their figures are those of a file whose own key is missing."""
    path = with_calculators(lacking)
    named = path.with_name("named.xyz")
    frames = ase.io.read(path, ":")
    for atoms in frames:
        for name, value in atoms.calc.results.items():
            (atoms.arrays if name == "forces" else atoms.info)[f"REF_{name}"] = value
        atoms.calc = None
    ase.io.write(named, frames, format="extxyz")
    options = {"E0s": ENERGIES, "max_num_epochs": 1, "std": 1.0, "mean": 0.0}
    by_name = train(E2IP, name="name", train_file=named, valid_file=named, test_file=named, **options)
    files = {"train_file": path, "valid_file": path, "test_file": path, "energy_key": "energy", "forces_key": "forces"}
    files["test_file"] = f"{path}@:"
    by_ase = train(E2IP, name="ase", **files, **options)
    for ours, theirs in zip(by_ase.validation, by_name.validation, strict=True):
        for figure in ("loss", "rmse_e", "rmse_f", "e2ip_nll"):
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-9), figure
    assert f"6 of 12 frames of the validation set (head Default) have no reference {lacking}" in by_ase.text
    fitted, expected = (run.model.e2ip_readout.leverage.state_dict() for run in (by_ase, by_name))
    for name, values in expected.items():
        torch.testing.assert_close(fitted[name], values)
    assert table(by_ase) == table(by_name)


def table(run):
    """Lines of the last error table."""
    return [line for line in run.text.splitlines() if "|" in line]


def test_frames_of_weight_zero_count_nowhere(train, data_files, tmp_path):
    """Of a validation set with two such frames, whose forces are wild, ours are the figures of the others."""
    frames = ase.io.read(data_files["valid"], ":")
    ase.io.write(tmp_path / "some.xyz", frames[:2])
    for atoms, key in zip(frames[2:], ("config_weight", "config_forces_weight"), strict=True):
        atoms.arrays["REF_forces"][:] = 100.0
        atoms.info[key] = 0.0
    ase.io.write(tmp_path / "all.xyz", frames)
    runs = [train(E2IP, name=name, valid_file=tmp_path / f"{name}.xyz", max_num_epochs=1) for name in ("some", "all")]
    some, every = (run.validation[-1] for run in runs)
    for figure in ("rmse_f", "e2ip_nll", "e2ip_coverage95"):
        assert every[figure] == pytest.approx(some[figure], rel=1e-6), figure
    fitted, expected = (run.model.e2ip_readout.leverage.state_dict() for run in (runs[1], runs[0]))
    for name, values in expected.items():
        # The energy of the frame whose forces have weight zero counts.
        if not name.startswith("energies."):
            torch.testing.assert_close(fitted[name], values, rtol=1e-6, atol=1e-12)
    assert "Å, by 2 validation energies" in runs[0].text and "Å, by 3 validation energies" in runs[1].text
    assert "1 of 4 frames of the validation set (head Default) have weight zero and count nowhere" in runs[1].text


def test_negative_weights_are_called_so(make_atoms_with_weights, caplog):
    """MACE trains with them: not a word about weight zero, nor that they count nowhere."""
    frames = [make_atoms_with_weights(**weights) for weights in ({}, {"config_weight": -1.0}, {"config_weight": 0.0})]
    frames.append(make_atoms_with_weights(config_forces_weight=-1.0))
    with caplog.at_level("INFO"):
        _tell_of_labels(frames, "of the training set")
    negative, zero = caplog.messages
    assert negative.startswith("2 of 4 frames of the training set have a negative weight: MACE moves away from")
    assert zero == "1 of 4 frames of the training set have weight zero and count nowhere"
    assert [labels.count_labels([frame])[0] for frame in frames] == [0, 1, 1, 0]


def test_prepared_data_without_forces(with_calculators, tmp_path):
    """HDF5 files of `mace_prepare_data` carry the same wrong weights; a worker of a data loader is another process."""
    import h5py

    keys = data.KeySpecification.from_defaults()
    keys.update(info_keys={"energy": "energy"}, arrays_keys={"forces": "forces"})
    _, configs = data.load_from_xyz(str(with_calculators("forces")), keys)
    with h5py.File(tmp_path / "train.h5", "w") as file:
        data.utils.save_configurations_as_HDF5(configs, 0, file)
    dataset = data.HDF5Dataset(tmp_path / "train.h5", r_max=3.0, z_table=AtomicNumberTable([1, 8]), head="Default")
    with without_missing(True):
        assert [dataset[i].forces_weight.item() for i in range(12)] == [1.0, 0.0] * 6
        loader = DataLoader(dataset, batch_size=12, num_workers=1, multiprocessing_context="spawn")
        assert next(iter(loader)).forces_weight.tolist() == [1.0, 0.0] * 6
    assert dataset[1].forces_weight == 1.0


def replay_options(data_files, tmp_path, change=lambda atoms: None):
    """Options of a fine-tuning with replayed data, whose labels have names of their own; ``change`` its frames."""
    frames = ase.io.read(data_files["train"], ":")
    for atoms in frames:
        atoms.info["pbe_energy"] = atoms.info.pop("REF_energy")
        atoms.arrays["pbe_forces"] = atoms.arrays.pop("REF_forces")
        change(atoms)
    ase.io.write(tmp_path / "replay.xyz", frames)
    own = {"train_file": str(data_files["train"]), "valid_file": str(data_files["valid"]), "E0s": "foundation"}
    keys = {"info_keys": {"energy": "pbe_energy"}, "arrays_keys": {"forces": "pbe_forces"}}
    files = {"train_file": None, "valid_file": None, "pt_train_file": tmp_path / "replay.xyz"}
    return {**files, "heads": {"ft": own, "pt_head": keys}, "E0s": None, "valid_fraction": 0.3, "max_num_epochs": 1}


def test_replayed_data_have_keys_of_their_own(train, foundation, data_files, tmp_path, message_of):
    options = replay_options(data_files, tmp_path)
    model = foundation.folder / "foundation.model"
    run = train(E2IP, foundation_model=model, name="replay", **options)
    assert run.model.heads == ["pt_head", "ft"]
    assert "have no reference" not in run.text and bool(run.model.e2ip_readout.leverage.fitted)
    options["heads"]["pt_head"]["arrays_keys"] = {"forces": "dft"}
    text = message_of(train, E2IP, foundation_model=model, **options)
    assert "--pt_train_file" in text and "no frame has forces under 'dft'" in text and "pbe_forces" in text
    # Without a foundation model, or without replay, MACE reads the entry like any other head.
    for settings in ({}, {"foundation_model": model, "multiheads_finetuning": False}):
        text = message_of(train, E2IP, **{**options, **settings})
        assert "head pt_head has no train_file, and --train_file is missing" in text


def test_predictions_that_replayed_data_have_for_labels(train, foundation, data_files, tmp_path):
    """MACE gives predictions the weights of the labels that the file has not: they count nowhere."""

    def unlabelled(atoms):
        del atoms.info["pbe_energy"], atoms.arrays["pbe_forces"]

    options = replay_options(data_files, tmp_path, unlabelled)
    flags = ("--pseudolabel_replay=True",)
    run = train(E2IP, *flags, foundation_model=foundation.folder / "foundation.model", name="pseudo", **options)
    assert "species" not in "".join(line for line in run.text.splitlines() if "left out" in line)
    assert "frames of the training set (head pt_head) have weight zero and count nowhere" in run.text
    assert "the references of head pt_head are predictions of the foundation model" in run.text


def test_files_that_a_training_reads(data_files):
    """What MACE makes of --heads and --pt_train_file, without a training."""
    from argparse import Namespace

    from mace_ext.training.data_sets import files_of_heads

    given = {"train_file": "t.xyz", "valid_file": None, "test_file": "x.xyz", "pt_train_file": "p.xyz"}
    given |= {"pt_valid_file": None, "foundation_model": "m.model", "multiheads_finetuning": True}
    given |= {"forces_key": "F", "energy_key": "E", "heads": None}

    def read(**changes):
        return [(head.name, head.files, head.keys) for head in files_of_heads(Namespace(**{**given, **changes}))]

    plain = {"forces": "F", "energy": "E"}
    own = {"train_file": ["t.xyz"], "valid_file": [], "test_file": ["x.xyz"]}
    replay = {"pt_train_file": ["p.xyz"], "pt_valid_file": []}
    assert read() == [("", own, plain), ("", replay, plain)]
    for changes in ({"multiheads_finetuning": False}, {"foundation_model": None}):
        assert read(**changes) == [("", own, plain)]
    heads = "{'a': {'forces_key': 'f', 'test_file': ['1.xyz', '2.xyz']}, 'pt_head': {'info_keys': {'energy': 'e'}}}"
    files = {"train_file": ["t.xyz"], "valid_file": [], "test_file": ["1.xyz", "2.xyz"]}
    expected = [("a", files, {**plain, "forces": "f"}), ("pt_head", replay, {**plain, "energy": "e"})]
    assert read(heads=heads) == expected
    published = read(heads=heads, foundation_model="small", pt_train_file=None)
    assert published[1] == ("pt_head", {"pt_train_file": [], "pt_valid_file": []}, {**plain, "energy": "e"})
