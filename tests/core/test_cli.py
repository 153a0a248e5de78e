"""The `e2ip` command itself, and what `e2ip fit` refuses before any long work; fits are tested with their hosts."""

import errno
import warnings
import zipfile

import ase
import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

import e2ip_plugins
from e2ip_plugins import cli
from e2ip_plugins.errors import InputError, UncertaintyWarning
from e2ip_plugins.fitting.constants import FittedConstants
from e2ip_plugins.fitting.report import FitReport


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def one_line(result):
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("e2ip: error: ")
    return line


@pytest.fixture
def files(tmp_path):
    """Training and validation frames, and a file that looks like a model."""
    for name, seed in (("train", 0), ("valid", 1)):
        rng = np.random.default_rng(seed)
        frames = [ase.Atoms("OH2", rng.normal(size=(3, 3))) for _ in range(4)]
        for atoms in frames:
            atoms.arrays["REF_forces"] = rng.normal(size=(3, 3))
        ase.io.write(tmp_path / f"{name}.xyz", frames, format="extxyz")
    (tmp_path / "my.model").write_bytes(b"not read")
    return tmp_path


@pytest.fixture
def fit(files):
    return lambda model="my.model", *more, train="train.xyz", valid="valid.xyz": run(
        "fit", files / model, "--train", files / train, "--valid", files / valid, *more
    )


@pytest.fixture
def calls(monkeypatch):
    """What hosts are asked to fit, which they do at once."""
    calls = []

    def fit_file(*arguments, **options):
        calls.append((arguments, options))
        constants = FittedConstants(2.0, (1.5, 2.7), -0.2, 0.1, (-4.5, -4.75), 4, 12)
        return FitReport({(0, 0): 4, (0, 1): 8}, {}, {0: constants}, 2, ["few atoms"])

    monkeypatch.setattr(cli.checks, "entry_point", lambda group, host, why: calls.append(host) or fit_file)
    return calls


def test_version():
    assert run("--version").stdout.strip() == e2ip_plugins.__version__


