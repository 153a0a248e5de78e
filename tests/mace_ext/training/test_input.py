"""Bad input ends the run before it starts, with one message and status 2."""

import math
from types import SimpleNamespace

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from forked_commands import run_command

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.interface import Option

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
        ([E2IP, "--e2ip_forces=fixed", "--foundation_model=nowhere.model"], "nowhere.model: no such file"),
        (["--e2ip_force_unit=0.1"], "--e2ip_force_unit has no effect without --readout e2ip"),
        (["--readout=other"], "argument --readout: invalid choice: 'other' (choose from"),
        ([E2IP, "--e2ip_evidence_weight=much"], "--e2ip_evidence_weight must be a float, got 'much'"),
        ([E2IP, "--e2ip_preset=best"], "--e2ip_preset: unknown preset 'best'"),
        ([E2IP, "--e2ip_evidence=some"], "--e2ip_evidence: unknown evidence mode 'some'"),
        ([E2IP, "--e2ip_evidence=independent", "--e2ip_evidence_weight=-1"], "--e2ip_evidence_weight must be a finite"),
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
        ([E2IP, "--energy_key=dft"], "no frame has an energy under 'dft' (names in the comment lines found: REF_ene"),
        ([E2IP, "--train_file=nowhere.xyz"], "--train_file nowhere.xyz: there is no such file"),
        ([E2IP, "--valid_file=nowhere.xyz"], "--valid_file nowhere.xyz: there is no such file"),
        ([E2IP, "--test_file=nowhere.xyz"], "--test_file nowhere.xyz: there is no such file"),
        ([E2IP, "--heads={'a': {'train_file': 'nowhere.xyz'}}"], "--train_file nowhere.xyz: there is no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(parse, message_of, flags, words):
    message = message_of(parse, *flags)
    assert ": error: " in message and words in message


@pytest.mark.parametrize("where", ["command line", "file"])
def test_an_unknown_readout_is_told_the_known_ones(parse, tmp_path, message_of, toy_family, where):
    (tmp_path / "config.yaml").write_text("readout: other\n")
    flag = "--readout=other" if where == "command line" else f"--config={tmp_path / 'config.yaml'}"
    message = message_of(parse, flag)
    assert all(f"'{name}'" in message for name in ("other", "stock", "e2ip", "isotropic"))


def test_options_of_another_family(parse, message_of, toy_family):
    assert message_of(parse, "--readout=isotropic", "--e2ip_evidence=coupled").endswith(
        "--e2ip_evidence is no option of --readout isotropic, but of e2ip, e2ip-ablation, e2ip-cholesky; leave it out"
    )
    assert parse("--readout=isotropic", "--e2ip_force_unit=0.1").readout == "isotropic"


def test_options_come_from_the_families(toy_family, monkeypatch, parse):
    """Also where two families have one of the same name."""
    from mace import tools

    from mace_ext.training.options import settings_of

    width = Option("width", "how wide, 50 % or so", type=int)
    monkeypatch.setattr(toy_family, "options", (width, Option("preset", "which", type=int)))
    text = " ".join(tools.build_default_arg_parser().format_help().split())
    assert "--e2ip_width E2IP_WIDTH readout isotropic: how wide, 50 % or so" in text
    assert "readout isotropic: which" in text
    settings = settings_of(parse("--readout=isotropic", "--e2ip_width=3", "--e2ip_preset=7"), 0.05)
    assert dict(settings.options) == {"width": 3, "preset": 7}


def test_what_is_not_refused(parse):
    """Stock runs, whose parser is the stock one down to what it lets through; forces alone, which need no energies."""
    assert parse(train_file="nowhere.xyz").readout == "stock"
    assert parse(E2IP, "--energy_key=dft", "--energy_weight=0").energy_weight == 0


def test_missing_training_file(parse, message_of):
    assert "--train_file is missing" in message_of(parse, E2IP, train_file=None)


def test_files(tmp_path, data_files):
    """A file is fine when some frame has the forces; MACE gives the others, isolated atoms say, weight zero."""
    from mace_ext.training.data_sets import check_file

    def refusal(path, key="REF_forces", label="forces"):
        try:
            check_file(str(path), "--train_file", label, key)
        except InputError as error:
            return str(error).removeprefix(f"--train_file {path}")
        return None

    for content in ("", "2\nno properties\nH 0 0\n", "\x00\x01\x02"):
        (tmp_path / "frames.xyz").write_text(content)
        assert refusal(tmp_path / "frames.xyz").startswith((": cannot be read", ": holds no frames"))
    assert refusal(tmp_path).startswith(": is a folder without HDF5 or LMDB files")
    frames = [Atoms("H", info={"config_type": "IsolatedAtom"}), *ase.io.read(data_files["valid"], ":")]
    ase.io.write(tmp_path / "mixed.xyz", frames)
    assert refusal(tmp_path / "mixed.xyz") is None
    # A part of a file, as ASE names it: MACE takes all of it.
    assert refusal(f"{tmp_path}/mixed.xyz@:") is None
    assert refusal(f"{tmp_path}/mixed.xyz@1:").startswith(f": MACE reads all of {tmp_path}/mixed.xyz, not '1:' of it")
    assert refusal(f"{tmp_path}/other.xyz@:1") == ": there is no such file"
    (tmp_path / "a.aselmdb").touch()
    (tmp_path / "b.aselmdb").touch()
    assert refusal(f"{tmp_path}/a.aselmdb:{tmp_path}/b.aselmdb") is None
    assert "c.aselmdb: there is no such file" in refusal(f"{tmp_path}/a.aselmdb:{tmp_path}/c.aselmdb")
    # What MACE takes for forces changes with constraints: of ASE's calculators, whose key is `forces`; the last frame.
    frames = [Atoms("OH2", np.eye(3)) for _ in range(3)]
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=1.0, forces=np.eye(3))
    path = tmp_path / "slab.traj"
    ase.io.write(path, frames)
    assert refusal(path, "forces") is None
    frames[2].set_constraint(FixAtoms([0, 1]))
    ase.io.write(path, frames)
    text = refusal(path, "forces")
    assert text.startswith(", frame 2: has constraints, ") and " of 2 atoms " in text and "REF_forces" in text
    assert refusal(path, "energy", "energy") is None


