"""How well PaiNN and AlphaNet learn, beside SchNetPack's PaiNN: one loop, one recipe, aspirin of rMD17 (E2IP_DATA).

    python benchmarks/backbones.py painn       # hours on a core; also: alphanet, schnetpack
    python benchmarks/backbones.py table       # table and figure of the results, with those of --work
    python benchmarks/backbones.py speed       # prediction and training step beside SchNetPack's, in alternation

950 configurations to train, 50 to validate, 1000 to test (split 01). The recipe is SchNetPack's for MD17 except for the
rate, which follows a cosine to zero instead of a plateau, so that all runs end: AdamW 1e-3, no decay of weights,
batches of ten, 0.01 mean square of energies (kcal/mol) + 0.99 of forces, weights averaged with 0.995. Energies less
their mean. Ours are trained as NequIP compiles them. A run that was stopped goes on after its last epoch; its curve is
written after every epoch, errors on the test frames at its end. For ``speed`` ours goes through NequIP: predictions
also have the stress, training steps of five frames are those of its EMA training module. SchNetPack must be installed
for all but our own networks: see schnetpack_painn.py.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ase.io
import ase.units
import numpy as np
import torch
from common import RESULTS, alternate, load, markdown, parser_of, rounded, save

from e2ip_plugins.files import replacing
from e2ip_plugins.files import save as save_state

UNIT = ase.units.kcal / ase.units.mol  # eV
SPECIES = ["C", "H", "O"]
BATCH, VALID, TRAIN = 10, 50, 950
RATE, AVERAGING = 1e-3, 0.995
# NequIP compares what it compiles with the eager model; float32 rounds AlphaNet's forces by more than its 5e-5.
os.environ.setdefault("NEQUIP_FLOAT32_MODEL_TOL", "1e-3")
NETWORKS: dict[str, dict[str, Any]] = {
    "painn": {"_target_": "nequip_ext.PaiNNModel", "preset": "paper"},
    # As many radial functions as PaiNN has.
    "alphanet": {"_target_": "nequip_ext.AlphaNetModel", "avg_num_neighbors": 14.0, "num_radial": 20},
    "schnetpack": {},
}


class Ours:
    """A network as NequIP builds it, and its data; energies and forces in kcal/mol and Å."""

    def __init__(self, name: str, seed: int, compile_mode: str = "compile") -> None:
        from hydra.utils import get_method
        from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
        from nequip.utils.global_state import set_global_state

        set_global_state(allow_tf32=False)
        config = {"seed": seed, "model_dtype": "float32", "type_names": SPECIES, "r_max": 5.0, **NETWORKS[name]}
        config |= {"per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.0, "compile_mode": compile_mode}
        self.model = get_method(config.pop("_target_"))(**config)
        types = ChemicalSpeciesToAtomTypeMapper(SPECIES, {s: s for s in SPECIES})
        self.transforms = [types, NeighborListTransform(r_max=5.0)]

    def inputs(self, frame: ase.Atoms) -> dict[str, torch.Tensor]:
        from nequip.data import AtomicDataDict, from_ase

        data = from_ase(ase.Atoms(frame.symbols, frame.positions))
        for transform in self.transforms:
            data = transform(data)
        # Without labels NequIP does not compare what it compiles with the eager model: generated code has been wrong.
        data[AtomicDataDict.FORCE_KEY] = torch.zeros_like(data[AtomicDataDict.POSITIONS_KEY])
        return data

    def predict(self, frames: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        from nequip.data import AtomicDataDict

        output = self.model(AtomicDataDict.batched_from_list(frames))
        return output["total_energy"].flatten(), output["forces"]


class Theirs:
    """SchNetPack's PaiNN in the same role."""

    def __init__(self, seed: int) -> None:
        import schnetpack_painn

        torch.manual_seed(seed)
        self.module, self.model = schnetpack_painn, schnetpack_painn.make_model()

    def inputs(self, frame: ase.Atoms) -> dict[str, torch.Tensor]:
        return self.module.inputs_of(frame)

    def predict(self, frames: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(self.module.batch_of(frames))
        return output["energy"].flatten(), output["forces"]


class Data:
    """Frames of one part: inputs, energies (B,) in kcal/mol less the mean of the training set, forces (B, N, 3)."""

    def __init__(self, frames: list[ase.Atoms], network: Ours | Theirs, mean: float) -> None:
        self.inputs = [network.inputs(frame) for frame in frames]
        energies = np.array([frame.info["REF_energy"] - mean for frame in frames])
        self.energies = torch.as_tensor(energies / UNIT, dtype=torch.float32)
        forces = np.array([frame.arrays["REF_forces"] for frame in frames])
        self.forces = torch.as_tensor(forces / UNIT, dtype=torch.float32)

    def batches(self, order: list[int]) -> Iterator[tuple[list, torch.Tensor, torch.Tensor]]:
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            yield [self.inputs[k] for k in chosen], self.energies[chosen], self.forces[chosen].flatten(0, 1)


def read() -> dict[str, list[ase.Atoms]]:
    """Return frames to train, validate and test, drawn with a fixed seed from split 01."""
    if "E2IP_DATA" not in os.environ:
        sys.exit("E2IP_DATA: name the folder with rmd17/aspirin_split01_train.extxyz and _test.extxyz")
    pool, test = (
        ase.io.read(Path(os.environ["E2IP_DATA"], "rmd17", f"aspirin_split01_{part}.extxyz"), ":")
        for part in ("train", "test")
    )
    order = np.random.default_rng(0).permutation(len(pool))[: TRAIN + VALID]
    return {"train": [pool[k] for k in order[:TRAIN]], "valid": [pool[k] for k in order[TRAIN:]], "test": test}


def errors(network: Ours | Theirs, data: Data) -> dict[str, float]:
    """Return mean absolute errors in meV and meV/Å."""
    deviations = []
    for inputs, *references in data.batches(list(range(len(data.inputs)))):
        pairs = zip(network.predict(inputs), references, strict=True)
        deviations.append([(predicted.detach() - reference).abs() for predicted, reference in pairs])
    means = (1e3 * UNIT * float(torch.cat(values).mean()) for values in zip(*deviations, strict=True))
    return dict(zip(("energy", "forces"), means, strict=True))


def train(options: argparse.Namespace) -> None:
    """Train until the last epoch; the curve gets a row for each."""
    torch.set_num_threads(1)
    name, seed = options.what, options.seed
    network = Theirs(seed) if name == "schnetpack" else Ours(name, seed)
    frames = read()
    mean = float(np.mean([frame.info["REF_energy"] for frame in frames["train"]]))
    data = {part: Data(atoms, network, mean) for part, atoms in frames.items()}
    weights = [weight for weight in network.model.parameters() if weight.requires_grad]
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * math.ceil(TRAIN / BATCH))
    label = f"{name}_{options.epochs}_s{seed}"
    options.work.mkdir(parents=True, exist_ok=True)
    result, saved = options.work / f"{label}.json", options.work / f"{label}.pt"
    curve: list[dict[str, float]] = []
    if saved.exists():
        state = torch.load(saved)
        with torch.no_grad():
            torch._foreach_copy_([*weights, *averages], [*state["weights"], *state["averages"]])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        curve = state["curve"]
        print(f"{label}: goes on after epoch {len(curve)}", flush=True)

    def judge(part: str) -> dict[str, float]:
        """Return errors with the averaged weights."""
        trained = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, averages)
        found = errors(network, data[part])
        with torch.no_grad():
            torch._foreach_copy_(weights, trained)
        return found

    def write(**more: dict[str, float]) -> None:
        about = {"network": name, "seed": seed, "epochs": options.epochs, "torch": torch.__version__}
        about |= {"weights": sum(weight.numel() for weight in weights), "curve": curve}
        with replacing(result) as unfinished:
            unfinished.write_text(json.dumps(about | more) + "\n")

    while len(curve) < options.epochs:
        began = time.monotonic()
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(1000 * seed + len(curve))).tolist()
        for inputs, energies, forces in data["train"].batches(order):
            energy, force = network.predict(inputs)
            loss = 0.01 * (energy - energies).square().mean() + 0.99 * (force - forces).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 1 - AVERAGING)
        curve.append({**judge("valid"), "seconds": time.monotonic() - began})
        print(f"{label}: epoch {len(curve)}, forces {curve[-1]['forces']:.2f} meV/Å", flush=True)
        state = {"weights": weights, "averages": averages, "curve": curve}
        save_state(state | {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, saved)
        write()
    write(test=judge("test"))


def speed(rounds: int = 80) -> None:
    """Time predictions of one frame and training steps of five, ours and SchNetPack's; write and print them."""
    import hosts_nequip
    from hosts_models import Settings, make_system, with_labels

    torch.set_num_threads(1)
    system, frame = make_system(21)
    for task, mode in (("inference", "eager"), ("inference", "aoti"), ("training", "eager"), ("training", "compile")):
        frames = [with_labels(frame, seed) for seed in range(1 if task == "inference" else 5)]
        theirs = Theirs(1)
        data, inputs = Data(frames, theirs, 0.0), [theirs.inputs(atoms) for atoms in frames]
        optimizer = torch.optim.Adam(theirs.model.parameters(), lr=1e-4)

        def step(theirs=theirs, data=data, inputs=inputs, optimizer=optimizer) -> None:
            energy, forces = theirs.predict(inputs)
            loss = (energy - data.energies).square().mean() + (forces - data.forces.flatten(0, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def predict(theirs=theirs, inputs=inputs) -> list[torch.Tensor]:
            return [value.detach() for value in theirs.predict(inputs)]

        theirs.model.train(task == "training")
        with tempfile.TemporaryDirectory() as cache:
            settings = Settings("nequip", mode, 21, size="painn", cache=cache)
            host = hosts_nequip.Host(settings, frame, len(frames))
            ours = host.predictor("baseline", 1) if task == "inference" else host.stepper("baseline", 1)
            calls = {"theirs": predict if task == "inference" else step, "ours": ours}
            times = alternate(calls, rounds, warm_up=5)
        save(RESULTS / "painn_speed.json", {f"{task}, ours {mode}": {"system": system, "frames": len(frames), **times}})
    print(speed_table(load(RESULTS / "painn_speed.json")))


def speed_table(results: dict[str, dict]) -> str:
    """Return the times as a Markdown table."""
    rows = []
    for name, times in results.items():
        theirs, ours = (np.array(times[key]) for key in ("theirs", "ours"))
        low, middle, high = np.quantile(ours / theirs, [0.25, 0.5, 0.75])
        medians = [f"{1e3 * statistics.median(values):.1f}" for values in (theirs, ours)]
        rows.append([name, *medians, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    return markdown(["", "theirs, ms", "ours, ms", "ratio"], rows)


def table(results: dict[str, dict]) -> str:
    """Return test errors, and the ratio to SchNetPack's of as many epochs."""
    theirs = {
        r["epochs"]: r["test"]["forces"] for r in results.values() if r["network"] == "schnetpack" and "test" in r
    }
    rows = []
    for result in results.values():
        test, curve = result.get("test", {}), result["curve"]
        ratio = test.get("forces", math.nan) / theirs.get(result["epochs"], math.nan)
        cells = [result["network"], result["weights"], f"{len(curve)} of {result['epochs']}"]
        cells += [f"{curve[-1]['forces']:.1f}", *(f"{test.get(key, math.nan):.1f}" for key in ("forces", "energy"))]
        rows.append([*cells, f"{ratio:.3f}", f"{statistics.median(point['seconds'] for point in curve):.0f}"])
    columns = ["network", "weights", "epochs", "validation, forces", "test, forces", "energies", "to SchNetPack's"]
    return markdown([*columns, "s per epoch"], rows)


def draw(results: dict[str, dict], path: Path) -> None:
    """Draw the learning curves."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    for result in results.values():
        values = [point["forces"] for point in result["curve"]]
        axes.plot(range(1, len(values) + 1), values, label=f"{result['network']}, seed {result['seed']}", lw=1)
    axes.set(xlabel="epoch", ylabel="force MAE, 50 validation frames (meV/Å)", xscale="log", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = parser_of(__doc__, "backbones", "work", "out", "figure")
    parser.add_argument("what", choices=(*NETWORKS, "table", "speed"))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "table":
        save(options.out, {path.stem: rounded(json.loads(path.read_text())) for path in options.work.glob("*.json")})
        print(table(load(options.out)))
        draw(load(options.out), options.figure)
    elif options.what == "speed":
        speed()
    else:
        train(options)


if __name__ == "__main__":
    main()
