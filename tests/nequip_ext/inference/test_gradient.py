"""`uncertainty_gradient` in NequIP: against finite differences, twice, in units, and where it cannot be had."""

import functools

import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError
from nequip_ext import uncertainty_gradient

ARCHITECTURES = {"scalar-only": {"l_max": 0}, "l1": {"l_max": 1}, "l2": {"l_max": 2}, "one-layer": {"num_layers": 1}}
STEP = 1e-5


@pytest.fixture
def model(make_anisotropic, gnn_config, request):
    """Parametrised indirectly by its architecture."""
    return make_anisotropic(gnn_config(**getattr(request, "param", {})))


@pytest.fixture
def calculator(model, as_calculator):
    return functools.partial(as_calculator, model)


@pytest.mark.parametrize("model", ARCHITECTURES.values(), ids=ARCHITECTURES.keys(), indirect=True)
def test_agrees_with_finite_differences(calculator, check_gradient, frames):
    check_gradient(calculator(), frames)


@pytest.mark.parametrize("model", [{"l_max": 0}, {"l_max": 2}], ids=["scalar-only", "l2"], indirect=True)
def test_second_derivatives(model, frames, to_data):
    """Hessian times a vector: the gradient's own gradient against its finite difference."""
    data = to_data(frames[1])
    direction = torch.randn(data["pos"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = data["pos"].clone().requires_grad_(True)
    _, gradient = uncertainty_gradient(model, {**data, "pos": positions}, create_graph=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), positions)
    ends = [uncertainty_gradient(model, {**data, "pos": data["pos"] + s * STEP * direction})[1] for s in (1, -1)]
    torch.testing.assert_close(product, (ends[0] - ends[1]) / (2 * STEP), rtol=1e-6, atol=1e-9)


def test_units(calculator, frames):
    """In eV and Å whatever the model was trained in, for keys and for functions of them."""
    atoms = frames[0]
    total = lambda outputs: outputs["forces_cov"].diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()  # noqa: E731
    for uncertainty in ("forces_epistemic_std", total):
        value, gradient = calculator().uncertainty_gradient(atoms, uncertainty)
        # distances stay: only the energy unit differs
        other = calculator(energy_units_to_eV=2.0).uncertainty_gradient(atoms, uncertainty)
        assert np.allclose(other[0], 2.0 * value) and np.allclose(other[1], 2.0 * gradient)


def test_leaves_the_callers_data_alone(model, frames, to_data):
    data = to_data(frames[0])
    before = {key: value.clone() for key, value in data.items()}
    value, gradient = uncertainty_gradient(model, data)
    assert not (value.requires_grad or gradient.requires_grad or data["pos"].requires_grad)
    assert data.keys() == before.keys() and all(torch.equal(data[key], before[key]) for key in data)


def test_structures_without_meaning(calculator, frames):
    """NequIP itself leaves an atom without a position out, and predicts the rest."""
    broken, strange = frames[0].copy(), frames[0].copy()
    broken.positions[1, 2] = float("nan")
    strange.symbols[1] = "N"
    for atoms, message in ((broken, "position of atom 1 is not finite"), (strange, "has N.*it knows H, C, O")):
        atoms.calc = calculator()
        with pytest.raises(InputError, match=message):
            atoms.get_forces()
        with pytest.raises(InputError, match=message):
            atoms.calc.uncertainty_gradient(atoms)


def test_properties_are_those_of_the_model(calculator):
    names = calculator().implemented_properties
    assert "e2ip_nu" in names
    assert not any(name.startswith(("eip_", "gaussian_")) for name in (*names, *names.uncertainties))


def test_errors(model, make_model, frames, to_data):
    data = to_data(frames[0])
    with pytest.raises(InputError, match="unknown uncertainty 'std'"):
        uncertainty_gradient(model, data, "std")
    with pytest.raises(InputError, match="no graph back to the positions"):
        uncertainty_gradient(model, data, lambda outputs: outputs["e2ip_nu"].detach())
    _, gaussian = make_model(readout="mve-spd")
    with pytest.raises(InputError, match=r"forces_epistemic_std is zero for every atom.*take e2ip_leverage"):
        uncertainty_gradient(gaussian, data, "forces_epistemic_std")
    baseline, _ = make_model()
    with pytest.raises(InputError, match="needs a model with an e2ip readout"):
        uncertainty_gradient(baseline, data)
    with pytest.raises(InputError, match=r"built by nequip_ext\.E2IPModel, not a Linear"):
        uncertainty_gradient(torch.nn.Linear(1, 1), data)
