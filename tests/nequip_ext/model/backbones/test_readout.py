"""The readout on both backbones: what it reads, exact symmetry, every predictive family, leverage."""

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from nequip.data import AtomicDataDict

from e2ip_plugins import families
from e2ip_plugins.fitting.batches import in_order
from nequip_ext import E2IPModel, uncertainty_gradient
from nequip_ext.fitting.passes import batching, fit_model
from nequip_ext.model.readout import LAST_KEY, TAP_KEY, find_readout

TARGETS = ["nequip_ext.PaiNNModel", "nequip_ext.AlphaNetModel"]
#: Families whose covariance turns with the atoms.
EQUIVARIANT = ["e2ip", "mve-spd", "shallow"]


@pytest.fixture(params=TARGETS, ids=lambda target: target.split(".")[1][:-5])
def target(request):
    return request.param


@pytest.fixture
def wrap(backbone_config, default_dtype):
    """Function that builds the model of `backbone_config` with a readout that is not isotropic."""

    def make(target, preset="default", changes=(), **options):
        model = E2IPModel(model=backbone_config(target, preset, **dict(changes)), seed=3, **options).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in find_readout(model).parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.7 * noise.to(parameter.dtype))
        return model

    return make


def test_energies_are_those_without_it_and_vectors_come_from_before_the_last_mixing(
    target, wrap, backbone_config, frames, to_data
):
    from hydra.utils import get_method

    config = backbone_config(target)
    stock, model, data = get_method(config.pop("_target_"))(**config).eval(), wrap(target), to_data(frames[1])
    expected, output = stock(dict(data)), model(dict(data))
    for key in ("total_energy", "atomic_energy", "forces", "stress"):
        assert torch.equal(expected[key], output[key]), key
    # Scalars from right after the last layer, and the readout where the averages of weights in checkpoints expect it.
    names = list(model.model.func._modules)
    assert [name for name in names if name in stock.model.func._modules] == list(stock.model.func._modules)
    at = names.index("e2ip_tap")
    assert names[at : at + 4] == ["e2ip_tap", "layer1_mixing", "e2ip_last_tap", "per_atom_energy_readout"]
    assert set(names) - set(stock.model.func._modules) == {"e2ip_tap", "e2ip_last_tap", names[-1]}
    assert names[-1] == "e2ip_readout"
    readout, channels = find_readout(model), stock.irreps_out["node_features"][0].mul
    assert readout.has_pool and readout.vector_blocks == [(channels, channels)]
    assert readout.scalar_blocks == [(0, channels)] and not {TAP_KEY, LAST_KEY} & set(output)
    # Nothing that the energy does not train is read.
    model.train()
    forces = model(dict(data))
    forces["forces_cov"].square().sum().backward()
    last = model.model.func.layer1_mixing.gates[2].weight.grad
    untrained = slice(channels, 2 * channels) if "PaiNN" in target else slice(2 * channels, None)
    assert (last[untrained] == 0).all() and (last != 0).any()


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_covariances_turn_with_the_atoms(target, preset, wrap, frames, to_data, anisotropy, turning_error):
    for family in EQUIVARIANT if preset == "default" else EQUIVARIANT[:1]:
        model, data = wrap(target, preset, readout=family), to_data(frames[1])
        assert anisotropy(model(dict(data))["forces_cov"]) > 0.02, "isotropic: nothing is tested"
        assert turning_error(model, data, count=2) < 1e-10, family


@pytest.mark.parametrize("family", list(families.table()))
def test_every_family(target, family, wrap, frames, to_data):
    model = wrap(target, readout=family, changes={"model_dtype": "float32"}.items())
    output = model(AtomicDataDict.batched_from_list([to_data(atoms) for atoms in frames]))
    for key in families.get(family).output_keys():
        assert torch.isfinite(output[key.name]).all(), key.name


@pytest.mark.parametrize("symbols", ["isolated", "pair", "linear", "planar", "crystal"])
def test_degenerate_neighbourhoods(target, symbols, wrap, to_data, anisotropy):
    atoms = {
        "isolated": Atoms("OH", [[0, 0, 0], [20.0, 0, 0]]),
        "pair": Atoms("CO", [[0, 0, 0], [0, 0, 1.1]]),
        "linear": molecule("CO2"),
        "planar": molecule("C6H6"),
        "crystal": Atoms("CO", [[0, 0, 0], [1.5, 1.5, 1.5]], cell=[3.0, 3.0, 3.0], pbc=True),
    }[symbols]
    model, data = wrap(target), to_data(atoms)
    covariance = model(dict(data))["forces_cov"]
    assert torch.isfinite(covariance).all() and (torch.linalg.eigvalsh(covariance) > 0).all()
    relative = anisotropy(covariance)
    # A linear molecule has an axis, also where it is symmetric to inversion and vectors vanish.
    assert relative < 1e-10 if symbols in ("isolated", "crystal") else relative > 1e-4
    value, gradient = uncertainty_gradient(model, data, "forces_epistemic_std")
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()


def test_leverage(target, wrap, frames, to_data):
    """Fitted to rattled frames; it is one on average for them, and grows for what is none of them."""
    model, data, generator = wrap(target, evidence="leverage"), [], torch.Generator().manual_seed(0)
    for number, atoms in enumerate(8 * frames):
        moved = atoms.copy()
        moved.rattle(0.05, seed=number)
        noise = torch.randn(len(moved), 3, generator=generator, dtype=torch.float64)
        data.append({**to_data(moved), "forces": 0.1 * noise})
    first = 6 * len(frames)
    fit_model(model, *(in_order([part], batching(len(frames))) for part in (data[:first], data[first:])))
    assert bool(find_readout(model).leverage.fitted)
    seen = torch.cat([model(dict(frame))["e2ip_leverage"] for frame in data[:first]]).mean()
    stretched = frames[0].copy()
    stretched.rattle(0.4, seed=1)
    near, far = (model(to_data(atoms)) for atoms in (frames[0], stretched))
    assert seen.item() == pytest.approx(1.0, abs=0.05)
    for key in ("e2ip_leverage", "forces_epistemic_std"):
        assert far[key].mean() > 2.0 * near[key].mean(), key
