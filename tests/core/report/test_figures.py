"""What the figure page of `e2ip compare` draws: read back from its axes (panels with --ood: test_ood.py)."""

import ase
import ase.io
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection

from e2ip_plugins.report.compare import load_models
from e2ip_plugins.report.figures import figure_page

FRAMES, ATOMS = 30, 5


@pytest.fixture
def write_gaussians(write):
    """Function that writes predictions of a Gaussian family with errors of a size and gives their file."""

    def written(name, size=1.0, uncertain=True, frames=FRAMES, widths=(1.0, 1.0, 1.0)):
        noise = np.random.default_rng(len(name))
        content = []
        for i in range(frames):
            atoms = ase.Atoms("CH2O2", np.random.default_rng(i).normal(size=(ATOMS, 3)))
            atoms.arrays["REF_forces"] = atoms.positions.copy()
            std = 0.1 * np.exp(0.5 * noise.normal(size=(ATOMS, 1)))
            atoms.arrays["forces"] = atoms.positions + size * std * noise.normal(size=(ATOMS, 3))
            if uncertain:
                atoms.arrays["gaussian_log_cov"] = (2 * np.log(std * widths)) @ np.eye(3, 6)
                atoms.info["uq_family"] = "gaussian"
            content.append(atoms)
        return write(f"{name}.xyz", content)

    return written


def panels(models):
    """Axes by title."""
    return {title: ax for ax in figure_page(models).axes if (title := ax.get_title(loc="left"))}


def test_panels(write_gaussians):
    stock, one, two = write_gaussians("stock", uncertain=False), write_gaussians("one"), write_gaussians("other", 1.5)
    shared = ["Reliability", "PIT deviation", "PIT histogram", "Dropping the most uncertain atoms"]
    assert list(panels(load_models([stock]))) == ["Force MAE"]
    assert list(panels(load_models([stock, one]))) == [*shared, "Error against uncertainty, one", "Force MAE"]
    densities = [f"Error against uncertainty, {name}" for name in ("one", "other")]
    assert list(panels(load_models([one, two]))) == [*shared, "Error against uncertainty", *densities, "Force MAE"]
    # Isotropic covariances have no directions.
    directed = panels(load_models([write_gaussians("directed", widths=(0.5, 1.0, 2.0))]))
    assert list(directed)[:4] == [*shared[:3], "Direction of the uncertainty"]


def test_many_models_are_told_apart(write_gaussians):
    """By colours of their own, and titles within their panels."""
    names = [f"one of many models with a name that no panel has room for, number {i}" for i in range(10)]
    files = [write_gaussians(f"{i}", uncertain=i < 10, frames=3) for i in range(15)]
    figure = figure_page(load_models(files, [*names, *"abcde"]))
    colours = {handle.get_facecolor() for handle in figure.legends[0].get_patches()}
    assert len(colours) == 15
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    assert figure.legends[0].get_window_extent(renderer).width < figure.bbox.width
    for ax in figure.axes:
        title = ax._left_title.get_window_extent(renderer)
        assert title.width < figure.bbox.width / 3
        for x in (point for line in ax.lines for point in line.get_xdata()):
            assert ax.get_title(loc="left") != "Direction of the uncertainty" or -0.5 <= x <= 2.5


def test_bands_are_the_intervals_of_the_coverages(write_gaussians):
    (model,) = models = load_models([write_gaussians("one", 1.3)])
    levels = np.arange(1, 100) / 100
    for name, zero in (("Reliability", 0.0), ("PIT deviation", levels)):
        (band,) = panels(models)[name].collections
        (outline,) = band.get_paths()
        for level, low, high in zip(levels, model.band.low - zero, model.band.high - zero, strict=True):
            ends = outline.vertices[np.isclose(outline.vertices[:, 0], level), 1]
            assert (ends.min(), ends.max()) == pytest.approx((low, high))


def test_density_counts_every_atom(write_gaussians):
    (model,) = models = load_models([write_gaussians("one")])
    ax = panels(models)["Error against uncertainty, one"]
    (cells,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    counts = cells.get_array()
    assert counts.min() >= 1 and 0.9 * len(model.species) < counts.sum() <= len(model.species)
    assert type(cells.norm).__name__ == "LogNorm"
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlim() == ax.get_ylim()


def test_what_cannot_be_drawn_is_left_out(write_gaussians):
    """One configuration has no bands, and an error of zero no place on a logarithmic axis."""
    path = write_gaussians("one", frames=1)
    atoms = ase.io.read(path)
    forces, atoms.calc = atoms.get_forces(), None
    atoms.arrays["forces"], atoms.arrays["REF_forces"][:2] = forces, forces[:2]
    ase.io.write(path, atoms, format="extxyz")
    found = panels(load_models([path]))
    assert not found["Reliability"].collections
    (cells,) = (c for c in found["Error against uncertainty, one"].collections if isinstance(c, PolyCollection))
    assert cells.get_array().sum() == ATOMS - 2
