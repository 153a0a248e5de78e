"""Cost and memory of the readout over the number of kinds of atoms that its leverage knows.

    python benchmarks/kinds.py                  # half an hour; runs/kinds.json
    python benchmarks/kinds.py --quick          # a smoke test of some seconds
    python benchmarks/kinds.py --regions 16     # of four kinds
    python benchmarks/kinds.py --compiled       # the leverage alone, compiled ahead of time; some minutes more
    python benchmarks/kinds.py --table          # tables of the results

A fitted readout of family e2ip with D 0e features, 16 1o and 16 2e channels, 40 neighbours per atom, with its energy
error; one CPU thread. Before: products of every atom with the matrices of all kinds, and all regions at once. Atoms are
of all kinds at random, or of four of them. Times are the processor's, the shortest of rounds in alternation; memory is
the most bytes that the call has allocated at one time, with its results.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import RESULTS, ROOT, alternate, hardware, load, markdown, parser_of, save
from hosts_models import as_fitted
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from e2ip_plugins.leverage import module, products
from e2ip_plugins.leverage.module import Leverage, Neighbours
from e2ip_plugins.readout.layout import Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

KINDS, ATOMS, FEATURES = (1, 4, 20, 89, 178), (21, 192, 4000), (64, 128, 256)
FEW, CHANNELS, NEIGHBOURS, SECONDS = 4, 16, 40, 0.05
#: Kinds of the compiled models: a compilation takes half a minute.
COMPILED = (4, 89)


def of_all(x: Tensor, matrices: Tensor, index: Tensor) -> Tensor:
    """Return what `own_products` does, from the products with the matrices of all kinds."""
    return products._of_all(x, matrices, index)


def fitted_readout(features: int, kinds: int, dtype: torch.dtype, regions: int = 1) -> Readout:
    """Return a readout whose leverage has a matrix for every kind."""
    layout = Layout([(0, features)], [(features, CHANNELS)], [(features + 3 * CHANNELS, CHANNELS)], num_species=kinds)
    readout = Readout(Settings.of("e2ip", {"evidence": "leverage"}, 0.05), layout)
    as_fitted(readout, regions)
    return readout.to(dtype).eval()


def inputs_of(atoms: int, features: int, kinds: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Neighbours]:
    """Return features, species and neighbours."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(atoms, features + 8 * CHANNELS, generator=generator).to(dtype)
    sender = torch.randint(0, atoms, (NEIGHBOURS * atoms,), generator=generator)
    receiver = torch.arange(atoms).repeat_interleave(NEIGHBOURS)
    lengths = torch.full((len(sender),), 2.0, dtype=dtype)
    species = torch.randint(0, kinds, (atoms,), generator=generator)
    return x, species, Neighbours(lengths, 0.1 * lengths, sender, receiver)


