"""The reader of labels: what a data set gives after its transforms, batches, predictions that are no references."""

import math
import re

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from nequip.data.dataset import ASEDataset
from nequip.data.transforms import (
    ChemicalSpeciesToAtomTypeMapper,
    NeighborListTransform,
    StressSignFlipTransform,
    VirialToStressTransform,
)

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.columns import predicted
from e2ip_plugins.readout.settings import Settings
from nequip_ext import E2IPLoss
from nequip_ext.model.model import lacking_types
from nequip_ext.training.data_sets import check_datasets, check_lacking_types
from nequip_ext.training.labels import labelled_frames, predicted_labels

KEYS = {"REF_energy": "total_energy", "REF_forces": "forces"}


def copper(count, seed=0):
    """Cells with references in a harmonic well, and virials."""
    frames = []
    for i in range(count):
        atoms, generator = bulk("Cu", cubic=True), np.random.default_rng(seed + i)
        stretch = 0.1 * generator.normal(size=atoms.positions.shape)
        atoms.positions += stretch
        atoms.info["REF_energy"] = float(-3.0 * len(atoms) + 5.0 * np.sum(stretch**2))
        atoms.arrays["REF_forces"] = -10.0 * stretch
        virial = generator.normal(size=(3, 3))
        atoms.info["virial"] = virial + virial.T
        frames.append(atoms)
    return frames


@pytest.fixture
def write(tmp_path):
    """Function that writes frames to a file; its path."""

    def to_file(name, frames):
        ase.io.write(tmp_path / name, frames, format="extxyz")
        return tmp_path / name

    return to_file


def test_labels_are_those_after_the_transforms(write):
    frames = copper(2)
    mapper = ChemicalSpeciesToAtomTypeMapper(["Cu"])
    transforms = [mapper, VirialToStressTransform(), StressSignFlipTransform(), NeighborListTransform(r_max=3.0)]
    data = ASEDataset(str(write("cu.xyz", frames)), transforms, key_mapping={**KEYS, "virial": "virial"})
    for atoms, frame in zip(frames, labelled_frames(data, "data"), strict=True):
        expected = atoms.info["virial"] / atoms.get_volume()
        np.testing.assert_allclose(frame.stress.values, expected, rtol=1e-6)
        np.testing.assert_allclose(frame.counted_forces, atoms.arrays["REF_forces"], atol=1e-7)
        assert float(frame.energy.values) == pytest.approx(atoms.info["REF_energy"])
    check_datasets("training", [{"file_path": "cu.xyz"}], [data], {"total_energy": False, "stress": False})


def test_a_transform_of_the_users_gets_what_nequips_make(write):
    """It may read types or neighbours."""

    def transform(data):
        data["total_energy"] = data["total_energy"] + data["atom_types"].sum() + data["edge_index"].shape[1]
        return data

    transforms = [ChemicalSpeciesToAtomTypeMapper(["Cu"]), NeighborListTransform(r_max=2.7), transform]
    frames = copper(1)
    data = ASEDataset(str(write("cu.xyz", frames)), transforms, key_mapping=KEYS)
    (frame,) = labelled_frames(data)
    assert float(frame.energy.values) > frames[0].info["REF_energy"] + 30


def prediction_files(tmp_path, labelled_later):
    """A file of `e2ip evaluate` with references; new ones under ASE's own names where labelled afterwards."""
    frames = []
    for atoms in copper(3):
        results = {"energy": 1.0, "forces": atoms.positions, "uq_family": "niw"}
        frame = predicted(atoms, {**results, "forces_epistemic_std": np.ones(len(atoms))})
        if labelled_later:
            frame.calc = SinglePointCalculator(frame, energy=-2.0, forces=-2.0 * atoms.positions)
        frames.append(frame)
    path = tmp_path / "predicted.xyz"
    ase.io.write(path, frames, format="extxyz")
    return path


