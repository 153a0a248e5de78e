"""The figure page of ``e2ip compare``: calibration first, then usefulness of the uncertainties, then errors."""

from functools import partial
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from e2ip_plugins.report.scored_model import ScoredModel
from e2ip_plugins.report.tables import REPORT_UNITS
from e2ip_plugins.scores.metrics import CALIBRATION_LEVELS, observed_coverage, sparsification

# Okabe & Ito, then Tol's muted ones: distinct for every kind of colour vision, the more so the fewer there are. Greys,
# from dark to light, are for models without uncertainties.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#332288", "#882255", "#999933", "#AA4499", "#117733", "#DDCC77"),
)
_GREYS = (0.45, 0.85)
# In panels whose colours stand for sets, not for models.
_OOD_COLOUR = "black"

_STYLE = Path(__file__).with_name("figures.mplstyle")

_IDEAL = {"color": "0.25", "linewidth": 1.0, "linestyle": (0, (4, 3)), "zorder": 1}

#: Draws one panel.
Panel = Callable[[Axes], None]


class _Look(NamedTuple):
    """Colours of models and their names in titles by label, the unit of forces, and its factor from eV/Å."""

    colours: Dict[str, str]
    names: Dict[str, str]
    force: str
    factor: float


def figure_page(models: List[ScoredModel], unit: str = "eV", ood: Sequence[ScoredModel] = ()) -> Figure:
    """Return panels for all models, or the errors alone where no file has uncertainties.

    The first panels show whether the distributions are calibrated, with 95 % bands from a bootstrap of whole
    configurations; the others show whether the uncertainties find the errors, and how large the errors are, in meV/Å or
    kcal/mol/Å. Every model with uncertainties has a panel with the density of its atoms over error and uncertainty.

    With the same models out of distribution, reliability and its deviation have a panel for either set, one panel shows
    the errors out of distribution against the uncertainties, and that of errors shows both sets. Every model with
    leverage has two more panels: errors, and predicted standard deviations, of both sets against it. The other panels
    stay those in distribution.
    """
    several_sets = bool(ood) and any("pit" in m.scores for m in models)
    # One model's panels are told apart by their set.
    names = {m.label: "in distribution" if several_sets and len(models) == 1 else m.label for m in models}
    look = _Look(_assign_colours(models), names, REPORT_UNITS[unit][0], REPORT_UNITS[unit][2])
    with style.context(_STYLE):
        panels = _calibration_panels(models, ood, look)
        for a, b in zip(models, ood, strict=False):
            panels += _leverage_panels(a, b, look)
        judged = [m for m in ood if "error" in m.scores]
        panels.append(partial(_errors_per_species, models=models, ood=judged, look=look))
        with_energies, ood_energies = ([m for m in shown if "frames" in m.energy_residuals] for shown in (models, ood))
        if with_energies or ood_energies:
            panels.append(partial(_errors_of_energies, models=with_energies, ood=ood_energies, look=look))

        # Three in a row, or four where that leaves less room empty.
        columns = min(min((3, 4), key=lambda n: -len(panels) % n), len(panels))
        rows = -(-len(panels) // columns)
        size = (4.0 * columns, 3.8 * rows) if columns > 2 else (5.5 * columns, 4.2 * rows)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.02, hspace=0.03)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for draw, ax in zip(panels, axes, strict=False):
            draw(ax)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        handles = [Patch(color=look.colours[m.label], label=m.label) for m in models]
        title = None
        if several_sets:
            files = " and ".join(dict.fromkeys(m.predictions.path.name for m in ood))
            title = f"out of distribution: {files}; panels that name no set are in distribution"
        # A letter of 10.5 points takes about 0.09 inches, a patch and its space 0.8.
        room = int(size[0] / (0.8 + 0.09 * max(len(m.label) for m in models)))
        ncols = max(1, min(len(models), room, 5))
        figure.legend(handles=handles, loc="outside upper center", ncols=ncols, fontsize=10.5, title=title)
    return figure


