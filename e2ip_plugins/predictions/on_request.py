"""Results of an ASE calculator whose uncertainties are computed when someone asks for them: ``"on request"``."""

import threading
from typing import Any, Callable, Container, Dict, Mapping, Optional, Type

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FRAME_KEYS
from e2ip_plugins.predictions.ase_properties import CalculatorResults

#: When a calculator evaluates its readout: in every evaluation, or for the geometries whose uncertainties are read.
ALWAYS, ON_REQUEST = "always", "on request"


def is_on_request(uncertainties: str) -> bool:
    """Return whether a calculator's option asks for `ON_REQUEST`; `InputError` for what is no such option."""
    if uncertainties not in (ALWAYS, ON_REQUEST):
        raise InputError(f"uncertainties={uncertainties!r}: choose '{ALWAYS}' or '{ON_REQUEST}'")
    return uncertainties == ON_REQUEST


def shallow_copy(original: Any, **attributes: Any) -> Any:
    """Return a shallow copy with other values of some attributes, several times as fast as `copy.copy`."""
    copied = object.__new__(type(original))
    vars(copied).update(vars(original), **attributes)
    return copied


class ResultsOnRequest(CalculatorResults):
    """Results that compute the uncertainties of their geometry once, when one of them is asked for.

    Energy, forces and stress are read by their names without them. Whatever looks at all results, iteration, ``len``,
    a copy or a pickle for example, has the uncertainties computed first, and sees what it would see with ``"always"``.

    Parameters
    ----------
    results : mapping
        What has been computed: energy, forces, …
    compute : callable
        Returns the uncertainties and the names of their origin. It keeps no calculator alive, and is forgotten after
        its first call.
    names : container of str
        Uncertainties that ``compute`` may return.
    kind : type
        Class of the complete results: dict or `CalculatorResults`. Copies are of this class.

    Examples
    --------
    >>> results = ResultsOnRequest({"energy": 1.0}, lambda: {"e2ip_nu": 8.0, "uq_family": "niw"}, ["e2ip_nu"])
    >>> results["energy"], results.pending, results["e2ip_nu"], results.pending, list(results)
    (1.0, True, 8.0, False, ['energy', 'e2ip_nu', 'uq_family'])
    """

    def __init__(
        self,
        results: Mapping[str, Any],
        compute: Callable[[], Mapping[str, Any]],
        names: Container[str],
        kind: Type[Dict[str, Any]] = dict,
    ) -> None:
        dict.__init__(self, results)
        self.names = {}
        self._compute: Optional[Callable[[], Mapping[str, Any]]] = compute
        self._expected, self._kind, self._lock = names, kind, threading.RLock()

    @property
    def pending(self) -> bool:
        """Whether nobody has asked for the uncertainties yet."""
        return self._compute is not None

    def complete(self) -> None:
        """Compute the uncertainties, unless that has been done."""
        with self._lock:
            if self._compute is not None:
                values = self._kind(self._compute())
                self._compute = None
                super().update(values)
                self.names.update(getattr(values, "names", {}))

    def _ask_for(self, key: object) -> None:
        if self._compute is not None and (key in FRAME_KEYS or key in self._expected):
            self.complete()

    def __missing__(self, key: str) -> Any:
        self._ask_for(key)
        return dict.get(self, key) if dict.__contains__(self, key) else super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._ask_for(key)
        return super().__contains__(key)

    def copy(self) -> Any:
        """Return a copy that holds all values."""
        return self._kind({**self, **self.names})

    __copy__ = copy

    def __reduce_ex__(self, _: Any) -> Any:
        return self._kind, ({**self, **self.names},)


def _after_completion(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def call(self: ResultsOnRequest, *args: Any, **kwargs: Any) -> Any:
        self.complete()
        return method(self, *args, **kwargs)

    return call


# All else that shows or changes several results. ``dict(results)`` and ``**results`` go by the first two.
for _name in (
    *("__iter__", "keys", "values", "items", "__len__", "__reversed__", "__repr__", "__eq__", "__ne__"),
    *("__or__", "__ror__", "__ior__", "__setitem__", "__delitem__"),
    *("pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(ResultsOnRequest, _name, _after_completion(_name))
