"""Study the leverage of finished runs of `e2ip bench`, and write the tables of all studies.

    python benchmarks/leverage_tables.py [OUT/runs/demo_mace_e2ip_s1 …]

For every run named, in the environment of its host, `leverage.py` writes the atoms of its model and judges leverage and
alternatives; the result joins benchmarks/results/leverage.json. Models of the method e2ip-fit are judged without
alternatives. Tables go to benchmarks/results/leverage.md, from that file alone.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

from ase import Atoms
from ase.build import molecule
from ase.io import write
from common import RESULTS as FOLDER
from common import markdown

from e2ip_plugins.bench.catalogue import METHODS, framework
from e2ip_plugins.bench.commands import MODELS
from e2ip_plugins.bench.data import read_json

HERE = Path(__file__).resolve().parent
RESULTS = FOLDER / "leverage.json"
RANKING = "spearman_epistemic"

#: Structures on which no model of the demo's molecule should be certain.
NONSENSE = {
    "isolated C": Atoms("C"),
    "C-H at 0.3 Å": Atoms("CH", [[0, 0, 0], [0, 0, 0.3]]),
    "benzene": molecule("C6H6"),
    "methane": molecule("CH4"),
    "C crystal, one atom in 2.5 Å": Atoms("C", cell=[2.5] * 3, pbc=True),
}


def study(folder: Path) -> dict:
    """What `leverage.py` finds for one run of the harness."""
    run = read_json(folder / "run.json")["run"]
    files = sorted(folder.parents[1].glob(f"data/{run['dataset']}_*.extxyz"))
    named = {path.stem.removeprefix(f"{run['dataset']}_"): path for path in files}
    sets = [f"--set={name}={path}" for name, path in named.items() if name != "rotated"]
    if run["dataset"] == "demo":
        write(folder / "nonsense.extxyz", list(NONSENSE.values()))
        sets.append(f"--set=nonsense={folder / 'nonsense.extxyz'}")
    script, host = [sys.executable, str(HERE / "leverage.py")], framework(run["host"])
    model, out = folder / MODELS[host], folder / "leverage.json"
    subprocess.run([*script, "atoms", "--host", host, "--model", model, *sets, "--out", folder / "atoms"], check=True)
    untrained = ["--untrained"] if METHODS[run["method"]].fit else []
    subprocess.run([*script, "judge", folder / "atoms", *untrained, "--out", out], check=True)
    return {"study": "tables", "model": folder.name, **read_json(out)}


def nonsense(studies: list[dict]) -> str:
    """Return a table with the least values over all seeds, for every structure."""
    heads = ("structure", "host", "model", "leverage", "training atoms below", "epistemic std eV/Å", "below")
    lines = []
    for i, structure in enumerate(NONSENSE):
        for host, (title, method) in itertools.product(("mace", "nequip"), (("e²IP", "e2ip"), ("stock", "e2ip-fit"))):
            rows = [s["nonsense"][i] for s in studies if s["model"].startswith(f"demo_{host}_{method}_s")]
            if rows:
                least = {name: min(row[name] for row in rows) for name in rows[0]}
                cells = [structure, host, f"{title}, {len(rows)} seeds"]
                for name, digits in (("leverage", ".1f"), ("epistemic_std", ".3g")):
                    cells += [f"{least[name]:{digits}}", f"{100 * least[f'training_below_{name}']:.2f} %"]
                lines.append(cells)
    return markdown(heads, lines)


def alternatives(studies: list[dict]) -> str:
    """Means over sets and hosts of means over seeds; worst cases over sets and hosts."""
    heads = ["NLL, in", "CE, in", "Spearman, in", "NLL, out", "CE, out", "largest CE, out", "coverage@95, out: lowest"]
    heads += ["highest", "Spearman, out"]
    lines = []
    newest = max(one["form"] for one in studies)
    kinds: dict[str, list[dict]] = {}
    for one in studies:
        if "_e2ip_s" in one["model"] and one["form"] == newest:
            kinds.setdefault(one["model"].rpartition("_s")[0], []).append({**one, **one["alternatives"]})
    every = [one for of_kind in kinds.values() for one in of_kind]
    # Alternatives that all studies have: `leverage.py` may have been changed between two of them.
    for title in ("as trained", "leverage", *(t for t in every[0]["alternatives"] if all(t in one for one in every))):

        def means(test: str, name: str, title: str = title) -> list[float]:
            having = [of_kind for of_kind in kinds.values() if test in of_kind[0][title]]
            return [statistics.mean(one[title][test][name] for one in of_kind) for of_kind in having]

        ce, coverage = means("ood", "calibration_error"), means("ood", "coverage95")
        cells = [f"{statistics.mean(means('test', name)):.3f}" for name in ("nll", "calibration_error", RANKING)]
        cells += [f"{statistics.mean(means('ood', 'nll')):.2f}", f"{statistics.mean(ce):.3f}", f"{max(ce):.3f}"]
        cells += [f"{min(coverage):.3f}", f"{max(coverage):.3f}", f"{statistics.mean(means('ood', RANKING)):.3f}"]
        lines.append([title, *cells])
    return markdown(["form", *heads], lines)


def page(studies: list[dict]) -> str:
    """Both tables."""
    of_tables = [one for one in studies if one["study"] == "tables"]
    blocks = ("# Results of leverage_tables.py", "## Nonsense", nonsense(of_tables), "## Alternatives")
    return "\n\n".join([*blocks, alternatives(of_tables)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    studies = {(one["study"], one["model"]): one for one in read_json(RESULTS)}
    for folder in parser.parse_args().runs:
        studies["tables", folder.name] = study(folder.resolve())
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, studies.values())) + "\n]\n")
    RESULTS.with_suffix(".md").write_text(page(list(studies.values())))


if __name__ == "__main__":
    main()
