"""What has weight zero counts in no report: figures are those of files without it."""

import json

import numpy as np
import pytest

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


@pytest.mark.parametrize("key", ["config_weight", "config_forces_weight"])
def test_compare_and_calibrate(make_frames, write, succeed, compared, folder, key):
    write("all.xyz", with_weights(make_frames(1), key))
    write("some.xyz", without(make_frames(1)))
    done, found, _ = compared("all.xyz")
    (model,), (expected,) = found["models"], compared("some.xyz")[1]["models"]
    assert figures(model) == figures(expected)
    text = "2 frames of weight zero" if key == "config_weight" else "forces of 2 frames have weight zero"
    assert text in done.stderr and text in model["left_out"][0]
    calibrations = []
    for name in ("all", "some"):
        done = succeed(
            "calibrate", f"{name}.xyz", "--method", "scale", "--method", "conformal", "--output", f"{name}.json"
        )
        calibrations.append(json.loads((folder / f"{name}.json").read_text()) | {"file": ""})
        assert (text in done.stderr) == (name == "all")
    # Constants, radii, thresholds, and the frames that it must not be tested on.
    assert calibrations[0] == calibrations[1]


def test_models_of_which_one_file_lacks_the_weights(make_frames, write, compared):
    """NequIP's xyz writer does not keep them."""
    write("mace.xyz", with_weights(make_frames(1)))
    bare = with_weights(make_frames(2))
    for i in OUT:
        del bare[i].info["config_weight"]
    write("nequip.xyz", bare)
    for name, noise in (("mace", 1), ("nequip", 2)):
        write(f"{name}-some.xyz", without(make_frames(noise)))
    found = compared("mace.xyz", "nequip.xyz")[1]["models"]
    expected = compared("mace-some.xyz", "nequip-some.xyz")[1]["models"]
    assert list(map(figures, found)) == list(map(figures, expected))


def test_frames_out_of_distribution(make_frames, write, compared):
    """Without references, too."""
    write("in.xyz", make_frames(1))
    for name, frames in (("all", with_weights(make_frames(3, seed=5))), ("some", without(make_frames(3, seed=5)))):
        for atoms in frames:
            del atoms.arrays["REF_forces"]
        write(f"{name}.xyz", frames)
    found, expected = (compared("in.xyz", "--ood", f"{name}.xyz")[1]["ood"] for name in ("all", "some"))
    assert found["frame_auroc"] == expected["frame_auroc"]
    assert figures(found["models"][0]) == figures(expected["models"][0])


def test_ensemble(make_frames, write, succeed, compared):
    for name, change in (("all", with_weights), ("some", without)):
        for member in (1, 2, 3, 4):
            write(f"{name}{member}.xyz", change(make_frames(member, uncertain=False)))
        succeed("ensemble", *(f"{name}{member}.xyz" for member in (1, 2, 3, 4)), "--output", f"{name}.xyz")
    (found,), (expected,) = (compared(f"{name}.xyz")[1]["models"] for name in ("all", "some"))
    assert figures(found) == figures(expected) and found["frames"] == 18


def test_thresholds(make_frames, write):
    from e2ip_plugins.errors import UncertaintyWarning
    from e2ip_plugins.md.heldout import HeldOut

    for key in ("config_weight", "config_forces_weight"):
        frames = with_weights(make_frames(1), key)
        for i, atoms in enumerate(frames):
            atoms.arrays["MACE_e2ip_nu"] = np.full(9, 5.0 + i)
        expected = HeldOut.read(write("some.xyz", without(frames)))
        with pytest.warns(UncertaintyWarning, match="2 frames"):
            found = HeldOut.read(write("all.xyz", frames))
        assert found.maxima == expected.maxima and found.frames == expected.frames == 18
