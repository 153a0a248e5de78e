"""What the log says of validation metrics."""

import logging

import pytest

from mace_ext.training.metrics import log_validation


@pytest.mark.parametrize(("epoch", "error", "warned"), [(None, 104.2, True), (None, 0.9, False), (3, 104.2, False)])
def test_energies_of_another_reference_are_warned_of_once(caplog, epoch, error, warned):
    with caplog.at_level(logging.INFO):
        log_validation({"e2ip_nll": 1.0, "rmse_e_per_atom": error}, epoch, "Default")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == warned
    assert all("energies are off by 104 eV per atom" in text for text in warnings)


def test_a_stock_model_is_not_warned_of(caplog):
    log_validation({"rmse_e_per_atom": 104.2}, None, "Default")
    assert not caplog.records
