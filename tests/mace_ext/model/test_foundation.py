"""E²IP models as starting points: `remove_pt_head`, `mace_select_head`, ``--foundation_model``, conversions."""

import logging

import pytest
import torch
from mace.tools.scripts_utils import extract_config_mace_model, remove_pt_head

from e2ip_plugins import families
from e2ip_plugins.readout.readout import model_name
from mace_ext.model.foundation import load_foundation_readout

NAMES = [key.name for key in families.get("e2ip").output_keys()]


def assert_same_uncertainties(output, expected):
    for name in ("energy", "forces", *NAMES):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("hidden_irreps", ["8x0e", "8x0e+8x1o"])
@pytest.mark.parametrize("kept", ["pt_head", "one", "two"])
def test_the_kept_head_keeps_its_readout(make_model, make_batch, frames, hidden_irreps, kept):
    heads = ["pt_head", "one", "two"]
    model = make_model(hidden_irreps=hidden_irreps, heads=tuple(heads))
    expected = model(make_batch(frames, heads=heads, head=kept))
    single = remove_pt_head(model, kept)
    assert single.heads == [kept] and len(single.e2ip_readout.trunks) == 1
    assert_same_uncertainties(single(make_batch(frames, heads=[kept], head=kept)), expected)


def test_select_head_command(model_files, make_batch, frames, run_tool, tmp_path):
    run_tool("mace_select_head", "-n", "two", "-o", tmp_path / "two.model", model_files["multihead"])
    both = torch.load(model_files["multihead"], weights_only=False)
    expected = both(make_batch(frames, heads=["one", "two"], head="two"))
    single = torch.load(tmp_path / "two.model", weights_only=False)
    assert_same_uncertainties(single(make_batch(frames, heads=["two"], head="two")), expected)


def test_settings_survive_a_rebuild(make_model):
    model = make_model(options=(("preset", "paper"), ("evidence_weight", 0.3)), force_unit=0.25)
    config = extract_config_mace_model(model)
    rebuilt = type(model)(**config)
    rebuilt.load_state_dict(model.state_dict())
    assert not rebuilt.e2ip_readout.settings.differences(model.e2ip_readout.settings)
    assert rebuilt.e2ip_readout.settings.options["evidence_weight"] == 0.3
    assert extract_config_mace_model(make_model(readout=None)).keys() == config.keys() - {
        "e2ip_settings",
        "e2ip_axes",
        "e2ip_regions",
        "e2ip_stress",
    }


def test_a_readout_that_means_something_else_is_not_taken_over(make_model, caplog):
    foundation, model = make_model(), make_model(seed=1, options=(("evidence", "independent"),))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING):
        load_foundation_readout(model, foundation)
    assert "differs in: evidence" in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_readout_that_differs_in_its_loss_alone_is_taken_over(make_model):
    """The weight of a term of the loss changes nothing in what the readout's weights mean."""
    independent = ("evidence", "independent")
    foundation = make_model(options=(independent,), hidden_irreps="8x0e")
    model = make_model(options=(independent, ("evidence_weight", 0.5)), hidden_irreps="8x0e", seed=1)
    load_foundation_readout(model, foundation)
    expected = foundation.e2ip_readout.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.e2ip_readout.state_dict().items())
    assert model.e2ip_readout.settings.options["evidence_weight"] == 0.5


def test_fine_tuning_starts_where_the_foundation_model_stopped(train, make_batch, frames):
    # One epoch at a vanishing rate: what is saved is what training began with.
    still = dict(max_num_epochs=1, lr=1e-30, E0s="{1: -1.0, 8: -2.0}")
    baseline = train(name="baseline", max_num_epochs=1)
    first = train("--readout=e2ip", f"--foundation_model={baseline.folder / 'baseline.model'}", name="first", **still)
    plain, upgraded = baseline.model.state_dict(), first.model.state_dict()
    for key, value in plain.items():
        if "atomic_energies" not in key and "scale_shift" not in key:
            assert torch.equal(upgraded[key], value)
    assert any(key.startswith("e2ip_readout.") for key in upgraded)

    learned = train("--readout=e2ip", "--e2ip_force_unit=0.2", name="learned", max_num_epochs=1)
    second = train("--readout=e2ip", f"--foundation_model={learned.folder / 'learned.model'}", name="second", **still)
    assert "readout taken over from the foundation model" in second.text
    assert second.model.e2ip_readout.settings.force_unit == 0.2
    stock = train(f"--foundation_model={learned.folder / 'learned.model'}", name="stock", **still)
    assert "the foundation model's readout is left out: this training has no --readout" in stock.text
    assert not hasattr(stock.model, "e2ip_readout")
    batch = make_batch([atoms for atoms in frames if set(atoms.numbers) <= {1, 8}], species=(1, 8))
    expected, output = learned.model({**batch}), second.model({**batch})
    for name in NAMES:
        torch.testing.assert_close(output[name], expected[name], rtol=1e-9, atol=1e-13)


def test_lora_weights_merge_into_the_same_uncertainties(make_model, make_batch, frames):
    from mace.modules.lora import inject_LoRAs, merge_lora_weights

    model = inject_LoRAs(make_model(), rank=2, alpha=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    batch = make_batch(frames)
    expected = model({**batch})
    merged = merge_lora_weights(model, inplace=False)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert_same_uncertainties(merged({**batch}), expected)


@pytest.mark.parametrize("hidden_irreps", ["8x0e", "8x0e+8x1o+8x2e"])
def test_cuequivariance_conversion_both_ways(make_model, make_batch, frames, hidden_irreps):
    pytest.importorskip("cuequivariance_torch", reason="cuequivariance_torch is not installed")
    from mace.cli import convert_cueq_e3nn, convert_e3nn_cueq

    heads = ["one", "two"]
    model = make_model(hidden_irreps=hidden_irreps, heads=tuple(heads))
    batch = make_batch(frames, heads=heads, head="two")
    expected = model({**batch})
    converted = convert_e3nn_cueq.run(model)
    # cuEquivariance puts components first.
    assert converted.e2ip_readout.components_first and not model.e2ip_readout.components_first
    assert model_name(converted.e2ip_readout) == model_name(model.e2ip_readout)
    assert_same_uncertainties(converted({**batch}), expected)
    assert_same_uncertainties(convert_cueq_e3nn.run(converted)({**batch}), expected)
