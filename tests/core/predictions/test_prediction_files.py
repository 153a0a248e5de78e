"""Reading predictions in the form that either host's tools give them."""

import ase
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.prediction_files import read_predictions

SIZES = (3, 1, 4)


def make_frames(style="mace", uncertain=True, seed=0, prefix="MACE_"):
    """Frames as ``mace_eval_configs`` or NequIP's ``TestTimeXYZFileWriter`` leaves them in ASE."""
    rng = np.random.default_rng(seed)
    frames = []
    for n in SIZES:
        atoms = ase.Atoms(rng.choice(["H", "C", "O"], n), rng.normal(size=(n, 3)))
        reference, energy = rng.normal(size=(n, 3)), float(rng.normal())
        forces = reference + 0.1 * rng.normal(size=(n, 3))
        parameters = {
            "e2ip_log_sigma0": rng.normal(size=(n, 6)) - 5.0,
            "e2ip_nu": 5.0 + rng.random(n),
            "e2ip_kappa": 1e-6 + rng.random(n),
        }
        if style == "nequip":
            prefix = ""
            atoms.arrays["original_dataset_forces"] = reference
            atoms.info["original_dataset_energy"] = np.array([energy])
            atoms.calc = SinglePointCalculator(atoms, energy=np.array([energy + 0.5]), forces=forces)
            parameters = {k: v.reshape(n, -1) for k, v in parameters.items()}
        else:
            atoms.arrays["REF_forces"] = reference
            atoms.info["REF_energy"] = energy
            atoms.arrays[prefix + "forces"] = forces
            atoms.info[prefix + "energy"] = energy + 0.5
            if uncertain:
                atoms.info[prefix + "uq_family"] = "niw"
        if uncertain:
            atoms.arrays.update({prefix + k: v for k, v in parameters.items()})
        frames.append(atoms)
    return frames


def write(path, frames):
    ase.io.write(path, frames, format="extxyz")
    return path


@pytest.mark.parametrize("style, prefix", [("mace", "MACE_"), ("mace", "my_"), ("nequip", "")])
def test_either_host_reads_the_same(tmp_path, style, prefix):
    frames = make_frames(style, prefix=prefix)
    p = read_predictions(write(tmp_path / "p.xyz", frames))
    plain = make_frames("mace")
    assert p.family.uq_family == "niw"
    assert p.sizes.tolist() == list(SIZES)
    assert p.species.tolist() == [s for a in plain for s in a.get_chemical_symbols()]
    for name, value in {"reference_forces": "REF_forces", "forces": "MACE_forces"}.items():
        np.testing.assert_allclose(getattr(p, name), np.concatenate([a.arrays[value] for a in plain]), atol=1e-8)
    np.testing.assert_allclose(p.energy - p.reference_energy, 0.5)
    for name, value in p.parameters.items():
        np.testing.assert_allclose(value, np.concatenate([a.arrays["MACE_" + name] for a in plain]), atol=1e-8)


@pytest.mark.parametrize("style", ["mace", "nequip"])
def test_deterministic_predictions_have_no_family(tmp_path, style):
    p = read_predictions(write(tmp_path / "p.xyz", make_frames(style, uncertain=False)))
    assert p.family is None and p.parameters == {}


def test_family_may_be_left_out(tmp_path):
    """Files of before may lack it: the parameter columns tell."""
    frames = make_frames()
    for atoms in frames:
        del atoms.info["MACE_uq_family"]
    assert read_predictions(write(tmp_path / "p.xyz", frames)).family.uq_family == "niw"


def test_references_by_option(tmp_path):
    frames = make_frames()
    for atoms in frames:
        atoms.arrays["xtb_forces"] = atoms.arrays.pop("REF_forces")
        atoms.info["e_xtb"] = atoms.info.pop("REF_energy")
    path = write(tmp_path / "p.xyz", frames)
    with pytest.raises(InputError, match="--ref-forces"):
        read_predictions(path, ref_forces="nope_forces")
    p = read_predictions(path, ref_forces="xtb_forces", ref_energy="e_xtb")
    np.testing.assert_allclose(p.energy - p.reference_energy, 0.5)
    with pytest.raises(InputError, match=r"'nope' .--ref-energy"):
        read_predictions(path, ref_forces="xtb_forces", ref_energy="nope")


def test_missing_energies_are_nan(tmp_path):
    frames = make_frames()
    for atoms in frames:
        del atoms.info["REF_energy"]
    assert np.isnan(read_predictions(write(tmp_path / "p.xyz", frames)).reference_energy).all()


def test_non_finite_references_are_read(tmp_path):
    frames = make_frames()
    frames[0].arrays["REF_forces"][1, 2] = np.nan
    frames[2].arrays["REF_forces"][0, 0] = np.inf
    p = read_predictions(write(tmp_path / "p.xyz", frames))
    assert np.flatnonzero(~np.isfinite(p.reference_forces).all(-1)).tolist() == [1, 4]


@pytest.mark.parametrize("style, prefix", [("mace", "MACE_"), ("mace", "my_"), ("nequip", "")])
def test_leverage_is_read(tmp_path, style, prefix):
    frames = make_frames(style, prefix=prefix)
    values = [np.array([0.0, 1.5, 20.0]), np.array([np.nan]), np.array([1.0, np.inf, 2.0, 3.0])]
    for atoms, leverage in zip(frames, values, strict=True):
        atoms.arrays[prefix + "e2ip_leverage"] = leverage.reshape(-1, 1) if style == "nequip" else leverage
    p = read_predictions(write(tmp_path / "p.xyz", frames))
    np.testing.assert_allclose(p.leverage, np.concatenate(values))
    assert "e2ip_leverage" not in p.parameters


