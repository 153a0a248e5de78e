"""The one exception for input that the user can mend."""


class InputError(ValueError):
    """Bad data, option or file; the message names it and the way out.

    Command-line entry points print the message without a traceback and exit with status 2.
    """
