"""The force block: masking, whatever the family."""

import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.readout.loss import add_gradient, clip_apart, force_loss

F64 = torch.float64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(families.table()))
def test_bad_references_are_masked_without_touching_gradients(name, bad):
    generator = torch.Generator().manual_seed(0)
    family = families.get(name)(families.get(name).resolve({}))
    width = family.num_columns()
    coefficients = torch.randn(8, width, dtype=F64, generator=generator, requires_grad=True)
    forces = torch.randn(8, 3, dtype=F64, generator=generator, requires_grad=True)
    reference = forces.detach() + 0.1 * torch.randn(8, 3, dtype=F64, generator=generator)
    clean = reference.clone()
    reference[3, 1] = bad
    unit = torch.full((8,), 0.05, dtype=F64)

    def outputs():
        made = family(coefficients, unit[0])
        return {**made, "e2ip_coefficients": coefficients, "e2ip_force_unit": unit}

    loss, mask = force_loss(family, reference, forces, outputs())
    assert mask.tolist() == [True] * 3 + [False] + [True] * 4 and loss[3] == 0
    whole, everything = force_loss(family, clean, forces, outputs())
    assert everything.all() and torch.equal(loss[mask], whole[mask])
    grads = torch.autograd.grad(loss.sum(), (forces, coefficients))
    expected = torch.autograd.grad(whole[mask].sum(), (forces, coefficients))
    for got, want in zip(grads, expected, strict=True):
        assert torch.isfinite(got).all() and torch.equal(got[3], torch.zeros_like(got[3]))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", sorted(families.table()))
def test_forces_that_vanish_by_symmetry_are_like_those_of_a_mean_square_error(name):
    """They count, with a loss and gradients of zero: a likelihood would shrink their variance without end."""
    generator = torch.Generator().manual_seed(0)
    family = families.get(name)(families.get(name).resolve({}))
    coefficients = torch.randn(4, family.num_columns(), dtype=F64, generator=generator, requires_grad=True)
    forces = torch.randn(4, 3, dtype=F64, generator=generator)
    forces[1] = torch.tensor([1e-7, 0.0, -2e-6])  # a site of a perfect crystal, and its reference with some noise
    forces[2] = torch.tensor([1e-7, 0.0, 0.1])
    reference = forces + 0.1
    reference[1] = torch.tensor([0.0, 3e-4, 0.0])
    forces.requires_grad_()
    unit = torch.full((4,), 0.05, dtype=F64)
    outputs = {**family(coefficients, unit[0]), "e2ip_coefficients": coefficients, "e2ip_force_unit": unit}
    loss, mask = force_loss(family, reference, forces, outputs)
    assert mask.all() and (loss == 0).tolist() == [False, True, False, False]
    for gradient in torch.autograd.grad(loss.sum(), (forces, coefficients)):
        assert (gradient == 0).all(-1).tolist() == [False, True, False, False]


def test_the_value_of_one_loss_with_the_gradient_of_both():
    x = torch.tensor(3.0, dtype=F64, requires_grad=True)
    total = add_gradient(0.1 * x, x.square())
    assert total.item() == (0.1 * x).item()
    total.backward()
    assert x.grad.item() == pytest.approx(6.1)
    for bad in (float("nan"), float("inf")):
        assert add_gradient(torch.tensor(0.3), bad * x).item() == torch.tensor(0.3).item()


def test_gradients_are_clipped_apart():
    """3, 4 and 0, 12 to norm 1; what has no gradient, and the gradients' order, stay."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5)]
    for parameter, gradient in zip(parameters, (3.0, 0.0, None, 4.0, 12.0), strict=True):
        parameter.grad = None if gradient is None else torch.tensor([gradient])
    readout = [parameters[i] for i in (0, 3)]
    clip_apart(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), readout, parameters)
    clipped = [None if parameter.grad is None else parameter.grad.item() for parameter in parameters]
    assert clipped[2] is None
    assert clipped[:2] + clipped[3:] == pytest.approx([0.6, 0.0, 0.8, 1.0], rel=1e-5)
