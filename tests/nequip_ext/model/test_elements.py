"""Models whose types are no elements."""

import shutil
import warnings

import ase.io
import pytest
import torch
import yaml
from ase.build import molecule
from torch.package import PackageExporter

from e2ip_plugins.errors import InputError
from e2ip_plugins.evaluation.evaluate import evaluate
from e2ip_plugins.evaluation.options import EvaluateOptions
from e2ip_plugins.predictions.labelled_files import read_frames
from nequip_ext import E2IPCalculator
from nequip_ext.export.strip import strip_file
from nequip_ext.fitting.file import fit_file
from nequip_ext.inference.batches import open_model, open_passes
from nequip_ext.inference.calculator import open_model as open_calculator
from nequip_ext.model.elements import types_of

NAMES = {"H": "light", "C": "tetravalent", "N": "base", "O": "acid"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, unpack):
    """A checkpoint that knows H, C, N, O; the same with other names for its types; one that does not explain them."""
    folder = tmp_path_factory.mktemp("types")
    plain, named, unexplained = (folder / f"{name}.ckpt" for name in ("plain", "named", "unexplained"))
    shutil.copy(unpack("nequip", "best.ckpt"), plain)
    checkpoint = torch.load(plain, map_location="cpu", weights_only=False)

    def renamed(section):
        if isinstance(section, dict):
            for key, value in section.items():
                if key == "type_names":
                    section[key] = [NAMES[name] for name in value]
                elif key == "model_type_names":
                    section[key] = list(NAMES.values())
                elif key == "chemical_species_to_atom_type_map":
                    section[key] = dict(NAMES)
                else:
                    renamed(value)
        elif isinstance(section, list):
            for part in section:
                renamed(part)

    renamed(checkpoint["hyper_parameters"])
    torch.save(checkpoint, named)
    checkpoint["hyper_parameters"]["info_dict"]["data"] = {}
    torch.save(checkpoint, unexplained)
    return plain, named, unexplained


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training and validation frames, labelled."""
    folder = tmp_path_factory.mktemp("frames")
    paths = []
    for name, count, offset in (("train", 6, 0), ("valid", 3, 50)):
        frames = [molecule(of) for of in ("CH3OH", "CH3NO2") for _ in range(count)]
        for number, atoms in enumerate(frames):
            rest = atoms.get_positions()
            atoms.rattle(0.1, seed=offset + number)
            atoms.arrays["REF_forces"] = rest - atoms.get_positions()
        paths.append(folder / f"{name}.xyz")
        ase.io.write(paths[-1], frames, format="extxyz")
    return paths


def test_the_training_s_data_section_explains_types(checkpoints):
    assert [types_of(path) for path in checkpoints] == [True, NAMES, True]
    assert types_of(checkpoints[0].with_name("none.ckpt")) is True


def test_a_package_has_that_section_too(tmp_path):
    path = tmp_path / "model.nequip.zip"
    mapper = {"_target_": "Mapper", "chemical_species_to_atom_type_map": NAMES}
    with PackageExporter(str(path)) as exporter:
        exporter.save_text("model", "config.yaml", yaml.safe_dump({"data": {"transforms": [{"r_max": 5.0}, mapper]}}))
    assert types_of(path) == NAMES
    wrapped = tmp_path / "wrapped.ckpt"  # as e2ip fit leaves it of a stock package
    torch.save({"hyper_parameters": {"info_dict": {"data": {"package_path": str(path)}}}}, wrapped)
    assert types_of(wrapped) == NAMES


def test_predictions_do_not_depend_on_the_names(checkpoints, files, tmp_path):
    written = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # never fitted
        for path in checkpoints[:2]:
            written.append(tmp_path / f"{path.stem}.xyz")
            evaluate(open_model(path), files[0], written[-1], EvaluateOptions(), {})
        calculators = [E2IPCalculator.from_saved_model(str(checkpoints[1])), open_calculator(checkpoints[1])]
    plain, named = (ase.io.read(path, ":") for path in written)
    for a, b in zip(plain, named, strict=True):
        assert (a.get_forces() == b.get_forces()).all() and (a.arrays["forces_cov"] == b.arrays["forces_cov"]).all()
    for calculator in calculators:
        atoms = ase.io.read(files[0], 0)
        atoms.calc = calculator
        assert abs(atoms.get_forces() - plain[0].get_forces()).max() < 1e-5


def test_fit_and_select_find_the_elements(checkpoints, files, tmp_path):
    frames = [read_frames([path]) for path in files]
    stock, fitted = tmp_path / "stock.ckpt", tmp_path / "fitted.ckpt"
    strip_file(checkpoints[1], stock)
    report = fit_file(stock, *frames, fitted)
    assert sum(report.atoms.values()) == sum(len(frame.atoms) for frame in frames[0])
    list(open_passes(fitted).run(frames[0], False))
    strange = tmp_path / "strange.xyz"
    ase.io.write(strange, molecule("SiH4"), format="extxyz")
    with pytest.raises(InputError, match=r"strange\.xyz, frame 0: has Si, .* it knows H, C, N, O"):
        fit_file(stock, read_frames([strange], need_forces=False), frames[1], fitted)


def test_types_that_nothing_explains(checkpoints, files, tmp_path):
    frames, stock = [read_frames([path]) for path in files], tmp_path / "unexplained.ckpt"
    strip_file(checkpoints[2], stock)
    message = r"unexplained\.ckpt: the model has types that are no elements .*light"
    with pytest.raises(InputError, match=message):
        fit_file(stock, *frames, tmp_path / "out.ckpt")
    for opened in (open_model, open_calculator, E2IPCalculator.from_saved_model):
        with pytest.raises(InputError, match=message):
            opened(checkpoints[2])