def write_figure(models: List[ScoredModel], unit: str, stem: Path, ood: Sequence[ScoredModel] = ()) -> None:
    """Save the page as PNG and PDF."""
    figure = figure_page(models, unit, ood)
    with style.context(_STYLE):
        for suffix in (".png", ".pdf"):
            figure.savefig(stem.with_suffix(suffix), dpi=160)


def _assign_colours(models: List[ScoredModel]) -> Dict[str, str]:
    uncertain = [m.label for m in models if "pit" in m.scores]
    others = [m.label for m in models if "pit" not in m.scores]
    greys = np.linspace(*_GREYS, max(3, len(others)))
    return {
        **dict(zip(uncertain, cycle(_COLOURS), strict=False)),
        **{label: f"{grey:.3f}" for label, grey in zip(others, greys, strict=False)},
    }


def _calibration_panels(models: List[ScoredModel], ood: Sequence[ScoredModel], look: _Look) -> List[Panel]:
    """Return the panels that need predicted distributions and errors."""
    uncertain, outside = ([m for m in shown if "pit" in m.scores] for shown in (models, ood))
    if not uncertain:
        return []
    sets = {", in distribution": uncertain} if ood else {"": uncertain}
    if outside:
        sets[", out of distribution"] = outside
    calibration = [
        partial(draw, models=shown, look=look, of_set=of_set)
        for draw in (_reliability, _pit_deviation)
        for of_set, shown in sets.items()
    ]
    # Isotropic covariances have no axes.
    directed = any(m.scores["directed"].any() for m in uncertain)
    usefulness = [_pit_histogram, *([_ellipsoid_axes] * directed), _sparsification]
    usefulness += [_error_against_std] * (len(uncertain) > 1)
    # Out of distribution one panel for all models: the page would grow by one for each.
    outer = [partial(_error_against_std, models=outside, look=look, of_set="out of distribution")] if outside else []
    return [
        *calibration,
        *(partial(draw, models=uncertain, look=look) for draw in usefulness),
        *(partial(_density, model=m, look=look) for m in uncertain),
        *outer,
    ]


def _title(what: str, label: str) -> str:
    """Return the title of one model's panel, in lines that have room above it."""
    return "\n".join([f"{what},", *wrap(label, 34)]) if len(what + label) > 38 else f"{what}, {label}"


def _remark(ax: Axes, x: float, y: float, text: str, **options: str) -> None:
    """Write a remark in grey at a place in the panel, from (0, 0) to (1, 1)."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.0}
    ax.text(x, y, text, color="0.45", transform=ax.transAxes, bbox=box, **options)


def _coverages(
    ax: Axes, models: List[ScoredModel], look: _Look, levels: np.ndarray, shown: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Draw what is ``shown`` of observed coverages, with their bands, against levels."""
    for m in models:
        colour = look.colours[m.label]
        ax.plot(levels, shown(observed_coverage(m.scores["pit"])), color=colour, linewidth=2)
        if m.band is not None:
            ax.fill_between(levels, shown(m.band.low), shown(m.band.high), color=colour, alpha=0.2, linewidth=0)


def _reliability(ax: Axes, models: List[ScoredModel], look: _Look, of_set: str) -> None:
    ax.set_title("Reliability" + of_set)
    ax.plot([0, 1], [0, 1], **_IDEAL | {"zorder": 3})
    _coverages(ax, models, look, _with_ends(CALIBRATION_LEVELS), _with_ends)
    ax.text(0.04, 0.95, "too cautious", color="0.45", va="top")
    ax.text(0.96, 0.05, "too confident", color="0.45", ha="right")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="expected share of atoms inside", ylabel="observed share of atoms inside")


def _with_ends(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values, [1.0]])


