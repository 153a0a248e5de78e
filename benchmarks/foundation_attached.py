"""Compare models bit by bit: BASE's forces with those of two models with readouts, and the latter's uncertainties.

python benchmarks/foundation_attached.py BASE FITTED ATTACHED FRAMES OUT.json
"""

import json
import sys
from pathlib import Path

import numpy as np
from ase.io import read
from mace.calculators import MACECalculator

#: Frames that are compared, and frames before, which TorchScript needs to be warm.
FRAMES, WARM_UP = 20, 3


def main() -> None:
    *models, frames, out = sys.argv[1:]
    calculators = [MACECalculator(model, device="cpu", default_dtype="float32") for model in models]
    cells = read(frames, f":{FRAMES}")
    forces, same, count = 0, 0, 0
    for number in range(-WARM_UP, len(cells)):
        results = []
        for calculator in calculators:
            calculator.calculate(cells[max(number, 0)])
            results.append(dict(calculator.results))
        if number < 0:
            continue
        base, fitted, attached = results
        count += 1
        forces += all(np.array_equal(base["forces"], other["forces"]) for other in (fitted, attached))
        keys = [key for key, value in fitted.items() if isinstance(value, np.ndarray)]
        same += all(np.array_equal(fitted[key], attached[key]) for key in keys)
    identical = {"frames": count, "frames_with_identical_forces": forces, "frames_with_identical_figures": same}
    Path(out).write_text(json.dumps(identical))


if __name__ == "__main__":
    main()
