"""Whether a run that is reweighted to the members of a model gives what runs of the members themselves give.

    python benchmarks/members.py FITTED.model    # MACE, of the demo's molecule; writes benchmarks/results/members.json
    python benchmarks/members.py --table         # the table of the results

Langevin dynamics from the relaxed molecule: replicas of the model itself, which are reweighted, and of each of the
first members with its own forces, all in one batch. The mass of a vibration is its force constant, so that all are as
fast and few steps tell much; no average of positions depends on masses. Errors are standard deviations over bootstrap
resamples of pieces of a replica.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase import Atoms, units
from ase.optimize import BFGS
from common import DEMO_DATA, RESULTS, load, markdown, parser_of, save

from e2ip_plugins.energies import reweight
from e2ip_plugins.energies.draws import random_directions

OUT = RESULTS / "members.json"

#: Distances that are averaged: names and atoms.
OBSERVABLES = {"C-N bond": (3, 4), "C=O bond": (3, 5), "carbonyl C to methyl C": (3, 0)}

#: Least force constant in eV/Å² that a vibration's mass is taken from, and that of translations and rotations.
SOFTEST, RIGID = 10.0, 50.0

#: Length in Å from which on a bond of the first two is broken.
LONGEST = 1.8

#: Pieces of each replica for errors, and bootstrap resamples.
PIECES, RESAMPLES = 4, 300


class Ensemble:
    """Energies, error vectors and forces of R replicas of a molecule, each of the model or of a member.

    Parameters
    ----------
    path : Path
        Fitted MACE model.
    atoms : ase.Atoms
    members : sequence of int
        Member whose forces a replica has (R,); -1 for the model itself.
    scale : float
        What r_k is multiplied by.
    """

    def __init__(self, path: Path, atoms: Atoms, members: Sequence[int], scale: float = 1.0) -> None:
        from mace.tools.torch_geometric import Batch

        from mace_ext.inference.batches import open_model

        opened = open_model(path)
        self.net = opened.net
        # All pairs: beyond the model's cutoff they count nothing, and the list stays.
        opened.cutoff = 100.0
        graph = opened.graph(atoms)[0]
        self.data = Batch.from_data_list([graph] * len(members)).to_dict()
        drawn = random_directions(max(*members, 0) + 1, opened.vector_length)
        chosen = np.array(members)
        self.directions = scale * torch.tensor(np.where(chosen[:, None] < 0, 0.0, drawn[np.maximum(chosen, 0)]))

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return energies of the model (R,), error vectors (R, M) and the replicas' own forces (R, N, 3)."""
        points = torch.as_tensor(positions.reshape(-1, 3)).to(self.data["positions"]).requires_grad_(True)
        data = {**self.data, "positions": points}
        # As in `ScaleShiftMACE.uncertainty_outputs`, which keeps the energy for itself.
        output = self.net.host_forward(data, compute_force=False)
        uncertainties = self.net._outputs(data, output["node_feats"], points, data["shifts"], None, True)
        vectors = uncertainties["energy_error_vector"]
        total = output["energy"].sum() + (vectors * self.directions.to(vectors)).sum()
        (slope,) = torch.autograd.grad(total, points)
        forces = -slope.double().numpy().reshape(positions.shape)
        return output["energy"].detach().numpy(), vectors.detach().numpy(), forces


def relaxed(path: Path) -> Atoms:
    """Return the demo's molecule in a minimum of the model."""
    from mace.calculators import MACECalculator

    atoms = ase.io.read(DEMO_DATA / "test.extxyz", 0)
    atoms.calc = MACECalculator(model_paths=str(path), device="cpu", default_dtype="float32")
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=100)
    return atoms


