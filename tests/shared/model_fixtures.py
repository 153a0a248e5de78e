"""What holds of the models of both frameworks: calculators, calibrations, gradients, files; as fixtures."""

from pathlib import Path

import pytest


@pytest.fixture
def write_calibration(tmp_path):
    """Function that writes a calibration, by default with a factor for hydrogen and one for others; its path."""
    from e2ip_plugins.scores.calibration import Calibration, CalibrationConstant

    def write(floor=0.0, uq_family="niw", factors=None, uq_model=None):
        factors = {"H": 2.0, "C": 0.5, "O": 0.5} if factors is None else factors
        factor = {symbol: CalibrationConstant(value, (0.4, 2.1)) for symbol, value in factors.items()}
        path, constant = tmp_path / "calibration.json", CalibrationConstant(floor, (floor, floor))
        Calibration(("species-scale",), uq_family, factor, constant, {}, 9, 99, (), "", uq_model=uq_model).write(path)
        return str(path)

    return write


@pytest.fixture(scope="session")
def energy_slope():
    """Function that gives the derivative of the energy in eV/Å as atoms move along ``direction`` (N, 3), by finite
    differences of fourth order."""

    def slope(atoms, direction):
        energies = {}
        for step in (-2, -1, 1, 2):
            moved = atoms.copy()
            moved.positions += 1e-4 * step * direction
            moved.calc = atoms.calc
            energies[step] = moved.get_potential_energy()
        return (8 * (energies[1] - energies[-1]) - (energies[2] - energies[-2])) / 12e-4

    return slope


@pytest.fixture(scope="session")
def check_gradient():
    """Function that compares a calculator's `uncertainty_gradient` with finite differences, for every frame."""
    import numpy as np

    def check(calc, frames, step=1e-5):
        for seed, atoms in enumerate(frames):
            value, gradient = calc.uncertainty_gradient(atoms)
            calc.calculate(atoms)
            assert np.allclose(value, calc.results["forces_epistemic_std"], rtol=1e-12)
            direction = np.random.default_rng(seed).normal(size=atoms.positions.shape)
            sums = []
            for sign in (1, -1):
                moved = atoms.copy()
                moved.positions += sign * step * direction
                calc.calculate(moved)
                sums.append(calc.results["forces_epistemic_std"].sum())
            assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-6)

    return check


@pytest.fixture(scope="session")
def check_written():
    """Function that compares a frame that `e2ip evaluate` has written with what ``calculator`` gives for it."""
    import numpy as np

    def check(written, calculator, keys, **tolerance):
        calculator.calculate(written)
        expected = calculator.results
        np.testing.assert_allclose(written.get_potential_energy(), expected["energy"], **tolerance)
        np.testing.assert_allclose(written.get_forces(), expected["forces"], **tolerance)
        for name in keys:
            found = written.arrays[name].reshape(np.shape(expected[name]))
            np.testing.assert_allclose(found, expected[name], **tolerance, err_msg=name)
        if "stress" in written.calc.results:
            np.testing.assert_allclose(written.get_stress(), expected["stress"], **tolerance)

    return check


@pytest.fixture
def check_continuation(tmp_path, monkeypatch):
    """Function that stops an `e2ip evaluate` with a model in its third batch and goes on: the file is that of a run
    which was not stopped, to the byte. Best with single precision, where another batch would be another last digit."""
    from e2ip_plugins.evaluation.evaluate import evaluate
    from e2ip_plugins.evaluation.options import EvaluateOptions

    def check(open_model, source):
        evaluate(open_model(), source, tmp_path / "whole.xyz", EvaluateOptions(batch_atoms=10), {})
        model, calls = open_model(), []
        forward = model.evaluate

        def stopping(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return forward(*arguments)

        monkeypatch.setattr(model, "evaluate", stopping)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, source, tmp_path / "stopped.xyz", EvaluateOptions(batch_atoms=10), {})
        assert (tmp_path / "stopped.xyz.part").stat().st_size
        evaluate(model, source, tmp_path / "stopped.xyz", EvaluateOptions(batch_atoms=10), {})
        assert (tmp_path / "stopped.xyz").read_bytes() == (tmp_path / "whole.xyz").read_bytes() and len(calls) == 4

    return check