def test_leverage_may_be_missing(tmp_path):
    assert read_predictions(write(tmp_path / "p.xyz", make_frames())).leverage is None


def with_leverage(change):
    def changed(frames):
        for atoms in frames:
            atoms.arrays["MACE_e2ip_leverage"] = np.ones(len(atoms))
        change(frames)

    return changed


def leverage_of_some_frames(frames):
    del frames[0].arrays["MACE_e2ip_leverage"]


def leverage_of_components(frames):
    for atoms in frames:
        atoms.arrays["MACE_e2ip_leverage"] = np.ones((len(atoms), 3))


def without(name):
    def change(frames):
        for atoms in frames:
            del atoms.arrays[name]

    return change


def put(name, index, value, frame=2):
    def change(frames):
        frames[frame].arrays[name][index] = value

    return change


def only_covariances(frames):
    for atoms in frames:
        for key in ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa"):
            del atoms.arrays["MACE_" + key]
        del atoms.info["MACE_uq_family"]
        atoms.arrays["MACE_forces_cov"] = np.ones((len(atoms), 9))


def two_families(frames):
    frames[1].info["MACE_uq_family"] = "quantile"
    return frames


def two_models(frames):
    for i, atoms in enumerate(frames):
        atoms.info["MACE_uq_model"] = f"readout-{min(i, 1)}"


def other_family(frames):
    for atoms in frames:
        atoms.info["MACE_uq_family"] = "quantile"


def drop_in_one_frame(frames):
    del frames[1].arrays["MACE_forces"]


def two_predictions(frames):
    for atoms in frames:
        atoms.arrays["other_forces"] = atoms.arrays["MACE_forces"]
        for key in ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa"):
            del atoms.arrays["MACE_" + key]
        del atoms.info["MACE_uq_family"]


def two_references(frames):
    for atoms in frames:
        atoms.arrays["dft_forces"] = atoms.arrays["REF_forces"]


@pytest.mark.parametrize("bare", [(0,), (1, 2)])
def test_frames_without_references_have_none(tmp_path, bare):
    """Isolated atoms, which stand first in many files."""
    whole = read_predictions(write(tmp_path / "whole.xyz", make_frames()))
    frames = make_frames()
    for i in bare:
        del frames[i].arrays["REF_forces"]
    found = read_predictions(write(tmp_path / "part.xyz", frames))
    lacking = np.isin(whole.frame_of_atom, bare)
    assert np.isnan(found.reference_forces[lacking]).all()
    np.testing.assert_array_equal(found.reference_forces[~lacking], whole.reference_forces[~lacking])


@pytest.mark.parametrize(
    "change, message",
    [
        (without("REF_forces"), "no reference forces"),
        (without("MACE_forces"), "no predicted forces"),
        (without("MACE_e2ip_nu"), "not the columns MACE_e2ip_nu"),
        (only_covariances, "not the columns MACE_e2ip_log_sigma0"),
        (other_family, "uq_family 'quantile' is not known"),
        (two_families, "uq_family is 'niw' in frame 0 and 'quantile' in frame 1"),
        (two_models, "uq_model is 'readout-0' in frame 0 and 'readout-1' in frame 1; one file"),
        (drop_in_one_frame, "frame 1 has no column 'MACE_forces'"),
        (two_predictions, "several columns may be the prediction"),
        (two_references, "several columns may be the reference"),
        (put("MACE_forces", (1, 1), np.nan), "MACE_forces is not finite for 1 atoms, first in frame 2"),
        (put("MACE_e2ip_nu", 0, 3.0), "MACE_e2ip_nu is not finite or outside its range .* frame 2"),
        (put("MACE_e2ip_kappa", 0, 0.0, frame=1), "MACE_e2ip_kappa .* first in frame 1"),
        (
            with_leverage(put("MACE_e2ip_leverage", 3, -1e-6)),
            "MACE_e2ip_leverage is negative for 1 atoms, first in frame 2",
        ),
        (with_leverage(put("MACE_e2ip_leverage", 0, -np.inf)), "MACE_e2ip_leverage is negative"),
        (with_leverage(leverage_of_some_frames), "frame 0 has no column 'MACE_e2ip_leverage' of 1 numbers"),
        (with_leverage(leverage_of_components), "no column 'MACE_e2ip_leverage' of 1 numbers"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, change, message):
    frames = make_frames()
    change(frames)
    with pytest.raises(InputError, match=message) as error:
        read_predictions(write(tmp_path / "p.xyz", frames))
    assert str(error.value).startswith(str(tmp_path / "p.xyz"))


def test_predictions_are_no_references(tmp_path):
    frames = make_frames()
    without("REF_forces")(frames)
    path = write(tmp_path / "p.xyz", frames)
    with pytest.raises(InputError, match=r"'MACE_forces' \(--ref-forces\) are the predictions"):
        read_predictions(path, ref_forces="MACE_forces")
    with pytest.raises(InputError, match="there are: none"):
        read_predictions(path)


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_predictions(tmp_path / "none.xyz")
    garbage = tmp_path / "garbage.xyz"
    garbage.write_text("hello\nworld\n")
    with pytest.raises(InputError, match="cannot be read as extxyz") as error:
        read_predictions(garbage)
    assert "\n" not in str(error.value)
    empty = tmp_path / "empty.xyz"
    empty.write_text("")
    with pytest.raises(InputError, match=r"empty\.xyz"):
        read_predictions(empty)
    cut = write(tmp_path / "cut.xyz", make_frames())
    cut.write_text(cut.read_text()[:-250])
    with pytest.raises(InputError, match=rf"cut\.xyz: frame {len(make_frames()) - 1} cannot be read as extxyz"):
        read_predictions(cut)
