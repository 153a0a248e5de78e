"""What NequIP needs to know in advance: our fields and the targets of ``nequip-compile``."""

from typing import Set

from nequip.data._key_registry import register_fields
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT, register_compile_targets
from nequip.scripts._package_utils import register_libraries_as_external_for_packaging

from e2ip_plugins import families
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, LEVERAGE, PLATEAU_KEY

#: NequIP's own targets; every readout has them with its outputs added, under the name <readout>_<target>.
COMPILE_TARGETS = ("ase", "pair_nequip", "batch")


#: Families that NequIP knows: a registration builds e3nn's tensors, which takes a second.
_registered: Set[str] = set()


def register() -> None:
    """Register fields and compile targets of every family; safe to call more than once."""
    for family in (family for name, family in families.table().items() if name not in _registered):
        keys = family.output_keys()
        names = [key.name for key in (*keys, LEVERAGE)]
        register_fields(
            node_fields=[*names, FORCE_UNIT_KEY, PLATEAU_KEY, COEFFICIENTS_KEY],
            cartesian_tensor_fields={key.name: "ij=ji" for key in keys if key.shape == (3, 3)},
        )
        for target in COMPILE_TARGETS:
            stock = COMPILE_TARGET_DICT[target]
            ours = {**stock, "output": [*stock["output"], *names]}
            register_compile_targets({f"{family.name}_{target}": ours})
        _registered.add(family.name)
    # Packages of PaiNN and AlphaNet need it installed where they are opened; others do not mention it.
    register_libraries_as_external_for_packaging(extern_modules=["torch_geometric"])
