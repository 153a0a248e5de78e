"""Products with the matrix of an atom's kind: one result in every form, at a cost that does not grow with the kinds."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from e2ip_plugins.leverage.module import Leverage
from e2ip_plugins.leverage.products import own_products

SIZE = 6

#: Bounds that choose the product with all matrices, and the form for many kinds.
ALL, MANY = (2**30, 2**30), (0, 0)


def draw(atoms=40, kinds=9, size=SIZE, present=None):
    """Features, matrices and kinds of atoms; of ``present`` kinds alone, where these are given."""
    generator = torch.Generator().manual_seed(atoms)
    x, matrices = torch.randn(atoms, size, generator=generator), torch.randn(size, kinds, size, generator=generator)
    return x, matrices, torch.randint(0, present or kinds, (atoms,), generator=generator)


def expected(x, matrices, index):
    return torch.einsum("ni,nij->nj", x, matrices[:, index].transpose(0, 1))


class Products(torch.nn.Module):
    def __init__(self, few: int, little: int):
        super().__init__()
        self.few, self.little = few, little

    def forward(self, x, matrices, index):
        return own_products(x, matrices, index, self.few, self.little)


def forms(bounds):
    """The functions that a product is computed by: eager, scripted, traced and exported, for any number of atoms."""
    module, arguments = Products(*bounds), draw(12)
    shapes = ({0: torch.export.Dim("atoms", min=2)}, None, {0: torch.export.Dim("atoms", min=2)})
    exported = torch.export.export(module, arguments, dynamic_shapes=shapes).module()
    traced = make_fx(module, tracing_mode="symbolic")(*arguments)
    return {"eager": module, "scripted": torch.jit.script(module), "traced": traced, "exported": exported}


@pytest.mark.parametrize("bounds", [ALL, MANY])
def test_every_form_gives_the_product_with_the_own_matrix(bounds):
    for name, form in forms(bounds).items():
        for atoms in (2, 7, 40):
            arguments = draw(atoms)
            torch.testing.assert_close(
                form(*arguments), expected(*arguments), rtol=1e-12, atol=1e-13, msg=f"{name}, {atoms}"
            )


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_ahead_of_time(dtype):
    x, matrices, index = draw(12)
    shapes = ({0: torch.export.Dim("atoms", min=2)}, None, {0: torch.export.Dim("atoms", min=2)})
    exported = torch.export.export(Products(*MANY), (x.to(dtype), matrices.to(dtype), index), dynamic_shapes=shapes)
    compiled = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(exported))
    for atoms in (2, 7, 40):
        x, matrices, index = draw(atoms)
        found = compiled(x.to(dtype), matrices.to(dtype), index)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found.double(), expected(x, matrices, index), rtol=tolerance, atol=0.1 * tolerance)


@pytest.mark.parametrize("bounds", [ALL, MANY])
@pytest.mark.parametrize(("atoms", "kinds"), [(0, 9), (1, 9), (40, 1), (0, 1)])
def test_no_atoms_one_atom_one_kind(bounds, atoms, kinds):
    arguments = draw(atoms, kinds)
    for form in (Products(*bounds), torch.jit.script(Products(*bounds))):
        torch.testing.assert_close(form(*arguments), expected(*arguments), rtol=1e-12, atol=1e-13)


def test_single_precision():
    x, matrices, index = draw(200)
    for form in forms(MANY).values():
        if not isinstance(form, torch.fx.GraphModule):  # those were traced in double precision
            found = form(x.float(), matrices.float(), index)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected(x, matrices, index), rtol=1e-4, atol=1e-5)


def test_first_and_second_derivatives():
    x, matrices, index = draw(5, 4)
    x.requires_grad_()
    for bounds in (ALL, MANY):
        assert torch.autograd.gradcheck(lambda x, bounds=bounds: own_products(x, matrices, index, *bounds), x)
        assert torch.autograd.gradgradcheck(
            lambda x, bounds=bounds: own_products(x, matrices, index, *bounds).square(), x
        )


def test_derivatives_in_a_graph():
    x, matrices, index = draw(12)

    def gradient(x, matrices, index):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(own_products(x, matrices, index, *MANY).square().sum(), x)[0]

    traced = make_fx(gradient, tracing_mode="symbolic")(x, matrices, index)
    for arguments in (draw(12), draw(30)):
        torch.testing.assert_close(traced(*arguments), gradient(*arguments), rtol=1e-12, atol=1e-12)


def test_an_atom_does_not_depend_on_the_rest_of_the_batch():
    x, matrices, index = draw(60)
    whole = own_products(x, matrices, index, *MANY)
    for part in (slice(0, 1), slice(3, 20), slice(20, 60)):
        alone = own_products(x[part], matrices, index[part], *MANY)
        torch.testing.assert_close(alone, whole[part], rtol=1e-13, atol=1e-14)


def fitted(kinds, size, regions=1):
    leverage = Leverage(size, kinds).float()
    leverage.resize(kinds, regions)
    leverage.axes.copy_(torch.arange(kinds))
    leverage.whitening.normal_(generator=torch.Generator().manual_seed(0))
    leverage.region_stretch.fill_(1.0)
    leverage.region_offsets.zero_()
    leverage.fitted.fill_(True)
    return leverage


def profiled(leverage, atoms, present):
    """Operators of a call, and the most bytes that it has in memory at once."""
    x, _, species = draw(atoms, 1, leverage.centres.shape[1], present)
    x = x.float()
    with torch.inference_mode():
        leverage(x, species)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            leverage(x, species)
    events = profiler.profiler.kineto_results.events()
    bytes_now = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"]).cumsum(0)
    operators = sum(event.name.startswith("aten::") and event.cpu_parent is None for event in profiler.events())
    return operators, int(bytes_now.max())


@pytest.mark.parametrize("atoms", [21, 192, 1500])
def test_many_kinds_take_no_more_memory_per_atom(atoms):
    """Four kilobytes in float32 for 256 features, of which one is the result; 92 where all matrices are multiplied."""
    few, many = (profiled(fitted(kinds, 256), atoms, kinds)[1] / atoms for kinds in (4, 89))
    assert many < 4120 + 1e5 / atoms and many < few + 1e5 / atoms


def test_regions_take_memory_up_to_a_bound():
    leverage = fitted(4, 64, 16)
    assert profiled(leverage, 2000, 4)[1] < 2000 * 4 * 4 * 64 + 3 * 4 * leverage.at_once


def test_operators_follow_the_kinds_of_the_atoms_not_of_the_model():
    """On a molecule each operator costs what a thousand atoms would."""
    few, many = (profiled(fitted(kinds, 64), 21, 4)[0] for kinds in (4, 89))
    assert few <= 35 and many <= few + 15
    assert profiled(fitted(178, 64), 21, 4)[0] == many


def test_regions_in_parts(fill_leverage):
    leverage, generator = Leverage(SIZE, 3).double(), torch.Generator().manual_seed(0)
    fill_leverage(leverage, [3, 1, 2])
    x, species = torch.randn(50, SIZE, generator=generator), torch.arange(50) % 3
    at_once = leverage(x, species)
    leverage.at_once = 7 * 3 * SIZE
    for parts in (leverage, torch.jit.script(leverage)):
        torch.testing.assert_close(parts(x, species).leverage, at_once.leverage, rtol=1e-13, atol=0)