COMMANDS = "compare ensemble calibrate bench fetch fit update evaluate strip md select label lammps".split()
COMMANDS += ["lammps-plugin", "export-readout", "attach"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(command):
    result = run(*command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout


def test_a_warning_of_ours_is_a_line_in_every_command(monkeypatch):
    def warned():
        warnings.warn("never fitted", UncertaintyWarning, stacklevel=1)
        warnings.warn("of somebody else", UserWarning, stacklevel=1)

    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    cli.app.command("warned")(warned)
    with pytest.warns(UserWarning, match="of somebody else"):
        result = run("warned")
    assert result.exit_code == 0 and result.stderr.startswith("e2ip: warning: never fitted\n")


# fit


def test_fit_hands_frames_to_the_host_and_prints_what_was_found(fit, files, calls):
    result = fit()
    assert result.exit_code == 0, result.output
    host, ((model, training, validation, output), options) = calls
    assert host == "mace" and model == files / "my.model" and output == files / "my-e2ip.model"
    assert len(training) == len(validation) == 4 and np.isfinite(validation[0].counted_forces).all()
    work = options.pop("work")
    assert options == {"head": None, "device": "cpu", "batch_size": 10}
    assert (work.output, work.part, work.merge) == (output, None, None)
    assert list(work.settings) == ["the model", "--train", "--head", "--valid"]
    assert result.stderr == "e2ip: warning: few atoms\n"
    assert "growth 2 (1.5 to 2.7)" in result.stdout and f"Written: {output}" in result.stdout


@pytest.mark.parametrize(
    ("model", "host", "output"),
    [
        ("a.model", "mace", "a-e2ip.model"),
        ("best.ckpt", "nequip", "best-e2ip.ckpt"),
        ("a.nequip.zip", "nequip", "a-e2ip.ckpt"),
    ],
)
def test_fit_names_its_output_after_the_model(fit, files, calls, model, host, output):
    (files / model).write_bytes(b"")
    assert fit(model).exit_code == 0
    assert calls[0] == host and calls[1][0][3] == files / output
    if model == "a.nequip.zip":  # a package with a readout
        with zipfile.ZipFile(files / model, "w") as archive:
            archive.writestr("a/nequip_ext/model/readout.py", "")
        assert fit(model).exit_code == 0 and calls[3][0][3] == files / "a-e2ip.nequip.zip"


def test_fit_passes_options_on_and_reads_every_file(fit, files, calls):
    options = ("--train", files / "valid.xyz", "--head", "pbe", "--device", "cpu:0", "--batch-size", 3)
    result = fit("my.model", *options, "--output", files / "other.model", "--forces-key", "REF_forces")
    assert result.exit_code == 0, result.output
    (_, training, _, output), given = calls[1]
    assert len(training) == 8 and output == files / "other.model"
    del given["work"]
    assert given == {"head": "pbe", "device": "cpu:0", "batch_size": 3}
    assert "warning: 4 of 4 validation frames are training frames: constants come out too small" in result.stderr


def test_fit_reads_the_array_of_its_option_from_the_training_frames_too(fit, files, calls):
    for name in ("train", "valid"):
        frames = ase.io.read(files / f"{name}.xyz", ":")
        for atoms in frames:
            atoms.arrays["mine"] = np.full((3, 3), 0.25)
        ase.io.write(files / f"{name}.xyz", frames, format="extxyz")
    assert fit("my.model", "--forces-key", "mine").exit_code == 0
    (_, training, validation, _), _ = calls[1]
    assert all((frame.counted_forces == 0.25).all() for frame in [*training, *validation])


def test_fit_needs_no_forces_of_training_frames(fit, files, calls):
    ase.io.write(files / "bare.xyz", ase.Atoms("OH2", np.eye(3)), format="extxyz")
    assert fit(train="bare.xyz").exit_code == 0
    assert "bare.xyz: no atom has finite reference forces" in one_line(fit(valid="bare.xyz"))


def test_fit_refuses_models_that_are_not_there_or_of_no_host(fit, files, calls):
    assert "nowhere.model: no such file" in one_line(fit("nowhere.model"))
    (files / "a.pt").write_bytes(b"")
    assert "a.pt: is none of .model, .ckpt, .zip" in one_line(fit("a.pt"))
    (files / "folder.model").mkdir()
    assert "folder.model: is a folder" in one_line(fit("folder.model"))
    assert calls == []


def test_fit_counts_what_it_leaves_out(fit, files, calls):
    frames = ase.io.read(files / "valid.xyz", ":")
    frames[2].arrays["REF_forces"][1, 0] = np.nan
    ase.io.write(files / "valid.xyz", frames, format="extxyz")
    assert "warning: 1 validation atoms have no finite reference force and are left out" in fit().stderr


def test_fit_does_not_write_over_the_model(fit, files, calls):
    assert "--output" in one_line(fit("my.model", "--output", files / "my.model"))
    (files / "link.model").symlink_to(files / "my.model")
    assert "is a file that this command reads" in one_line(
        fit("my.model", "--overwrite", "--output", files / "link.model")
    )
    assert calls == []


def test_fit_writes_over_other_files_only_where_it_is_told_to(fit, files, calls):
    (files / "my-e2ip.model").write_bytes(b"")
    assert "my-e2ip.model: is there already" in one_line(fit())
    assert f"--output {files}: is a folder" in one_line(fit("my.model", "--overwrite", "--output", files))
    assert "there is no folder" in one_line(fit("my.model", "--output", files / "nowhere" / "a.model"))
    assert "the name of such a model ends with .model" in one_line(fit("my.model", "--output", files / "fitted"))
    assert calls == []
    assert fit("my.model", "--overwrite").exit_code == 0 and calls


def test_fit_refuses_frames_that_are_not_there_or_have_no_forces(fit, calls):
    assert "nothing.xyz: no such file" in one_line(fit(train="nothing.xyz"))
    assert "nothing.xyz: no such file" in one_line(fit(valid="nothing.xyz"))
    line = one_line(fit("my.model", "--forces-key", "mine"))
    assert "valid.xyz: no atom has finite reference forces under 'mine'" in line and "--forces-key" in line
    assert calls == []


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_fit_refuses_devices_that_cannot_compute(fit, calls, device):
    assert f"--device {device}: torch cannot compute there" in one_line(fit("my.model", "--device", device))
    assert calls == []


def test_outputs_that_cannot_be_written_are_told_first(fit, files, calls, monkeypatch):
    """Before anything is read: these files are no predictions."""

    def fails(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(InputError, match=r"my\.model: is a file; give a folder"):
        cli.checks.make_folder(files / "my.model")
    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    both = [files / "train.xyz", files / "valid.xyz"]
    for command in (
        fit(),
        run("ensemble", *both, "--output", files / "e.xyz"),
        run("calibrate", both[0], "--output", files / "c.json"),
    ):
        assert "nothing can be written to that folder (Permission denied)" in one_line(command)
    assert calls == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.model"), "out.model: No space left on device"),
        (InputError("my.model: is no model of MACE"), "my.model: is no model of MACE"),
    ],
)
def test_errors_while_fitting_end_as_one_line(fit, monkeypatch, error, message):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(cli.checks, "entry_point", lambda group, host, why: fails)
    assert one_line(fit()) == f"e2ip: error: {message}"


def test_files_that_no_host_opens_end_as_one_line(tmp_path, monkeypatch):
    """A part of a file is told from a whole one that the host cannot open."""

    def fails(*_, **__):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(cli.checks, "entry_point", lambda group, host, why: fails)
    model = tmp_path / "my.model"
    model.write_bytes(b"PK\x03\x04 half")
    with pytest.raises(InputError, match=r"my\.model: is damaged, cut off or of another kind"):
        cli.checks.opened("calculator", "mace", model)
    with zipfile.ZipFile(model, "w"):
        pass
    with pytest.raises(InputError, match=r"my\.model: mace cannot open it \(RuntimeError: no such operator\)"):
        cli.checks.opened("calculator", "mace", model)


def test_a_host_that_is_not_installed_is_named(fit, monkeypatch):
    class EntryPoint:
        def load(self):
            raise ModuleNotFoundError("No module named 'mace'")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [EntryPoint()])
    assert "run it in an environment with e2ip-plugins[mace]" in one_line(fit())


