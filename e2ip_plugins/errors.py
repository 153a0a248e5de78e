"""The one exception for input that the user can mend, and the one warning."""


class InputError(ValueError):
    """Bad data, option or file; the message names it and the way out.

    Command-line entry points print the message without a traceback and exit with status 2.
    """


class UncertaintyWarning(UserWarning):
    """What to know of an uncertainty: above its threshold, a threshold hardly meant so, a model never fitted."""
