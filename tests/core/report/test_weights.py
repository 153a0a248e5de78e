"""What has weight zero counts in no report: figures are those of files without it."""

import json

import numpy as np
import pytest

from e2ip_plugins.errors import UncertaintyWarning
from e2ip_plugins.md.heldout import HeldOut
from e2ip_plugins.report.compare import compare, load_both_sets, load_models

OUT = (3, 7)


def with_weights(frames, key="config_weight"):
    """The frames; two of them have absurd references, and the weight zero."""
    for i in OUT:
        frames[i].arrays["REF_forces"] = np.full((9, 3), 100.0)
        frames[i].info[key] = 0
        if key == "config_weight":
            frames[i].info["REF_energy"] = 1e6
    return frames


def without(frames):
    return [atoms for i, atoms in enumerate(frames) if i not in OUT]


def figures(model):
    return {name: value for name, value in model.items() if name not in ("label", "file", "left_out", "frames")}


def models_of(*paths):
    return compare(load_models(paths))["models"]


@pytest.mark.parametrize("key", ["config_weight", "config_forces_weight"])
def test_compare_and_calibrate(make_frames, write, succeed, folder, key):
    paths = write("all.xyz", with_weights(make_frames(1), key)), write("some.xyz", without(make_frames(1)))
    (model,), (expected,) = map(models_of, paths)
    assert figures(model) == figures(expected)
    text = "2 frames of weight zero" if key == "config_weight" else "forces of 2 frames have weight zero"
    assert text in model["left_out"][0] and expected["left_out"] == []
    calibrations = []
    for path in paths:
        methods = ("--method", "scale", "--method", "conformal")
        done = succeed("calibrate", path, *methods, "--output", path.with_suffix(".json"))
        calibrations.append(json.loads(path.with_suffix(".json").read_text()) | {"file": ""})
        assert (text in done.stderr) == (path == paths[0])
    # Constants, radii, thresholds, and the frames that it must not be tested on.
    assert calibrations[0] == calibrations[1]


def test_models_of_which_one_file_lacks_the_weights(make_frames, write):
    """NequIP's xyz writer does not keep them."""
    bare = with_weights(make_frames(2))
    for i in OUT:
        del bare[i].info["config_weight"]
    found = models_of(write("mace.xyz", with_weights(make_frames(1))), write("nequip.xyz", bare))
    expected = models_of(*(write(f"{noise}.xyz", without(make_frames(noise))) for noise in (1, 2)))
    assert list(map(figures, found)) == list(map(figures, expected))


def test_frames_out_of_distribution(make_frames, write):
    """Without references, too."""
    inside, results = write("in.xyz", make_frames(1)), []
    for change in (with_weights, without):
        frames = change(make_frames(3, seed=5))
        for atoms in frames:
            del atoms.arrays["REF_forces"]
        results.append(compare(*load_both_sets([inside], [write("out.xyz", frames)]))["ood"])
    assert results[0]["frame_auroc"] == results[1]["frame_auroc"]
    assert figures(results[0]["models"][0]) == figures(results[1]["models"][0])


def test_ensemble(make_frames, write, succeed):
    found = []
    for change in (with_weights, without):
        members = [write(f"{i}.xyz", change(make_frames(i, uncertain=False))) for i in (1, 2, 3, 4)]
        succeed("ensemble", *members, "--output", "ensemble.xyz", "--overwrite")
        found += models_of("ensemble.xyz")
    assert figures(found[0]) == figures(found[1]) and found[0]["frames"] == 18


def test_thresholds(make_frames, write):
    for key in ("config_weight", "config_forces_weight"):
        frames = with_weights(make_frames(1), key)
        for i, atoms in enumerate(frames):
            atoms.arrays["MACE_e2ip_nu"] = np.full(9, 5.0 + i)
        expected = HeldOut.read(write("some.xyz", without(frames)))
        with pytest.warns(UncertaintyWarning, match="2 frames"):
            found = HeldOut.read(write("all.xyz", frames))
        assert found.maxima == expected.maxima and found.frames == expected.frames == 18
