"""What NequIP needs to know in advance: our fields and the targets of ``nequip-compile``."""

from nequip.data._key_registry import register_fields
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT, register_compile_targets

from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, OUTPUT_KEYS, PLATEAU_KEY

#: NequIP's own targets, each with every output of ours added, under the name e2ip_<target>.
COMPILE_TARGETS = ("ase", "pair_nequip", "batch")


def register() -> None:
    """Register fields and compile targets; safe to call more than once."""
    names = [key.name for key in OUTPUT_KEYS]
    register_fields(
        node_fields=[*names, FORCE_UNIT_KEY, PLATEAU_KEY, COEFFICIENTS_KEY],
        cartesian_tensor_fields={key.name: "ij=ji" for key in OUTPUT_KEYS if key.shape == (3, 3)},
    )
    register_compile_targets(
        {
            f"e2ip_{name}": {**COMPILE_TARGET_DICT[name], "output": [*COMPILE_TARGET_DICT[name]["output"], *names]}
            for name in COMPILE_TARGETS
        }
    )