def allocated(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call has allocated at one time."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def clock(call: Callable[[], Any]) -> float:
    """Return seconds of the processor per call, of as many calls as fit into `SECONDS`, one at least."""
    began, repeats = time.process_time(), 0
    while repeats == 0 or time.process_time() - began < SECONDS:
        call()
        repeats += 1
    return (time.process_time() - began) / repeats


def costs(calls: dict[str, Callable[[], Any]], atoms: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return time in µs and memory in bytes per atom."""
    times = alternate(calls, rounds, clock=clock)
    return {
        name: {"us": 1e6 * min(times[name]) / atoms, "bytes": allocated(call) / atoms} for name, call in calls.items()
    }


def former(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call with the former product, and with all regions at once."""

    def run() -> Any:
        with mock.patch.object(module, "own_products", of_all), mock.patch.object(Leverage, "at_once", 2**60):
            return call()

    return run


def eager(readouts: dict[int, Readout], atoms: int, features: int, rounds: int) -> dict[str, Any]:
    """Return costs of readout and leverage by name; all kinds of models are measured in alternation."""
    dtype, calls = next(iter(readouts.values())).force_unit.dtype, {}
    for kinds, readout in readouts.items():
        for name, present in {"all": kinds, "few": min(FEW, kinds)}.items():
            if name == "few" and kinds <= FEW:
                continue
            x, species, neighbours = inputs_of(atoms, features, present, dtype)
            scalars = x[:, :features].contiguous()

            def whole(
                readout: Readout = readout, x: Tensor = x, species: Tensor = species, near: Neighbours = neighbours
            ) -> Any:
                return readout(x, x, species, near, num_frames=1)

            def white(readout: Readout = readout, x: Tensor = scalars, species: Tensor = species) -> Any:
                return readout.leverage(x, species)

            calls[f"readout {kinds} {name}"], calls[f"leverage {kinds} {name}"] = whole, white
            if name == "all":
                calls[f"former readout {kinds} {name}"] = former(whole)
                calls[f"former leverage {kinds} {name}"] = former(white)
    with torch.inference_mode():
        return costs(calls, atoms, rounds)


class Flat(nn.Module):
    """The h of atoms: what is compiled."""

    def __init__(self, leverage: Leverage) -> None:
        super().__init__()
        self.leverage = leverage

    def forward(self, scalars: Tensor, species: Tensor) -> Tensor:
        return self.leverage(scalars, species).distance


def compiled(readout: Readout, features: int) -> Any:
    """Return the leverage, compiled ahead of time as `nequip-compile` does, for any number of atoms."""
    x, species, _ = inputs_of(50, features, len(readout.leverage.axes), readout.force_unit.dtype)
    atoms = torch.export.Dim("atoms", min=2)
    exported = torch.export.export(
        Flat(readout.leverage), (x[:, :features].contiguous(), species), dynamic_shapes=({0: atoms}, {0: atoms})
    )
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(exported))


def compiled_costs(features: int, dtype: torch.dtype, rounds: int) -> dict[int, dict[str, Any]]:
    """Return µs per atom of the compiled leverage by atoms."""
    models: dict[str, Any] = {}
    for kinds in COMPILED:
        readout = fitted_readout(features, kinds, dtype)
        models[f"leverage {kinds} all"] = compiled(readout, features)
        if kinds > FEW:
            with mock.patch.object(module, "own_products", of_all):
                models[f"former leverage {kinds} all"] = compiled(readout, features)
    results = {}
    for atoms in ATOMS:
        calls = {}
        for name, model in models.items():
            x, species, _ = inputs_of(atoms, features, int(name.split()[-2]), dtype)
            scalars = x[:, :features].contiguous()
            calls[name] = lambda model=model, scalars=scalars, species=species: model(scalars, species)
        times = alternate(calls, rounds, clock=clock)
        results[atoms] = {name: {"us": 1e6 * min(values) / atoms} for name, values in times.items()}
    return results


def tables(entries: dict[str, Any]) -> str:
    """Return a Markdown table for every type and mode."""
    units = ["µs/atom before", "µs/atom", "bytes/atom before", "bytes/atom"]
    blocks = []
    for mode in ("eager", "compiled"):
        for dtype in ("float32", "float64"):
            rows = []
            for entry in sorted(entries.values(), key=_size):
                if (entry["mode"], entry["dtype"]) == (mode, dtype):
                    rows += _rows(entry)
            if rows:
                table = markdown(["D", "atoms", "regions", "part", "kinds", *units], rows)
                blocks += [f"## {mode}, {dtype}", table]
    return "\n\n".join(blocks)


def _rows(entry: dict[str, Any]) -> list[list[Any]]:
    """Return a row for every part and number of kinds."""
    rows = []
    for name in sorted({key.removeprefix("former ") for key in entry["costs"]}, key=_place):
        now, before = entry["costs"][name], entry["costs"].get(f"former {name}", {})
        part, kinds, present = name.split()
        where = kinds if present == "all" else f"{kinds}, {FEW} present"
        cells = [cell.get(key) for key in ("us", "bytes") for cell in (before, now)]
        texts = ["" if cell is None else f"{cell:.3g}" for cell in cells]
        rows.append([entry["features"], entry["atoms"], entry["regions"], part, where, *texts])
    return rows


def _size(entry: dict[str, Any]) -> tuple[int, int, int]:
    return entry["regions"], entry["features"], entry["atoms"]


def _place(name: str) -> tuple[str, int, str]:
    part, kinds, present = name.split()
    return part, int(kinds), present


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="21 atoms, 64 features: shows that it runs")
    parser.add_argument("--compiled", action="store_true", help="the leverage compiled ahead of time, 256 features")
    parser.add_argument("--regions", type=int, default=1, help="of every kind; more than 1: of four kinds alone")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "kinds.json", help="results")
    parser.add_argument("--table", nargs="?", type=Path, const=RESULTS / "kinds.json", help="run nothing")
    options = parser.parse_args()
    if options.table:
        print(tables(load(options.table)))
        return
    torch.set_num_threads(1)
    sizes = [(64, 21)] if options.quick else [(features, atoms) for features in FEATURES for atoms in ATOMS]
    rounds, machine = 3 if options.quick else options.rounds, {"machine": hardware(), "torch": torch.__version__}
    for dtype in (torch.float32, torch.float64):
        label = str(dtype).removeprefix("torch.")
        if options.compiled:
            features = 64 if options.quick else max(FEATURES)
            found = {(features, atoms): cost for atoms, cost in compiled_costs(features, dtype, rounds).items()}
        else:
            found = {}
            for features, atoms in sizes:
                chosen = KINDS if options.regions == 1 else (FEW,)
                readouts = {kinds: fitted_readout(features, kinds, dtype, options.regions) for kinds in chosen}
                found[features, atoms] = eager(readouts, atoms, features, rounds)
                print(label, features, atoms, flush=True)
        mode = "compiled" if options.compiled else "eager"
        for (features, atoms), cost in found.items():
            size = {"features": features, "atoms": atoms, "regions": options.regions}
            name = f"{mode} {label} {features} {atoms} {options.regions}"
            save(options.out, {name: {"mode": mode, "dtype": label, **size, **machine, "costs": cost}}, 4)
    print(tables(load(options.out)))


if __name__ == "__main__":
    main()
