"""Small PaiNN and AlphaNet models; without torch-geometric nothing in this folder is collected."""

import importlib.util

import pytest

if importlib.util.find_spec("nequip") is None or importlib.util.find_spec("torch_geometric") is None:
    collect_ignore_glob = ["test_*.py"]

#: Sizes at which a test takes a fraction of a second.
SIZES = {
    "nequip_ext.PaiNNModel": {"num_layers": 2, "num_features": 8, "num_radial": 6},
    "nequip_ext.AlphaNetModel": {
        "num_layers": 2,
        "num_features": 16,
        "num_radial": 6,
        "num_phase_channels": 16,
        "num_phases": 3,
        "num_states": 4,
        "phase_rank": 2,
    },
}
KINDS = [(target, preset) for target in SIZES for preset in ("default", "paper")]


def _config(target, preset="default", **changes):
    return {
        "_target_": target,
        "seed": 1,
        "model_dtype": "float64",
        "type_names": ["H", "C", "O"],
        "r_max": 4.0,
        "preset": preset,
        **SIZES[target],
        "avg_num_neighbors": 8.0,
        "per_type_energy_scales": 1.3,
        "per_type_energy_shifts": {"H": -1.0, "C": -2.0, "O": -3.0},
        **changes,
    }


@pytest.fixture(scope="session")
def backbone_config():
    """Function that gives the config of a small model by target and preset; keywords replace its values."""
    return _config


@pytest.fixture(scope="session")
def build(default_dtype):
    """Function that builds the model of `backbone_config`, with biases and gains that are not those of the start."""
    import torch
    from hydra.utils import get_method

    def make(target, preset="default", **changes):
        config = _config(target, preset, **changes)
        model = get_method(config.pop("_target_"))(**config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise.to(parameter.dtype))
        return model

    return make


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind).split(".")[1].replace("Model", ""))
def kind(request):
    """Target and preset of a backbone."""
    return request.param


@pytest.fixture
def any_model(kind, build):
    """Such a model."""
    return build(*kind)
