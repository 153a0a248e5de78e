"""Which of many frames and atoms are kept: a sample that no order, batch, process or part of the work changes."""

import numpy as np

#: Training configurations for each of the validation set, about, whose errors are compared with those there.
TRAINING_PER_VALIDATION = 4


def hashes_of(numbers: np.ndarray) -> np.ndarray:
    """Return hashes (n,) uint64 of numbers (n,): the same for a number everywhere, without any order among them.

    Of many numbers, those with the smallest hashes are a sample. That of several parts together is among the samples of
    the parts. (SplitMix64, by Steele, Lea and Flood.)

    >>> hashes_of(np.array([0, 1, 2])).argsort().tolist()
    [2, 1, 0]
    """
    hashes = (np.asarray(numbers).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def hashes_of_atoms(frames: np.ndarray) -> np.ndarray:
    """Return a hash (N,) for every atom, from the number (N,) of its frame; atoms of a frame follow each other."""
    _, first, index = np.unique(frames, return_index=True, return_inverse=True)
    place = np.arange(len(frames)) - first[index]
    return hashes_of(hashes_of(frames) + place.astype(np.uint64))


def smallest(hashes: np.ndarray, number: int) -> np.ndarray:
    """Return the places, in order, of as many of the smallest hashes (n,)."""
    if len(hashes) <= number:
        return np.arange(len(hashes))
    return np.sort(np.argpartition(hashes, number - 1)[:number])


def training_subset(training: int, validation: int) -> range:
    """Return the indices, of so many training configurations, of those to compare with so many of the validation set
    in a fit."""
    return range(0, training, max(1, training // max(1, TRAINING_PER_VALIDATION * validation)))
