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

from common import load, parser_of


def main() -> None:
    parser = parser_of(__doc__ or "", "foundation", "work", "out")
    parser.add_argument("step", choices=("structures", "label", "train", "ways", "table"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of structures")
    parser.add_argument("--member", type=int, default=1, help="which training: 1 is the stand-in")
    parser.add_argument("--epochs", type=int, default=25, help="budget of a training; more continue a finished one")
    parser.add_argument("--tuning-epochs", type=int, default=20, help="budget of a fine-tuning")
    options = parser.parse_args()
    # Each step imports what its environment has.
    if options.step == "structures":
        from foundation_structures import write_all

        write_all(options.work / "structures", options.scale)
    elif options.step == "label":
        from foundation_labels import label_all

        label_all(options.work / "structures", options.work / "data")
    elif options.step == "train":
        from foundation_ways import Work, train

        train(Work(options.work), options.member, options.epochs)
    elif options.step == "ways":
        from foundation_scores import judge_all
        from foundation_ways import Work

        judge_all(Work(options.work), options.tuning_epochs, options.out)
    else:
        from foundation_tables import tables

        print(tables(load(options.out)))


if __name__ == "__main__":
    main()
