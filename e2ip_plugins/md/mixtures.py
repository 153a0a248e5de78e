"""Results of a frame's calculator, also where ASE has mixed a model with others, such as a dispersion correction.

ASE adds up whatever properties all calculators of a `SumCalculator` show. Those of this project hide the uncertainties
(`ImplementedProperties`); other calculators may show them, and a sum of ν means nothing.
"""

from typing import Any, Dict, List, Tuple

from ase import Atoms
from ase.calculators.mixing import LinearCombinationCalculator

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.columns import our_names


def results_of(atoms: Atoms) -> Dict[str, Any]:
    """Return the results of a frame's calculator, which has been evaluated.

    Of a mixture (`SumCalculator` and other classes of ``ase.calculators.mixing``) energies, forces and stress are the
    mixture's. The uncertainties are those of the one calculator that has some: another one's forces, which have none,
    shift the distribution and do not change its covariance.

    Raises
    ------
    InputError
        Several calculators of a mixture have uncertainties, or the one that has some has a weight other than 1.
    """
    return _results(atoms.calc, atoms)


def _results(calculator: Any, atoms: Atoms) -> Dict[str, Any]:
    if not isinstance(calculator, LinearCombinationCalculator):
        return calculator.results
    ours = set(our_names())
    mixed = {name: value for name, value in calculator.results.items() if name not in ours}
    parts: List[Tuple[float, Any, Dict[str, Any]]] = []
    for weight, part in zip(calculator.mixer.weights, calculator.mixer.calcs, strict=True):
        # It may have been evaluated for another structure since.
        part.get_property("forces", atoms)
        results = _results(part, atoms)
        if ours & set(results):
            parts.append((weight, part, results))
    if not parts:
        return mixed
    if len(parts) > 1 or parts[0][0] != 1.0:
        names = " and ".join(f"{weight:g} × {type(part).__name__}" for weight, part, _ in parts)
        raise InputError(
            f"{type(calculator).__name__} mixes {names}, and a mixture of predicted distributions is none of their "
            "families: add other calculators to one model, with weight 1, or combine models by a committee of MACE or "
            "e2ip ensemble"
        )
    _, _, results = parts[0]
    unbiased = {}
    if "energy_bias" in results:
        unbiased = {f"{n}_unbiased": mixed[n] - results[n] + results[f"{n}_unbiased"] for n in ("energy", "forces")}
        unbiased["energy_bias"] = results["energy_bias"]
    return {**{name: results[name] for name in ours if name in results}, **mixed, **unbiased}
