"""Reading predictions in the form that MACE's and NequIP's tools give them."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.copies import distinct
from e2ip_plugins.predictions.fingerprints import force_sizes
from e2ip_plugins.predictions.prediction_files import read_predictions

SIZES = (3, 1, 4)
PARAMETERS = ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa")
STYLES = pytest.mark.parametrize(("style", "prefix"), [("mace", "MACE_"), ("mace", "my_"), ("nequip", "")])


def make_frames(style="mace", uncertain=True, prefix="MACE_"):
    """Frames as ``mace_eval_configs`` or NequIP's ``TestTimeXYZFileWriter`` leaves them in ASE."""
    rng = np.random.default_rng(0)
    frames = []
    for n in SIZES:
        atoms = ase.Atoms(rng.choice(["H", "C", "O"], n), rng.normal(size=(n, 3)))
        reference, energy = rng.normal(size=(n, 3)), float(rng.normal())
        forces = reference + 0.1 * rng.normal(size=(n, 3))
        values = (rng.normal(size=(n, 6)) - 5.0, 5.0 + rng.random(n), 1e-6 + rng.random(n))
        if style == "nequip":
            atoms.arrays["original_dataset_forces"] = reference
            atoms.info["original_dataset_energy"] = np.array([energy])
            atoms.calc = SinglePointCalculator(atoms, energy=np.array([energy + 0.5]), forces=forces)
            values = tuple(value.reshape(n, -1) for value in values)
        else:
            atoms.arrays |= {"REF_forces": reference, prefix + "forces": forces}
            atoms.info |= {"REF_energy": energy, prefix + "energy": energy + 0.5}
            if uncertain:
                atoms.info[prefix + "uq_family"] = "niw"
        if uncertain:
            atoms.arrays |= {prefix + name: value for name, value in zip(PARAMETERS, values, strict=True)}
        frames.append(atoms)
    return frames


@pytest.fixture
def read(tmp_path):
    """Function that writes frames to a file and reads the predictions."""

    def from_file(frames, **options):
        ase.io.write(tmp_path / "p.xyz", frames, format="extxyz")
        return read_predictions(tmp_path / "p.xyz", **options)

    return from_file


@STYLES
def test_either_host_reads_the_same(read, style, prefix):
    p = read(make_frames(style, prefix=prefix))
    plain = make_frames("mace")
    assert p.family.uq_family == "niw"
    assert p.sizes.tolist() == list(SIZES)
    assert p.species.tolist() == [s for a in plain for s in a.get_chemical_symbols()]
    for name, value in {"reference_forces": "REF_forces", "forces": "MACE_forces"}.items():
        np.testing.assert_allclose(getattr(p, name), np.concatenate([a.arrays[value] for a in plain]), atol=1e-8)
    np.testing.assert_allclose(p.energy - p.reference_energy, 0.5)
    for name, value in p.parameters.items():
        np.testing.assert_allclose(value, np.concatenate([a.arrays["MACE_" + name] for a in plain]), atol=1e-8)


@STYLES
def test_the_method_may_come_last(read, style, prefix):
    """References are found by names such as ``forces_pbe``, whose energy is ``energy_pbe``; two methods are refused."""
    before = "REF" if style == "mace" else "original_dataset"
    frames = make_frames(style, prefix=prefix)
    for atoms in frames:
        atoms.arrays["forces_pbe"] = atoms.arrays.pop(f"{before}_forces")
        atoms.info["energy_pbe"] = float(np.ravel(atoms.info.pop(f"{before}_energy"))[0])
    renamed, usual = read(frames), read(make_frames(style, prefix=prefix))
    np.testing.assert_array_equal(renamed.reference_forces, usual.reference_forces)
    np.testing.assert_allclose(renamed.reference_energy, usual.reference_energy)
    for atoms in frames:
        atoms.arrays["forces_scan"] = atoms.arrays["forces_pbe"]
    with pytest.raises(InputError, match="several columns may be the reference: forces_pbe, forces_scan"):
        read(frames)
    np.testing.assert_allclose(read(frames, ref_forces="forces_pbe").reference_energy, usual.reference_energy)


@pytest.mark.parametrize("style", ["mace", "nequip"])
def test_deterministic_predictions_have_no_family(read, style):
    p = read(make_frames(style, uncertain=False))
    assert p.family is None and p.parameters == {}


def test_columns_that_may_be_missing(read):
    """The parameter columns tell the family, energies are NaN, the leverage is None."""
    frames = make_frames()
    for atoms in frames:
        del atoms.info["MACE_uq_family"], atoms.info["REF_energy"]
    p = read(frames)
    assert p.family.uq_family == "niw" and np.isnan(p.reference_energy).all() and p.leverage is None


