"""Run a MACE command with the plugin where start-up files are not read.

``python -m mace_ext.run mace_run_train --readout e2ip ...`` does what ``mace_run_train --readout e2ip ...``
does after a normal installation. Needed with ``pip install --target``, on ``PYTHONPATH`` and under
``python -S``, where Python ignores ``.pth`` and ``.start`` files.
"""

import sys
from importlib import metadata

from mace_ext import _hook


def main() -> None:
    """Install the hook, then run the command named by the first argument with the others."""
    points = metadata.distribution("mace-torch").entry_points
    commands = {point.name: point for point in points if point.group == "console_scripts"}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: python -m mace_ext.run COMMAND ARGUMENTS...\ncommands: {', '.join(sorted(commands))}")
    _hook.install()
    sys.argv = sys.argv[1:]
    sys.exit(commands[sys.argv[0]].load()())


if __name__ == "__main__":
    main()
