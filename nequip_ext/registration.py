"""What NequIP needs to know in advance: our fields and the targets of ``nequip-compile``."""

import functools
import importlib
from typing import Any, Callable, Dict

from nequip.data._key_registry import register_fields
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT, register_compile_targets

from e2ip_plugins import families
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, LEVERAGE, PLATEAU_KEY

#: NequIP's own targets; every readout has them with its outputs added, under the name <readout>_<target>.
COMPILE_TARGETS = ("ase", "pair_nequip", "batch")


def register() -> None:
    """Register fields and compile targets of every family; safe to call more than once."""
    for family in families.table().values():
        keys = family.output_keys()
        names = [key.name for key in (*keys, LEVERAGE)]
        register_fields(
            node_fields=[*names, FORCE_UNIT_KEY, PLATEAU_KEY, COEFFICIENTS_KEY],
            cartesian_tensor_fields={key.name: "ij=ji" for key in keys if key.shape == (3, 3)},
        )
        for target in COMPILE_TARGETS:
            stock = COMPILE_TARGET_DICT[target]
            settings = _comparing_unfitted(stock["data_settings"])
            ours = {**stock, "output": [*stock["output"], *names], "data_settings": settings}
            register_compile_targets({f"{family.name}_{target}": ours})


def _comparing_unfitted(data_settings: Callable[..., Any]) -> Callable[..., Any]:
    """A target's ``data_settings``, which NequIP calls before it exports a model and compares outputs before and after.

    That comparison takes no NaN, which is what the leverage of a model is until it has been fitted. So it is shown
    another number there.
    """

    @functools.wraps(data_settings)
    def wrapped(data: Any) -> Any:
        aot: Any = importlib.import_module("nequip.utils.aot")
        compare = aot.test_model_output_similarity_by_dtype
        if not hasattr(compare, "takes_unfitted"):
            aot.test_model_output_similarity_by_dtype = _taking_unfitted(compare)
        return data_settings(data)

    return wrapped


def _taking_unfitted(compare: Callable[..., Any]) -> Callable[..., Any]:
    def with_number(model: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: Any) -> Dict[str, Any]:
            outputs = dict(model(data))
            if LEVERAGE.name in outputs:
                outputs[LEVERAGE.name] = outputs[LEVERAGE.name].nan_to_num(nan=-1.0)
            return outputs

        return call

    @functools.wraps(compare)
    def wrapped(model1: Callable[..., Any], model2: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return compare(with_number(model1), with_number(model2), *args, **kwargs)

    wrapped.takes_unfitted = True  # type: ignore[attr-defined]
    return wrapped
