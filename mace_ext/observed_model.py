"""A model whose calls are observed, whatever it is: not all TorchScript and compiled models take hooks."""

from typing import Any, Callable


def ignore(*_: Any) -> None:
    """Do nothing."""


class ObservedModel:
    """Stand-in for a model in MACE's code, which reports calls and keeps the last ``output``.

    Parameters
    ----------
    model : torch.nn.Module
    before, after : callable
        Called as ``before(model)`` and ``after(model, batch, output)``.
    """

    def __init__(self, model: Any, before: Callable = ignore, after: Callable = ignore) -> None:
        self._model, self._before, self._after = model, before, after
        self.output: Any = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._before(self._model)
        self.output = self._model(batch, *args, **kwargs)
        self._after(self._model, batch, self.output)
        return self.output

    def to(self, *args: Any, **kwargs: Any) -> "ObservedModel":
        """Move the model and return this stand-in."""
        self._model = self._model.to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
