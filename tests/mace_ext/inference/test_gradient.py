"""`uncertainty_gradient` in MACE: against finite differences, twice, in units, and where it cannot be had."""

import numpy as np
import pytest
import torch

from e2ip_plugins.errors import InputError

IRREPS = ["8x0e", "8x0e+8x1o", "8x0e+8x1o+8x2e"]
STEP = 1e-5


@pytest.fixture
def make_calculator(make_model):
    """Function from hidden irreps (and a calculator's settings) to a `MACECalculator`."""
    from mace.calculators import MACECalculator

    def make(irreps="8x0e+8x1o", **settings):
        models = settings.pop("models", None) or [make_model(hidden_irreps=irreps)]
        return MACECalculator(models=models, device="cpu", default_dtype="float64", **settings)

    return make


@pytest.mark.parametrize("irreps", IRREPS)
def test_agrees_with_finite_differences(make_calculator, check_gradient, frames, irreps):
    check_gradient(make_calculator(irreps), frames)


@pytest.mark.parametrize("irreps", ["8x0e", "8x0e+8x1o"])
def test_second_derivatives(make_model, make_batch, frames, irreps):
    """Hessian times a vector: the gradient's own gradient against its finite difference."""
    from mace_ext import uncertainty_gradient

    model, data = make_model(hidden_irreps=irreps), make_batch(frames)
    direction = torch.randn(data["positions"].shape, generator=torch.Generator().manual_seed(1))
    positions = data["positions"].clone().requires_grad_(True)
    _, gradient = uncertainty_gradient(model, {**data, "positions": positions}, create_graph=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), positions)
    ends = [
        uncertainty_gradient(model, {**data, "positions": data["positions"] + s * STEP * direction})[1] for s in (1, -1)
    ]
    torch.testing.assert_close(product, (ends[0] - ends[1]) / (2 * STEP), rtol=1e-6, atol=1e-8)


def test_units(make_calculator, frames):
    """In eV and Å whatever the model was trained in, for keys and for functions of them."""
    total = lambda outputs: outputs["forces_cov"].diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()  # noqa: E731
    for uncertainty in ("forces_epistemic_std", total):
        value, gradient = make_calculator().uncertainty_gradient(frames[0], uncertainty)
        other = make_calculator(energy_units_to_eV=2.0).uncertainty_gradient(frames[0], uncertainty)
        assert np.allclose(other[0], 2.0 * value) and np.allclose(other[1], 2.0 * gradient)


def test_padding_changes_nothing(make_calculator, frames):
    mean = lambda outputs: outputs["forces_uncertainty"].mean()  # noqa: E731
    for uncertainty in ("forces_epistemic_std", mean):
        plain = make_calculator().uncertainty_gradient(frames[0], uncertainty)
        padded = make_calculator(pad_num_atoms=16, pad_num_edges=256).uncertainty_gradient(frames[0], uncertainty)
        for ours, expected in zip(padded, plain, strict=True):
            assert ours.shape == expected.shape
            np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-14)


def test_heads_have_gradients_of_their_own(make_model, make_batch, frames):
    from mace_ext import uncertainty_gradient

    model = make_model(heads=("one", "two"))
    first, second = (
        uncertainty_gradient(model, make_batch(frames, heads=["one", "two"], head=head))[1] for head in ("one", "two")
    )
    assert not torch.allclose(first, second)


def test_errors(make_calculator, make_model, make_batch, frames):
    from mace_ext import uncertainty_gradient

    with pytest.raises(InputError, match="unknown uncertainty 'std'"):
        make_calculator().uncertainty_gradient(frames[0], "std")
    with pytest.raises(InputError, match=r"needs a model with an e2ip readout.*; this ScaleShiftMACE is none"):
        uncertainty_gradient(make_model(readout=None), make_batch(frames))
    with torch.inference_mode(), pytest.raises(InputError, match="no graph back to the positions"):
        make_calculator().uncertainty_gradient(frames[0])
    with pytest.raises(InputError, match="this one has 2 models"):
        make_calculator(models=[make_model(), make_model(seed=1)]).uncertainty_gradient(frames[0])
