"""What NequIP needs to know in advance: our fields and the targets of ``nequip-compile``."""

import importlib
import importlib.util
import sys

from nequip.data._key_registry import _CARTESIAN_TENSOR_FIELDS, register_fields
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT, register_compile_targets
from nequip.scripts._package_utils import register_libraries_as_external_for_packaging

from e2ip_plugins import families
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, LEVERAGE, PLATEAU_KEY

#: NequIP's own targets and Allegro's; every readout has them with its outputs added, under the name <readout>_<target>.
COMPILE_TARGETS = ("ase", "pair_nequip", "batch", "pair_allegro")


def register() -> None:
    """Register fields and compile targets of every family; safe to call more than once."""
    if "allegro" not in sys.modules and importlib.util.find_spec("allegro") is not None:
        # NequIP imports its extensions in any order. Where Allegro itself is what imports NequIP, its target is there
        # at the next call only, that of the first attribute of `nequip_ext`.
        importlib.import_module("allegro")
    for family in families.table().values():
        keys = family.output_keys()
        names = [key.name for key in (*keys, LEVERAGE)]
        tensors = [key.name for key in keys if key.shape == (3, 3)]
        register_fields(
            node_fields=[*names, FORCE_UNIT_KEY, PLATEAU_KEY, COEFFICIENTS_KEY],
            # New ones alone: NequIP (0.19.1) takes a quarter of a second to look at each.
            cartesian_tensor_fields={name: "ij=ji" for name in tensors if name not in _CARTESIAN_TENSOR_FIELDS},
        )
        for target in filter(COMPILE_TARGET_DICT.__contains__, COMPILE_TARGETS):
            if target == "pair_allegro" and family.takes_forces:
                # Forces of its members have parts on ghost atoms, and squares of sums cannot be communicated as sums.
                continue
            stock = COMPILE_TARGET_DICT[target]
            ours = {**stock, "output": [*stock["output"], *names]}
            register_compile_targets({f"{family.name}_{target}": ours})
    # Packages of PaiNN and AlphaNet need it installed where they are opened; others do not mention it.
    register_libraries_as_external_for_packaging(extern_modules=["torch_geometric"])
