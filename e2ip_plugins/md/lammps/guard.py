"""Errors in callbacks of LAMMPS, which lets no exception through: they end the run, and its command raises them."""

import functools
import sys
from typing import Any, Callable, Optional

from e2ip_plugins.errors import InputError


class RunGuard:
    """Run a callback of ``fix external``; the method of ``lmp`` that was called raises what the callback raised.

    To that end ``command``, ``commands_list``, ``commands_string`` and ``file`` of this one ``lmp`` are wrapped.
    After an error further runs of the same input file are left out, but other commands (and loops) are not. Then LAMMPS
    can go on; set a ``timer timeout`` of the input anew.

    Parameters
    ----------
    lmp : lammps.lammps
    fix : str
        Id of the fix.
    gives : str
        What LAMMPS has by it, for the message of a run without it.
    """

    def __init__(self, lmp: Any, fix: str, gives: str) -> None:
        self.lmp, self.fix, self.gives = lmp, fix, gives
        self.error: Optional[BaseException] = None
        for name in ("command", "commands_list", "commands_string", "file"):
            setattr(lmp, name, self._guarded(name))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function unless one has failed before; keep its error for the end of the run."""
        if self.error is not None:
            return
        try:
            function()
        except BaseException as error:
            # ctypes would print the error and go on.
            self.error = error
            self.lmp.force_timeout()

    def _guarded(self, name: str) -> Callable[..., Any]:
        method = getattr(self.lmp, name)

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            present = self.lmp.has_id("fix", self.fix)
            try:
                return method(*args, **settings)
            finally:
                error, self.error = self.error, None
                # Removed among other commands: who removes the fix by one command does so on purpose.
                gone = present and name != "command" and not self.lmp.has_id("fix", self.fix)
                if error is None and sys.exc_info()[0] is None and gone:
                    problem = f"fix {self.fix}, by which LAMMPS has {self.gives}, is gone (clear, unfix)"
                    raise InputError(f"{problem}; later runs lacked them: connect LAMMPS anew, or leave that out")
                if error is not None:
                    # LAMMPS leaves runs out until this command.
                    type(self.lmp).command(self.lmp, "timer timeout off")
                    raise error

        return call