def inverse_root(path: Path, atoms: Atoms, step: float = 0.01) -> np.ndarray:
    """Return the inverse square root (3N, 3N) of a mass matrix in eV/Å²: the unit of time is 1/ω."""
    moves = step * np.eye(3 * len(atoms)).reshape(-1, len(atoms), 3)
    ensemble = Ensemble(path, atoms, [-1] * (2 * len(moves)))
    _, _, forces = ensemble(atoms.positions + np.concatenate([moves, -moves]))
    plus, minus = forces.reshape(2, len(moves), -1)
    hessian = (minus - plus) / (2.0 * step)
    values, modes = np.linalg.eigh(0.5 * (hessian + hessian.T))
    # The six that are nearest to 0 are translations and rotations.
    rigid = np.argsort(np.abs(values))[:6]
    values = np.maximum(values, SOFTEST)
    values[rigid] = RIGID
    return (modes * values**-0.5) @ modes.T


def sample(ensemble: Ensemble, start: np.ndarray, inverse: np.ndarray, options: Any) -> dict[str, np.ndarray]:
    """Return what is observed in every third step after the first tenth: arrays with the axes time, replica."""
    rng, kT, step = np.random.default_rng(0), units.kB * options.temperature, options.timestep
    damping = np.exp(-step)
    positions, shape = start.copy(), start.shape
    # Momenta of unit mass along coordinates in which all vibrations are alike: x = inverse q.
    momenta = rng.standard_normal((len(start), inverse.shape[0])) * kT**0.5
    _, _, forces = ensemble(positions)
    found: dict[str, list[np.ndarray]] = {"energies": [], "vectors": [], "values": []}
    for number in range(options.steps):
        momenta += 0.5 * step * forces.reshape(len(start), -1) @ inverse
        positions += (0.5 * step * momenta @ inverse).reshape(shape)
        momenta = damping * momenta + ((1.0 - damping**2) * kT) ** 0.5 * rng.standard_normal(momenta.shape)
        positions += (0.5 * step * momenta @ inverse).reshape(shape)
        energies, vectors, forces = ensemble(positions)
        momenta += 0.5 * step * forces.reshape(len(start), -1) @ inverse
        if number >= options.steps // 10 and number % 3 == 0:
            distances = [np.linalg.norm(positions[:, i] - positions[:, j], axis=1) for i, j in OBSERVABLES.values()]
            for name, values in zip(found, (energies, vectors, np.stack(distances, 1)), strict=True):
                found[name].append(values)
        if number % 50 == 0:
            print(f"step {number} of {options.steps}, energy {energies.mean():.3f} eV", flush=True)
    return {name: np.array(values, np.float64) for name, values in found.items()}


def pieces_of(values: np.ndarray) -> list[np.ndarray]:
    """Return the pieces (T, …) of arrays with the axes time, replica."""
    return [piece for replica in np.moveaxis(values, 1, 0) for piece in np.array_split(replica, PIECES)]


#: Averages of every member in the results, and what has an error.
WAYS = ("model", "weights", "cumulant")


def averages(pieces: Sequence[tuple[np.ndarray, ...]], temperature: float) -> list[np.ndarray]:
    """Return averages of the model's run as it is, with weights, as a cumulant, and the effective share of its frames.

    A piece has observables (T, n), and in eV energies (T,) and a member's corrections of them (T,).
    """
    values, energies, corrections = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    # The second member is the model: `reweight` asks for two.
    result = reweight(values, np.stack([energies + corrections, energies], 1), energies, temperature)
    return [result.sampled, result.direct.members[0], result.cumulant.members[0], result.effective[:1]]