class Loader:
    """A loader of which every frame is a batch, and which counts the passes over its data."""

    def __init__(self, *forces, weights=()):
        one = torch.tensor(1.0)
        frames = zip(forces, [*weights, *[1.0] * len(forces)], strict=False)
        self.frames = [SimpleNamespace(forces=f, weight=one, forces_weight=torch.tensor(w)) for f, w in frames]
        self.passes = 0

    @property
    def dataset(self):
        self.passes += 1
        return self.frames

    def __iter__(self):
        return iter(self.frames)


def test_data_without_forces_train_nothing():
    """Of HDF5 files nobody has looked before."""
    from mace_ext.training.labels import FiniteForces

    lacking = [torch.zeros(3, 3), torch.full((3, 3), math.nan)]
    with pytest.raises(InputError, match="no frame of the training data has finite reference forces"):
        FiniteForces(Loader(*lacking, weights=[0.0])).check()
    FiniteForces(Loader(*lacking, torch.zeros(3, 3), weights=[0.0])).check()


def test_forces_that_are_not_finite_read_as_the_mean_of_all_others():
    """Computed once, however many batches have some: root mean square 2 of 1, 1, … and √7, √7, …."""
    from mace_ext.training.labels import FiniteForces

    forces = [torch.full((3, 3), 1.0), torch.full((3, 3), math.sqrt(7.0))]
    forces += [torch.full((3, 3), bad) for bad in (math.nan, math.inf, math.nan)]
    loader = Loader(*forces)
    read = [batch.forces.clone() for batch in FiniteForces(loader)]
    assert loader.passes == 1
    assert torch.equal(read[0], forces[0])
    for tensor in read[2:]:
        torch.testing.assert_close(tensor, torch.full((3, 3), 2.0))


