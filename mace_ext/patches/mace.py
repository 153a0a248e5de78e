"""`mace.calculators.mace`: `MACECalculator` returns uncertainties."""

from mace_ext.inference import calculator
from mace_ext.patches import wrap


def apply(module):
    """Patch two methods of ``MACECalculator`` and add one."""
    wrap(module.MACECalculator, __init__=calculator.init, calculate=calculator.calculate)
    module.MACECalculator.uncertainty_gradient = calculator.uncertainty_gradient
