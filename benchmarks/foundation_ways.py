"""The stand-in's training, and the four ways to error bars on a model that others have trained.

`foundation.py train`, `committee` and `ways` call this module. Every command runs once; a stopped training goes on
where its last checkpoint was written.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from ase import Atoms
from ase.io import read, write
from common import Step, environment, run
from foundation_structures import all_elements

#: Sets that models are judged on; frames for updates are taken off those of `UPDATED`.
TESTS = ("seen", "compositions", "pairs", "rare", "absent", "hot", "surfaces")
UPDATES = (20, 50)
#: Sets that models are updated to. Frames with elements that no training frame has cannot tell a model anything.
UPDATED = ("compositions", "pairs", "rare", "hot", "surfaces")
#: Number of training frames in the public subset, and of the user's frames for training and for validation.
SUBSET, USER_TRAIN, USER_VALID = 400, 70, 30
#: Frames of the subset that are replayed in a fine-tuning.
REPLAY = 150
NETWORK = "--num_channels=32 --max_L=0 --max_ell=2 --correlation=2 --num_interactions=2 --r_max=5.0"
LOSS = "--loss=universal --energy_weight=1 --forces_weight=10 --stress_weight=50 --compute_stress=True"
COMMON = f"{LOSS} --error_table=PerAtomMAE --default_dtype=float32 --device=cpu --ema --ema_decay=0.99"


class Way(NamedTuple):
    """A model with error bars.

    Attributes
    ----------
    name : str
        Its folder below ``models``, with ``fitted.model``.
    tests : tuple of str
        Sets that it is judged on.
    head : str or None
        MACE head of the predictions.
    """

    name: str
    tests: tuple[str, ...]
    head: str | None = None


class Work:
    """The benchmark's folder: ``data`` (labelled sets), ``frames`` (their parts), ``models``, ``predictions``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.frames = self.folder / "frames"
        self.split()

    def data(self, name: str) -> list[Atoms]:
        """Return the labelled frames of a set."""
        path = self.folder / "data" / f"{name}.extxyz"
        if not path.exists():
            sys.exit(f"{path}: is missing; run the steps structures and label first")
        return read(path, ":")

    def part(self, name: str) -> Path:
        """Return the file of a part of a set, such as ``hot-update20`` or ``user-valid``."""
        return self.frames / f"{name}.extxyz"

    def model(self, name: str, file: str = "fitted.model") -> Path:
        """Return a file of a model's folder."""
        return self.folder / "models" / name / file

    def split(self) -> None:
        """Write the parts of all sets, each of which is needed by one of the ways."""
        self.frames.mkdir(parents=True, exist_ok=True)
        parts = {"subset": self.data("train")[:SUBSET], "train": self.data("train"), "valid": self.data("valid")}
        user = self.data("user")
        parts |= {"user-train": user[:USER_TRAIN], "user-valid": user[USER_TRAIN : USER_TRAIN + USER_VALID]}
        parts["user"] = user[USER_TRAIN + USER_VALID :]
        for name in TESTS:
            frames = self.data(name)
            if name in UPDATED:
                parts |= {f"{name}-update{number}": frames[:number] for number in UPDATES}
                frames = frames[max(UPDATES) :]
            parts[name] = frames
        for name, frames in parts.items():
            if not self.part(name).exists():
                write(self.part(name), frames, format="extxyz")


def train(work: Work, member: int, epochs: int) -> Path:
    """Train one member, the first of which is the stand-in, with a budget of epochs; resume it where it stopped.

    More epochs continue a finished training.
    """
    folder = work.model(f"member{member}", "")
    folder.mkdir(parents=True, exist_ok=True)
    mark, log = folder / "epochs.json", folder / "train.log"
    if mark.exists() and json.loads(mark.read_text())["epochs"] >= epochs:
        return folder / "standin.model"
    command = ["mace_run_train", "--name=standin", f"--seed={member}", *NETWORK.split(), *COMMON.split()]
    command += [f"--train_file={work.part('train')}", f"--valid_file={work.part('valid')}"]
    # Elements without frames are listed, or the model could not evaluate them; their E0 becomes 0.
    command += [f"--atomic_numbers={all_elements()}", "--E0s=average", "--batch_size=8", "--valid_batch_size=40"]
    command += ["--lr=0.01", "--scheduler=ExponentialLR", "--lr_scheduler_gamma=0.9"]
    command += ["--eval_interval=2", "--restart_latest"]
    began = time.monotonic()
    with log.open("a") as file:
        done = subprocess.run(
            [*command, f"--max_num_epochs={epochs}"], cwd=folder, env=environment(), stdout=file, stderr=file
        )
    if done.returncode:
        sys.exit(f"{log}: status {done.returncode}")
    mark.write_text(json.dumps({"epochs": epochs, "wall_s": time.monotonic() - began}))
    return folder / "standin.model"


