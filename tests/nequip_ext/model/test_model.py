"""E2IPModel: stock energies and forces, physics of the covariances, clear errors."""

import math

import pytest
import torch
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, PLATEAU_KEY
from e2ip_plugins.maths.kernels.inference import _tables
from e2ip_plugins.readout.loss import force_loss
from nequip_ext import E2IPModel
from nequip_ext.model.readout import TAP_KEY, find_readout

KEYS = families.get(families.DEFAULT).output_keys()
ARCHITECTURES = {
    "scalar-only": {"l_max": 0},
    "l1": {"l_max": 1},
    "l1-no-parity": {"l_max": 1, "parity": False},
    "l2": {"l_max": 2},
    "l3": {"l_max": 3, "num_features": [4, 3, 2, 2]},
    "one-layer": {"l_max": 2, "num_layers": 1},
    "three-layers": {"l_max": 2, "num_layers": 3},
}
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


def randomise(model):
    """Strong random readout weights: untrained ones are close to isotropic and would hide errors."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in find_readout(model).named_parameters():
            size = 300.0 if "mix" in name else 2.0  # untrained features are small
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("readout", "architecture"),
    [
        pytest.param(readout, ARCHITECTURES[name], id=f"{readout}-{name}")
        for readout, names in (("e2ip", ARCHITECTURES), ("shallow", ("scalar-only", "l2", "one-layer")))
        for name in names
    ],
)
def test_energy_and_forces_are_the_baselines(make_model, gnn_config, frames, to_data, architecture, dtype, readout):
    baseline, model = make_model(gnn_config(model_dtype=dtype, **architecture), readout=readout)
    for training in (False, True):
        baseline.train(training), model.train(training)
        for atoms in frames:
            expected, output = baseline(to_data(atoms)), model(to_data(atoms))
            for key in ("total_energy", "atomic_energy", "forces", "stress", "virial"):
                assert torch.equal(torch.nan_to_num(expected[key]), torch.nan_to_num(output[key])), key
            assert output["forces_cov"].requires_grad == training


def test_outputs_are_of_use_to_autograd(make_model, gnn_config, frames, to_data):
    """Though they are computed where it is not, and constants that are kept are those of a training, too."""
    _tables.cache_clear()
    _, model = make_model(gnn_config(l_max=2))
    output, weight = model.eval()(to_data(frames[0])), torch.ones((), requires_grad=True)
    for key in KEYS:
        assert not output[key.name].requires_grad and not output[key.name].is_inference()
        (gradient,) = torch.autograd.grad((weight * output[key.name]).sum(), weight)
        assert torch.isfinite(gradient)
    output = model.train()(to_data(frames[0]))
    found = {name: value.squeeze(-1) for name, value in output.items()}
    loss, _ = force_loss(find_readout(model).family, torch.zeros_like(output["forces"]), output["forces"], found)
    loss.sum().backward()


def test_building_draws_nothing_from_the_global_stream(make_model, gnn_config):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    make_model(gnn_config())
    assert torch.equal(torch.rand(3), expected)


def test_seed_decides_the_readout_alone(gnn_config):
    first, second, again = (E2IPModel(model=gnn_config(), seed=seed) for seed in (1, 2, 1))
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, c), name
        assert torch.equal(a, b) or "e2ip_readout" in name, name
    assert not torch.equal(find_readout(first).trunks[0].out.weight, find_readout(second).trunks[0].out.weight)


@architectures
def test_shapes_and_bookkeeping(make_model, gnn_config, frames, to_data, architecture):
    _, model = make_model(gnn_config(model_dtype="float32", **architecture))
    output = model(to_data(frames[0]))
    number = len(frames[0])
    for key in KEYS:
        assert output[key.name].shape == (number, *(key.shape or (1,))), key.name
        assert output[key.name].dtype == torch.float64
        assert (key.name in model.irreps_out) == (key.shape in ((), (3, 3)))
    assert torch.allclose(output[FORCE_UNIT_KEY], torch.tensor(0.0433641))
    assert output[PLATEAU_KEY].shape == (number, 1)
    assert TAP_KEY not in output and TAP_KEY not in model.irreps_out
    parts = output["forces_aleatoric_cov"] + output["forces_epistemic_cov"]
    assert torch.allclose(output["forces_cov"], parts, rtol=1e-12)
    assert (torch.linalg.eigvalsh(output["forces_cov"]) > 0).all()


@architectures
def test_only_proper_parities_are_read(make_model, gnn_config, architecture):
    model = make_model(gnn_config(**architecture))[1]
    readout, tapped = find_readout(model), model.model.func.e2ip_readout.irreps_in.get(TAP_KEY)
    if tapped is None:
        assert architecture.get("num_layers") == 1
        assert not readout.vector_blocks and not readout.tensor_blocks and readout.has_pool
        return
    layout = tapped.slices()
    for found, irrep in ((readout.vector_blocks, "1o"), (readout.tensor_blocks, "2e")):
        used = [tapped[[s.start for s in layout].index(start)].ir for start, _ in found]
        assert all(str(ir) == irrep for ir in used)
        assert len(used) == sum(str(ir) == irrep for _, ir in tapped)
    assert readout.has_pool == (not readout.tensor_blocks)


@architectures
def test_rotations_and_reflections(make_model, gnn_config, frames, to_data, anisotropy, turning_error, architecture):
    _, model = make_model(gnn_config(**architecture))
    randomise(model)
    keys = ("forces", "forces_cov", "forces_aleatoric_cov", "forces_epistemic_cov")
    for data in map(to_data, frames[:2]):
        assert anisotropy(model(dict(data))["forces_cov"]) > 0.1, "isotropic: nothing is tested"
        assert turning_error(model, data, keys, 100) < 1e-10


@pytest.mark.parametrize("architecture", [{"l_max": 0}, {"l_max": 2}, {"l_max": 1, "num_layers": 1}], ids=str)
def test_rotations_and_reflections_of_a_readout_with_forces(
    make_model, gnn_config, frames, to_data, anisotropy, turning_error, architecture
):
    _, model = make_model(gnn_config(**architecture), readout="shallow")
    for data in map(to_data, frames[:2]):
        assert anisotropy(model(dict(data))["forces_cov"]) > 0.3
        assert turning_error(model, data) < 1e-10


def test_outputs_are_smooth_at_the_cutoff(make_model, gnn_config, to_data):
    import ase

    for architecture in ({"l_max": 0}, {"l_max": 2}):
        _, model = make_model(gnn_config(**architecture))
        randomise(model)
        inside, outside = (
            model(to_data(ase.Atoms("OHC", [[0, 0, 0], [0.9, 0.1, 0], [0, 4.0 + step, 0.0]]))) for step in (-1e-4, 1e-4)
        )
        for key in ("e2ip_log_sigma0", "e2ip_nu", "e2ip_kappa"):
            assert torch.allclose(inside[key], outside[key], atol=1e-8), key


def test_isolated_atom_is_isotropic(make_model, gnn_config, to_data):
    import ase

    _, model = make_model(gnn_config())
    randomise(model)
    covariance = model(to_data(ase.Atoms("OH", [[0, 0, 0], [0, 0, 50.0]])))["forces_cov"]
    assert torch.allclose(covariance, covariance[:, :1, :1] * torch.eye(3))


def test_force_unit_is_saved_with_the_model(gnn_config):
    automatic = E2IPModel(model=gnn_config(), seed=1, force_unit="auto", forces_rms=2.0)
    assert find_readout(automatic).force_unit.item() == pytest.approx(0.06)
    default = E2IPModel(model=gnn_config(), seed=1)
    default.load_state_dict(automatic.state_dict())
    assert find_readout(default).force_unit.item() == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evidence": "both"}, "unknown evidence mode 'both'"),
        ({"preset": "other"}, "unknown preset 'other'"),
        ({"force_units": 0.1}, "force_units is no option of readout 'e2ip'.*; E2IPModel itself takes model, seed, "),
        ({"force_unit": 0.0}, "force_unit must be"),
        ({"force_unit": "auto"}, "needs the training forces"),
        ({"force_unit": "auto", "forces_rms": math.nan}, "needs the training forces"),
    ],
)
def test_bad_options(gnn_config, options, message):
    with pytest.raises(InputError, match=message):
        E2IPModel(model=gnn_config(), seed=1, **options)


def test_bad_inner_models(gnn_config):
    with pytest.raises(InputError, match="computes forces"):
        E2IPModel(model=gnn_config(do_derivatives=False), seed=1)
    with pytest.raises(InputError, match="config of the inner model"):
        E2IPModel(model={"seed": 1}, seed=1)
    with pytest.raises(InputError, match="already has an e2ip readout"):
        E2IPModel(model={"_target_": "nequip_ext.E2IPModel", "seed": 1, "model": gnn_config()}, seed=1)
    with pytest.raises(InputError, match="E2IPDataStatisticsManager"):
        E2IPModel(model=gnn_config(per_type_energy_scales=math.nan), seed=1)


@pytest.mark.parametrize("family", families.table())
def test_every_family_leaves_the_stock_model_alone_learns_and_turns_if_it_says_so(
    make_model, frames, to_data, turning_error, family
):
    baseline, model = make_model(readout=family)
    model.train()
    data = AtomicDataDict.batched_from_list([to_data(atoms) for atoms in frames])
    expected, output = baseline(dict(data)), model(dict(data))
    for key in ("total_energy", "forces"):
        assert torch.equal(output[key], expected[key])
    found = {key: value.squeeze(-1) if value.shape[1:] == (1,) else value for key, value in output.items()}
    if found[COEFFICIENTS_KEY].dim() == 1:
        found[COEFFICIENTS_KEY] = output[COEFFICIENTS_KEY]
    reference = output["forces"].detach() + 0.1
    loss, mask = force_loss(find_readout(model).family, reference, output["forces"], found)
    assert mask.all() and torch.isfinite(loss).all() and (loss > 0).all()
    loss.sum().backward()
    gradients = [parameter.grad for parameter in find_readout(model).trunks.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    turning = turning_error(model, to_data(frames[1]), count=2)
    assert (turning < 1e-9) == families.get(family).equivariant
