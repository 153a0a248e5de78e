"""NequIP's own extension tests, run on E2IPModel (compile tests run where there is a GPU)."""

import pytest
from nequip.utils.unittests.model_tests_train_time_compile import TrainTimeCompileMixin

_COMMON = {
    "seed": 123,
    "type_names": ["H", "C", "O", "Cu"],
    "r_max": 4,
    "avg_num_neighbors": 20.0,
    "radial_mlp_depth": 1,
    "radial_mlp_width": 8,
    "num_features": 4,
}
_ARCHITECTURES = {
    "scalar-only": {"l_max": 0, "num_layers": 2},
    "l2": {"l_max": 2, "num_layers": 2, "parity": False},
}


class TestE2IPModel(TrainTimeCompileMixin):
    @pytest.fixture
    def strict_locality(self):
        return False

    @pytest.fixture(scope="class", params=_ARCHITECTURES.values(), ids=_ARCHITECTURES.keys())
    @classmethod
    def config(cls, request):
        inner = {"_target_": "nequip.model.NequIPGNNModel", **_COMMON, **request.param}
        # The host's tests read type_names off the outermost model.
        return {"_target_": "nequip_ext.E2IPModel", "seed": 1, "model": inner, "type_names": inner["type_names"]}

    @staticmethod
    def make_model(model_config, device):
        without = {key: value for key, value in model_config.items() if key != "type_names"}
        return TrainTimeCompileMixin.make_model(without, device)
