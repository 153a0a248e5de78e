"""How well PaiNN and AlphaNet learn, beside SchNetPack's PaiNN: one loop, one recipe, aspirin of rMD17 (E2IP_DATA).

    python benchmarks/backbones.py painn                # hours on a core; also: alphanet, schnetpack, painn-default
    python benchmarks/backbones.py --table --plot docs/figures/backbones.png
    python benchmarks/backbones.py --same               # our network with SchNetPack's weights

950 configurations to train, 50 to validate, 1000 to test (split 01). The recipe is SchNetPack's for MD17 but for the
rate, which follows a cosine to zero instead of a plateau, so that all runs end: AdamW 1e-3, no decay of weights,
batches of ten, 0.01 mean square of energies (kcal/mol) + 0.99 of forces, weights averaged with 0.995. Energies less
their mean. Ours are trained as NequIP compiles them. A run that was stopped goes on after its last epoch, which is
kept in --work; its curve goes to docs/results/backbones after every epoch, errors on the test frames at its end.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import ase.io
import ase.units
import numpy as np
import torch

from e2ip_plugins.files import replacing, save

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT.parent / "docs" / "results" / "backbones"
UNIT = ase.units.kcal / ase.units.mol  # eV
SPECIES = ["C", "H", "O"]
BATCH, VALID, TRAIN = 10, 50, 950
# NequIP compares what it compiles with the eager model; float32 rounds AlphaNet's forces by more than its 5e-5.
os.environ.setdefault("NEQUIP_FLOAT32_MODEL_TOL", "1e-3")
NETWORKS = {
    "painn": {"_target_": "nequip_ext.PaiNNModel", "preset": "paper"},
    "painn-default": {"_target_": "nequip_ext.PaiNNModel"},
    # As many radial functions as PaiNN has.
    "alphanet": {"_target_": "nequip_ext.AlphaNetModel", "avg_num_neighbors": 14.0, "num_radial": 20},
    "schnetpack": None,
}


class Ours:
    """A network as NequIP builds it, and its data; energies and forces in kcal/mol and Å."""

    def __init__(self, name: str, seed: int, compile_mode: str = "compile", dtype: str = "float32") -> None:
        from hydra.utils import get_method
        from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
        from nequip.utils.global_state import set_global_state

        set_global_state(allow_tf32=False)
        config = {"seed": seed, "model_dtype": dtype, "type_names": SPECIES, "r_max": 5.0, **NETWORKS[name]}
        config |= {"per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.0, "compile_mode": compile_mode}
        self.model = get_method(config.pop("_target_"))(**config)
        self.transforms = [
            ChemicalSpeciesToAtomTypeMapper(SPECIES, {s: s for s in SPECIES}),
            NeighborListTransform(r_max=5.0),
        ]

    def inputs(self, frame: ase.Atoms) -> dict:
        from nequip.data import AtomicDataDict, from_ase

        bare = ase.Atoms(frame.symbols, frame.positions)
        data = from_ase(bare)
        for transform in self.transforms:
            data = transform(data)
        # Without labels NequIP does not compare what it compiles with the eager model: generated code has been wrong.
        data[AtomicDataDict.FORCE_KEY] = torch.zeros_like(data[AtomicDataDict.POSITIONS_KEY])
        return data

    def predict(self, frames: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        from nequip.data import AtomicDataDict

        found = self.model(AtomicDataDict.batched_from_list(frames))
        return found["total_energy"].flatten(), found["forces"]


class Theirs:
    """SchNetPack's PaiNN in the same role."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        import schnetpack_painn as spk

        self.spk = spk
        torch.manual_seed(seed)
        self.model = spk.make_model(dtype)

    def inputs(self, frame: ase.Atoms) -> dict:
        return self.spk.inputs_of(frame)

    def predict(self, frames: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(self.spk.batch_of(frames))
        return found["energy"].flatten(), found["forces"]


class Data:
    """Frames of one part: inputs, energies (B,) in kcal/mol less the mean of the training set, forces (B, N, 3)."""

    def __init__(self, frames: list[ase.Atoms], network: Ours | Theirs, mean: float) -> None:
        self.inputs = [network.inputs(frame) for frame in frames]
        energies = np.array([frame.info["REF_energy"] - mean for frame in frames])
        self.energies = torch.as_tensor(energies / UNIT, dtype=torch.float32)
        forces = np.array([frame.arrays["REF_forces"] for frame in frames])
        self.forces = torch.as_tensor(forces / UNIT, dtype=torch.float32)

    def batches(self, order: list[int]):
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            yield [self.inputs[k] for k in chosen], self.energies[chosen], self.forces[chosen].flatten(0, 1)


def read() -> dict[str, list[ase.Atoms]]:
    """Frames to train, validate and test, drawn with a fixed seed from split 01."""
    if "E2IP_DATA" not in os.environ:
        sys.exit("E2IP_DATA: name the folder with rmd17/aspirin_split01_train.extxyz and _test.extxyz")
    folder = Path(os.environ["E2IP_DATA"]) / "rmd17"
    pool = ase.io.read(folder / "aspirin_split01_train.extxyz", ":")
    order = np.random.default_rng(0).permutation(len(pool))[: TRAIN + VALID]
    test = ase.io.read(folder / "aspirin_split01_test.extxyz", ":")
    return {"train": [pool[k] for k in order[:TRAIN]], "valid": [pool[k] for k in order[TRAIN:]], "test": test}


def errors(network: Ours | Theirs, data: Data) -> dict[str, float]:
    """Mean absolute errors in meV and meV/Å."""
    energy, force = [], []
    for inputs, energies, forces in data.batches(list(range(len(data.inputs)))):
        found = network.predict(inputs)
        energy.append((found[0].detach() - energies).abs())
        force.append((found[1].detach() - forces).abs())
    return {
        "energy": 1e3 * UNIT * float(torch.cat(energy).mean()),
        "forces": 1e3 * UNIT * float(torch.cat(force).mean()),
    }


def train(options: argparse.Namespace) -> None:
    """Epochs until the last; a row of the curve for each."""
    torch.set_num_threads(1)
    name, seed = options.network, options.seed
    network = Theirs(seed) if name == "schnetpack" else Ours(name, seed)
    frames = read()
    mean = float(np.mean([frame.info["REF_energy"] for frame in frames["train"]]))
    parts = {part: Data(some, network, mean) for part, some in frames.items()}
    weights = [weight for weight in network.model.parameters() if weight.requires_grad]
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=options.lr, weight_decay=0.0)
    steps = math.ceil(TRAIN / BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * steps)
    label = f"{name}_{options.epochs}_s{seed}"
    result, saved = RESULTS / f"{label}.json", options.work / f"{label}.pt"
    for folder in (RESULTS, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    curve: list[dict] = []
    if saved.exists():
        state = torch.load(saved)
        for target, source in ((weights, state["weights"]), (averages, state["averages"])):
            for tensor, value in zip(target, source, strict=True):
                tensor.data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        curve = state["curve"]
        print(f"{label}: goes on after epoch {len(curve)}", flush=True)

    def judge(part: str) -> dict[str, float]:
        """With the averaged weights."""
        kept = [weight.detach().clone() for weight in weights]
        for weight, average in zip(weights, averages, strict=True):
            weight.data.copy_(average)
        found = errors(network, parts[part])
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)
        return found

    def write(**more: dict) -> None:
        about = {"network": name, "seed": seed, "epochs": options.epochs, "lr": options.lr, "torch": torch.__version__}
        about |= {"weights": sum(weight.numel() for weight in weights), "curve": curve}
        with replacing(result) as unfinished:
            unfinished.write_text(json.dumps(about | more) + "\n")

    while len(curve) < options.epochs:
        began = time.monotonic()
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(1000 * seed + len(curve))).tolist()
        for inputs, energies, forces in parts["train"].batches(order):
            found = network.predict(inputs)
            loss = 0.01 * (found[0] - energies).square().mean() + 0.99 * (found[1] - forces).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 1 - 0.995)
        curve.append({**judge("valid"), "seconds": time.monotonic() - began})
        print(f"{label}: epoch {len(curve)}, forces {curve[-1]['forces']:.2f} meV/Å", flush=True)
        state = {"weights": weights, "averages": averages, "curve": curve}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save(state, saved)
        write()
    write(test=judge("test"))


