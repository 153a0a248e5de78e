"""`mace.calculators.mace`: `MACECalculator` returns uncertainties."""


def apply(module):
    """Patch four methods of ``MACECalculator`` and add one."""
    from mace_ext import calculator

    cls = module.MACECalculator
    cls.__init__ = calculator.wrap_init(cls.__init__)
    cls._create_result_tensors = calculator.wrap_create_result_tensors(cls._create_result_tensors)
    cls._slice_real_outputs = calculator.wrap_slice_real_outputs(cls._slice_real_outputs)
    cls.calculate = calculator.wrap_calculate(cls.calculate)
    cls.uncertainty_gradient = calculator.uncertainty_gradient