def _pit_deviation(ax: Axes, models: List[ScoredModel], look: _Look, of_set: str) -> None:
    ax.set_title("PIT deviation" + of_set)
    ax.axhline(0.0, **_IDEAL)
    _coverages(ax, models, look, CALIBRATION_LEVELS, lambda coverage: coverage - CALIBRATION_LEVELS)
    largest = max(0.05, 1.15 * max(np.abs(ax.get_ylim())))  # below, room for a line of text
    ax.set(xlim=(0, 1), ylim=(-largest, largest))
    ax.set(xlabel="expected share of atoms inside", ylabel="observed - expected share")
    _remark(ax, 0.03, 0.03, "bands: 95 %, configurations resampled")


def _pit_histogram(ax: Axes, models: List[ScoredModel], look: _Look) -> None:
    ax.set_title("PIT histogram")
    ax.axhline(1.0, **_IDEAL)
    bins = np.linspace(0.0, 1.0, 21)
    for m in models:
        density, _ = np.histogram(m.scores["pit"], bins, density=True)
        ax.stairs(density, bins, color=look.colours[m.label], linewidth=2)
        ax.stairs(density, bins, color=look.colours[m.label], fill=True, alpha=0.12)
    ax.set(xlim=(0, 1), xlabel="PIT of the reference force (flat: calibrated)", ylabel="density")
    ax.set_ylim(0, max(2.0, ax.get_ylim()[1]))


def _ellipsoid_axes(ax: Axes, models: List[ScoredModel], look: _Look) -> None:
    ax.set_title("Direction of the uncertainty")
    ax.axhline(1.0, **_IDEAL)
    top = 1.5
    for i, m in enumerate(models):
        directed = m.scores["z_scores"][m.scores["directed"]]
        if not len(directed):
            continue
        z_rms = np.sqrt(np.square(directed).mean(0))
        x = np.arange(3) + min(0.12, 0.8 / len(models)) * (i - 0.5 * (len(models) - 1))
        ax.plot(x, z_rms, "o-", color=look.colours[m.label], linewidth=1.5, markersize=7, markeredgecolor="white")
        top = max(top, 1.15 * z_rms.max())
    ax.set_xticks([0, 1, 2], ["minor", "middle", "major"])
    ax.set(xlim=(-0.5, 2.5), ylim=(0, top), ylabel="RMS error / predicted std. deviation")
    ax.set_xlabel("principal axis of the predicted covariance")


def _sparsification(ax: Axes, models: List[ScoredModel], look: _Look) -> None:
    ax.set_title("Dropping the most uncertain atoms")
    ax.axhline(1.0, **_IDEAL)
    for m in models:
        error, colour = m.scores["error_norm"], look.colours[m.label]
        at = np.linspace(0, len(error) - 1, min(len(error), 300)).astype(int)
        dropped = 100.0 * at / len(error)
        ax.plot(dropped, sparsification(m.scores["total_std"], error)[at], color=colour, linewidth=2)
        ax.plot(dropped, sparsification(error, error)[at], color=colour, linewidth=1, linestyle=":")
    # The last few atoms left are noise.
    ax.set(xlim=(0, 98), ylim=(0, 1.1), xlabel="atoms dropped (%)", ylabel="mean error of the rest / of all")
    _remark(ax, 0.03, 0.03, "dotted: dropped by true error\ndashed: dropped at random")


def _error_against_std(ax: Axes, models: List[ScoredModel], look: _Look, of_set: str = "") -> None:
    what = "Error against uncertainty"
    ax.set_title(_title(what, of_set) if of_set else what)
    _equal_axes(ax, [_rms_in_bins(ax, m, look) for m in models], look)
    _remark(ax, 0.04, 0.95, "points: RMS in bins\nof equal size", va="top")


