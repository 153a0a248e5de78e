"""Bad input ends the run before it starts, with one message and status 2."""

import math
import subprocess

import ase.io
import numpy as np
import pytest
from ase import Atoms

from e2ip_plugins.errors import InputError

E2IP = "--readout=e2ip"


@pytest.fixture
def parse(training_command):
    """Function that parses options as `mace_run_train` does."""

    def parse(*flags, **settings):
        from mace import tools

        _, _, _, *options = training_command(*flags, **settings)
        return tools.build_default_arg_parser().parse_args(options)

    return parse


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--e2ip_preset=paper"], "--e2ip_preset has no effect without --readout e2ip"),
        (["--readout=e2ip", "--e2ip_forces=fixed"], "name it with --foundation_model"),
        (
            ["--readout=e2ip", "--e2ip_forces=fixed", "--foundation_model=nowhere.model"],
            "--foundation_model nowhere.model: no such file",
        ),
        (["--e2ip_force_unit=0.1"], "--e2ip_force_unit has no effect without --readout e2ip"),
        (["--readout=other"], "argument --readout: invalid choice: 'other' (choose from"),
        ([E2IP, "--e2ip_evidence_weight=much"], "--e2ip_evidence_weight must be a float, got 'much'"),
        ([E2IP, "--e2ip_preset=best"], "--e2ip_preset: unknown preset 'best'"),
        ([E2IP, "--e2ip_evidence=some"], "--e2ip_evidence: unknown evidence mode 'some'"),
        (
            [E2IP, "--e2ip_evidence=independent", "--e2ip_evidence_weight=-1"],
            "--e2ip_evidence_weight must be a finite number >= 0, got -1.0",
        ),
        ([E2IP, "--e2ip_evidence_weight=0.1"], "has no regulariser"),
        ([E2IP, "--e2ip_force_unit=0"], "error: --e2ip_force_unit must be 'auto' or a finite number > 0"),
        ([E2IP, "--e2ip_force_unit=-1"], "force_unit must be 'auto' or a finite number > 0"),
        ([E2IP, "--e2ip_force_unit=much"], "got 'much'"),
        ([E2IP, "--loss=forces_only"], "needs a --loss with energy and forces"),
        ([E2IP, "--loss=dipole"], "needs a --loss with energy and forces"),
        ([E2IP, "--loss=energy_forces_dipole"], "needs a --loss with energy and forces"),
        ([E2IP, "--model=AtomicDipolesMACE"], "needs --model MACE or ScaleShiftMACE, not AtomicDipolesMACE"),
        ([E2IP, "--forces_weight=0"], "needs --forces_weight > 0"),
        ([E2IP, "--forces_key=dft"], "no frame has forces under 'dft' (per-atom columns found: REF_forces)"),
        (
            [E2IP, "--energy_key=dft"],
            "no frame has an energy under 'dft' (names in the comment lines found: REF_energy",
        ),
        ([E2IP, "--train_file=nowhere.xyz"], "--train_file nowhere.xyz: there is no such file"),
        ([E2IP, "--valid_file=nowhere.xyz"], "--valid_file nowhere.xyz: there is no such file"),
        ([E2IP, "--test_file=nowhere.xyz"], "--test_file nowhere.xyz: there is no such file"),
        ([E2IP, "--heads={'a': {'train_file': 'nowhere.xyz'}}"], "--train_file nowhere.xyz: there is no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(parse, capsys, flags, words):
    with pytest.raises(SystemExit) as ended:
        parse(*flags)
    assert ended.value.code == 2
    # Of argparse's own errors the last line, after its usage.
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert ": error: " in message and words in message


@pytest.mark.parametrize("where", ["command line", "file"])
def test_an_unknown_readout_is_told_the_known_ones(parse, tmp_path, capsys, toy_family, where):
    (tmp_path / "config.yaml").write_text("readout: other\n")
    with pytest.raises(SystemExit) as ended:
        parse("--readout=other" if where == "command line" else f"--config={tmp_path / 'config.yaml'}")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(f"'{name}'" in message for name in ("other", "stock", "e2ip", "isotropic"))


def test_options_of_another_family(parse, capsys, toy_family):
    with pytest.raises(SystemExit) as ended:
        parse("--readout=isotropic", "--e2ip_evidence=coupled")
    assert ended.value.code == 2
    expected = (
        "--e2ip_evidence is no option of --readout isotropic, but of e2ip, e2ip-ablation, e2ip-cholesky; leave it out"
    )
    assert capsys.readouterr().err.strip().endswith(expected)
    assert parse("--readout=isotropic", "--e2ip_force_unit=0.1").readout == "isotropic"


def test_options_come_from_the_families(toy_family, monkeypatch, parse):
    """Also where two families have one of the same name."""
    from mace import tools

    from e2ip_plugins.families.interface import Option
    from mace_ext.training.options import settings_of

    width = Option("width", "how wide, 50 % or so", int)
    monkeypatch.setattr(toy_family, "options", (width, Option("preset", "which", int)))
    text = " ".join(tools.build_default_arg_parser().format_help().split())
    assert "--e2ip_width E2IP_WIDTH readout isotropic: how wide, 50 % or so" in text
    assert "readout isotropic: which" in text
    settings = settings_of(parse("--readout=isotropic", "--e2ip_width=3", "--e2ip_preset=7"), 0.05)
    assert dict(settings.options) == {"width": 3, "preset": 7}


def test_missing_training_file(parse, capsys):
    with pytest.raises(SystemExit):
        parse(E2IP, train_file=None)
    assert "--train_file is missing" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "2\nno properties\nH 0 0\n", "\x00\x01\x02"], ids=["empty", "torn", "binary"])
