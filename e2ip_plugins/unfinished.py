"""An output file that grows in pieces, survives whatever stops its program, and gets its name when it is complete.

Beside ``OUT.part`` lies the journal ``OUT.part.json``: how far the work has come, and with which settings. When the
work goes on, whatever the journal does not know is cut off: nothing is lost or written twice.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Tuple

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError, ResumableError
from e2ip_plugins.formats import JOURNALS, FormatError

#: What to do about a part that cannot be continued.
START_ANEW = "choose another name for the output, or delete that file and its .json to start anew"

#: Seconds between two entries in the journal: what a kill may cost.
INTERVAL = 1.0


class Unfinished:
    """``OUT.part`` and its journal; a context manager.

    Parameters
    ----------
    output : Path
        Name of the complete file.
    settings : dict
        Everything that decides what is written: text by option.
    command : str
        Name of the command that writes it.

    Attributes
    ----------
    state : dict or None
        State of the last piece that counts, as `write` got it; None at the beginning.

    Raises
    ------
    InputError
        Other settings than the journal's, a journal that cannot be read, another program that writes the same file.
    """

    def __init__(self, output: Path, settings: Dict[str, str], command: str = "e2ip evaluate") -> None:
        self.output, self.settings, self.command = output, settings, command
        self.part = output.with_name(f"{output.name}.part")
        self.journal = output.with_name(f"{output.name}.part.json")
        self.state: Optional[Dict[str, Any]] = None
        self._bytes, self._last_entry = 0, time.monotonic()
        self._file: Optional[BinaryIO] = None

    def __enter__(self) -> "Unfinished":
        with self._errors():
            # Without a buffer, everything that was written is in the file.
            self._file = open(self.part, "ab", buffering=0)
        try:
            self._lock(self._file)
            self._continue(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._file is None:
            return
        try:
            if self.state is None:  # nothing to continue
                self.journal.unlink(missing_ok=True)
                self.part.unlink(missing_ok=True)
            else:
                self._note(self._file)
        except (InputError, OSError):
            if kind is None:
                raise
        finally:
            self._file.close()

    def write(self, piece: bytes, state: Dict[str, Any]) -> None:
        """Append a piece; ``state`` is what must be known to continue after it.

        Raises
        ------
        InputError
            The piece cannot be written, on a full disk for example. The pieces before it stay.
        """
        assert self._file is not None
        with self._errors():
            try:
                rest = piece
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._bytes)
                raise
        self._bytes, self.state = self._bytes + len(piece), state
        if time.monotonic() - self._last_entry > INTERVAL:
            self._note(self._file)

    def finish(self) -> None:
        """Give the file its name."""
        assert self._file is not None
        with self._errors():
            os.fsync(self._file.fileno())
            # While the lock still holds: a program that waits for it must not find the part.
            os.replace(self.part, self.output)
            self.journal.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """Delete the file, which nobody needs any more, and its journal."""
        assert self._file is not None
        self.part.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _continue(self, file: BinaryIO) -> None:
        """Bring file and state to the last entry of the journal, and begin a journal where there is none."""
        size = os.fstat(file.fileno()).st_size
        if self.journal.exists():
            self._read_journal(size)
            with self._errors():
                file.truncate(self._bytes)
        elif size:
            raise InputError(f"{self.part}: is there without {self.journal.name}; delete it to start anew")
        self._note(file)

    def _read_journal(self, size: int) -> None:
        try:
            content = json.loads(self.journal.read_text(encoding="utf-8"))
            if content["format"] != self.command:
                raise ValueError(f"it is of {content['format']}")
            JOURNALS.check(content["version"], f"{self.journal}:", content.get("e2ip_version"))
            settings, state, end = content["settings"], content["state"], int(content["bytes"])
            if end > size == 0 and self.output.exists():
                return  # The program was killed when the file had its name already.
            if end > size:
                raise ValueError(f"{self.part.name} should have {end} bytes and has {size}")
        except FormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            way = f"delete it and {self.part.name} to start anew"
            raise InputError(f"{self.journal}: cannot be used ({error}); {way}") from error
        for name in {**settings, **self.settings}:
            before, now = settings.get(name, "none"), self.settings.get(name, "none")
            if before != now and state is not None:
                problem = f"was begun with {name} {before}, now it is {now}: give the same to go on"
                raise InputError(f"{self.part}: {problem}, {START_ANEW}")
        self._bytes, self.state = end, state

    def _note(self, file: BinaryIO) -> None:
        """Bring the journal up to date; never half of it."""
        header = {"format": self.command, "version": JOURNALS.number, "e2ip_version": __version__}
        content = {**header, "settings": self.settings, "state": self.state, "bytes": self._bytes}
        temporary = self.journal.with_name(f"{self.journal.name}.new")
        with self._errors():
            try:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                os.fsync(file.fileno())
                os.replace(temporary, self.journal)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        self._last_entry = time.monotonic()

    def _lock(self, file: BinaryIO) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self.part}: another {self.command} is writing it") from error
        except OSError:
            pass  # a file system without locks

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an ``OSError`` into a `ResumableError` that says what is kept."""
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error}); what is finished is kept"
            raise ResumableError(f"{self.part}: {problem}: run the same command again once that is mended") from error


def part_of(text: str) -> Tuple[int, int]:
    """Return (i, n) of ``i/n``; `InputError` for anything else."""
    try:
        i, n = map(int, text.split("/"))
        if not 1 <= i <= n:
            raise ValueError
    except ValueError as error:
        raise InputError(f"--part {text}: give I/N, for example 3/8 for the third of eight parts") from error
    return i, n


def digest_of(path: Path) -> str:
    """Return the name of a file and the SHA-256 of its content."""
    try:
        return f"{path.name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()})"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
