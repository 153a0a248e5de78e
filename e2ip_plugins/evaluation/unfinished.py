"""An output file that grows in pieces, survives whatever stops its program, and gets its name when it is complete.

Beside ``OUT.part`` lies the journal ``OUT.part.json``: how far the work has come and with which settings. What the
journal does not vouch for is cut off when the work goes on, so that nothing is lost or there twice.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Optional

from e2ip_plugins.errors import InputError

FORMAT, VERSION = "e2ip evaluate", 1

#: Seconds between two entries in the journal: what a kill may cost.
INTERVAL = 1.0


class Unfinished:
    """``OUT.part`` and its journal; a context manager.

    Parameters
    ----------
    output : Path
        Name of the complete file.
    settings : dict
        Text by option: whatever decides what is written.

    Attributes
    ----------
    state : dict or None
        What `write` was given for the last piece that counts; None at the beginning.

    Raises
    ------
    InputError
        Other settings than the journal's, a journal that cannot be read, a second program at the same file.
    """

    def __init__(self, output: Path, settings: Dict[str, str]) -> None:
        self.output, self.settings = output, settings
        self.part = output.with_name(f"{output.name}.part")
        self.journal = output.with_name(f"{output.name}.part.json")
        self.state: Optional[Dict[str, Any]] = None
        self._bytes, self._noted, self._when = 0, True, time.monotonic()
        self._file: Optional[BinaryIO] = None

    def __enter__(self) -> "Unfinished":
        with self._errors():
            # Not buffered: whatever is written counts.
            self._file = open(self.part, "ab", buffering=0)
        try:
            self._lock()
            self._go_on()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._file is None:
            return
        try:
            if self.state is None:  # nothing to go on from
                self.journal.unlink(missing_ok=True)
                self.part.unlink(missing_ok=True)
            self._note()
        except (InputError, OSError):
            if kind is None:
                raise
        finally:
            self._file.close()

    def write(self, piece: bytes, state: Dict[str, Any]) -> None:
        """Append a piece; ``state`` is what has to be known to go on after it.

        Raises
        ------
        InputError
            Where it cannot be written, a full disk for example; the pieces before it stay.
        """
        assert self._file is not None
        with self._errors():
            try:
                written = 0
                while written < len(piece):
                    written += self._file.write(piece[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._bytes)
                raise
        self._bytes, self.state, self._noted = self._bytes + len(piece), state, False
        if time.monotonic() - self._when > INTERVAL:
            self._note()

    def finish(self) -> None:
        """Give the file its name."""
        assert self._file is not None
        with self._errors():
            os.fsync(self._file.fileno())
            # Before the lock goes: whoever waits for it must not find the part.
            os.replace(self.part, self.output)
            self.journal.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _go_on(self) -> None:
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        if not self.journal.exists():
            if size:
                raise InputError(f"{self.part}: is there without {self.journal.name}; delete it to start anew")
            self._noted = False
            self._note()
            return
        try:
            content = json.loads(self.journal.read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ValueError("another format or version")
            settings, state, end = content["settings"], content["state"], int(content["bytes"])
            if end > size == 0 and self.output.exists():
                state, end = None, 0  # it was killed when the file had its name already
            if end > size:
                raise ValueError(f"{self.part.name} should have {end} bytes and has {size}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.journal}: cannot be used ({error}); delete it and {self.part.name} to start anew"
            ) from error
        for name in {**settings, **self.settings}:
            before, now = settings.get(name, "none"), self.settings.get(name, "none")
            if before != now and state is not None:
                raise InputError(
                    f"{self.part}: was begun with {name} {before}, now it is {now}: give the same to go on, choose "
                    "another name for the output, or delete that file and its .json to start anew"
                )
        with self._errors():
            self._file.truncate(end)
        self._bytes, self.state, self._noted = end, state, False
        self._note()

    def _note(self) -> None:
        """Bring the journal up to date; never half of it."""
        if self._noted or not self.part.exists():
            return
        assert self._file is not None
        content = {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "state": self.state,
            "bytes": self._bytes,
        }
        temporary = self.journal.with_name(f"{self.journal.name}.new")
        with self._errors():
            try:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                os.fsync(self._file.fileno())
                os.replace(temporary, self.journal)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        self._noted, self._when = True, time.monotonic()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self.part}: another e2ip evaluate is writing it") from error
        except OSError:
            pass  # a file system without locks

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.part}: cannot be written ({error.strerror or error}); what is finished is kept: run the same "
                "command again once that is mended"
            ) from error
