"""What the fit depends on and what not: batches, heads, families, bad input, several processes."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from readout_alone import buffers_of, fit_frames, leverages, make_frames, make_readout, run, training_of, validation_of

from e2ip_plugins.errors import InputError
from e2ip_plugins.families.e2ip import E2IP
from e2ip_plugins.fitting.fit import fit_leverage

# What does not matter


def test_of_a_species_without_training_atoms_the_others_variance_is_typical():
    readout = make_readout()
    fit_frames(readout, make_frames(40, species=(0,)), make_frames(10, seed=1, species=(0,)))
    known, lacking = readout.leverage.log_variance[:2]
    assert abs(known) > 0.1 and lacking == known
    outputs = run(readout, make_frames(4, seed=2, species=(1,)))[0]
    assert (outputs["e2ip_leverage"] == 1e6).all()
    # A million of the typical variances.
    growth = readout.leverage.growth[0]
    usual = 2.0 * (1.0025 / 1.16) ** 0.25
    scale = readout.leverage.log_factor[1] + readout.leverage.surplus[0]
    expected = torch.exp(known + scale) * 1e6 / (1.0 + usual * growth) ** 2
    epistemic = torch.exp(E2IP.log_variance(outputs)) * 1e6 / (1e6 + 1.0)
    torch.testing.assert_close(epistemic, expected.to(epistemic).expand(20), rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("constant", [False, True])
def test_order_and_batches_do_not_matter(constant):
    rng = np.random.default_rng(0)
    training, validation = make_frames(80), make_frames(30, seed=1, width=3.0)
    first, second = make_readout(constant=constant), make_readout(constant=constant)
    report = fit_frames(first, training, validation, constant_readout=constant)
    assert report.regions > 4, "more than one of a species"
    shuffled = [[frames[i] for i in rng.permutation(len(frames))] for frames in (training, validation)]
    again = fit_frames(second, *shuffled, size=11, constant_readout=constant)
    # Whitening's axes have no sign: leverages are compared, and what has no axes.
    wide = make_frames(20, seed=4, width=5.0)
    torch.testing.assert_close(leverages(second, wide), leverages(first, wide), rtol=1e-8, atol=1e-8)
    for name in ("centres", "log_variance"):
        torch.testing.assert_close(getattr(second.leverage, name), getattr(first.leverage, name), rtol=1e-8, atol=1e-8)
    for name in ("growth", "log_factor"):
        torch.testing.assert_close(getattr(second.leverage, name), getattr(first.leverage, name), rtol=1e-4, atol=1e-4)
    assert again.atoms == report.atoms and again.regions == report.regions


def test_random_states_and_weights_are_left_alone(training):
    readout = make_readout()
    weights = {name: value.clone() for name, value in readout.named_parameters()}
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    fit_frames(readout, training, make_frames(10, seed=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))  # noqa: NPY002
    assert all(torch.equal(value, weights[name]) for name, value in readout.named_parameters())


@pytest.mark.parametrize("species", [(0, 1), (0,)])
def test_what_was_fitted_before_does_not_matter(species):
    """Also where it was fitted to other species."""
    first, second = make_readout(), make_readout()
    fit_frames(second, make_frames(90, seed=7, width=4.0), make_frames(4, seed=8))
    for readout in (first, second):
        fit_frames(readout, make_frames(40, species=species), make_frames(10, seed=1, species=species))
    for name, value in buffers_of(first).items():
        assert torch.equal(buffers_of(second)[name], value), name


def test_hooks_are_gone_afterwards_also_after_an_error(training):
    readout = make_readout()
    fit_frames(readout, training, make_frames(10, seed=1))
    with pytest.raises(InputError):
        fit_frames(readout, training, [])
    assert not readout._forward_hooks and not readout.leverage._forward_hooks


# Heads, families


def test_heads_have_moments_and_constants_of_their_own():
    both = make_readout(num_heads=2)
    training = [make_frames(40), make_frames(30, seed=3, width=5.0, head=1)]
    validation = [make_frames(20, seed=1, width=3.0), make_frames(20, seed=2, width=9.0, head=1)]
    mixed = [[f for pair in itertools.zip_longest(*frames) for f in pair if f] for frames in (training, validation)]
    report = fit_frames(both, *mixed)
    assert set(report.constants) == {0, 1}
    assert report.atoms == {(0, 0): 120, (0, 1): 80, (1, 0): 90, (1, 1): 60}
    report.heads = ["pbe", "scan"]
    lines = report.lines()
    assert len(lines) == 3 and "350 training atoms, 2 species of 2 heads in" in lines[0] and "(head scan)" in lines[2]
    for head in (0, 1):
        alone = make_readout()
        alone.trunks[0].load_state_dict(both.trunks[head].state_dict())
        result = fit_frames(alone, training[head], validation[head]).constants[0]
        assert report.constants[head].growth == pytest.approx(result.growth, rel=1e-6)
        assert report.constants[head].log_scale == pytest.approx(result.log_scale, abs=1e-6)
        assert both.leverage.growth[head] == report.constants[head].growth


def test_where_there_is_one_head_data_sets_are_not_told_apart(training):
    """As in a model that one head of several was taken out of."""
    readout, validation = make_readout(), make_frames(9, seed=1)
    expected = fit_frames(make_readout(), training, validation).constants
    others = [[frame._replace(head=2) for frame in frames] for frames in (training, validation)]
    assert fit_frames(readout, *others).constants == expected


def test_a_head_without_validation_atoms_gets_the_expected_growth_and_a_warning():
    readout = make_readout(num_heads=2)
    readout.leverage.growth.fill_(77.0)
    training = make_frames(40) + make_frames(30, seed=3, head=1)
    report = fit_frames(readout, training, make_frames(12, seed=1), heads=["pbe", "scan"])
    (warning,) = report.warnings
    assert warning.startswith("no validation atoms with forces (head scan): the growth is the expected 2.5")
    assert set(report.constants) == {0} and readout.leverage.growth[1] == 2.5
    assert readout.leverage.log_factor[2:].tolist() == [0.0, 0.0]
    # One of the other head's atoms has them.
    assert readout.leverage.log_factor[:2].ne(0).all() and leverages(readout, training).isfinite().all()


def test_families_that_do_not_take_it_get_moments_alone(toy_family, training):
    def untouched():
        raise AssertionError("validation costs a pass with forces")
        yield

    readout = make_readout(toy_family.name)
    report = fit_leverage(readout, training_of(readout, training), untouched())
    assert report.constants == {} and report.atoms == {(0, 0): 180, (0, 1): 120}
    assert leverages(readout, training).mean().item() == pytest.approx(1.0, abs=1e-6)
    assert report.lines() == ["leverage: features of 300 training atoms, 2 species in 8 regions"]


# Bad input


@pytest.mark.parametrize("frames", [0, 1])
def test_training_set_without_atoms(frames):
    training = make_frames(frames, atoms=0)
    readout = make_readout()
    with pytest.raises(InputError, match="the training set has no atoms"):
        fit_frames(readout, training, make_frames(3))
    assert not readout.leverage.fitted


@pytest.mark.parametrize("validation", ["none", "without forces"])
def test_validation_set_without_forces(training, validation):
    frames = [] if validation == "none" else make_frames(3, seed=1)
    for frame in frames:
        frame.residual.fill_(float("nan"))
    readout = make_readout()
    fit_frames(readout, training, make_frames(3))
    with pytest.raises(InputError, match="validation set has no configuration with finite reference forces"):
        fit_frames(readout, training, frames)
    assert not readout.leverage.fitted, "constants of one fit and moments of another mean nothing"


def test_every_validation_configuration_has_a_species_without_training_atoms():
    training, mixed = make_frames(20, species=(0,)), make_frames(3, seed=1)
    with pytest.raises(
        InputError, match=r"\(3 validation configurations have Pd, of which there are no training atoms"
    ):
        fit_frames(make_readout(), training, mixed, species=("O", "Pd"))
    validation = [*make_frames(12, seed=2, species=(0,)), mixed[0]]
    report = fit_frames(make_readout(), training, validation, species=("O", "Pd"))
    assert "1 validation configuration has Pd, of which there are no training atoms: left out" in report.warnings


def test_features_that_are_not_finite(training):
    broken = make_frames(8, seed=5)
    broken[3].x[2, 1] = float("nan")
    broken[5].x[:2, 0] = float("inf")
    readout = make_readout()
    with pytest.raises(InputError, match="features of 3 training atoms are not finite"):
        fit_frames(readout, training + broken, make_frames(3))
    assert not readout.leverage.fitted


# Several processes


def share(rank, world):
    """What a process of a distributed training has: of an odd number of frames; of one species, all or nothing."""
    training = make_frames(70, species=(0,)) + make_frames(4, seed=8, species=(1,))
    validation = make_frames(11, seed=1, width=4.0)
    if world == 1:
        return (training, 0), (validation, 0)
    return ((training[:41], 0), (validation[:3], 0)) if rank == 0 else ((training[41:], 41), (validation[3:], 3))


def fit_of_process(rank, world):
    readout, ((training, first), (validation, first_valid)) = make_readout(), share(rank, world)
    known = [frame._replace(residual=0.4 * frame.residual) for frame in training]
    report = fit_leverage(
        readout,
        training_of(readout, training, 4, first=first),
        validation_of(readout, validation, 4, first_valid),
        training_errors=validation_of(readout, known, first=first),
    )
    _, (wide, _) = share(0, 1)
    return {
        "leverage": leverages(readout, wide).tolist(),
        "growth": report.constants[0].growth,
        "log_scale": report.constants[0].log_scale,
        "optimism": report.constants[0].optimism,
        "nll": list(report.constants[0].nll),
        "atoms": sorted(report.atoms.values()),
        "configurations": report.constants[0].configurations,
        "warnings": report.warnings,
        "left out": left_out(rank, world),
    }


def left_out(rank, world):
    """What a process says where its own share has fewer configurations of unsupported species than the other's."""
    (training, _), (mixed, _) = share(rank, world)
    known = make_frames(8, seed=9, width=4.0, species=(0,))[rank::world]
    alone = [frame for frame in training if not frame.species.any()]
    readout = make_readout()
    validation = validation_of(readout, [*known, *mixed], 4, 100 * rank)
    report = fit_leverage(readout, training_of(readout, alone, 4, first=100 * rank), validation)
    return [text for text in report.warnings if "left out" in text]


def test_two_processes_fit_what_one_does(tmp_path):
    # Not torch.multiprocessing: its children cannot import a test module of pytest's importlib mode.
    command = [sys.executable, __file__, str(tmp_path / "store")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True, env=env) for r in (0, 1)]
    expected = fit_of_process(0, 1)
    result = []
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        result.append(json.loads(output))
    assert result[0] == result[1]
    for name in ("warnings", "left out"):
        assert result[0].pop(name) == expected.pop(name), name
    for name, value in expected.items():
        assert result[0][name] == pytest.approx(value, rel=1e-8 if name == "leverage" else 1e-4), name


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{sys.argv[1]}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=int(sys.argv[2]), world_size=2)
    print(json.dumps(fit_of_process(int(sys.argv[2]), 2)))
    torch.distributed.destroy_process_group()
