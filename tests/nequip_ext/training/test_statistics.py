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


def test_frames_without_labels_are_counted():
    from nequip_ext.training.checks import Labels, check_datasets

    with_stress = Labels(("total_energy", "stress"), ())
    labelled = {"forces": torch.zeros(2, 3), "total_energy": torch.zeros(1)}
    config = {"file_path": "valid.xyz"}
    check_datasets("validation", [config], [SimpleNamespace(data_list=[labelled, labelled])])
    some = SimpleNamespace(data_list=[labelled, {"total_energy": torch.zeros(1)}, labelled])
    with pytest.raises(InputError, match=r"1 of 3 frames of the validation data \(valid\.xyz\).*frame 1"):
        check_datasets("validation", [config], [some])
    with pytest.raises(InputError, match=r"the training data \(valid\.xyz\) has no reference stress.*REF_stress"):
        check_datasets("training", [config], [SimpleNamespace(data_list=[labelled])], with_stress)
    broken = {**labelled, "pos": torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]])}
    with pytest.raises(
        InputError, match=r"frame 1 of the test data \(valid\.xyz\): the position of atom 1 is not finite"
    ):
        check_datasets("test", [config], [SimpleNamespace(data_list=[labelled, broken])])
    inside = {**labelled, "pos": torch.tensor([[0.0, 0.1, 0.0], [9.0, 0.1, 0.0]])}
    check_datasets("training", [config], [SimpleNamespace(data_list=[inside])])
    periodic = {**inside, "cell": 9.0 * torch.eye(3).unsqueeze(0), "pbc": torch.ones(1, 3, dtype=torch.bool)}
    with pytest.raises(InputError, match=r"frame 1 of the training data \(valid\.xyz\): atoms 0 and 1 are at the same"):
        check_datasets("training", [config], [SimpleNamespace(data_list=[inside, periodic])])
    nameless = {**labelled, "total_energy": torch.full((1, 1), math.nan)}
    with pytest.raises(InputError, match=r"frame 1 of the validation data \(valid\.xyz\): the reference energy is not"):
        check_datasets("validation", [config], [SimpleNamespace(data_list=[labelled, nameless])])
    check_datasets("test", [config], [SimpleNamespace(data_list=[labelled, nameless])])
    stressed = [{**labelled, "stress": torch.full((1, 3, 3), value)} for value in (0.0, math.nan)]
    with pytest.raises(InputError, match=r"frame 1 of the training data \(valid\.xyz\): the reference stress is not"):
        check_datasets("training", [config], [SimpleNamespace(data_list=stressed)], with_stress)
    check_datasets("training", [config], [SimpleNamespace(data_list=stressed)])
    check_datasets(
        "training", [config], [SimpleNamespace(data_list=stressed)], with_stress._replace(masked=("stress",))
    )
    strange = {**labelled, "atomic_numbers": torch.tensor([[1], [16]])}
    mapper = ChemicalSpeciesToAtomTypeMapper(NAMES)
    with pytest.raises(InputError, match=r"frame 0 of the test data \(valid\.xyz\): has S.*it knows H, C, O"):
        check_datasets("test", [config], [SimpleNamespace(data_list=[strange], transforms=[mapper])])


def test_parts_of_a_data_set_are_looked_at_as_a_whole_one_is():
    """``split_dataset`` of NequIP's data modules; numbers are those of the file."""
    from nequip_ext.training.checks import check_atom_types, check_datasets
    from nequip_ext.training.statistics import _check_in_order

    frame = {"forces": torch.zeros(2, 3), "total_energy": torch.zeros(1), "atomic_numbers": torch.tensor([1, 8])}
    frame["pos"] = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    frames = [frame, {**frame, "total_energy": torch.full((1,), math.nan)}, {**frame, "pos": torch.zeros(2, 3)}]
    mapper = ChemicalSpeciesToAtomTypeMapper(["O", "H"])
    whole = SimpleNamespace(data_list=frames, transforms=[mapper])

    def part(*indices):
        return torch.utils.data.Subset(torch.utils.data.Subset(whole, [2, 1, 0]), indices)  # type: ignore[arg-type]

    config = {"_target_": "split", "dataset": {"file_path": "all.xyz"}}
    check_datasets("training", [config], [part(2)])
    with pytest.raises(InputError, match=r"frame 1 of the training data \(all\.xyz\): the reference energy is not"):
        check_datasets("training", [config], [part(2, 1)])
    with pytest.raises(InputError, match=r"frame 2 of the training data \(all\.xyz\): atoms 0 and 1 are at the same"):
        check_datasets("training", [config], [part(0)])
    with pytest.raises(InputError, match="frame 1 of the training data: the reference energy is not finite"):
        _check_in_order(part(1))
    model = torch.nn.Linear(1, 1)
    model.is_graph_model, model.type_names = True, ["H", "O"]
    with pytest.raises(InputError, match=r"the data have the atom types \[O, H\], the model has \[H, O\]"):
        check_atom_types(model, [part(2)])


def test_labels_are_those_that_metrics_compare():
    from nequip_ext import E2IPLoss, E2IPMetrics
    from nequip_ext.training.checks import Labels, labels_of

    coeffs = {"total_energy": 1.0, "forces": 1.0}
    assert labels_of(E2IPLoss(coeffs)) == labels_of(None) == Labels(("total_energy",), ())
    assert labels_of(E2IPLoss({**coeffs, "stress": 1.0})) == Labels(("total_energy", "stress"), ())
    masked = E2IPLoss({**coeffs, "stress": 1.0}, ignore_nan={"stress": True})
    assert labels_of(masked) == Labels(("total_energy", "stress"), ("stress",))
    metrics = torch.nn.ModuleList([E2IPMetrics({"stress_rmse": 1.0}, ignore_nan={"total_energy": True})])
    assert labels_of(metrics) == Labels(("total_energy", "stress"), ("total_energy",))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"total_energy": torch.full((1, 1), math.nan)}, "frame 1 of the training data: the reference energy is not"),
        ({"atomic_numbers": torch.tensor([[1], [16]])}, "frame 1 of the training data: has S.*it knows H, C, O"),
    ],
)
def test_frames_have_the_number_that_they_have_in_the_file(changed, message):
    """Whatever order the loader has."""
    frame = {"pos": torch.rand(2, 3), "atomic_numbers": torch.tensor([[1], [6]]), "total_energy": torch.zeros(1, 1)}
    mapper = ChemicalSpeciesToAtomTypeMapper(NAMES)

    class Loader:
        dataset = SimpleNamespace(data_list=[frame, {**frame, **changed}], transforms=[mapper])

        def __iter__(self):
            return map(mapper, reversed(self.dataset.data_list))

    with pytest.raises(InputError, match=message):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(Loader())


def test_labels_of_some_frames_only(frames, to_data):
    """NequIP's batches refuse them, before the statistics see any."""
    one, other = ({**to_data(frames[0]), "total_energy": torch.zeros(1, 1)} for _ in range(2))
    one["forces"] = torch.zeros_like(one["pos"])
    batches = (AtomicDataDict.batched_from_list(pair) for pair in [[one, one], [one, other]])
    with pytest.raises(InputError, match=r"labels that others lack \(.*'forces'.*give them NaN"):
        E2IPDataStatisticsManager(type_names=NAMES).get_statistics(batches)
