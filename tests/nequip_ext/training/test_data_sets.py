"""Checks of data sets: of every frame, named by its file and its number there."""

import math
from types import SimpleNamespace

import pytest
import torch
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper

from e2ip_plugins.errors import InputError
from nequip_ext import E2IPLoss, E2IPMetrics
from nequip_ext.training.data_sets import check_atom_types, check_datasets, labels_of

FRAME = {
    "pos": torch.tensor([[0.0, 0.1, 0.0], [9.0, 0.1, 0.0]]),
    "forces": torch.zeros(2, 3),
    "total_energy": torch.zeros(1),
    "atomic_numbers": torch.tensor([[1], [8]]),
}
STRESSES = {"total_energy": False, "stress": False}


def frame(**changes):
    return {name: value for name, value in {**FRAME, **changes}.items() if value is not None}


def nan(*shape):
    return torch.full(shape, math.nan)


@pytest.mark.parametrize(
    ("frames", "split", "labels", "message"),
    [
        ([frame()], "validation", {}, None),
        ([frame(), frame(forces=None), frame()], "validation", {}, "1 of 3 frames of the WHERE.*frame 1"),
        ([frame()], "training", {"labels": STRESSES}, "the WHERE has no reference stress.*REF_stress"),
        ([frame(), frame(pos=nan(2, 3))], "test", {}, "frame 1 of the WHERE: the position of atom 0 is not finite"),
        (
            [frame(), frame(pos=torch.zeros(2, 3))],
            "training",
            {},
            "frame 1 of the WHERE: atoms 0 and 1 are at the same",
        ),
        (
            [frame(cell=9.0 * torch.eye(3).unsqueeze(0), pbc=torch.ones(1, 3, dtype=torch.bool))],
            *("training", {}, "frame 0 of the WHERE: atoms 0 and 1 are at the same"),
        ),
        (
            [frame(total_energy=nan(1, 1))],
            "validation",
            {},
            r"frame 0 of the WHERE: the reference energy is not.*'ignore_nan: \{total_energy: true\}'",
        ),
        ([frame(total_energy=nan(1, 1))], "test", {}, None),
        ([frame(stress=nan(1, 3, 3))], "training", {"labels": STRESSES}, "WHERE: the reference stress is not"),
        ([frame(stress=nan(1, 3, 3))], "training", {}, None),
        ([frame(stress=nan(1, 3, 3))], "training", {"labels": {**STRESSES, "stress": True}}, None),
        ([frame(atomic_numbers=torch.tensor([[1], [16]]))], "test", {}, "0 of the WHERE: has S.*it knows H, O"),
    ],
)
def test_frames(frames, split, labels, message):
    dataset = SimpleNamespace(data_list=frames, transforms=[ChemicalSpeciesToAtomTypeMapper(["H", "O"])])
    arguments = (split, [{"file_path": "some.xyz"}], [dataset])
    if message is None:
        check_datasets(*arguments, **labels)
    else:
        with pytest.raises(InputError, match=message.replace("WHERE", rf"{split} data \(some\.xyz\)")):
            check_datasets(*arguments, **labels)


def test_parts_of_a_data_set_are_looked_at_as_a_whole_one_is():
    """``split_dataset`` of NequIP's data modules; numbers are those of the file."""
    frames = [frame(), frame(total_energy=nan(1)), frame(pos=torch.zeros(2, 3))]
    whole = SimpleNamespace(data_list=frames, transforms=[ChemicalSpeciesToAtomTypeMapper(["O", "H"])])

    def part(*indices):
        return torch.utils.data.Subset(torch.utils.data.Subset(whole, [2, 1, 0]), indices)  # type: ignore[arg-type]

    config = {"_target_": "split", "dataset": {"file_path": "all.xyz"}}
    check_datasets("training", [config], [part(2)])
    with pytest.raises(InputError, match=r"frame 1 of the training data \(all\.xyz\): the reference energy is not"):
        check_datasets("training", [config], [part(2, 1)])
    with pytest.raises(InputError, match=r"frame 2 of the training data \(all\.xyz\): atoms 0 and 1 are at the same"):
        check_datasets("training", [config], [part(0)])
    model = torch.nn.Linear(1, 1)
    model.is_graph_model, model.type_names = True, ["H", "O"]
    with pytest.raises(InputError, match=r"the data have the atom types \[O, H\], the model has \[H, O\]"):
        check_atom_types(model, [part(2)])


def test_labels_are_those_that_metrics_compare():
    coeffs = {"total_energy": 1.0, "forces": 1.0}
    assert labels_of(E2IPLoss(coeffs)) == labels_of(None) == {"total_energy": False}
    assert labels_of(E2IPLoss({**coeffs, "stress": 1.0})) == STRESSES
    masked = E2IPLoss({**coeffs, "stress": 1.0}, ignore_nan={"stress": True})
    assert labels_of(masked) == {"total_energy": False, "stress": True}
    metrics = torch.nn.ModuleList([E2IPMetrics({"stress_rmse": 1.0}, ignore_nan={"total_energy": True})])
    assert labels_of(metrics) == {"total_energy": True, "stress": False}
