"""Energies, forces and stresses of CHGNet, in an environment of its own with chgnet and PyTorch.

`foundation.py label` calls this module. The weights come with the package: nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.io import read, write
from pymatgen.io.ase import AseAtomsAdaptor

CHUNK = 100
#: Frames with a larger force (eV/Å), or a larger component of the stress (eV/Å³), are left out.
LARGEST_FORCE, LARGEST_STRESS = 20.0, 1.0


def labelled(atoms: Atoms, prediction: dict[str, np.ndarray]) -> Atoms:
    """Return the frame with what CHGNet predicts as reference, in eV, eV/Å and eV/Å³."""
    frame = atoms.copy()
    frame.info["REF_energy"] = float(prediction["e"]) * len(frame)
    frame.info["REF_stress"] = (np.asarray(prediction["s"], dtype=float) * units.GPa).reshape(9)
    frame.arrays["REF_forces"] = np.asarray(prediction["f"], dtype=float)
    return frame


def graph_of(model: Any, atoms: Atoms) -> Any:
    """Return CHGNet's graph of a frame; None where an atom has no neighbour within its cutoff."""
    try:
        return model.graph_converter(AseAtomsAdaptor.get_structure(atoms))
    except ValueError:
        return None


def usable(frame: Atoms) -> bool:
    """Return whether a frame's labels are finite and its forces and stress bounded."""
    forces, stress = frame.arrays["REF_forces"], frame.info["REF_stress"]
    finite = np.isfinite(frame.info["REF_energy"]) and np.isfinite(forces).all() and np.isfinite(stress).all()
    return bool(finite and np.abs(forces).max() < LARGEST_FORCE and np.abs(stress).max() < LARGEST_STRESS)


def label(source: Path, target: Path) -> None:
    """Write the frames of a file with labels; finished chunks of an interrupted call are kept beside the target.

    Parameters
    ----------
    source, target : Path
        Extended-XYZ files.
    """
    if target.exists():
        return
    from chgnet.model import CHGNet

    model = CHGNet.load(use_device="cpu", verbose=False)
    frames, chunks = read(source, ":"), []
    for start in range(0, len(frames), CHUNK):
        chunk = target.with_name(f".{target.stem}-{start}.extxyz")
        if not chunk.exists():
            group = frames[start : start + CHUNK]
            graphs = [graph_of(model, atoms) for atoms in group]
            connected = [atoms for atoms, graph in zip(group, graphs, strict=True) if graph is not None]
            kept = [graph for graph in graphs if graph is not None]
            predictions = model.predict_graph(kept, task="efs", batch_size=16)
            unfinished = chunk.with_suffix(".part")
            write(unfinished, [labelled(*pair) for pair in zip(connected, predictions, strict=True)], format="extxyz")
            unfinished.replace(chunk)
        chunks.append(chunk)
        print(f"{target.name}: {min(start + CHUNK, len(frames))} of {len(frames)}", flush=True)
    kept = [frame for chunk in chunks for frame in read(chunk, ":") if usable(frame)]
    write(target, kept, format="extxyz")
    print(f"{target.name}: {len(kept)} of {len(frames)} frames kept", flush=True)
    for chunk in chunks:
        chunk.unlink()


def label_all(sources: Path, folder: Path) -> None:
    """Label every set of a folder, into another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(sources.glob("*.extxyz")):
        label(source, folder / source.name)
