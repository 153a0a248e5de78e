"""Builders of both backbones: numbers of weights, and options with which no model can be built."""

import pytest
from hydra.utils import get_method

from e2ip_plugins.errors import InputError

PAINN, ALPHANET = "nequip_ext.PaiNNModel", "nequip_ext.AlphaNetModel"


@pytest.mark.parametrize(
    ("target", "types", "options", "expected"),
    [
        (PAINN, 100, {}, 589_057),
        (PAINN, 100, {"num_layers": 6, "num_radial": 128}, 1_405_825),
        (ALPHANET, 4, {}, 3_410_115),
        (ALPHANET, 3, {}, 3_409_859),
        # The first published form without the map of angles of the last layer, which nothing trains.
        (ALPHANET, 95, {"preset": "paper"}, 3_429_123 - 64 - 2_112),
    ],
)
def test_numbers_of_weights(default_dtype, target, types, options, expected):
    common = {"seed": 1, "model_dtype": "float32", "r_max": 5.0, "avg_num_neighbors": 20.0}
    model = get_method(target)(type_names=[f"X{i}" for i in range(types)], **common, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (PAINN, {"preset": "smooth"}, "unknown preset 'smooth'; choose from: default, paper"),
        (PAINN, {"num_layers": 0}, "num_layers is 0"),
        (PAINN, {"num_layers": 2.5}, "num_layers is 2.5: give a whole number"),
        (PAINN, {"num_features": 7}, "num_features is 7: give an even number"),
        (PAINN, {"num_features": -2}, "num_features is -2: give a whole number from 1 on"),
        (
            PAINN,
            {"numlayers": 2},
            "PaiNNModel: unknown option numlayers; it has: seed, .* num_layers, .* pair_pot",
        ),
        (PAINN, {"r_max": -1.0}, "r_max is -1.0: give the cutoff in Å"),
        (PAINN, {"type_names": ["H", "C_1"]}, "letters and digits only; found: C_1"),
        (ALPHANET, {"num_features": 24}, "num_features is 24: give a multiple of 16"),
        (ALPHANET, {"num_phase_channels": 8}, "num_phase_channels is 8: give a multiple of 16"),
        (ALPHANET, {"num_complex": 5}, "AlphaNetModel: unknown option num_complex; it has: .* num_phase_channels"),
        (ALPHANET, {"avg_num_neighbors": None}, "weighs neighbours by their mean number"),
        (ALPHANET, {"avg_num_neighbors": float("nan")}, "weighs neighbours by their mean number"),
        (ALPHANET, {"avg_num_neighbors": {"H": 3.0, "C": 4.0}}, "weighs neighbours by their mean number"),
    ],
)
def test_bad_options(default_dtype, backbone_config, target, changes, message):
    config = backbone_config(target, **changes)
    with pytest.raises(InputError, match=message):
        get_method(config.pop("_target_"))(**config)
