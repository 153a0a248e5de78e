"""The evidential model: the stock energy and forces, and covariances that turn with the atoms."""

import numpy as np
import pytest
import torch

from e2ip_plugins import families
from e2ip_plugins.readout.loss import force_loss

FORCES = ("forces", "forces_cov", "forces_aleatoric_cov", "forces_epistemic_cov")
IRREPS = ["8x0e", "8x0e+8x1o", "8x0e+8x1o+8x2e", "8x0e+8x1o+8x2e+8x3o"]


def randomise(model, seed=0):
    """Weights far from the nearly isotropic start, so that a test of anisotropy is not vacuous."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.e2ip_readout.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(2.0 * noise)


def anisotropy(covariance):
    """Ratio of the largest to the smallest eigenvalue, per atom."""
    values = torch.linalg.eigvalsh(covariance)
    return values[:, 2] / values[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("readout", "irreps", "training"),
    [*(("e2ip", irreps, True) for irreps in IRREPS), *(("shallow", IRREPS[1], training) for training in (True, False))],
)
def test_energy_and_forces_are_the_stock_ones_to_the_last_bit(
    make_model, make_batch, frames, readout, irreps, training, dtype
):
    stock, ours = (make_model(irreps, readout=name, dtype=dtype, max_ell=3) for name in (None, readout))
    torch.set_default_dtype(dtype)
    # The first evaluations in a process may round otherwise than all later ones, stock MACE against itself, too.
    for stress in (False, True, False, True):
        expected = stock(make_batch(frames), compute_stress=stress, training=training)
        found = ours(make_batch(frames), compute_stress=stress, training=training)
    for key in ("energy", "forces", "stress", "node_energy", "node_feats"):
        assert found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]), key
    assert found["forces_cov"].requires_grad == training


def test_adding_a_readout_draws_no_random_numbers(make_model):
    """Whatever is drawn later, the order of the batches to begin with, is as in the stock run."""
    from e2ip_plugins.readout.settings import Settings
    from mace_ext.model.model import add_readout

    model = make_model(readout=None)
    state = torch.random.get_rng_state()
    add_readout(model, Settings.of("e2ip", {}, 0.05), seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(("readout", "irreps"), [*(("e2ip", irreps) for irreps in IRREPS), ("shallow", IRREPS[1])])
def test_rotations_and_reflections(make_model, make_batch, readout, irreps, periodic):
    from ase import Atoms
    from scipy.spatial.transform import Rotation

    rng = np.random.default_rng(1)
    model = make_model(irreps, max_ell=3, readout=readout)
    if readout == "e2ip":
        randomise(model)
    numbers, positions = [6, 8, 1, 1, 6, 1], rng.uniform(0, 3.5, (6, 3))
    cell = np.diag([4.2, 4.6, 5.1]) + rng.uniform(-0.3, 0.3, (3, 3)) if periodic else np.zeros((3, 3))
    turns = [np.eye(3)]
    turns += [
        sign * matrix
        for matrix, sign in zip(Rotation.random(100, rng=rng).as_matrix(), rng.choice([-1, 1], 100), strict=True)
    ]
    turned = [Atoms(numbers, positions @ turn.T, cell=cell @ turn.T, pbc=periodic) for turn in turns]
    output = model(make_batch(turned))
    found = {key: output[key].detach().reshape(101, 6, *output[key].shape[1:]) for key in FORCES}
    assert anisotropy(found["forces_cov"][0]).max() > (2.0 if readout == "e2ip" else 3.0)
    turn = torch.from_numpy(np.stack(turns))
    for key, value in found.items():
        if key == "forces":
            expected = torch.einsum("rij,nj->rni", turn, value[0])
        else:
            expected = torch.einsum("rij,njk,rlk->rnil", turn, value[0], turn)
        assert (value - expected).abs().max() <= 1e-10 * expected.abs().max(), (
            key
        )  # a shallow ensemble has no aleatoric part


@pytest.mark.parametrize("irreps", IRREPS[:2])
def test_sites_with_inversion_symmetry_can_be_anisotropic(make_model, make_batch, irreps):
    """Products of vectors vanish on the carbon of CO2: the edge pool sees its axis."""
    from ase import Atoms

    model = make_model(irreps)
    randomise(model)
    covariance = model(make_batch([Atoms("OCO", [[0, 0, -1.16], [0, 0, 0], [0, 0, 1.16]])]))["forces_cov"]
    assert anisotropy(covariance[1:2]).item() > 1.5
    assert covariance[1, 0, 0].item() == pytest.approx(covariance[1, 1, 1].item())


@pytest.mark.parametrize(
    "settings", [{"num_interactions": 1}, {"keep_last_layer_irreps": True}, {"apply_cutoff": False}], ids=str
)
def test_other_architectures(make_model, make_batch, frames, settings):
    if "apply_cutoff" in settings:
        from mace import modules

        block = modules.interaction_classes["RealAgnosticDensityResidualInteractionBlock"]
        settings = {**settings, "interaction_cls": block}
    output = make_model("8x0e+8x1o", **settings)(make_batch(frames))
    assert torch.isfinite(output["forces_cov"]).all()


def test_an_isolated_atom_is_isotropic(make_model, make_batch):
    from ase import Atoms

    model = make_model("8x0e+8x1o")
    randomise(model)
    covariance = model(make_batch([Atoms("O", [[0, 0, 0]])]))["forces_cov"][0]
    assert torch.allclose(covariance, covariance[0, 0] * torch.eye(3))


def test_the_node_features_learn_from_the_uncertainty(make_model, make_batch, frames):
    model = make_model()
    model(make_batch(frames), training=True)["e2ip_nu"].sum().backward()
    assert model.node_embedding.linear.weight.grad.abs().max() > 0


def test_every_mace_head_has_its_own_uncertainty(make_model, make_batch, frames):
    model = make_model(heads=("one", "two"))
    randomise(model)
    first, second = (model(make_batch(frames, heads=["one", "two"], head=head)) for head in ("one", "two"))
    assert not torch.allclose(first["e2ip_nu"], second["e2ip_nu"])
    model.e2ip_readout.trunks[1].load_state_dict(model.e2ip_readout.trunks[0].state_dict())
    second = model(make_batch(frames, heads=["one", "two"], head="two"))
    assert torch.equal(first["e2ip_nu"], second["e2ip_nu"])


@pytest.mark.parametrize(
    ("irreps", "apply_cutoff"), [("8x0e", True), ("8x0e", False), ("8x0e+8x1o", True), ("8x0e+8x1o+8x2e", True)]
)
def test_uncertainties_are_smooth_where_an_atom_leaves_the_cutoff(make_model, make_batch, irreps, apply_cutoff):
    """No jump and no kink: value and slope go to those of the atom out of reach, as MACE's own forces do."""
    from ase import Atoms
    from mace import modules

    from mace_ext import uncertainty_gradient

    settings = {"max_ell": 3}
    if not apply_cutoff:
        # The models that leave the cutoff to their interactions: their radial functions alone have a slope there.
        block = modules.interaction_classes["RealAgnosticDensityResidualInteractionBlock"]
        settings.update(apply_cutoff=False, interaction_cls=block, interaction_cls_first=block)
    model, cutoff = make_model(irreps, **settings), 4.0
    weights = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))

    def at(distance):
        """Weighted sum of all covariances, and its slope, with the oxygen that far from the carbon alone."""
        atoms = Atoms("CHHO", [[0, 0, 0], [-0.6, 0.8, 0.1], [-0.6, -0.3, 0.8], [distance, 0, 0]])
        found, slope = uncertainty_gradient(model, make_batch([atoms]), lambda o: (weights * o["forces_cov"]).sum())
        return found.item(), slope[3, 0].item()

    outside, slope_outside = at(cutoff + 1e-4)
    inside, slope_inside = at(cutoff - 1e-4)
    within, slope_within = at(0.75 * cutoff)
    assert slope_outside == 0.0
    # The atom within reach matters: otherwise the rest would mean nothing.
    assert abs(within - outside) > 1e-4 * abs(outside) and abs(slope_within) > 0
    assert abs(inside - outside) < 1e-6 * abs(within - outside)
    assert abs(slope_inside) < 1e-4 * abs(slope_within)