def test_unreadable_file(tmp_path, content):
    from mace_ext.training.checks import check_file

    path = tmp_path / "frames.xyz"
    path.write_text(content)
    with pytest.raises(InputError, match=r"--train_file .*frames\.xyz: (cannot be read|holds no frames)"):
        check_file(str(path), "--train_file", "REF_forces", "--forces_key")


def test_isolated_atoms_may_lack_forces(tmp_path, data_files):
    """A file is fine when some frame has the forces; MACE gives the others weight zero."""
    from mace_ext.training.checks import check_file

    frames = [Atoms("H", info={"config_type": "IsolatedAtom"}), *ase.io.read(data_files["valid"], ":")]
    ase.io.write(tmp_path / "mixed.xyz", frames)
    check_file(str(tmp_path / "mixed.xyz"), "--train_file", "REF_forces", "--forces_key")


def test_constraints_change_what_mace_takes_for_forces(tmp_path):
    """Of ASE's calculators, whose key is ``forces``; in the last frame only."""
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms

    from mace_ext.training.checks import check_file

    frames = [Atoms("OH2", np.eye(3)) for _ in range(3)]
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=1.0, forces=np.eye(3))
    path = str(tmp_path / "slab.traj")
    ase.io.write(path, frames)
    check_file(path, "--train_file", "forces", "--forces_key")
    frames[2].set_constraint(FixAtoms([0, 1]))
    ase.io.write(path, frames)
    with pytest.raises(InputError, match=r"slab\.traj, frame 2: has constraints, .* of 2 atoms .*REF_forces"):
        check_file(path, "--train_file", "forces", "--forces_key")
    check_file(path, "--train_file", "energy", "--energy_key")


def test_joined_files(tmp_path):
    from mace_ext.training.checks import check_file

    for name in ("a.aselmdb", "b.aselmdb"):
        (tmp_path / name).touch()
    check_file(f"{tmp_path}/a.aselmdb:{tmp_path}/b.aselmdb", "--train_file", "REF_forces", "--forces_key")
    with pytest.raises(InputError, match=r"c\.aselmdb: there is no such file"):
        check_file(f"{tmp_path}/a.aselmdb:{tmp_path}/c.aselmdb", "--train_file", "REF_forces", "--forces_key")


def test_data_without_forces_train_nothing():
    """Of HDF5 files nobody has looked before."""
    from types import SimpleNamespace

    import torch

    from mace_ext.training.configure import _check_reference_forces

    def frame(forces, weight=1.0):
        return SimpleNamespace(weight=torch.tensor(1.0), forces_weight=torch.tensor(weight), forces=forces)

    lacking = [frame(torch.zeros(3, 3), weight=0.0), frame(torch.full((3, 3), math.nan))]
    with pytest.raises(InputError, match="no frame of the training data has finite reference forces"):
        _check_reference_forces(lacking)
    _check_reference_forces([*lacking, frame(torch.zeros(3, 3))])


def test_stock_runs_are_not_checked(parse):
    """Without our options the parser is the stock one, down to what it lets through."""
    assert parse(train_file="nowhere.xyz").readout == "stock"