def members(work: Work) -> list[str]:
    """Return the names of the members whose training is finished."""
    return sorted(path.parent.name for path in (work.folder / "models").glob("member*/epochs.json"))


def e2ip(folder: Path, name: str, *arguments: str) -> None:
    """Run a subcommand of `e2ip` in a folder, unless it has finished there; in this process, whose start it saves."""
    from e2ip_plugins.cli import app

    folder.mkdir(parents=True, exist_ok=True)
    mark, text = folder / f"{name}.done", shlex.join(arguments)
    if mark.exists() and mark.read_text() == text:
        return
    print(f"[{folder.name}] $ e2ip {text}", flush=True)
    with (folder / f"{name}.log").open("w") as log, chdir(folder), redirect_stdout(log), redirect_stderr(log):
        status = app([*arguments, "--overwrite"], standalone_mode=False)
    if status:
        sys.exit(f"{folder / name}.log: status {status}")
    mark.write_text(text)


def fit(work: Work, base: Path, name: str, training: str, validation: str, head: str | None = None) -> Path:
    """Fit a model's error bars, as `e2ip fit` does."""
    options = [
        f"--train={work.part(training)}",
        f"--valid={work.part(validation)}",
        *([f"--head={head}"] if head else []),
    ]
    e2ip(work.model(name, ""), "fit", "fit", str(base), *options, "--output=fitted.model")
    return work.model(name)


def fine_tune(work: Work, base: Path, name: str, epochs: int, *options: str) -> Path:
    """Fine-tune the stand-in to the user's frames with MACE's own command."""
    command = ["mace_run_train", "--name=tuned", "--seed=1", f"--foundation_model={base}", *COMMON.split()]
    command += [f"--train_file={work.part('user-train')}", f"--valid_file={work.part('user-valid')}", "--batch_size=8"]
    command += ["--foundation_model_elements=True", "--E0s=foundation", "--lr=0.003", f"--max_num_epochs={epochs}"]
    run(
        work.model(name, ""),
        Step("train", [*command, *options], ("checkpoints", "logs", "results", "tuned.model")),
    )
    return work.model(name, "tuned.model")


def replay(work: Work) -> tuple[str, ...]:
    """Return the options of multi-head fine-tuning with frames of the public subset as replay."""
    return (
        "--multiheads_finetuning=True",
        f"--pt_train_file={work.part('subset')}",
        f"--pt_valid_file={work.part('valid')}",
        f"--num_samples_pt={REPLAY}",
        "--force_mh_ft_lr=True",
    )


def ways(work: Work, epochs: int) -> Iterator[Way]:
    """Make the models of all ways, as far as they are missing; yield each once it is finished."""
    base = work.model("member1", "standin.model")
    if not base.exists():
        sys.exit(f"{base}: is missing; run the step train first")
    for name, training in (("all", "train"), ("subset", "subset")):
        fit(work, base, name, training, "valid")
        yield Way(name, (*TESTS, "user"))
    fit(work, base, "own", "user-train", "user-valid")
    yield Way("own", ("user", "seen", "rare"))
    for test in UPDATED:
        for number in UPDATES:
            name = f"update-{test}-{number}"
            frames = f"--frames={work.part(f'{test}-update{number}')}"
            e2ip(work.model(name, ""), "update", "update", str(work.model("all")), frames, "--output=fitted.model")
            yield Way(name, (test, "seen"))
    tuned = fine_tune(work, base, "multihead", epochs, *replay(work))
    fit(work, tuned, "multihead", "user-train", "user-valid", "Default")
    fit(work, tuned, "multihead-replay", "subset", "valid", "pt_head")
    yield Way("multihead", ("user", "seen"), "Default")
    yield Way("multihead-replay", ("user", "seen", "pairs"), "pt_head")
    tuned = fine_tune(work, base, "lora", epochs, "--lora=True", "--lora_rank=4", "--multiheads_finetuning=False")
    fit(work, tuned, "lora", "user-train", "user-valid")
    yield Way("lora", ("user", "seen"))
    options = (*replay(work), "--readout=e2ip")
    trained = fine_tune(work, base, "multihead-readout", epochs, *options)
    if not work.model("multihead-readout").exists():
        work.model("multihead-readout").symlink_to(trained.name)
    yield Way("multihead-readout", ("user", "seen"), "Default")