@pytest.fixture
def check_calibrated(write_calibration):
    """Function that compares calibrated calculators with raw ones: results, gradients, units."""
    import numpy as np
    import torch

    from e2ip_plugins import families
    from e2ip_plugins.errors import InputError

    family = families.get("e2ip")

    def check(make_calculator, frames):
        for unit in (1.0, 27.211386):
            raw = make_calculator(energy_units_to_eV=unit)
            with_floor = make_calculator(energy_units_to_eV=unit, calibration=write_calibration(0.01))
            for atoms in frames:
                for calculator in (raw, with_floor):
                    calculator.calculate(atoms)
                before, after = raw.results, with_floor.results
                factor = np.where(atoms.numbers == 1, 2.0, 0.5)[:, None, None]
                wide = factor * before["forces_cov"] + 0.01 * np.eye(3)
                np.testing.assert_allclose(after["forces_cov"], wide, rtol=1e-9, atol=1e-14)
                np.testing.assert_allclose(after["forces"], before["forces"], rtol=1e-12)
                parameters = {key.name: torch.from_numpy(after[key.name]) for key in family.parameter_keys}
                for name, value in family.derive(parameters).items():
                    np.testing.assert_allclose(after[name], value.numpy(), rtol=1e-12, atol=1e-15)
                assert (after["uq_family"], after["uq_calibration"]) == ("niw", "calibration.json")
                assert set(before) == set(after) - {"uq_calibration"}
            with pytest.raises(InputError, match="has a floor"):
                with_floor.uncertainty_gradient(frames[0])
            calibrated = make_calculator(energy_units_to_eV=unit, calibration=write_calibration())
            weight = torch.from_numpy(np.sqrt(np.where(frames[0].numbers == 1, 2.0, 0.5)))
            value, gradient = calibrated.uncertainty_gradient(frames[0])
            weighted = raw.uncertainty_gradient(frames[0], lambda views: weight * views["forces_epistemic_std"])  # noqa: B023
            np.testing.assert_allclose(value, weighted[0], rtol=1e-9)
            np.testing.assert_allclose(gradient, weighted[1], rtol=1e-7, atol=1e-10)

    return check


@pytest.fixture
def check_refused_calibrations(write_calibration):
    """Function that gives a calculator calibrations of another family, of other species and of another model."""
    from e2ip_plugins.errors import InputError

    def check(make_calculator, atoms):
        def results_with(**calibration):
            calculator = make_calculator(calibration=write_calibration(**calibration))
            calculator.calculate(atoms)
            return calculator.results

        for wrong, message in (
            ({"uq_family": "gaussian"}, "is for predictions of family 'gaussian'"),
            ({"factors": {"H": 2.0}}, "was fitted to H and knows nothing of C, O, which this structure has"),
            ({"uq_model": "readout-1"}, r"another model \(readout-1\) than the model has \(readout-"),
        ):
            with pytest.raises(InputError, match=message):
                results_with(**wrong)
        with pytest.raises(InputError, match=r"nothing\.json: cannot be read"):
            make_calculator(calibration="nothing.json")
        name = results_with()["uq_model"]
        assert results_with(uq_model=name)["uq_model"] == name

    return check


@pytest.fixture(scope="session")
def check_features():
    """Function that compares what passes over frames give with a calculator of the same model, and leverages that are
    made anew of its training set with its own."""
    import numpy as np

    from e2ip_plugins.active.features import collect
    from e2ip_plugins.active.scoring import by_leverage

    def check(passes, calculator, training, candidates):
        known, features = collect(passes, training), collect(passes, candidates, forces=True)
        leverage, forces = [], []
        for frame in candidates:
            forces.append(calculator.get_property("forces", frame.atoms))
            leverage.append(calculator.results["e2ip_leverage"])
        np.testing.assert_allclose(features.leverage, np.concatenate(leverage), rtol=1e-9)
        np.testing.assert_allclose(features.forces, np.concatenate(forces), atol=1e-9)
        ((index, score),) = by_leverage(known, features, 1)
        means = np.mean(leverage, axis=1)
        assert index == means.argmax() and score == pytest.approx(means[index], rel=1e-6)
        assert known.leverage.mean() == pytest.approx(1.0, abs=1e-6) and np.isnan(known.forces).all()

    return check