@pytest.mark.parametrize("keys", [{}, KEYS], ids=str)
def test_predictions_are_no_references(tmp_path, keys):
    """NequIP takes ``forces`` before ``REF_forces``, whatever key_mapping says."""
    path = prediction_files(tmp_path, labelled_later=False)
    config = {"file_path": str(path)}
    data = ASEDataset(str(path), key_mapping=keys)
    assert predicted_labels(data) == {i: {"forces": "forces", "energy": "energy"} for i in range(3)}
    for split in ("training", "validation", "test"):
        message = (
            rf"frame 0 of the {split} data \(.*predicted\.xyz\): its forces are predictions.*uq_family.*exclude_keys"
        )
        with pytest.raises(InputError, match=message):
            check_datasets(split, [config], [data])
    part = ASEDataset(f"{path}@1:", key_mapping=KEYS)
    assert set(predicted_labels(part)) == {0, 1}
    names = ["energy", "forces", "stress"]
    check_datasets("training", [config], [ASEDataset(str(path), key_mapping=KEYS, exclude_keys=names)])


def references_of(dataset):
    return [dataset[i]["forces"].numpy().tolist() for i in range(len(dataset))]


def test_the_ways_out_that_the_message_names(tmp_path):
    """Of a file with references NequIP reads these then; columns that key_mapping itself names are not excluded so."""
    path = prediction_files(tmp_path, labelled_later=False)
    frames = ase.io.read(path, ":")
    config = {"file_path": str(path)}
    with pytest.raises(InputError) as error:
        check_datasets("training", [config], [ASEDataset(str(path), key_mapping=KEYS)])
    assert "where the file has references, too, give 'exclude_keys: [energy, forces, stress]'" in str(error.value)
    way = {"exclude_keys": ["energy", "forces", "stress"], "key_mapping": KEYS}
    dataset = ASEDataset(str(path), **way)
    expected = [atoms.arrays["REF_forces"] for atoms in frames]
    np.testing.assert_allclose(references_of(dataset), expected, atol=1e-6)
    check_datasets("training", [config], [dataset])
    # As MACE's and NequIP's own tools name predictions and references.
    for atoms in frames:
        atoms.arrays["MACE_forces"], atoms.info["MACE_energy"] = atoms.get_forces(), atoms.get_potential_energy()
        atoms.info["MACE_uq_family"] = atoms.info.pop("uq_family")
        atoms.calc = None
    ase.io.write(path, frames, format="extxyz")
    wrong = {"MACE_forces": "forces", "MACE_energy": "total_energy"}
    message = (
        "its forces are predictions.*key_mapping names the column 'MACE_forces': name the references there instead"
    )
    with pytest.raises(InputError, match=message) as error:
        check_datasets("training", [config], [ASEDataset(str(path), key_mapping=wrong)])
    assert "exclude_keys" not in str(error.value) and "has no references, take other frames" in str(error.value)
    dataset = ASEDataset(str(path), key_mapping=KEYS)
    np.testing.assert_allclose(references_of(dataset), expected, atol=1e-6)
    check_datasets("training", [config], [dataset])


def test_frames_that_were_labelled_afterwards_have_references(tmp_path):
    path = prediction_files(tmp_path, labelled_later=True)
    data = ASEDataset(str(path))
    assert not any(predicted_labels(data).values())
    check_datasets("training", [{"file_path": str(path)}], [data])


