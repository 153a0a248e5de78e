"""Parameters to output keys: units, committees, TorchScript."""

import pytest
import torch

from e2ip_plugins.families.e2ip import convert_niw, derive_niw, derive_niw_committee
from e2ip_plugins.keys import DERIVED_KEYS


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    draw = {
        "e2ip_log_sigma0": torch.randn(3, 7, 6, generator=generator, dtype=torch.float64) - 5.0,
        "e2ip_nu": 5.0 + torch.rand(3, 7, generator=generator, dtype=torch.float64),
        "e2ip_kappa": 0.1 + torch.rand(3, 7, generator=generator, dtype=torch.float64),
    }
    return draw, torch.randn(3, 7, 3, generator=generator, dtype=torch.float64)


def test_unit_factor_is_squared_on_covariances_and_plain_on_stds(parameters):
    factor = 27.2113 / 0.529177
    before, after = derive_niw(parameters[0]), derive_niw(convert_niw(parameters[0], factor))
    assert set(before) == {key.name for key in DERIVED_KEYS}
    for key in DERIVED_KEYS:
        torch.testing.assert_close(after[key.name], before[key.name] * factor**key.force_power, rtol=1e-12, atol=0)


def test_committee_covariance_is_that_of_samples_from_the_mixture(parameters):
    niw, forces = parameters
    got = derive_niw_committee(niw, forces)
    members = derive_niw(niw)
    # E[xxᵀ] - E[x]E[x]ᵀ of the mixture, which must not depend on how it is split.
    second_moment = (members["forces_cov"] + forces.unsqueeze(-1) * forces.unsqueeze(-2)).mean(0)
    mean = forces.mean(0)
    expected = second_moment - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    torch.testing.assert_close(got["forces_cov"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["forces_aleatoric_cov"], members["forces_aleatoric_cov"].mean(0))
    torch.testing.assert_close(got["forces_cov"], got["forces_aleatoric_cov"] + got["forces_epistemic_cov"])
    assert not any(key.startswith("e2ip_") for key in got)


def test_committee_of_one_model_is_that_model(parameters):
    niw, forces = ({key: value[:1] for key, value in parameters[0].items()}, parameters[1][:1])
    single = derive_niw({key: value[0] for key, value in niw.items()})
    for key, value in derive_niw_committee(niw, forces).items():
        assert torch.equal(value, single[key])


def test_derive_niw_scripts(parameters):
    scripted = torch.jit.script(derive_niw)(parameters[0])
    for key, value in derive_niw(parameters[0]).items():
        assert torch.equal(scripted[key], value)
