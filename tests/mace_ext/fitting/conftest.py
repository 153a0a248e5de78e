"""Frames, and models whose leverage is fitted to them."""

import copy
import functools

import pytest


@pytest.fixture(scope="session")
def training_frames(labelled):
    return [*labelled("CH3CH2OH", 12, 0), *labelled("H2O", 4, 1)]


@pytest.fixture(scope="session")
def validation_frames(labelled):
    return labelled("CH3CH2OH", 8, 2)


@pytest.fixture(scope="session")
def fit_sets():
    """Function that fits a model in place to data sets of graphs; returns its report."""
    from e2ip_plugins.fitting.batches import in_order
    from mace_ext.fitting.passes import batching, fit_model

    return lambda model, *sets, batch_size=5: fit_model(model, *(in_order([s], batching(batch_size)) for s in sets))


@pytest.fixture(scope="session")
def fit(fit_sets, training_frames, validation_frames):
    """Function that fits a model in place; returns its report."""
    from mace_ext.fitting.passes import Graphs

    def run(model, batch_size=5):
        sets = [Graphs(frames, model, model.heads[0]) for frames in (training_frames, validation_frames)]
        return fit_sets(model, *sets, batch_size=batch_size)

    return run


@pytest.fixture(scope="session")
def make_fitted(make_model, fit):
    """Function from hidden irreps to a fitted model, a copy each."""

    @functools.lru_cache
    def build(irreps):
        model = make_model(irreps, options=(("evidence", "leverage"),))
        fit(model)
        return model

    return lambda irreps="8x0e+8x1o": copy.deepcopy(build(irreps))
