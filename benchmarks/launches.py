"""Kernels that a prediction would launch on a GPU, counted without one, by part of the readout.

    python benchmarks/launches.py --host mace          # in the MACE environment
    python benchmarks/launches.py --host nequip --path eager

Every operator of PyTorch that is no view and makes no empty tensor counts as one launch, and so does every call of a
Triton kernel. Some operators launch two kernels, so that the counts are lower bounds. Models and systems are those of
`hosts.py`, with a fitted leverage and error bars of energies. The paths are those of a GPU: Triton's kernels are
counted, not run, so that the outputs of this run are not to be used.
"""

import contextlib
import functools
import importlib
import json
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from common import parser_of
from hosts_models import Settings, make_system
from torch.utils._python_dispatch import TorchDispatchMode

from e2ip_plugins.families import niw
from e2ip_plugins.leverage.energies import EnergyErrors
from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.maths.kernels import paths, triton_launch
from e2ip_plugins.readout.kernels import fused
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.trunk import EdgePool, Trunk

#: Functions whose operators are counted under a name; what is called inside of another one counts there alone.
PARTS = (
    (Readout, "forward", "readout, the remainder"),
    (EdgePool, "forward", "edge pool"),
    (Trunk, "forward", "trunk"),
    (Leverage, "forward", "leverage"),
    (niw.NIW, "forward", "growth"),
    (niw, "_views", "derived keys"),
    (EnergyErrors, "forward", "energies"),
    (EnergyErrors, "of_weights", "energies"),
    (fused, "predict", "fused readout"),
)
#: In each host, what calls the readout.
ADAPTERS = {
    "nequip": ("nequip_ext.model.readout", "GraphReadout"),
    "mace": ("mace_ext.model.model", "ScaleShiftMACE"),
}
#: Methods of the adapters that belong to e²IP alone.
ADAPTER_METHODS = {"nequip": "forward", "mace": "read_out"}
STOCK = "MACE or NequIP"

#: Operators that launch nothing: they make a tensor without values, or read or rename one.
_SILENT = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias")


class Counts(TorchDispatchMode):
    """Launches by part, while it is active.

    Attributes
    ----------
    launches : Counter
        Pairs of part and operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.parts = [STOCK]

    def add(self, operator: str) -> None:
        self.launches[self.parts[-1], operator] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (
            name not in _SILENT
            and not func.is_view
            and any(r.type.kind() == "TensorType" for r in func._schema.returns)
        ):
            self.add(name)
        return func(*args, **(kwargs or {}))

    def inside(self, function: Callable, part: str) -> Callable:
        """Return a function during whose calls operators count for a part."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.parts.pop()

        return run

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for the launch of a Triton kernel."""
        self.add(f"Triton's {kernel.__name__}")


@contextlib.contextmanager
def as_on_a_gpu(counts: Counts, host: str, path: str) -> Iterator[None]:
    """Let all calls take the paths that they take on a GPU, nothing launched."""
    module, owner = ADAPTERS[host]
    adapter = getattr(importlib.import_module(module), owner)
    parts = [*PARTS, (adapter, ADAPTER_METHODS[host], "adapter")]
    with contextlib.ExitStack() as stack:
        patch = unittest.mock.patch.object
        for place, name, part in parts:
            stack.enter_context(patch(place, name, counts.inside(getattr(place, name), part)))
        # The counter itself is a mode that would have the plain form be traced.
        stack.enter_context(patch(paths, "_dispatch_modes", lambda: 0))
        stack.enter_context(patch(paths, "choose", lambda *_, **__: path))
        stack.enter_context(patch(paths, "TRITON_DEVICES", ("cpu", "cuda")))
        stack.enter_context(patch(triton_launch, "start", counts.launch))
        yield


def count(settings: Settings, variant: str, path: str) -> Counts:
    """Return the launches of one prediction after another that has made all tables."""
    host = importlib.import_module(f"hosts_{settings.host}").Host(settings, make_system(settings.atoms)[1])
    predict = host.predictor(variant, 1)
    predict()
    with as_on_a_gpu(Counts(), settings.host, path):
        predict()
    counts = Counts()
    with as_on_a_gpu(counts, settings.host, path), counts:
        predict()
    return counts


def table(counts: Counts, operators: bool) -> str:
    """Return the launches by part as text, with ``operators`` those of each part."""
    by_part: dict[str, Counter[str]] = {}
    for (part, operator), number in counts.launches.items():
        by_part.setdefault(part, Counter())[operator] += number
    lines = []
    for part, numbers in by_part.items():
        lines.append(f"{part:25} {sum(numbers.values()):5}")
        if operators and part != STOCK:
            lines += [f"    {operator:30} {number:3}" for operator, number in numbers.most_common()]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--host", choices=tuple(ADAPTERS), required=True)
    parser.add_argument("--path", choices=("eager", "triton"), default="triton", help="what E2IP_KERNEL chooses")
    parser.add_argument("--atoms", type=int, default=21)
    parser.add_argument("--size", default="full", help="full or tiny, or a backbone of hosts.py")
    parser.add_argument("--operators", action="store_true", help="also the operators of each part")
    options = parser.parse_args()
    settings = Settings(options.host, "eager", options.atoms, size=options.size)
    stock, ours = (count(settings, variant, options.path) for variant in ("baseline", "e2ip"))
    print(table(ours, options.operators))
    totals = {name: c.launches.total() for name, c in (("stock", stock), ("e2ip", ours))}
    print(json.dumps({**totals, "beside the stock model": totals["e2ip"] - totals["stock"]}))


if __name__ == "__main__":
    main()