def _density(ax: Axes, model: ScoredModel, look: _Look) -> None:
    ax.set_title(_title("Error against uncertainty", look.names[model.label]))
    std, error = _std_and_error(model, look)
    positive = error > 0  # others have no place on a logarithmic axis
    spans = [np.quantile(std, [0.001, 0.999]), _rms_in_bins(ax, model, look)]
    spans += [np.quantile(error[positive], [0.02, 0.999])] if positive.any() else []
    low, high = _equal_axes(ax, spans, look)
    if not positive.any():
        return
    shades = LinearSegmentedColormap.from_list("tint", ["#e4e8ec", look.colours[model.label]])
    extent = np.log10([low, high, low, high])
    cells = ax.hexbin(
        std[positive], error[positive], xscale="log", yscale="log", extent=extent, gridsize=45, mincnt=1, cmap=shades,
        alpha=0.7, linewidths=0, bins="log", rasterized=True,
    )  # fmt: skip
    # hexbin changes the limits and ticks of the axes.
    ax.set(xlim=(low, high), ylim=(low, high))
    bar = ax.figure.colorbar(cells, ax=ax, label="atoms", shrink=0.8, pad=0.02, aspect=30)
    _plain_ticks(ax.xaxis, ax.yaxis, bar.ax.yaxis)


def _std_and_error(model: ScoredModel, look: _Look) -> Tuple[np.ndarray, np.ndarray]:
    return model.scores["total_std"] * look.factor, model.scores["error_norm"] * look.factor / np.sqrt(3.0)


def _rms_in_bins(ax: Axes, model: ScoredModel, look: _Look) -> np.ndarray:
    """Draw RMS errors against RMS standard deviations, in bins of equal size; return both, errors of 0 left out."""
    std, error = _std_and_error(model, look)
    bins = np.array_split(np.argsort(std), min(12, len(std)))
    x, y = (np.array([np.sqrt(np.square(values[b]).mean()) for b in bins]) for values in (std, error))
    colour = look.colours[model.label]
    ax.plot(x, y, "o-", color=colour, markersize=6, markeredgecolor="white", linewidth=1.8, zorder=4)
    return np.concatenate([x, y[y > 0]])


def _equal_axes(ax: Axes, spans: Sequence[np.ndarray], look: _Look) -> Tuple[float, float]:
    """Set logarithmic axes of the same length that hold the spans, draw their diagonal, and return their ends."""
    low, high = min(map(min, spans)) / 1.3, max(map(max, spans)) * 1.3
    ax.plot([low, high], [low, high], **_IDEAL | {"zorder": 3})
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    _plain_ticks(ax.xaxis, ax.yaxis)
    ax.set_xlabel(f"predicted total standard deviation ({look.force})")
    ax.set_ylabel(f"force error per component ({look.force})")
    return low, high


def _plain_ticks(*axes: Axis) -> None:
    """Label logarithmic axes with plain numbers, few enough not to overlap."""
    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300.0 * low else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


#: Score drawn against leverage: title, label of its axis, number of components that share its square.
_AGAINST_LEVERAGE = {
    "error_norm": ("Error", "force error per component", 3),
    "total_std": ("Uncertainty", "predicted std. deviation", 1),
}


