"""The one exception for input that the user can mend, and the one warning of runs."""


class InputError(ValueError):
    """Bad data, option or file; the message names it and the way out.

    Command-line entry points print the message without a traceback and exit with status 2.
    """


class UncertaintyWarning(UserWarning):
    """An uncertainty has risen above its threshold, or a threshold is hardly meant as it is given."""
