"""One module per seam of `mace_ext.seams`; each has ``apply(module)``. Imported while MACE is."""

from functools import wraps
from typing import Any, Callable


def wrap(owner: Any, name: str, function: Callable) -> None:
    """Put ``function(stock, *args, **kwargs)`` in the place of a module's function or a class's method ``stock``."""
    stock = getattr(owner, name)

    @wraps(stock)
    def wrapper(*args, **kwargs):
        return function(stock, *args, **kwargs)

    setattr(owner, name, staticmethod(wrapper) if isinstance(vars(owner)[name], staticmethod) else wrapper)