@pytest.mark.parametrize("forces", ["likelihood", "host"])
def test_a_batch_without_any_reference_leaves_the_weights_alone(forces, make_batch):
    target, preds = make_batch(torch.float64)
    loss = E2IPLoss(
        {"total_energy": 1.0, "forces": 1.0, "stress": 1.0}, ignore_nan={"total_energy": True, "stress": True}
    )
    loss["forces_e2ip"].bind(Settings.of("e2ip", {}, 0.05, forces))
    preds["e2ip_coefficients"] = torch.zeros(6, 8, dtype=torch.float64)
    preds["e2ip_force_unit"] = torch.full((6, 1), 0.05, dtype=torch.float64)
    preds["stress"] = torch.zeros(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for name, shape in (("total_energy", (2, 1)), ("forces", (6, 3)), ("stress", (2, 3, 3))):
        target[name] = torch.full(shape, math.nan, dtype=torch.float64)
    preds["forces"].requires_grad_(True)
    with pytest.warns(UserWarning, match="6 of 6 atoms"):
        assert loss(preds, target)["weighted_sum"].item() == 0.0


def test_types_without_data():
    model = {"_target_": "nequip.model.NequIPGNNModel", "type_names": ["Cu", "Au"], "avg_num_neighbors": 1.0}
    scales = {**model, "per_type_energy_scales": {"Cu": 1.0, "Au": math.nan}, "per_type_energy_shifts": [math.nan, 0.0]}
    nested = {"_target_": "nequip_ext.E2IPModel", "model": {"_target_": "modify", "model": scales}}
    assert lacking_types(nested) == {"per_type_energy_scales": ["Au"], "per_type_energy_shifts": ["Cu"]}
    assert lacking_types(model) == {}


def test_types_that_the_data_have(write):
    config = {"_target_": "model", "per_type_energy_scales": {"Cu": math.nan, "Au": 1.0}}
    data = ASEDataset(str(write("cu.xyz", copper(1))), [ChemicalSpeciesToAtomTypeMapper(["Cu", "Au"])])
    with pytest.raises(InputError, match="per_type_energy_scales is NaN for Cu, of which the data have atoms"):
        check_lacking_types(config, [data])
    config["per_type_energy_scales"] = {"Cu": 1.0, "Au": math.nan}
    (text,) = check_lacking_types(config, [data])
    assert re.search("NaN for Au, of which the training data have no atoms.*Leave these out of chemical_species", text)


def test_a_training_reads_what_the_transforms_give(write, train, logged):
    """Stress from virials, energies that are NaN in some frames and in whole batches, a type without data."""
    frames = copper(6)
    for atoms in frames[::2]:
        atoms.info["REF_energy"] = math.nan
    files = {"train": write("train.xyz", frames), "val": write("val.xyz", copper(2, seed=100))}
    transforms = [
        "{_target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper, model_type_names: [Cu, Au]}",
        "{_target_: nequip.data.transforms.VirialToStressTransform}",
        "{_target_: nequip.data.transforms.NeighborListTransform, r_max: 3.0}",
    ]
    run = train(
        *("nequip_e2ip", files["train"].parent / "run", files, "run=[train]", "max_epochs=1", "batch_size=1"),
        *("chemical_species=[Cu,Au]", "+data.key_mapping.virial=virial", f"data.transforms=[{','.join(transforms)}]"),
        *("+training_module.loss.coeffs.stress=1.0", "+training_module.loss.ignore_nan={total_energy: true}"),
        "training_module.model.model.per_type_energy_scales=${training_data_stats:per_type_forces_rms}",
    )
    log = (run / "train.log").read_text()
    assert "per_type_energy_scales is NaN for Au, of which the training data have no atoms" in log
    mean = np.mean([atoms.info["REF_energy"] / len(atoms) for atoms in frames[1::2]])
    stored = torch.load(run / "last.ckpt", weights_only=False)["hyper_parameters"]["model"]["model"]
    assert stored["per_type_energy_shifts"] == pytest.approx(mean)
    losses = logged(run, "train_loss_epoch")[0]
    assert len(losses) == 4 and all(map(math.isfinite, losses.values()))


def test_a_prediction_file_is_refused_before_a_training(leverage_run, failure, tmp_path, train_files):
    """Of NequIP's own writer, whose references have names of their own."""
    files = {**train_files, "train": leverage_run / "test_dataset0.xyz"}
    assert "its forces are predictions of a model" in failure("nequip_e2ip", tmp_path / "run", files)
