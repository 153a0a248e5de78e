"""`mace.calculators.mace`: `MACECalculator` returns uncertainties."""

from mace_ext.inference import calculator
from mace_ext.patches import wrap


def apply(module):
    """Patch methods of ``MACECalculator``, two of which it inherits from ASE, and add one."""
    wrap(module.MACECalculator, __init__=calculator.init, calculate=calculator.calculate)
    wrap(
        module.MACECalculator,
        get_property=calculator.get_property,
        export_properties=calculator.export_properties,
    )
    module.MACECalculator.uncertainty_gradient = calculator.uncertainty_gradient
