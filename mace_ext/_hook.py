"""Import hook that lets the stock MACE commands know `--readout`.

A ``.pth`` file (a ``.start`` file from Python 3.15 on) calls `install` at interpreter start. That adds one finder,
which ignores everything except the MACE modules of the seam table: their usual loader loads these, then they are
patched.
Standard library only, and nothing except ``sys`` and the switch until MACE is imported.
``E2IP_DISABLE=1`` turns it off.
"""

import sys

from mace_ext.switch import disabled


class _Finder:
    """Meta-path finder for the modules of `mace_ext.seams.SEAMS`."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("mace."):
            return None
        from mace_ext import seams

        if name not in seams.SEAMS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Runs the stock loader of a module, restores that loader, then patches the module."""

    def __init__(self, stock):
        self.stock = stock

    def create_module(self, spec):
        return self.stock.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.stock
        self.stock.exec_module(module)
        from mace_ext import seams

        seams.apply(module)

    def get_code(self, name):
        # `python -m` runs a module's code under the name __main__, where nothing could be patched
        # before it starts: run the imported, patched module instead.
        return compile(f"import sys, {name}\nsys.exit({name}.main())", f"<{name}>", "exec")

    def __getattr__(self, attribute):
        return getattr(self.stock, attribute)


def install():
    """Add the finder once; does nothing under ``E2IP_DISABLE=1``."""
    if disabled():
        return
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