def _leverage_panels(inside: ScoredModel, outside: ScoredModel, look: _Look) -> List[Panel]:
    """Return panels of errors and of standard deviations of both sets against leverage, if the model has one."""
    curves: Dict[str, List[tuple]] = {}
    one = look.names[inside.label] != inside.label
    colour = look.colours[inside.label]
    for m, name, of_set in ((inside, "in distribution", colour), (outside, "out of distribution", _OOD_COLOUR)):
        leverage = m.scores.get("leverage", np.empty(0))
        order = np.argsort(leverage)
        # Others have no place on a logarithmic axis.
        order = order[np.isfinite(leverage[order]) & (leverage[order] > 0)]
        bins = np.array_split(order, min(12, len(order))) if len(order) else []
        x = [np.median(leverage[b]) for b in bins]
        for score, (_, _, components) in _AGAINST_LEVERAGE.items():
            if bins and score in m.scores:
                values = look.factor * m.scores[score] / np.sqrt(components)
                bands = np.array([np.quantile(values[b], [0.1, 0.5, 0.9]) for b in bins]).T
                curves.setdefault(score, []).append((name, of_set, x, bands))
    ends = [end for sets in curves.values() for *_, bands in sets for end in (bands.min(), bands.max())]

    def draw(ax: Axes, score: str) -> None:
        what, label, _ = _AGAINST_LEVERAGE[score]
        ax.set_title(_title(f"{what} against leverage", "both sets" if one else inside.label))
        ax.set(xscale="log", yscale="log", xlabel="leverage (1: training atoms on average)")
        ax.set_ylabel(f"{label} ({look.force})")
        for name, of_set, x, (low, middle, high) in curves[score]:
            ax.fill_between(x, low, high, color=of_set, alpha=0.15, linewidth=0)
            ax.plot(x, middle, "o-", color=of_set, markersize=6, markeredgecolor="white", linewidth=1.8, label=name)
        # Leave room for the legend above.
        ax.set_ylim(max(min(ends), 1e-4 * max(ends)) / 1.3, 4.0 * max(ends))
        _plain_ticks(ax.xaxis)
        ax.legend(title="medians and 10–90 % in bins of equal size", alignment="left", loc="upper left")

    return [partial(draw, score=score) for score in curves]


def _errors_per_species(ax: Axes, models: List[ScoredModel], ood: Sequence[ScoredModel], look: _Look) -> None:
    ax.set_title("Force MAE, both sets" if ood else "Force MAE")
    symbols = sorted({str(s) for m in [models[0], *ood[:1]] for s in np.unique(m.species)})
    width = 0.8 / len(models)
    for shown, outline in ((models, False), (ood, True)):
        for i, m in enumerate(shown):
            groups = [np.ones(len(m.species), dtype=bool), *(m.species == s for s in symbols)]
            # A set need not have every species.
            maes = [look.factor * np.abs(m.scores["error"][g]).mean() if g.any() else np.nan for g in groups]
            x = np.arange(len(groups)) + width * (i - 0.5 * (len(models) - 1))
            colour = look.colours[m.label]
            options = {"edgecolor": colour, "fill": False, "linewidth": 1.2} if outline else {"color": colour}
            ax.bar(x, maes, 0.92 * width, **options)
    ax.set_xticks(range(len(symbols) + 1), ["all", *symbols])
    ax.set(ylabel=f"component MAE ({look.force})")
    if ood:
        ax.margins(y=0.15)
        _remark(ax, 0.03, 0.97, "outlines: out of distribution", va="top")


def _errors_of_energies(ax: Axes, models: List[ScoredModel], ood: Sequence[ScoredModel], look: _Look) -> None:
    """Draw every frame's error against its standard deviation, both per atom."""
    ax.set_title("Errors of energies, both sets" if ood else "Errors of energies")
    spans = []
    for shown, marker in ((models, "o"), (ood, "x")):
        for m in shown:
            r = m.energy_residuals["frames"]
            std, error = look.factor * r.std / r.atoms, look.factor * np.abs(r.error) / r.atoms
            ax.plot(std, error, marker, color=look.colours[m.label], markersize=4, alpha=0.5)
            spans.append((std.min(), std.max(), error.max()))
    low, high = np.min(spans) / 10.0, np.max(spans) * 1.3
    ax.plot([low, high], [low, high], **_IDEAL | {"zorder": 3})
    unit = look.force.replace("/Å", "/atom")
    ax.set(xscale="log", yscale="log", xlim=(np.min(spans) / 1.3, high), ylim=(low, high))
    _plain_ticks(ax.xaxis, ax.yaxis)
    ax.set(xlabel=f"predicted standard deviation ({unit})", ylabel=f"|error| ({unit})")
    if ood:
        _remark(ax, 0.97, 0.03, "crosses: out of distribution", ha="right")
