"""One module per patched MACE module (`mace_ext.seams.SEAMS`), each with ``apply(module)``; imported while MACE is."""

from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterator


def wrap(owner: Any, **functions: Callable) -> None:
    """Replace functions of a module or methods of a class, by name, by ``function(stock, *args, **kwargs)``."""
    for name, function in functions.items():
        setattr(owner, name, _wrapped(getattr(owner, name), function, isinstance(vars(owner)[name], staticmethod)))


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
