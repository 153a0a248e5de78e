"""Formats of the files that are written and read again: a number for each kind, and one answer to other numbers.

A number is raised when what is saved changes, or what it means. Every version reads all numbers since that of release
0.2.0. What a newer release wrote is refused, and so is what was written before the first release.
"""

from typing import Any, NamedTuple, Optional

from e2ip_plugins import __version__
from e2ip_plugins.errors import InputError

#: Release that froze the formats.
FIRST_RELEASE = "0.2.0"


class FormatError(InputError):
    """A file in a format that this version does not read.

    Attributes
    ----------
    reason : str
        The message without the name of the file.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where} {reason}")
        self.reason = reason


class Format(NamedTuple):
    """Format of one kind of file.

    Attributes
    ----------
    files : str
        What has it, in the plural, for messages.
    number : int
        Number that this version writes.
    oldest : int
        Number of release 0.2.0, the oldest that is read.
    """

    files: str
    number: int
    oldest: int

    def check(self, number: Any, where: str, release: Optional[str] = None) -> int:
        """Return the number of a file's format if this version reads it.

        Parameters
        ----------
        number
            As it stands in the file; None where there is none.
        where : str
            Where the message begins: a file with a colon, or a subject such as ``this model``.
        release : str, optional
            Release of e2ip-plugins that wrote the file, if the file has it.

        Raises
        ------
        FormatError
            For the formats of newer releases, and for those before 0.2.0.

        Examples
        --------
        >>> Format("models", 7, 5).check(6, "my.model")
        6
        """
        if not isinstance(number, int) or number < self.oldest:
            reason = f"was written before e2ip-plugins {FIRST_RELEASE}, whose formats are the first that are read"
            raise FormatError(where, f"{reason}: make it anew")
        if number > self.number:
            writer = "a newer e2ip-plugins" if release is None else f"e2ip-plugins {release}"
            reason = f"was written by {writer} in format {number} of {self.files}"
            known = f"e2ip-plugins {__version__}, which is installed, reads formats up to {self.number}"
            raise FormatError(where, f"{reason}, and {known}: update e2ip-plugins")
        return number


#: Models, checkpoints and readout files: settings and state of a readout.
READOUTS = Format("models and readouts", 5, 5)

#: Files of ``e2ip calibrate``.
CALIBRATIONS = Format("calibrations", 1, 1)

#: Parts of ``e2ip fit``.
FIT_PARTS = Format("parts of a fit", 1, 1)

#: Journals of work that goes on after a stop.
JOURNALS = Format("journals", 1, 1)
