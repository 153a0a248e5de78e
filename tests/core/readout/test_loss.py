"""The force block: masking, whatever the family."""

import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.readout.loss import force_loss

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
