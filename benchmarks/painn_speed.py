"""Is our PaiNN as fast as SchNetPack's, of the same size, in one process and in alternation?

    python benchmarks/painn_speed.py        # with SchNetPack installed: see schnetpack_painn.py

One aspirin frame (with E2IP_DATA; else seven water molecules) for predictions of energy and forces, batches of five for
training steps. Ours goes through NequIP: predictions also have the stress, as NequIP's always do, training steps are
those of its EMA training module; eager on both sides, then as NequIP exports and compiles models. Raw results go to
docs/results/painn_speed.json.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import schnetpack_painn as spk  # noqa: E402
from host_cost import nequip_models  # noqa: E402
from host_cost.settings import Settings  # noqa: E402
from host_cost.systems import make_system, with_labels  # noqa: E402

RESULTS = ROOT.parent / "docs" / "results" / "painn_speed.json"
FRAMES = 5


def theirs(frames: list, task: str):
    """A function that predicts or trains once with SchNetPack's PaiNN, and the number of its weights."""
    model = spk.make_model()
    inputs = spk.batch_of([spk.inputs_of(frame) for frame in frames])
    energy = torch.tensor([atoms.info["REF_energy"] for atoms in frames], dtype=torch.float32)
    forces = torch.as_tensor(np.concatenate([a.arrays["REF_forces"] for a in frames]), dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def predict():
        return {key: value.detach() for key, value in model({**inputs}).items()}

    def step():
        found = model({key: value.clone() for key, value in inputs.items()})
        loss = (found["energy"].flatten() - energy).square().mean() + (found["forces"] - forces).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.train(task == "training")
    return (predict if task == "inference" else step), sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name, frame = make_system(21)
    found = {"system": name, "schnetpack": spk.VERSION, "torch": torch.__version__, "results": []}
    for task, mode in (("inference", "eager"), ("inference", "aoti"), ("training", "eager"), ("training", "compile")):
        count = 1 if task == "inference" else FRAMES
        with tempfile.TemporaryDirectory() as cache:
            settings = Settings("nequip", mode, 21, frames=count, size="painn", committee=False, cache=cache)
            ours = getattr(nequip_models.Host(settings, frame), task)()["baseline"]
            their, weights = theirs([with_labels(frame, seed) for seed in range(count)], task)
            times = []
            for _ in range(options.rounds + 5):
                pair = []
                for function in (their, ours):
                    start = time.perf_counter()
                    function()
                    pair.append(time.perf_counter() - start)
                times.append(pair)
        times = np.array(times[5:])
        ratios = times[:, 1] / times[:, 0]
        low, high = np.quantile(ratios, [0.25, 0.75])
        found["results"].append({"task": task, "ours": mode, "weights of theirs": weights, "seconds": times.tolist()})
        print(
            f"{task}, {count} frames of {name}: SchNetPack {1e3 * np.median(times[:, 0]):.1f} ms, ours ({mode}) "
            f"{1e3 * np.median(times[:, 1]):.1f} ms, ratio {np.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        )
    RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