def judge(found: dict[str, np.ndarray], members: np.ndarray, options: Any) -> dict[str, Any]:
    """Return averages of the model, and of members reweighted and sampled, with errors: (members, observables).

    The last observable is the member's correction u · r_k of the energy in eV.
    """
    rng, count = np.random.default_rng(1), int(members.max()) + 1
    columns: list[dict[str, np.ndarray]] = []
    for k, direction in enumerate(random_directions(count, found["vectors"].shape[-1])):
        correction = options.scale * (found["vectors"] @ direction)
        values = np.concatenate([found["values"], correction[:, :, None]], axis=2)
        arrays = (values, found["energies"], correction)
        model = list(zip(*(pieces_of(array[:, members < 0]) for array in arrays), strict=True))
        everything = averages(model, options.temperature)
        draws = rng.integers(len(model), size=(RESAMPLES, len(model)))
        resampled = [averages([model[i] for i in drawn], options.temperature) for drawn in draws]
        means = np.array([piece.mean(0) for piece in pieces_of(values[:, members == k])])
        column = {"effective": everything[3], "sampled": means.mean(0)}
        bonds = found["values"][:, members == k, :2]
        column["broken"] = np.array((bonds > LONGEST).any((0, 2)).sum())
        column["sampled_error"] = means.std(0, ddof=1) / len(means) ** 0.5
        for i, way in enumerate(WAYS):
            column[way] = everything[i]
            column[f"{way}_error"] = np.std([part[i] for part in resampled], axis=0, ddof=1)
            # Of the difference from the run that is reweighted.
            column[f"{way}_shift_error"] = np.std([part[i] - part[0] for part in resampled], axis=0, ddof=1)
        columns.append(column)
    return {name: [column[name].tolist() for column in columns] for name in columns[0]}


def show(result: dict[str, Any]) -> None:
    """Print the table: shifts of members from the model, in mÅ and meV, and differences in units of their error."""
    print(
        f"{result['replicas']} replicas of each member, {2 * result['replicas']} of the model, {result['steps']} "
        f"steps; members' replicas with broken bonds: {', '.join(map(str, result['broken']))}"
    )
    table = {name: np.array(values) for name, values in result.items() if isinstance(values, list)}
    rows = []
    for i, name in enumerate([*OBSERVABLES, "u · r"]):
        for k in range(result["members"]):
            model = table["model"][k, i]
            cells = [f"{model:.4f}"]
            for way, error in (("sampled", "sampled"), ("weights", "weights_shift"), ("cumulant", "cumulant_shift")):
                cells.append(f"{1e3 * (table[way][k, i] - model):.1f} ± {1e3 * table[f'{error}_error'][k, i]:.1f}")
            for way in ("weights", "cumulant"):
                error = np.hypot(table[f"{way}_error"][k, i], table["sampled_error"][k, i])
                cells.append(f"{(table[way][k, i] - table['sampled'][k, i]) / error:.1f}")
            rows.append([name, str(k), f"{table['effective'][k, 0]:.2f}", *cells])
    head = ["observable", "member", "effective", "model", "sampled", "weights", "cumulant", "z weights", "z cumulant"]
    print(markdown(head, rows))


def main() -> None:
    """Run, judge, write and print."""
    parser = parser_of(__doc__, "members", "out", "table")
    parser.add_argument("model", type=Path, nargs="?", help="MACE model of the demo's molecule after e2ip fit")
    parser.add_argument("--members", type=int, default=2, help="members with runs of their own")
    parser.add_argument(
        "--replicas", type=int, default=8, help="replicas of each, and for every member one of the model"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--timestep", type=float, default=0.5, help="in units of 1/ω of all vibrations")
    parser.add_argument("--temperature", type=float, default=300.0, help="kelvin")
    parser.add_argument("--scale", type=float, default=1.0, help="what the members' r are multiplied by")
    options = parser.parse_args()
    if options.table:
        for name, result in load(options.out).items():
            print(f"\n{name}: ", end="")
            show(result)
        return
    if options.model is None:
        parser.error("give a model, or --table")
    of_model = [-1] * (2 * options.replicas)
    members = np.array(of_model + [k for k in range(options.members) for _ in range(options.replicas)])
    # Few threads: the batch is small.
    torch.set_num_threads(1)
    atoms = relaxed(options.model)
    ensemble = Ensemble(options.model, atoms, members.tolist(), options.scale)
    start = np.repeat(atoms.positions[None], len(members), axis=0)
    runs = sample(ensemble, start, inverse_root(options.model, atoms), options)
    settings = {
        name: getattr(options, name) for name in ("members", "replicas", "steps", "timestep", "temperature", "scale")
    }
    result = {**settings, **judge(runs, members, options)}
    save(options.out, {f"r times {options.scale:g}": result}, digits=6)
    show(result)


if __name__ == "__main__":
    main()
