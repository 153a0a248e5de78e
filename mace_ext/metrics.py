"""What MACE logs about the uncertainty, beside its own figures and through its own loggers.

Loaded while MACE is: imports of MACE and of SciPy wait until they are used.
"""

import logging
import sys

import torch
from torchmetrics.utilities import dim_zero_cat

#: Keys of `ForceUncertainty.compute` in logs and tables, with a format and the heading of the error table.
REPORTED = (
    ("nll", "8.4f", "e2ip NLL / nats"),
    ("coverage95", "6.4f", "e2ip coverage @ 95 %"),
    ("spearman", "6.4f", "e2ip Spearman"),
    ("plateau", "6.4f", "e2ip plateau"),
)


def evidential_mace_loss(stock):
    """`MACELoss` that also measures the force distributions when the loss is evidential.

    Atoms whose reference force is not finite are left out of the stock force errors, too.
    """

    class MACELoss(stock):
        def __init__(self, loss_fn):
            super().__init__(loss_fn=loss_fn)
            self.evidential = getattr(loss_fn, "evidential", False)
            if self.evidential:
                # What `ForceUncertainty.update` takes, 15 numbers per atom. Not a metric of its own inside this
                # one: torchmetrics' forward resets and restores only states, and would count every batch twice.
                self.add_state("e2ip_atoms", default=[], dist_reduce_fx="cat")

        def update(self, batch, output):
            if not self.evidential:
                return super().update(batch, output)
            finite = torch.isfinite(batch.forces).all(-1)
            frames = len(self.fs)
            super().update(batch, output)
            if len(self.fs) > frames:
                self.fs[-1] = self.fs[-1][finite]
            sizes = batch.ptr[1:] - batch.ptr[:-1]
            labelled = torch.repeat_interleave(batch.weight * batch.forces_weight > 0, sizes)
            if labelled.any():
                # The stock update has already flattened the components of the labelled atoms.
                self.delta_fs[-1] = self.delta_fs[-1][finite[labelled].repeat_interleave(3)]
                columns = [
                    batch.forces,
                    output["forces"],
                    output["e2ip_log_sigma0"],
                    output["e2ip_nu"].unsqueeze(-1),
                    output["e2ip_kappa"].unsqueeze(-1),
                    output["e2ip_plateau"].unsqueeze(-1),
                ]
                self.e2ip_atoms.append(torch.cat(columns, -1)[labelled].detach().reshape(-1))

        def compute(self):
            loss, aux = super().compute()
            if self.evidential and len(self.e2ip_atoms) > 0:
                from e2ip_plugins.scores.training import ForceUncertainty

                # The states are synchronised already.
                metric = ForceUncertainty(sync_on_compute=False)
                atoms = dim_zero_cat(self.e2ip_atoms).reshape(-1, 15)
                metric.update(*torch.split(atoms, [3, 3, 6, 1, 1, 1], dim=-1))
                values = metric.compute()
                aux.update({f"e2ip_{name}": values[name] for name, _, _ in REPORTED})
            return loss, aux

    MACELoss.__qualname__ = stock.__qualname__
    MACELoss.__module__ = stock.__module__
    return MACELoss


def log_validation(metrics, epoch, head):
    """The line after the stock validation line, and W&B where a run is open."""
    if "e2ip_nll" not in metrics:
        return
    phrase = "Initial" if epoch is None else f"Epoch {epoch}"
    figures = ", ".join(f"e2ip_{name}={metrics[f'e2ip_{name}']:{form}}" for name, form, _ in REPORTED)
    logging.info(f"{phrase}: head: {head}, {figures}")
    if epoch is not None:
        log_wandb({f"{head}_valid_e2ip_{name}": metrics[f"e2ip_{name}"] for name, _, _ in REPORTED}, commit=False)


def log_wandb(figures, commit):
    """Add figures to an open W&B run; with ``commit=False`` they join the stock code's next step."""
    wandb = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is not None:
        wandb.log(figures, commit=commit)


def add_table_columns(table, metrics):
    """Our columns at the right of the stock error table; ``metrics`` has one dict per row."""
    if len(metrics) != len(table.rows) or not all("e2ip_nll" in row for row in metrics):
        return
    for name, form, heading in REPORTED:
        table.add_column(heading, [f"{row[f'e2ip_{name}']:{form}}" for row in metrics])
    for row, figures in zip(table.rows, metrics, strict=True):
        log_wandb({f"{row[0]}_final_e2ip_{name}": figures[f"e2ip_{name}"] for name, _, _ in REPORTED}, commit=True)
