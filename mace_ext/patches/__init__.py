"""One module per patched MACE module (`mace_ext.seams.SEAMS`), each with ``apply(module)``; imported while MACE is."""

import inspect
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterator


def wrap(owner: Any, **functions: Callable) -> None:
    """Replace functions of a module or methods of a class, by name, by ``function(stock, *args, **kwargs)``.

    A method that the class inherits is replaced for this class alone.
    """
    for name, function in functions.items():
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, _wrapped(getattr(owner, name), function, static))


def _wrapped(stock: Callable, function: Callable, static: bool) -> Any:
    @wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return staticmethod(wrapper) if static else wrapper


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner.name`` another value while the context lasts."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)
