"""A model whose calls are heard, whatever it is: TorchScript and compiled models do not all take hooks."""

from typing import Any, Callable, Optional


class Heard:
    """Stands for a model in MACE's own code, tells of its calls and keeps what it put out last.

    Parameters
    ----------
    model : torch.nn.Module
    before, after : callable, optional
        Called as ``before(model)`` and ``after(model, batch, output)``.
    """

    def __init__(
        self,
        model: Any,
        before: Optional[Callable[[Any], None]] = None,
        after: Optional[Callable[[Any, Any, Any], None]] = None,
    ) -> None:
        self._model, self._before, self._after = model, before, after
        self.output: Any = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before(self._model)
        self.output = self._model(batch, *args, **kwargs)
        if self._after is not None:
            self._after(self._model, batch, self.output)
        return self.output

    def to(self, *args: Any, **kwargs: Any) -> "Heard":
        """Moves the model."""
        self._model = self._model.to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
