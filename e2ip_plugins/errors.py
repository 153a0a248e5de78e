"""The exception for input that the user can correct, the warning about uncertainties, and numbers in messages."""


class InputError(ValueError):
    """Bad data, option or file; the message names it and says what to do.

    Command-line entry points print the message without a traceback and exit with status 2.
    """


class ResumableError(InputError):
    """What stopped long work, of which everything that is finished is kept: the same command goes on."""


class UncertaintyWarning(UserWarning):
    """Warning about an uncertainty: above its threshold, with a doubtful threshold, or of a model never fitted."""


def plural(number: int, noun: str) -> str:
    """Return a number of things as messages have it.

    >>> plural(1, "frame"), plural(2, "frame"), plural(2, "energy")
    ('1 frame', '2 frames', '2 energies')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("gy") else f"{noun}s"
    return f"{number} {noun if number == 1 else several}"
