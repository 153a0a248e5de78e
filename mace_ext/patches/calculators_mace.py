"""`mace.calculators.mace`: `MACECalculator` returns uncertainties."""

from mace_ext.inference import calculator
from mace_ext.patches import wrap


def apply(module):
    """Patch two methods of ``MACECalculator`` and add one."""
    cls = module.MACECalculator
    wrap(cls, "__init__", calculator.init)
    wrap(cls, "calculate", calculator.calculate)
    cls.uncertainty_gradient = calculator.uncertainty_gradient