def test_the_command_ends_with_status_2_and_one_message(training_command):
    done = run_command(training_command(E2IP, forces_key="dft"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("name it with --forces_key")


def position(frames):
    frames[-1].positions[0, 0] = math.nan


def energy(frames):
    frames[1].info["REF_energy"] = math.nan


def stress(frames):
    for i, atoms in enumerate(frames):
        atoms.info["REF_stress"] = np.full((3, 3), math.nan if i == 2 else 0.0)


def no_energy(frames):
    del frames[3].info["REF_energy"]


def same_place(frames):
    """Isolated atoms, which MACE takes out: frames are numbered as in the file."""
    frames[-1].positions[2] = frames[-1].positions[0]
    frames[:0] = [Atoms(symbol, info={"config_type": "IsolatedAtom", "REF_energy": -1.0}) for symbol in "HCO"]


def species(frames):
    """MACE itself would train first, then fail without a model."""
    frames[0].symbols[0] = "S"


def no_forces(frames):
    for atoms in frames:
        atoms.arrays["REF_forces"] *= 0.0


TRAINING, VALIDATION = (f"of the {name} set (head Default): " for name in ("training", "validation"))
STRESSES = ("--loss=stress", "--compute_stress=True")


@pytest.mark.parametrize(
    ("option", "change", "flags", "message"),
    [
        ("train_file", position, (), f"frame 11 {TRAINING}the position of atom 0 is not finite"),
        # Unlike forces they are not masked: the loss would be NaN, and the model with it.
        ("train_file", energy, (), f"frame 1 {TRAINING}the reference energy is not finite"),
        ("valid_file", energy, (), f"frame 1 {VALIDATION}the reference energy is not finite"),
        ("train_file", stress, STRESSES, f"frame 2 {TRAINING}the reference stress is not finite"),
        ("train_file", no_energy, (), "1 of 12 have none, the first is"),
        ("train_file", no_energy, (), "frame 3: leave such frames out"),
        ("train_file", same_place, (), f"frame 14 {TRAINING}atoms 0 and 2 are at the same place"),
        ("test_file", species, (), "(head Default): has S, which the model does not know; it knows H, O"),
        ("train_file", no_forces, ("--e2ip_force_unit=auto", "--std=1.0", "--mean=0.0"), "component RMS"),
    ],
)
def test_data_that_nothing_can_be_learned_from(train, tmp_path, data_files, message_of, option, change, flags, message):
    frames = ase.io.read(data_files["train" if option == "train_file" else "valid"], ":")
    change(frames)
    path = tmp_path / "broken.xyz"
    ase.io.write(path, frames)
    text = message_of(train, E2IP, *flags, **{option: path})
    assert message in text
    assert f"{path}, frame " in text or change is no_forces


def test_stresses_are_of_no_account_to_a_loss_that_does_not_look_at_them(train, tmp_path, data_files):
    frames = ase.io.read(data_files["train"], ":")
    stress(frames)
    ase.io.write(tmp_path / "broken.xyz", frames)
    trained = train(E2IP, name="weighted", train_file=tmp_path / "broken.xyz")
    assert all(math.isfinite(entry["loss"]) for entry in trained.validation)


def test_help_states_every_default_once():
    from mace import tools

    text = " ".join(tools.build_default_arg_parser().format_help().split())
    ours = text[text.rindex("force uncertainties (e2ip-plugins)") :]
    assert "None" not in ours
    # readout, evidence, its weight, force unit; eip's weight of the regulariser; members of shallow
    assert ours.count("(default: ") == 6
    assert "readout e2ip, e2ip-ablation, e2ip-cholesky: leverage, coupled or independent" in ours