@pytest.fixture
def check_labels_of_fits(tmp_path):
    """Function that fits a model of a host by ``e2ip fit`` to files with weights, and with predictions for references.

    It is given a model with a readout, of which the stock model is fitted.
    """
    import ase.io
    import numpy as np
    from ase.calculators.singlepoint import SinglePointCalculator
    from typer.testing import CliRunner

    from e2ip_plugins.cli import app

    data = Path(__file__).parents[2] / "demo" / "data"

    def run(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        return result.stderr

    def write(name, frames):
        ase.io.write(tmp_path / name, frames, format="extxyz")
        return tmp_path / name

    def spoilt(frames, chosen, key):
        """The frames; some have absurd forces, and the weight zero."""
        frames = [atoms.copy() for atoms in frames]
        for i in chosen:
            frames[i].arrays["REF_forces"] = np.full((len(frames[i]), 3), 100.0)
            frames[i].info[key] = 0
        return frames

    def check(model):
        stock, fitted = (tmp_path / f"{name}{model.suffix}" for name in ("stock", "fitted"))
        known, others = (ase.io.read(data / f"{name}.extxyz", ":8") for name in ("train", "valid"))
        train, test = write("train.xyz", known), write("test.xyz", others[:2])
        run("strip", model, "--output", stock)

        def covariances(train, valid):
            """What the fit says on standard error, and the covariances of its model."""
            said = run("fit", stock, "--train", train, "--valid", valid, "--output", fitted, "--overwrite")
            run("evaluate", fitted, test, tmp_path / "p.xyz", "--overwrite")
            return said, np.concatenate([a.arrays["forces_cov"] for a in ase.io.read(tmp_path / "p.xyz", ":")])

        some = [atoms for i, atoms in enumerate(others) if i not in (3, 7)]
        _, expected = covariances(train, write("some.xyz", some))
        for key, text in (("config_weight", "2 frames of weight zero"), ("config_forces_weight", "forces of 2 frames")):
            said, found = covariances(train, write("all.xyz", spoilt(others, (3, 7), key)))
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert text in said
        # Of the training set, too.
        more = write("more.xyz", spoilt([*known, *some[:2]], (8, 9), "config_weight"))
        np.testing.assert_allclose(covariances(more, tmp_path / "some.xyz")[1], expected, rtol=1e-6)

        # Predictions are no references, until the frames are labelled.
        bare = [atoms.copy() for atoms in some]
        for atoms in bare:
            del atoms.arrays["REF_forces"], atoms.info["REF_energy"]
        run("evaluate", fitted, write("bare.xyz", bare), tmp_path / "o.xyz")
        arguments = ("fit", stock, "--train", train, "--valid", tmp_path / "o.xyz", "--output", fitted, "--overwrite")
        assert "'forces' are predictions of a model (uq_family is in the frame)" in run(*arguments, code=2)
        labelled = ase.io.read(tmp_path / "o.xyz", ":")
        forces = [atoms.get_forces() for atoms in labelled]
        for atoms, reference in zip(labelled, some, strict=True):
            atoms.calc = SinglePointCalculator(atoms, forces=reference.arrays["REF_forces"])
        _, found = covariances(train, write("labelled.xyz", labelled))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        # Without the key nothing tells them but that their errors vanish.
        for atoms, predicted in zip(labelled, forces, strict=True):
            atoms.calc = SinglePointCalculator(atoms, forces=predicted)
            for name in ("uq_family", "uq_force_sizes"):
                atoms.info.pop(name, None)
        said, _ = covariances(train, write("unmarked.xyz", labelled))
        assert "are the predicted ones: are they predictions of this model?" in said

    return check