def test_references_by_option(read):
    frames = make_frames()
    for atoms in frames:
        atoms.arrays["xtb_forces"] = atoms.arrays.pop("REF_forces")
        atoms.info["e_xtb"] = atoms.info.pop("REF_energy")
    p = read(frames, ref_forces="xtb_forces", ref_energy="e_xtb")
    np.testing.assert_allclose(p.energy - p.reference_energy, 0.5)
    with pytest.raises(InputError, match="--forces-key"):
        read(frames, ref_forces="nope_forces")
    with pytest.raises(InputError, match=r"'nope' .--energy-key"):
        read(frames, ref_forces="xtb_forces", ref_energy="nope")


def test_non_finite_references_are_read(read):
    frames = make_frames()
    frames[0].arrays["REF_forces"][1, 2] = np.nan
    frames[2].arrays["REF_forces"][0, 0] = np.inf
    assert np.flatnonzero(~np.isfinite(read(frames).reference_forces).all(-1)).tolist() == [1, 4]


@STYLES
def test_leverage_is_read(read, style, prefix):
    frames = make_frames(style, prefix=prefix)
    values = [np.array([0.0, 1.5, 20.0]), np.array([np.nan]), np.array([1.0, np.inf, 2.0, 3.0])]
    for atoms, leverage in zip(frames, values, strict=True):
        atoms.arrays[prefix + "e2ip_leverage"] = leverage.reshape(-1, 1) if style == "nequip" else leverage
    p = read(frames)
    np.testing.assert_allclose(p.leverage, np.concatenate(values))
    assert "e2ip_leverage" not in p.parameters


@pytest.mark.parametrize("bare", [(0,), (1, 2)])
def test_frames_without_references_have_none(read, bare):
    """Isolated atoms, which stand first in many files."""
    whole, frames = read(make_frames()), make_frames()
    for i in bare:
        del frames[i].arrays["REF_forces"]
    found = read(frames)
    lacking = np.isin(whole.frame_of_atom, bare)
    assert np.isnan(found.reference_forces[lacking]).all()
    np.testing.assert_array_equal(found.reference_forces[~lacking], whole.reference_forces[~lacking])


def test_copies_are_left_out_of_every_array(read):
    frames = make_frames()
    for atoms in frames:
        atoms.arrays["MACE_e2ip_leverage"] = atoms.positions[:, 0] ** 2
    once, twice = read(frames), distinct(read([*frames, frames[1], frames[0]]))
    assert twice.remarks == ("2 frames are there more than once, and count once",)
    for name, value in vars(once).items():
        if name not in ("remarks", "parameters", "path", "total"):
            np.testing.assert_array_equal(getattr(twice, name), value)
    for name, value in once.parameters.items():
        np.testing.assert_array_equal(twice.parameters[name], value)


# Functions that spoil frames: of all of them, or of one.


def without(*names):
    def change(atoms):
        for name in names:
            (atoms.info if name in atoms.info else atoms.arrays).pop(name)

    return change


def ones(name, *shape):
    return lambda atoms: atoms.arrays.update({name: np.ones((len(atoms), *shape))})


def info(name, value):
    return lambda atoms: atoms.info.update({name: value})


def entry(name, index, value):
    def change(atoms):
        atoms.arrays[name][index] = value

    return change


def copy(name, other):
    return lambda atoms: atoms.arrays.update({other: atoms.arrays[name]})


UNCERTAINTIES = [f"MACE_{name}" for name in PARAMETERS] + ["MACE_uq_family"]
LEVERAGE = "MACE_e2ip_leverage"
NO_LEVERAGE = r"has no column 'MACE_e2ip_leverage' of 1 numbers"


