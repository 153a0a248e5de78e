"""Uncertainties among the results of an ASE calculator, where ASE's own calls accept them."""

from typing import Any, Dict, Iterable, List, Mapping

import ase.outputs
from ase.calculators import singlepoint

from e2ip_plugins.keys import FRAME_KEYS, FRAME_OUTPUTS
from e2ip_plugins.predictions.columns import our_names, uncertainties


class CalculatorResults(Dict[str, Any]):
    """Results of an ASE calculator, in which iteration and ``**`` give arrays and numbers alone.

    The names of family, readout and calibration (`FRAME_KEYS`) are text, which `SinglePointCalculator` would turn into
    numbers. They are found by name, ``results["uq_family"]``, and are in `names`.

    Parameters
    ----------
    results : mapping
        Arrays, numbers and names by their keys.

    Examples
    --------
    >>> results = CalculatorResults({"energy": 1.0, "uq_family": "niw"})
    >>> results["uq_family"], "uq_family" in results, list(results)
    ('niw', True, ['energy'])
    """

    names: Dict[str, str]

    def __init__(self, results: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in results.items() if key not in FRAME_KEYS})
        self.names = {key: results[key] for key in FRAME_KEYS if key in results}

    def __missing__(self, key: str) -> str:
        return self.names[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.names

    def get(self, key: str, default: Any = None) -> Any:
        """Return a result or a name by its key."""
        return self[key] if key in self else default

    def copy(self) -> "CalculatorResults":
        """Return a copy that has the names, too."""
        return CalculatorResults({**self, **self.names})


class ImplementedProperties(List[str]):
    """Names of what a calculator computes, in which iteration gives all but the uncertainties.

    ASE's mixing calculators (`SumCalculator` and others) iterate over these names and add up what all their parts have:
    of two models with readouts that would be ν, too. `get_property` asks with ``in``, and finds the uncertainties.

    Parameters
    ----------
    stock : iterable of str
        Properties that iteration gives.
    uncertainties : iterable of str
        Properties that ``in`` alone finds, and that the attribute of this name lists.

    Examples
    --------
    >>> names = ImplementedProperties(["energy", "forces"], ["e2ip_nu"])
    >>> "e2ip_nu" in names, list(names), names.uncertainties
    (True, ['energy', 'forces'], ['e2ip_nu'])
    """

    uncertainties: List[str]

    def __init__(self, stock: Iterable[str], uncertainties: Iterable[str]) -> None:
        super().__init__(stock)
        self.uncertainties = list(uncertainties)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.uncertainties


def register_with_ase() -> None:
    """Let ASE's `SinglePointCalculator` and `Properties` take the outputs of every family; may be called repeatedly.

    ``ase.calculators.calculator.all_properties`` stays: ASE's readers would take columns of these names out of
    ``atoms.arrays``.
    """
    keys = uncertainties()
    for name, key in keys.items():
        if name not in ase.outputs.all_outputs:
            ase.outputs.all_outputs[name] = ase.outputs.ArrayProperty(name, float, ("natoms", *key.shape))
    for key in FRAME_OUTPUTS:
        # A shape of a name: as many numbers as there are.
        shape = tuple(f"n_{key.name}" for _ in key.shape)
        ase.outputs.all_outputs.setdefault(key.name, ase.outputs.ArrayProperty(key.name, float, shape))
    known = singlepoint.all_properties
    singlepoint.all_properties = [*known, *(name for name in our_names() if name not in (*known, *FRAME_KEYS))]
