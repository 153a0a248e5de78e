"""Registers our fields and targets of ``nequip-compile`` with NequIP."""

import importlib
import importlib.util
import sys

from nequip.data._key_registry import _CARTESIAN_TENSOR_FIELDS, register_fields
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT, register_compile_targets
from nequip.scripts._package_utils import register_libraries_as_external_for_packaging

from e2ip_plugins import families
from e2ip_plugins.keys import COEFFICIENTS_KEY, FORCE_UNIT_KEY, FRAME_OUTPUTS, LEVERAGE, PLATEAU_KEY

#: Targets of NequIP and Allegro; every readout has each of them with its outputs added, named <readout>_<target>.
COMPILE_TARGETS = ("ase", "pair_nequip", "batch", "pair_allegro")


def register() -> None:
    """Register fields and compile targets of every family; safe to call more than once."""
    if "allegro" not in sys.modules and importlib.util.find_spec("allegro") is not None:
        # NequIP imports its extensions in any order. Where Allegro imports NequIP, Allegro's target exists only at the
        # next call, at the first attribute of `nequip_ext`.
        importlib.import_module("allegro")
    register_fields(graph_fields=[key.name for key in FRAME_OUTPUTS])
    for family in families.table().values():
        keys = family.output_keys()
        names = [key.name for key in (*keys, LEVERAGE)]
        tensors = [key.name for key in keys if key.shape == (3, 3)]
        register_fields(
            node_fields=[*names, FORCE_UNIT_KEY, PLATEAU_KEY, COEFFICIENTS_KEY],
            # Only new ones, because NequIP (0.19.1) takes a quarter of a second to check each.
            cartesian_tensor_fields={name: "ij=ji" for name in tensors if name not in _CARTESIAN_TENSOR_FIELDS},
        )
        for target in filter(COMPILE_TARGET_DICT.__contains__, COMPILE_TARGETS):
            if target == "pair_allegro" and family.takes_forces:
                # Members' forces have parts on ghost atoms, and squares of sums cannot be communicated as sums.
                continue
            stock = COMPILE_TARGET_DICT[target]
            # LAMMPS takes what atoms have.
            more = [] if target.startswith("pair") else [key.name for key in FRAME_OUTPUTS]
            ours = {**stock, "output": [*stock["output"], *names, *more]}
            register_compile_targets({f"{family.name}_{target}": ours})
    # Packages of PaiNN and AlphaNet need torch_geometric where they are opened; other packages do not mention it.
    register_libraries_as_external_for_packaging(extern_modules=["torch_geometric"])