def test_the_command_ends_with_status_2_and_one_message(training_command):
    done = subprocess.run(training_command(E2IP, forces_key="dft"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("name it with --forces_key")


def test_training_forces_that_are_all_zero_have_no_automatic_unit(train, tmp_path, data_files, capsys):
    frames = ase.io.read(data_files["train"], ":")
    for atoms in frames:
        atoms.arrays["REF_forces"] *= 0.0
    ase.io.write(tmp_path / "zero.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, "--e2ip_force_unit=auto", train_file=tmp_path / "zero.xyz", std=1.0, mean=0.0)
    assert ended.value.code == 2
    assert "component RMS" in capsys.readouterr().err


def test_training_positions_that_are_no_numbers(train, tmp_path, data_files, capsys):
    frames = ase.io.read(data_files["train"], ":")
    frames[-1].positions[0, 0] = float("nan")
    ase.io.write(tmp_path / "broken.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, train_file=tmp_path / "broken.xyz")
    assert ended.value.code == 2
    assert (
        "broken.xyz, frame 11 of the training set (head Default): the position of atom 0 is not finite"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("split", ["train", "valid"])
def test_energies_that_are_no_numbers(train, tmp_path, data_files, capsys, split):
    """Unlike forces they are not masked: the loss would be NaN, and the model with it."""
    frames = ase.io.read(data_files[split], ":")
    frames[1].info["REF_energy"] = float("nan")
    ase.io.write(tmp_path / "broken.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, **{f"{split}_file": tmp_path / "broken.xyz"})
    assert ended.value.code == 2
    name = {"train": "training", "valid": "validation"}[split]
    expected = f"broken.xyz, frame 1 of the {name} set (head Default): the reference energy is not finite"
    assert expected in capsys.readouterr().err


def test_stresses_that_are_no_numbers(train, tmp_path, data_files, capsys):
    frames = ase.io.read(data_files["train"], ":")
    for i, atoms in enumerate(frames):
        atoms.info["REF_stress"] = np.full((3, 3), float("nan") if i == 2 else 0.0)
    ase.io.write(tmp_path / "broken.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, "--loss=stress", "--compute_stress=True", train_file=tmp_path / "broken.xyz")
    assert ended.value.code == 2
    expected = "broken.xyz, frame 2 of the training set (head Default): the reference stress is not finite"
    assert expected in capsys.readouterr().err
    # Of no account to a loss that does not look at them.
    trained = train(E2IP, name="weighted", train_file=tmp_path / "broken.xyz")
    assert all(math.isfinite(entry["loss"]) for entry in trained.validation)


def test_averages_of_energies_that_some_frames_lack(train, tmp_path, data_files, capsys):
    frames = ase.io.read(data_files["train"], ":")
    del frames[3].info["REF_energy"]
    ase.io.write(tmp_path / "some.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, train_file=tmp_path / "some.xyz", E0s="average")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "1 of 12 have none, the first is" in said and "some.xyz, frame 3: leave such frames out" in said


def test_training_atoms_at_the_same_place(train, tmp_path, data_files, capsys):
    frames = ase.io.read(data_files["train"], ":")
    frames[-1].positions[2] = frames[-1].positions[0]
    # MACE takes them out; frames are numbered as in the file.
    alone = [Atoms(symbol, info={"config_type": "IsolatedAtom", "REF_energy": -1.0}) for symbol in "HCO"]
    ase.io.write(tmp_path / "broken.xyz", [*alone, *frames])
    with pytest.raises(SystemExit) as ended:
        train(E2IP, train_file=tmp_path / "broken.xyz")
    assert ended.value.code == 2
    expected = "broken.xyz, frame 14 of the training set (head Default): atoms 0 and 2 are at the same place"
    assert expected in capsys.readouterr().err


def test_elements_of_the_test_set_alone(train, tmp_path, data_files, capsys):
    """MACE itself would train first, then fail without a model."""
    frames = ase.io.read(data_files["valid"], ":")
    frames[0].symbols[0] = "S"
    ase.io.write(tmp_path / "test.xyz", frames)
    with pytest.raises(SystemExit) as ended:
        train(E2IP, test_file=tmp_path / "test.xyz")
    assert ended.value.code == 2
    assert "(head Default): has S, which the model does not know; it knows H, O" in capsys.readouterr().err


def test_folder_without_data_is_refused(tmp_path):
    from mace_ext.training.checks import check_file

    with pytest.raises(InputError, match="folder"):
        check_file(str(tmp_path), "--train_file", "REF_forces", "--forces_key")


def test_forces_alone_need_no_energies(parse):
    assert parse(E2IP, "--energy_key=dft", "--energy_weight=0").energy_weight == 0


def test_help_states_every_default_once():
    from mace import tools

    text = " ".join(tools.build_default_arg_parser().format_help().split())
    ours = text[text.rindex("force uncertainties (e2ip-plugins)") :]
    assert "None" not in ours
    # readout, evidence, its weight, force unit; eip's weight of the regulariser; members of shallow
    assert ours.count("(default: ") == 6
    assert "readout e2ip, e2ip-ablation, e2ip-cholesky: leverage, coupled or independent" in ours
