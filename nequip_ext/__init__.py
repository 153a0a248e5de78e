"""NequIP adapter of e²IP, imported whenever NequIP is (entry point ``nequip.extension``).

Use ``nequip_ext.E2IPModel``, ``nequip_ext.E2IPLoss`` and ``nequip_ext.E2IPMetrics`` as ``_target_`` in the
YAML of ``nequip-train``, and ``nequip_ext.PaiNNModel`` or ``nequip_ext.AlphaNetModel`` where a NequIP model may stand.
They are imported when first used: what is imported here costs every NequIP command time and would be part of every
packaged model that reaches this module.
"""

import importlib
import sys
from typing import Any

from nequip_ext import contract

_EXPORTS = {
    "E2IPModel": "model.model",
    "E2IPLoss": "training.loss",
    "E2IPMetrics": "training.metrics",
    "E2IPDataStatisticsManager": "training.statistics",
    "E2IPCalculator": "inference.calculator",
    "E2IPInputCheck": "training.checks",
    "E2IPXYZFileWriter": "inference.xyz",
    "uncertainty_gradient": "inference.gradient",
    "PaiNNModel": "model.backbones.models",
    "AlphaNetModel": "model.backbones.models",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'nequip_ext' has no attribute '{name}'")
    contract.check("backbones" if "backbones" in _EXPORTS[name] else "")
    _register()
    return getattr(importlib.import_module(f"nequip_ext.{_EXPORTS[name]}"), name)


def _register() -> None:
    from nequip_ext.registration import register

    register()


# Lightning imports this package, too (`nequip_ext.setup`), and shall not get NequIP from that.
if "nequip" in sys.modules:
    try:
        _register()
    except (ImportError, AttributeError, KeyError, TypeError):
        # A release that lacks what this needs: plain NequIP goes on working, and `contract.check` says what it lacks.
        pass
