"""Families with random coefficients, and what follows from them."""

import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.families.laws import law_of

F64 = torch.float64
UNIT = 0.05


@pytest.fixture(scope="session")
def build():
    """Function that makes a family from its name and options."""
    return lambda name, **options: families.get(name)(families.get(name).resolve(options))


@pytest.fixture(scope="session")
def example():
    """Function that gives random coefficients, outputs with what a loss needs, and residuals."""
    return _example


def _example(module, count=30, spread=1.0, unit=UNIT):
    generator = torch.Generator().manual_seed(0)
    coefficients = spread * torch.randn(count, module.num_columns(), dtype=F64, generator=generator)
    if module.takes_forces:
        coefficients = coefficients / module.energy_unit
    coefficients.requires_grad_()
    outputs = module(coefficients, torch.tensor(unit, dtype=F64))
    outputs["e2ip_force_unit"] = torch.full((count,), unit, dtype=F64)
    outputs["e2ip_coefficients"] = coefficients
    residual = unit * torch.randn(count, 3, dtype=F64, generator=generator)
    return coefficients, residual.requires_grad_(), outputs


@pytest.fixture(scope="session")
def law_from():
    """Function that gives the law of a family's outputs."""
    return lambda module, outputs: law_of(
        module, {k.name: outputs[k.name].detach().numpy() for k in module.parameter_keys}
    )
