"""What dynamics with a monitor costs: the stock model without one, and uncertainties always and on request.

    python benchmarks/on_request.py --host nequip [--atoms 21] [--steps 1500] [--interval 10]

Runs of ASE's velocity Verlet from one structure of `hosts.py` make their steps in alternation; those of the e²IP model
are checked by a `Monitor`. The model is fitted as in `hosts.py`. Printed are processor times of a step, their ratios to
the stock model's within rounds between checks and with a check, and the mean of these over a run, with the 95 %
interval of the median (of the mean of medians).
"""

import argparse
import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet
from common import alternate, hardware, markdown, parser_of
from hosts_models import Host, Settings, make_system

from e2ip_plugins.errors import UncertaintyWarning
from e2ip_plugins.md import Monitor

STOCK = "stock model"
#: Variant of the model and options of the calculator.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    STOCK: ("baseline", {}),
    "always": ("e2ip", {"uncertainties": "always"}),
    "on request": ("e2ip", {"uncertainties": "on request"}),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--host", choices=("nequip", "mace"), required=True)
    parser.add_argument("--atoms", type=int, default=21)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=400.0, help="after so many no further step is made")
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two checks, to see that all runs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UncertaintyWarning)
    size, steps = ("tiny", 2 * options.interval) if options.quick else ("full", options.steps)
    name, frame = make_system(options.atoms)
    settings = Settings(options.host, "eager", options.atoms, size=size)
    host = importlib.import_module(f"hosts_{options.host}").Host(settings, frame)
    runs = {variant: run_of(host, frame, variant, options.interval) for variant in VARIANTS}
    # Whole intervals, so that the next check is that of step `interval` again.
    measured = alternate(runs, steps, warm_up=2 * options.interval, seconds=options.seconds, clock=processor_time)
    times = {variant: np.array(values) for variant, values in measured.items()}
    checked = np.arange(1, len(times[STOCK]) + 1) % options.interval == 0
    rows = [
        [variant, f"{1e3 * np.median(values):.2f}", *ratios(values / times[STOCK], checked, options.interval)]
        for variant, values in times.items()
    ]
    print(f"{options.host}, {name}, a check every {options.interval} steps, {len(checked)} steps; {hardware()}\n")
    print(markdown(["uncertainties", "ms per step", "between checks", "with a check", "a run"], rows))


def run_of(host: Host, frame: Atoms, variant: str, interval: int) -> Callable[[], None]:
    """Return a run's next step, with its check if it has one."""
    kind, options = VARIANTS[variant]
    atoms = frame.copy()
    atoms.calc = host.calculator(kind, **options)
    # Hardly any motion: an untrained model holds no molecule together.
    dynamics = VelocityVerlet(atoms, 0.01 * units.fs)
    if kind == "e2ip":
        dynamics.attach(Monitor(atoms, {"forces_epistemic_std": 1e9, "e2ip_leverage": 1e9}), interval=interval)
    return lambda: dynamics.run(1)


def ratios(values: np.ndarray, checked: np.ndarray, interval: int) -> list[str]:
    """Return medians between checks and with one, and their mean over a run, each with its 95 % interval."""
    rng = np.random.default_rng(0)
    medians = []
    for part in (values[~checked], values[checked]):
        drawn = np.median(rng.choice(part, (2000, len(part))), axis=1)
        medians.append(np.concatenate([[np.median(part)], drawn]))
    between, check = medians
    of_run = ((interval - 1) * between + check) / interval
    texts = []
    for middle, *drawn in (between, check, of_run):
        low, high = np.quantile(drawn, [0.025, 0.975])
        texts.append(f"{middle:.3f} ({low:.3f}–{high:.3f})")
    return texts


def processor_time(call: Callable[[], None]) -> float:
    """Return the seconds that the processor needs for a call: with one thread, other work counts less than by clock."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
