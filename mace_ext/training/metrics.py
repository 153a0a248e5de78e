"""What MACE logs about the uncertainty, beside its own figures and through its own loggers.

Figures are called ``FAMILY_FIGURE``, in the words of `e2ip_plugins.scores.training.FIGURES`. Loaded while MACE is:
imports of SciPy wait until they are used.
"""

import logging
import math
import sys
from typing import Any, Dict, List, NamedTuple

from e2ip_plugins import families
from e2ip_plugins.keys import ENERGY_UNCERTAINTY
from mace_ext.compat import finite_errors
from mace_ext.training.labels import atom_weights, finite_references, reference_energies, reference_forces

#: Energy errors in eV per atom from which a model that is not yet trained has another reference: MACE's own E0s and
#: shift leave less.
OTHER_REFERENCE = 1.0


class Logged(NamedTuple):
    """A figure as logged: its key, heading in tables, and formatted value."""

    key: str
    heading: str
    text: str


def mace_loss_with_figures(stock: type) -> type:
    """Return a `MACELoss` that also measures force distributions when the loss is `mace_ext.training.loss.E2IPLoss`.

    Atoms whose reference force is not finite are left out of the stock force errors, too.
    """

    class MACELoss(stock):
        def __init__(self, loss_fn):
            super().__init__(loss_fn=loss_fn)
            family = getattr(loss_fn, "family", None)
            self.uq_family = None if family is None else type(family)
            if self.uq_family is not None:
                # Rows of the core's table of atoms, flat, so that they fit what torchmetrics puts in for a rank
                # without atoms. Not a metric of its own inside this one: torchmetrics' forward resets and restores
                # only states, and would count every batch twice.
                self.add_state("e2ip_atoms", default=[], dist_reduce_fx="cat")
                self.add_state("e2ip_frames", default=[], dist_reduce_fx="cat")

        def update(self, batch, output):
            if self.uq_family is None:
                return super().update(batch, output)
            from e2ip_plugins.scores.training import energy_rows, rows

            finite, labelled = finite_references(batch), atom_weights(batch) > 0
            frames = len(self.fs)
            super().update(batch, output)
            if len(self.fs) > frames:
                self.fs[-1] = self.fs[-1][finite]
            if labelled.any():
                self.delta_fs[-1] = finite_errors(self.delta_fs[-1], finite, labelled)
                table = rows(self.uq_family, reference_forces(batch), output["forces"], output)
                self.e2ip_atoms.append(table[labelled].reshape(-1))
            std = output.get(ENERGY_UNCERTAINTY.name)
            if std is not None:
                self.e2ip_frames.append(energy_rows(reference_energies(batch), output["energy"], std).reshape(-1))

        def compute(self):
            loss, aux = super().compute()
            if self.uq_family is not None and len(self.e2ip_atoms) > 0:
                from e2ip_plugins.scores.training import ENERGY_FIGURES, FIGURES, energy_figures, figures

                values = figures(self.uq_family, self.e2ip_atoms)
                aux.update({figure.key(self.uq_family.name): values[figure.name] for figure in FIGURES})
                values = energy_figures(self.e2ip_frames)
                # Before the fit after the training, and without energies, there are none.
                fitted = [figure for figure in ENERGY_FIGURES if not math.isnan(values[figure.name])]
                aux.update({figure.key(self.uq_family.name): values[figure.name] for figure in fitted})
            return loss, aux

    MACELoss.__qualname__ = stock.__qualname__
    MACELoss.__module__ = stock.__module__
    return MACELoss


def find_figures(metrics: Dict[str, Any]) -> List[Logged]:
    """Return our figures among MACE's validation metrics."""
    from e2ip_plugins.scores.training import ENERGY_FIGURES, FIGURES

    keys = [(figure.key(name), name, figure) for name in families.table() for figure in (*FIGURES, *ENERGY_FIGURES)]
    logged = [(key, name, figure) for key, name, figure in keys if key in metrics]
    return [Logged(key, f"{name} {figure.heading}", f"{metrics[key]:{figure.form}}") for key, name, figure in logged]


def log_validation(metrics: Dict[str, Any], epoch: Any, head: str) -> None:
    """Log the line after the stock validation line, and to W&B where a run is open."""
    figures = find_figures(metrics)
    if not figures:
        return
    phrase = "Initial" if epoch is None else f"Epoch {epoch}"
    logging.info(f"{phrase}: head: {head}, {', '.join(f'{figure.key}={figure.text}' for figure in figures)}")
    error = metrics.get("rmse_e_per_atom")
    if epoch is None and error is not None and error > OTHER_REFERENCE:
        logging.warning(
            f"head: {head}: before the training the model's energies are off by {error:.3g} eV per atom. Unless forces "
            "are fixed, the energy loss will pull them along, and may ruin them: subtract the difference from the "
            "energies (e2ip fit prints it), or give E0s of the same reference"
        )
    if epoch is not None:
        log_wandb({f"{head}_valid_{figure.key}": metrics[figure.key] for figure in figures}, commit=False)


def log_wandb(figures: Dict[str, Any], commit: bool) -> None:
    """Add figures to an open W&B run; with ``commit=False`` they join the stock code's next step."""
    wandb: Any = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:
        wandb.log(figures, commit=commit)


def add_table_columns(table: Any, metrics: List[Dict[str, Any]]) -> None:
    """Add our columns at the right of the stock error table; ``metrics`` has one dict per row."""
    rows = [{figure.key: figure for figure in find_figures(row)} for row in metrics]
    if len(metrics) != len(table.rows) or not all(rows):
        return
    # Data sets without energies lack some.
    headings = {key: figure.heading for row in rows for key, figure in row.items()}
    for key, heading in headings.items():
        table.add_column(heading, [row[key].text if key in row else "" for row in rows])
    for row, values, cells in zip(table.rows, metrics, rows, strict=True):
        log_wandb({f"{row[0]}_final_{key}": values[key] for key in cells}, commit=True)
