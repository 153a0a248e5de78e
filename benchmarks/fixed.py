"""How long a readout trains alone on a frozen model, in units of a whole training.

    python benchmarks/fixed.py --host mace --work DIR [--set aspirin] [--repeats 2] [--longer 4] [--methods stock,…]

In the host's environment; data from E2IP_DATA. The trainings are those of `e2ip bench rmd17 --preset cpu`: the stock
model, the whole of e²IP, and e²IP's readout alone (method e2ip-fixed), start, validations and fit included, without
predictions; ``--longer`` multiplies their epochs. What counts is the processor time of the command, on one thread. Raw
results go to docs/results.
"""

import argparse
import json
import os
import shutil
import statistics
from pathlib import Path

import evaluate

from e2ip_plugins.bench import commands, data
from e2ip_plugins.bench.plan import PRESETS, Preset, Run, dataset

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
METHODS = ("stock", "e2ip", "e2ip-fixed")


def train(run: Run, preset: Preset, files: dict[str, Path], work: Path) -> dict[str, float]:
    """Seconds of the processor and of the clock."""
    folder = work / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = commands.stages(run, dataset(run.dataset), preset, files, folder)[0].command
    if run.host == "nequip":
        command.append("run=[train]")
    processor, wall = evaluate.run(command, folder)
    return {"processor": processor, "wall": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=("mace", "nequip"), required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the trainings, made anew")
    parser.add_argument("--set", default="aspirin")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--longer", type=int, default=1, help="factor on the epochs")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, help="separated by commas")
    options = parser.parse_args()
    preset = PRESETS["cpu"]._replace(epochs=options.longer * PRESETS["cpu"].epochs)
    roots, work = [Path(os.environ["E2IP_DATA"])], options.work.resolve()
    files = data.prepare(options.set, dataset(options.set), roots, work / "data", preset.frames)
    seconds: dict[str, list] = {method: [] for method in options.methods}
    for _ in range(options.repeats):
        for method in options.methods:
            seconds[method].append(train(Run(options.set, options.host, method, 1), preset, files, work))
            print(method, {name: round(value) for name, value in seconds[method][-1].items()}, flush=True)
    medians = {name: statistics.median(entry["processor"] for entry in found) for name, found in seconds.items()}
    result = {"host": options.host, "set": options.set, "longer": options.longer, "seconds": seconds}
    result |= {"ratios": {name: value / medians["stock"] for name, value in medians.items()}}
    name = f"fixed_time_{options.host}" + (f"_{options.longer}x" if options.longer > 1 else "")
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["ratios"])


if __name__ == "__main__":
    main()
