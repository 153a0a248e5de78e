"""Lightning's entry point ``lightning.pytorch.callbacks_factory``: every Trainer gets our set-up, and only NequIP's
training modules notice (`nequip_ext.training.checks`, `nequip_ext.fitting.after_training`)."""

from typing import Any, List

from nequip_ext import contract


def callbacks() -> List[Any]:
    """Callbacks for a new Trainer; none where NequIP is not in use or lacks what they need."""
    if not contract.holds():
        return []
    from nequip_ext.fitting.after_training import E2IPFit
    from nequip_ext.training.checks import E2IPInputCheck

    return [E2IPInputCheck(), E2IPFit()]
