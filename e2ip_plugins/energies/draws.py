"""Members: K energies per frame that err together, as K models would, from one model."""

import numpy as np

from e2ip_plugins.energies.frames import FrameEnergies, Source, read_energies
from e2ip_plugins.errors import InputError


def random_directions(number: int, length: int, seed: int = 0) -> np.ndarray:
    """Return r (K, M) ~ N(0, 1) of K members, for error vectors of M numbers.

    The first members are the same whatever K is.

    Raises
    ------
    InputError
        Less than one member, or a negative seed.

    Examples
    --------
    >>> random_directions(2, 3)
    array([[ 0.13, -0.13,  0.64],
           [ 0.10, -0.54,  0.36]])
    """
    if number < 1 or seed < 0:
        raise InputError(f"{number} members with seed {seed}: there is at least one member, and no seed below 0")
    # By its name: `numpy.random.default_rng` may become another generator.
    return np.random.Generator(np.random.PCG64(seed)).standard_normal((number, length))


def members(frames: Source, number: int = 32, seed: int = 0) -> np.ndarray:
    """Return energies (F, K) in eV of K members: E_k = E + u · r_k.

    One r_k serves all frames of a model, also those of other files: member k is one model. Its energies are smooth
    functions of the positions, and spread over the members as `e2ip_plugins.energies.difference` says.

    Parameters
    ----------
    frames : path, ase.Atoms, or sequence of them
        F frames with predictions of one model, or files of them.
    number : int
        Members K.
    seed : int

    Raises
    ------
    InputError
        As `e2ip_plugins.energies.frames.read_energies` and `random_directions` do.
    """
    return member_energies(read_energies(frames), number, seed)


def member_energies(read: FrameEnergies, number: int, seed: int, centred: bool = False) -> np.ndarray:
    """Return the energies (F, K) of `members`.

    With ``centred``, the mean of the K ≥ 2 members is the model: r_k minus their mean, times √(K/(K - 1)), so that
    each of them is still distributed as N(0, 1). Members then depend on K.
    """
    directions = random_directions(number, read.vectors.shape[1], seed)
    if centred:
        if number < 2:
            raise InputError("a committee has at least two members, got 1")
        directions = (directions - directions.mean(0)) * np.sqrt(number / (number - 1.0))
    return read.energies[:, None] + read.vectors @ directions.T