def same() -> None:
    """How far energies and forces of our PaiNN are from SchNetPack's with its weights, in float64."""
    theirs, ours = Theirs(1, torch.float64), Ours("painn", 1, "eager", dtype="float64")
    given, own = dict(theirs.model.named_parameters()), dict(ours.model.named_parameters())
    filters = given["representation.filter_net.weight"], given["representation.filter_net.bias"]
    for name, tensor in own.items():
        module, *rest = name.removeprefix("model.func.").split(".")
        layer = int(module[5]) if module.startswith("layer") else 0
        place = "1" if "2" in rest else "0"  # activations count in our networks and not in theirs
        if module == "type_embed":
            value = given["representation.embedding.weight"][ase.symbols.symbols2numbers(SPECIES)]
        elif rest[0] == "filters":
            value = filters[rest[1] == "bias"].chunk(3)[layer]
        elif rest[0] == "atoms":
            value = given[f"representation.interactions.{layer}.interatomic_context_net.{place}.{rest[-1]}"]
        elif rest[0] == "gates":
            value = given[f"representation.mixing.{layer}.intraatomic_context_net.{place}.{rest[-1]}"]
        elif rest[0] == "mixing":
            value = given[f"representation.mixing.{layer}.mu_channel_mix.weight"]
        else:
            value = given[f"output_modules.0.outnet.{place}.{rest[-1]}"]
        tensor.data.copy_(value)
    frames = read()["valid"]
    inputs = [theirs.inputs(frame) for frame in frames]
    for one, frame in zip(inputs, frames, strict=True):
        one |= {key: value.double() for key, value in one.items() if value.is_floating_point()}
        one[theirs.spk.keys.R] = torch.as_tensor(frame.positions)
    expected = theirs.predict(inputs)
    found = ours.predict([ours.inputs(frame) for frame in frames])
    energies, forces = (a.detach() - b.detach() for a, b in zip(found, expected, strict=True))
    energies -= energies.mean()  # isolated atoms have none with us
    print(f"forces up to {float(expected[1].detach().abs().max()):.2f} kcal/mol/Å; largest differences:")
    print(f"forces {float(forces.abs().max()):.1e}, energies {float(energies.abs().max()):.1e}")


