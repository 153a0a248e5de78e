"""NequIP's own tests of models, run on the backbones (those that compile run where there is a GPU).

Minutes of numerical Jacobians: at night. What they look at is tested beside this file in seconds, and closer.
"""

import pytest
from nequip.utils.unittests.model_tests_train_time_compile import TrainTimeCompileMixin

_COMMON = {"seed": 123, "type_names": ["H", "C", "O", "Cu"], "r_max": 4, "avg_num_neighbors": 20.0}
_EDGES = {"per_edge_type_cutoff": {"H": 2.0, "C": {"H": 4.0, "C": 3.5, "O": 3.7, "Cu": 3.9}, "O": 3.9, "Cu": 4.0}}


class _Backbone(TrainTimeCompileMixin):
    @pytest.fixture
    def strict_locality(self):
        return False


@pytest.mark.nightly
class TestPaiNN(_Backbone):
    @pytest.fixture(scope="class", params=[{"preset": "paper"}, _EDGES], ids=["paper", "edge-types"])
    @classmethod
    def config(cls, request):
        sizes = {"num_layers": 2, "num_features": 8, "num_radial": 6}
        return {"_target_": "nequip_ext.PaiNNModel", **_COMMON, **sizes, **request.param}


@pytest.mark.nightly
class TestAlphaNet(_Backbone):
    @pytest.fixture(scope="class", params=[{"preset": "paper"}, _EDGES], ids=["paper", "edge-types"])
    @classmethod
    def config(cls, request):
        sizes = {"num_layers": 2, "num_features": 16, "num_radial": 6, "num_phase_channels": 16, "num_states": 4}
        return {"_target_": "nequip_ext.AlphaNetModel", **_COMMON, **sizes, **request.param}
