"""What opening a ``.model`` file says where e2ip-plugins is not installed.

A ``.model`` is a pickle of the whole module, and a pickle names its classes by import path: without the
plugin the stock answer is "No module named 'mace_ext'", which tells nobody what to install. A pickle
may call the standard library, though, before it comes to the class: here it imports a module whose
name is ``mace_ext`` where that can be found and the installation hint where it cannot.
"""

import importlib
import importlib.util

# No dots: the import system would split there and show a part of it only.
HINT = "this MACE model has an e2IP readout: install e2ip-plugins to open it (pip install 'path/of/its/clone[mace]')"


class _Call:
    """A call that unpickling makes."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __call__(self, *arguments):
        """Call what unpickling evaluates to: `copy.deepcopy` rebuilds objects without a pickle in between."""
        return self._value()(*arguments)

    def _value(self):
        return self.function(*(x._value() if isinstance(x, _Call) else x for x in self.arguments))

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return self.function, self.arguments


def constructor(module, function):
    """Return a stand-in for ``function`` of ``mace_ext.<module>`` that pickles with the hint.

    It is meant for the first item of a ``__reduce__`` tuple.
    """
    package = _Call(getattr, _Call(importlib.util.find_spec, "mace_ext"), "name", HINT)
    return _Call(getattr, _Call(importlib.import_module, "." + module, package), function)
