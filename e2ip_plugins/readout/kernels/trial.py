"""Before the kernels of this folder are first used on a device, they predict a few atoms as the plain form does.

Once per process, device and dtype; see `e2ip_plugins.maths.kernels.check`.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch import Tensor

from e2ip_plugins.leverage.module import Neighbours
from e2ip_plugins.maths.kernels import check
from e2ip_plugins.readout.kernels import fused
from e2ip_plugins.readout.layout import Edges, Layout
from e2ip_plugins.readout.readout import Readout
from e2ip_plugins.readout.settings import Settings

#: Largest error allowed, as in `check`. In IEEE arithmetic the kernels reach 1e-5 and 1e-13.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-10}

#: Atoms and pairs: more than two blocks of each, and for the interpreter, where an atom takes half a second, few.
_MANY, _FEW = (300, 1500), (4, 12)


class Case(NamedTuple):
    """A readout, and the arguments of its call.

    Attributes
    ----------
    readout : Readout
    arguments : dict
    """

    readout: Readout
    arguments: Dict[str, Any]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Case":
        """Return the same with other tensors; the readout is moved itself."""

        def move(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.to(device, dtype if x.is_floating_point() else x.dtype)
            return type(x)(*map(move, x)) if isinstance(x, tuple) else x

        return Case(self.readout.to(device, dtype), {name: move(x) for name, x in self.arguments.items()})


def failure(launchers: Any, kernel: str, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    """As `check.failure`, for ``predict``, ``predict_pooled`` and ``envelope``."""
    return check.failure(launchers, kernel, device, dtype, _trial)


def _trial(launcher: Callable, kernel: str, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    with torch.no_grad():
        if kernel == "envelope":
            return _of_envelope(launcher, device, dtype)
        atoms, pairs = _MANY if device.type == "cuda" else _FEW
        case = make_case(kernel == "predict_pooled", atoms=atoms, pairs=pairs)
        return _of_prediction(launcher, case, device, dtype)


def _of_envelope(launcher: Callable, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    lengths, power = torch.linspace(0.0, 6.0, 200, device="cpu").to(dtype), torch.tensor(6, device=device)
    x = lengths.double() / 5.0
    expected = torch.where(x < 1.0, 1.0 - x**6 * (28.0 - x * (48.0 - x * 21.0)), 0.0)
    ours = launcher(lengths.to(device), torch.tensor(5.0, dtype=dtype, device=device), power.to(torch.int32))
    return _compared({"envelope": ours}, {"envelope": expected}, dtype)


def _of_prediction(launcher: Callable, case: Case, device: torch.device, dtype: torch.dtype) -> Optional[Exception]:
    # Numbers that both dtypes have.
    case = case.to(torch.device("cpu"), dtype).to(torch.device("cpu"), torch.float64)
    expected, vectors = case.readout._plain(**case.arguments)
    assert vectors is not None
    expected["energy_error_vector"] = vectors
    case = case.to(device, dtype)
    names = ("invariant", "equivariant", "species", "neighbours", "edges", "node_heads")
    try:
        tensors, flags = fused.inputs(case.readout, **{name: case.arguments[name] for name in names}, energies=True)
        ours = launcher(tensors, flags)
        energies = case.readout.leverage.energies
        weights, whitened = ours.pop("weights"), ours.pop("whitened")
        ours["energy_error_vector"] = energies.of_weights(weights, whitened, case.arguments["species"], None, 1)
        return _compared(ours, expected, dtype)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as failed:  # As in `check`.
        return failed


def _compared(results: Dict[str, Tensor], expected: Dict[str, Tensor], dtype: torch.dtype) -> Optional[Exception]:
    for name, values in results.items():
        # Infinite leverages are equal, and others are smaller than this.
        ours, theirs = (x.to("cpu", torch.float64).clamp(max=1e7) for x in (values, expected[name]))
        error = check._largest_error(ours, theirs)
        # NaN is not within any tolerance.
        if not error <= TOLERANCE[dtype]:
            return ArithmeticError(f"{name} is off by {error:.1e} in {dtype}")
    return None


def make_case(
    pooled: bool, heads: int = 2, regions: int = 3, fitted: bool = True, atoms: int = 300, pairs: int = 1500
) -> Case:
    """Return a readout with a leverage in every number, and atoms that are near and far, two of them at one place.

    Parameters
    ----------
    pooled : bool
        Whether 2e features are edge pools; else they and 1o features are the model's.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    scalars, vectors, tensors = [(0, 12), (20, 12)], ([(6, 3), (44, 2)] if not pooled else []), [(50, 3)]
    layout = Layout(scalars, vectors, [] if pooled else tensors, pooled, 5, 0, num_species=3)
    settings = Settings.of("e2ip", {}, 1.0)
    with torch.device("cpu"):
        readout = Readout(settings, layout, heads, seed=1).double()
    for weights in readout.parameters():
        weights.requires_grad_(False)
    fill(readout, regions, draw)
    readout.leverage.fitted.fill_(fitted)
    features = draw(atoms, 65) * torch.linspace(0.1, 3.0, atoms, dtype=torch.float64, device="cpu").unsqueeze(1)
    index = torch.randint(0, atoms, (2, pairs), generator=generator)
    directions = draw(pairs, 3)
    lengths = directions.norm(dim=1)
    lengths[0] = 0.0
    neighbours = Neighbours(lengths, 1.0 / (1.0 + lengths), index[0], index[1])
    edges = Edges(directions, draw(pairs, 5), index[0], index[1])
    named = {"invariant": features, "equivariant": features, "neighbours": neighbours}
    named |= {"species": torch.arange(atoms) % 3, "node_heads": torch.arange(atoms) // 3 % heads}
    named |= {"edges": edges if pooled else None, "positions": None, "create_graph": False}
    return Case(readout, {**named, "frames": None, "num_frames": 1})


def fill(readout: Readout, regions: int, draw: Callable[..., Tensor]) -> None:
    """Give a leverage numbers as a fit does."""
    leverage = readout.leverage
    kinds, features = leverage.centres.shape
    leverage.resize(kinds, regions)
    leverage.axes.copy_(torch.arange(kinds).flip(0))
    leverage.centres.copy_(0.3 * draw(kinds, features))
    leverage.whitening.copy_(draw(features, kinds, features) / features**0.5)
    leverage.region_stretch.copy_(0.5 + draw(kinds, regions, features).abs())
    leverage.region_offsets.copy_(0.3 * draw(kinds, regions, features))
    leverage.region_norms.copy_(0.1 + 0.1 * draw(kinds, regions).abs())
    # The last region of one kind does not exist.
    leverage.region_stretch[0, -1:] = 0.0
    leverage.region_offsets[0, -1:] = 1e10
    for name in ("log_variance", "log_factor"):
        getattr(leverage, name).copy_(0.5 * draw(kinds))
    heads = len(leverage.growth)
    leverage.growth.copy_(0.5 + draw(heads).abs())
    leverage.surplus.copy_(torch.tanh(draw(heads).abs()))
    for head in range(heads):
        leverage.energies.set_head(head, 1.0 + head, 0.01)
