"""Uncertainties of a stand-in foundation model: a small MACE model of 29 elements, trained on labels of CHGNet.

No public foundation model is used. Structures come from the builders of ASE and pymatgen (`foundation_structures.py`),
labels from CHGNet, whose weights come with its package (`foundation_labels.py`). The first two steps run in an
environment of their own (`pip install chgnet -c constraints.txt`), the others in that of MACE; all in this order, and
all with the same --work:

    python benchmarks/foundation.py structures       # a minute
    python benchmarks/foundation.py label            # ten minutes
    python benchmarks/foundation.py train            # an hour; --member 2 to 5 are the committee
    python benchmarks/foundation.py ways             # fits, updates, fine-tunings and their scores
    python benchmarks/foundation.py table            # prints the tables of docs/howto/foundation-models.md
"""

import argparse

from common import load, parser_of
from foundation_tables import tables


def make_structures(options: argparse.Namespace) -> None:
    """Write the structures of every set, without labels."""
    from ase.io import write
    from foundation_structures import structures

    folder = options.work / "structures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in structures(options.scale).items():
        write(folder / f"{name}.extxyz", frames)
        print(f"{name}: {len(frames)}", flush=True)


def make_labels(options: argparse.Namespace) -> None:
    """Label every set with CHGNet."""
    from foundation_labels import label

    folder = options.work / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted((options.work / "structures").glob("*.extxyz")):
        label(source, folder / source.name)


def train_member(options: argparse.Namespace) -> None:
    """Train the stand-in or another member of its committee."""
    from foundation_ways import Work, train

    work = Work(options.work)
    work.split()
    train(work, options.member, options.epochs)


def try_ways(options: argparse.Namespace) -> None:
    """Fit, update and fine-tune the stand-in, and judge every model."""
    from foundation_scores import judge_all
    from foundation_ways import Work

    work = Work(options.work)
    work.split()
    judge_all(work, options.tuning_epochs, options.out)


def print_table(options: argparse.Namespace) -> None:
    """Print the tables of the documentation."""
    print(tables(load(options.out)))


STEPS = {
    "structures": make_structures,
    "label": make_labels,
    "train": train_member,
    "ways": try_ways,
    "table": print_table,
}


def main() -> None:
    parser = parser_of(__doc__ or "", "foundation", "work", "out")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of structures")
    parser.add_argument("--member", type=int, default=1, help="which training: 1 is the stand-in")
    parser.add_argument("--epochs", type=int, default=25, help="budget of a training; more continue a finished one")
    parser.add_argument("--tuning-epochs", type=int, default=20, help="budget of a fine-tuning")
    options = parser.parse_args()
    STEPS[options.step](options)


if __name__ == "__main__":
    main()