@pytest.mark.parametrize(
    ("of_all", "of_one", "message"),
    [
        ([without("REF_forces")], {}, "no reference forces"),
        ([without("MACE_forces")], {}, "no predicted forces beside the reference 'REF_forces'; e2ip evaluate MODEL"),
        ([without("MACE_e2ip_nu")], {}, "not the columns MACE_e2ip_nu"),
        ([without(*UNCERTAINTIES), ones("MACE_forces_cov", 9)], {}, "not the columns MACE_e2ip_log_sigma0"),
        ([info("MACE_uq_family", "quantile")], {}, "uq_family 'quantile' is not known"),
        ([], {1: info("MACE_uq_family", "quantile")}, "uq_family is 'niw' in frame 0 and 'quantile' in frame 1"),
        (
            [info("MACE_uq_model", "a")],
            {1: info("MACE_uq_model", "b")},
            "'a' in frame 0 and 'b' in frame 1; ",
        ),
        ([], {1: without("MACE_forces")}, "frame 1 has no column 'MACE_forces'"),
        ([without(*UNCERTAINTIES), copy("MACE_forces", "other_forces")], {}, "several columns may be the prediction"),
        ([copy("REF_forces", "dft_forces")], {}, "several columns may be the reference"),
        ([], {2: info("MACE_energy", "low")}, "'MACE_energy' of frame 2 is not a number"),
        ([], {2: entry("MACE_forces", (1, 1), np.nan)}, "MACE_forces is not finite for 1 atoms, first in frame 2"),
        ([], {2: entry("MACE_e2ip_nu", 0, 3.0)}, "MACE_e2ip_nu is not finite or outside its range .* frame 2"),
        ([], {1: entry("MACE_e2ip_kappa", 0, 0.0)}, "MACE_e2ip_kappa .* first in frame 1"),
        (
            [ones(LEVERAGE)],
            {2: entry(LEVERAGE, 3, -1e-6)},
            "is negative for 1 atoms, first in frame 2",
        ),
        ([ones(LEVERAGE)], {2: entry(LEVERAGE, 0, -np.inf)}, f"{LEVERAGE} is negative"),
        ([ones(LEVERAGE)], {0: without(LEVERAGE)}, f"frame 0 {NO_LEVERAGE}"),
        ([ones(LEVERAGE, 3)], {}, NO_LEVERAGE),
    ],
)
def test_bad_files_say_what_is_wrong(read, tmp_path, of_all, of_one, message):
    frames = make_frames()
    for change in of_all:
        for atoms in frames:
            change(atoms)
    for i, change in of_one.items():
        change(frames[i])
    with pytest.raises(InputError, match=message) as error:
        read(frames)
    assert str(error.value).startswith(str(tmp_path / "p.xyz"))


def test_predictions_are_no_references(read):
    frames = make_frames()
    for atoms in frames:
        del atoms.arrays["REF_forces"]
    with pytest.raises(InputError, match=r"'MACE_forces' \(--forces-key\) are the predictions"):
        read(frames, ref_forces="MACE_forces")
    with pytest.raises(InputError, match="numbers per atom: none"):
        read(frames)
    bare = read(frames, required=False)
    assert not bare.labelled and np.isnan(bare.reference_energy).all()
    assert not read(frames, ref_forces="other", required=False).labelled


def test_unreadable_files(tmp_path, read):
    with pytest.raises(InputError, match="no such file"):
        read_predictions(tmp_path / "none.xyz")
    path = tmp_path / "p.xyz"
    for text, message in (("", "has no frames"), ("hello\nworld\n", "frame 0: a line with the number of atoms")):
        path.write_text(text)
        with pytest.raises(InputError, match=rf"p\.xyz.*{message}") as error:
            read_predictions(path)
        assert "\n" not in str(error.value)
    read(make_frames())
    path.write_text(path.read_text()[:-250])
    with pytest.raises(InputError, match=r"p\.xyz, frame 2: is cut off, the file ends in the middle"):
        read_predictions(path)


# Weights


def test_frames_and_forces_of_weight_zero(read):
    frames = make_frames()
    frames[0].info["config_weight"] = 0
    frames[1].info["config_forces_weight"] = 0.0
    frames[2].info.update(config_energy_weight=0.0, config_weight=3.0)
    whole, p = read(make_frames()), read(frames)
    assert p.index.tolist() == [1, 2] and p.total == 3 and p.counted.tolist() == [False, True]
    assert p.remarks == (
        "1 frame of weight zero (config_weight) left out",
        "forces of 1 frame have weight zero (config_forces_weight) and are left out",
    )
    assert np.isnan(p.reference_forces[:1]).all() and np.array_equal(p.reference_forces[1:], whole.reference_forces[4:])
    assert np.isnan(p.reference_energy).tolist() == [False, True]
    for atoms in frames:
        atoms.info["config_weight"] = 0.0
    with pytest.raises(InputError, match=r"p\.xyz: all of its frames have weight zero"):
        read(frames)
    frames[0].info.update(config_weight=1.0, config_forces_weight=-2.0)
    frames[1].info["config_weight"] = -1.0
    assert read(frames).remarks == (
        "2 frames of zero or negative weight (config_weight) left out",
        "forces of 1 frame have negative weight (config_forces_weight) and are left out",
    )
    frames[1].info["config_weight"] = "much"
    with pytest.raises(InputError, match=r"p\.xyz, frame 1: config_weight is 'much', which is no number"):
        read(frames)


def test_forces_that_are_not_those_of_the_uncertainties(read):
    """A frame was labelled after its evaluation, under the name of the predictions: covariances are not of these."""
    frames = make_frames("nequip", prefix="")
    for atoms in frames:
        atoms.info["uq_force_sizes"] = force_sizes(atoms.calc.results["forces"])
    read(frames)
    frames[2].calc.results["forces"] = 1.01 * frames[2].calc.results["forces"]
    with pytest.raises(InputError, match=r"'forces' of frame 2 are not those that were predicted .*e2ip evaluate"):
        read(frames)
