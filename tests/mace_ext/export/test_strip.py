"""``e2ip strip``: MACE's own model out of one with a readout."""

import pickletools
import zipfile

import pytest
import torch
from e3nn.util import jit
from mace.modules import models
from typer.testing import CliRunner

from e2ip_plugins.cli import app
from e2ip_plugins.errors import InputError
from mace_ext.export.strip import strip_file


def strings(path):
    """Every name and string in the pickle of a file of torch."""
    with zipfile.ZipFile(path) as archive:
        (pickle,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return {str(argument) for _, argument, _ in pickletools.genops(pickle) if isinstance(argument, str)}


def test_what_is_left_is_stock_mace_to_the_last_bit(make_model, make_batch, frames, tmp_path):
    model = make_model()
    torch.save(model, tmp_path / "m.model")
    result = CliRunner().invoke(app, ["strip", str(tmp_path / "m.model")])
    assert result.exit_code == 0, result.output
    stock = torch.load(tmp_path / "m-stock.model", weights_only=False)
    assert type(stock) is models.ScaleShiftMACE
    # Opens where there is no plugin.
    assert any("mace_ext" in text for text in strings(tmp_path / "m.model"))
    assert not any("mace_ext" in text or "e2ip" in text for text in strings(tmp_path / "m-stock.model"))
    for _ in range(3):  # TorchScript inside e3nn compiles itself during the first calls, which changes rounding
        theirs, ours = (net(make_batch(frames), compute_stress=True) for net in (stock, model))
    assert set(theirs) < set(ours) and not any("cov" in name or "e2ip" in name for name in theirs)
    for name in ("energy", "forces", "stress"):
        assert torch.equal(theirs[name], ours[name])
    # As MACE goes on to use it.
    scripted = jit.compile(stock)
    torch.testing.assert_close(scripted(make_batch(frames))["forces"], ours["forces"])


def test_every_head_stays(make_model, make_batch, frames, tmp_path):
    heads = ["one", "two"]
    model = make_model(heads=tuple(heads))
    torch.save(model, tmp_path / "m.model")
    strip_file(tmp_path / "m.model", tmp_path / "s.model")
    stock = torch.load(tmp_path / "s.model", weights_only=False)
    for head in heads:
        batch = make_batch(frames, heads=heads, head=head)
        assert torch.equal(stock(batch)["energy"], model(batch)["energy"])


def test_bad_input(make_model, tmp_path):
    torch.save(make_model(readout=None), tmp_path / "stock.model")
    with pytest.raises(InputError, match="has no readout to be stripped of"):
        strip_file(tmp_path / "stock.model", tmp_path / "out.model")
    (tmp_path / "text.model").write_text("text")
    with pytest.raises(InputError, match="is not a model file"):
        strip_file(tmp_path / "text.model", tmp_path / "out.model")
    (tmp_path / "there.model").touch()
    result = CliRunner().invoke(
        app, ["strip", str(tmp_path / "stock.model"), "--output", str(tmp_path / "there.model")]
    )
    assert result.exit_code == 2 and "is there already" in " ".join(result.output.split())
    assert not (tmp_path / "out.model").exists()