def test_fit_in_parts(fit, files, calls):
    """What parts are of is told from the data alone, wherever they are."""
    result = fit("my.model", "--part", "2/3")
    assert (
        result.exit_code == 0 and "my-e2ip.model.2-of-3; with all 3 parts, --merge 3 makes the model" in result.stdout
    )
    assert fit("my.model", "--merge", 3).exit_code == 0
    part, merge = (options["work"] for _, options in calls[1::2])
    assert part.part == (2, 3) and merge.part is None and merge.merge == 3
    assert part.settings == {name: value for name, value in merge.settings.items() if name != "--valid"}
    (files / "copy.xyz").write_bytes((files / "train.xyz").read_bytes())
    assert fit("my.model", "--part", "1/3", train="copy.xyz").exit_code == 0
    assert fit("my.model", "--part", "1/3", train="valid.xyz").exit_code == 0
    same, other = (options["work"].settings["--train"] for _, options in calls[5::2])
    assert same == part.settings["--train"] != other
    assert "--part 4/3: give I/N" in one_line(fit("my.model", "--part", "4/3"))
    assert "--part and --merge: give one of them" in one_line(fit("my.model", "--part", "1/3", "--merge", 3))


def test_fit_refuses_a_file_that_ends_in_the_middle_of_a_frame(fit, files, calls):
    text = (files / "train.xyz").read_text()
    (files / "train.xyz").write_text(text[: text.rindex("H")])
    assert "train.xyz, frame 3: is cut off, the file ends in the middle of it" in one_line(fit())
    assert calls == []


# update


def test_update_hands_new_frames_to_the_host(files, calls):
    bad = ase.io.read(files / "valid.xyz", ":")
    bad[0].arrays["REF_forces"][1, 2] = np.nan
    ase.io.write(files / "new.xyz", [*bad, bad[1]], format="extxyz")
    result = run("update", files / "my.model", "--frames", files / "new.xyz", "--head", "two")
    assert result.exit_code == 0, result.output
    assert "1 new frames are there more than once" in result.stderr
    assert "warning: 1 new atoms have no finite reference force and are left out" in result.stderr
    arguments, options = calls[1]
    assert len(arguments[1]) == 4 and arguments[2] == files / "my-updated.model" and options["head"] == "two"
    (files / "my.nequip.zip").touch()
    run("update", files / "my.nequip.zip", "--frames", files / "new.xyz")
    assert calls[3][0][2] == files / "my-updated.nequip.zip"


def test_update_needs_references(files, calls):
    """Predictions of a model are none."""
    frames = ase.io.read(files / "valid.xyz", ":")
    for name, change in (("none", lambda atoms: atoms.arrays.pop("REF_forces")), ("predicted", _predict)):
        for atoms in frames:
            change(atoms)
        ase.io.write(files / f"{name}.xyz", frames, format="extxyz")
    message = one_line(run("update", files / "my.model", "--frames", files / "none.xyz"))
    assert "none.xyz: no atom has finite reference forces under any of REF_forces" in message
    message = one_line(run("update", files / "my.model", "--frames", files / "predicted.xyz"))
    assert "predicted.xyz, frame 0: 'forces' are predictions of a model" in message
    assert not calls


def _predict(atoms):
    atoms.arrays["forces"] = np.ones((len(atoms), 3))
    atoms.info["uq_family"] = "e2ip"