def test_layout_follows_the_backend(make_model):
    """cuEquivariance puts components first; the blocks are those of MACE's concatenated layers."""
    from types import SimpleNamespace

    from mace_ext.model.readout import _layout

    model = make_model("8x0e+4x1o+2x2e", readout=None)
    expected = {"scalars": [(0, 8), (30, 8)], "vectors": [(8, 4)], "tensors": [(20, 2)], "num_radial": 4}
    for name in ("mul_ir", "ir_mul"):
        model.products[0].cueq_config = SimpleNamespace(enabled=True, layout_str=name)
        found = _layout(model)
        assert {key: getattr(found, key) for key in expected} == expected
        assert found.components_first == (name == "ir_mul")


@pytest.mark.parametrize("family", families.table())
def test_every_family_leaves_the_stock_model_alone_learns_and_turns_if_it_says_so(
    make_model, make_batch, frames, family
):
    stock, model = make_model(readout=None), make_model(readout=family)
    batch = make_batch(frames)
    for _ in range(3):  # TorchScript inside e3nn compiles itself during the first calls, which changes rounding
        expected, output = stock(batch, training=True), model(batch, training=True)
    for key in ("energy", "forces"):
        assert torch.equal(output[key], expected[key])
    reference = output["forces"].detach() + 0.1
    loss, mask = force_loss(model.e2ip_readout.family, reference, output["forces"], output)
    assert mask.all() and torch.isfinite(loss).all() and (loss > 0).all()
    loss.sum().backward()
    gradients = [parameter.grad for parameter in model.e2ip_readout.trunks.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    generator = torch.Generator().manual_seed(0)
    turn = -torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]
    turned = [frame.copy() for frame in frames]
    for frame in turned:
        frame.positions, frame.cell = frame.positions @ turn.numpy().T, frame.cell.array @ turn.numpy().T
    covariance, after = (f["forces_cov"].detach() for f in (output, model(make_batch(turned))))
    moved = (after - turn @ covariance @ turn.T).abs().max() / covariance.abs().max()
    assert (moved < 1e-9) == families.get(family).equivariant


@pytest.mark.parametrize("transform", ["None", "Agnesi", "Soft"])
def test_the_pool_reads_the_radial_functions_of_the_host(make_model, make_batch, frames, transform):
    """The readout puts them together itself, from the host's parts."""
    model, ours, hosts = make_model(distance_transform=transform), [], []
    model.e2ip_readout.pool.register_forward_pre_hook(lambda _, given: ours.append(given[1]))
    model.radial_embedding.register_forward_hook(lambda *call: hosts.append(call[-1]))
    model(make_batch(frames))
    (radial,), (expected,) = ours, hosts
    assert torch.equal(radial, expected[0] if isinstance(expected, tuple) else expected)