def table(plot: Path | None) -> None:
    """Test errors, and the ratio to SchNetPack's of as many epochs; a figure of the curves."""
    rows = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    theirs = {row["epochs"]: row["test"]["forces"] for row in rows if row["network"] == "schnetpack" and "test" in row}
    print(
        "| network | weights | epochs | validation, forces | test, forces | energies | to SchNetPack's | s per epoch |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        test, curve = row.get("test", {}), row["curve"]
        ratio = test["forces"] / theirs[row["epochs"]] if test and row["epochs"] in theirs else math.nan
        cells = [row["network"], row["weights"], f"{len(curve)} of {row['epochs']}", f"{curve[-1]['forces']:.1f}"]
        cells += [f"{test.get(key, math.nan):.1f}" for key in ("forces", "energy")]
        cells += [f"{ratio:.3f}", f"{np.median([point['seconds'] for point in curve]):.0f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    if plot is None:
        return
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    for row in rows:
        values = [point["forces"] for point in row["curve"]]
        axes.plot(range(1, len(values) + 1), values, label=f"{row['network']}, seed {row['seed']}", lw=1)
    axes.set(xlabel="epoch", ylabel="force MAE, 50 validation frames (meV/Å)", xscale="log", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)
    figure.savefig(plot, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", choices=NETWORKS)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--work", type=Path, default=Path("runs/backbones"), help="where unfinished runs are kept")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--same", action="store_true")
    options = parser.parse_args()
    if not (options.network or options.same or options.table):
        parser.error("nothing to do: name a network, or give --table or --same")
    sys.path.insert(0, str(ROOT))
    if options.network:
        train(options)
    if options.same:
        same()
    if options.table:
        table(options.plot)


if __name__ == "__main__":
    main()
