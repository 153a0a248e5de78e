"""Reference data: statistics equal NequIP's, bad labels are named, masked and counted."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from nequip.data import AtomicDataDict, CommonDataStatisticsManager
from nequip.data.dataset import ASEDataset
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper

from e2ip_plugins.errors import InputError
from nequip_ext import E2IPDataStatisticsManager

NAMES = ["H", "C", "O"]


@pytest.fixture
def batches(frames, to_data):
    """Three batches with random labels."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for atoms in frames:
        data = to_data(atoms)
        data["forces"] = torch.randn(data["pos"].shape, generator=generator)
        data["total_energy"] = torch.randn(1, 1, generator=generator)
        made.append(AtomicDataDict.batched_from_list([data, data]))
    return made


def test_clean_data_gives_nequips_statistics(batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)
    assert ours == CommonDataStatisticsManager(type_names=NAMES).get_statistics(batches)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_forces_are_left_out_and_counted(batches, bad):
    forces = torch.cat([data["forces"] for data in batches])
    batches[0]["forces"][1, 2] = bad
    batches[2]["forces"][0] = bad
    good = torch.ones(len(forces), dtype=bool)
    good[[1, len(batches[0]["pos"]) + len(batches[1]["pos"])]] = False
    with pytest.warns(UserWarning, match=f"2 of {len(forces)} atoms"):
        ours = E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)
    assert ours["forces_rms"] == pytest.approx(forces[good].square().mean().sqrt().item())
    assert all(math.isfinite(value) for value in ours["per_type_forces_rms"].values())


def test_no_usable_forces(batches):
    for data in batches:
        data["forces"][:] = math.nan
    with pytest.raises(InputError, match="no atom"):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)
    with pytest.raises(InputError, match="no batch: fewer frames than batch_size"):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics([])


def test_missing_forces(batches):
    del batches[1]["forces"]
    with pytest.raises(InputError, match=r"no reference forces.*key_mapping"):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)


def test_a_missing_file_is_named_by_nequip_itself():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.xyz"):
        ASEDataset(file_path="nowhere.xyz")


class Loader:
    """A loader that shuffles: frames have the number that they have in the file."""

    def __init__(self, frames):
        self.dataset = SimpleNamespace(data_list=frames, transforms=[ChemicalSpeciesToAtomTypeMapper(NAMES)])

    def __iter__(self):
        return map(self.dataset.transforms[0], reversed(self.dataset.data_list))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"total_energy": torch.full((1, 1), math.nan)}, "frame 1 of the training data: the reference energy is not"),
        ({"atomic_numbers": torch.tensor([[1], [16]])}, "frame 1 of the training data: has S.*it knows H, C, O"),
    ],
)
def test_frames_that_nothing_can_be_learned_from(changed, message):
    frame = {"pos": torch.rand(2, 3), "atomic_numbers": torch.tensor([[1], [6]]), "total_energy": torch.zeros(1, 1)}
    with pytest.raises(InputError, match=message):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(Loader([frame, {**frame, **changed}]))


def test_labels_of_some_frames_only(frames, to_data):
    """NequIP's batches refuse them, before the statistics see any."""
    one, other = ({**to_data(frames[0]), "total_energy": torch.zeros(1, 1)} for _ in range(2))
    one["forces"] = torch.zeros_like(one["pos"])
    batches = (AtomicDataDict.batched_from_list(pair) for pair in [[one, one], [one, other]])
    with pytest.raises(InputError, match=r"labels that others lack \(.*'forces'.*give them NaN"):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)
