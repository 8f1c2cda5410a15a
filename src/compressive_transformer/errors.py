"""The one exception for mistakes that the user can mend, and the one warning."""


class CompressiveError(ValueError):
    """What was wrong, what was expected and what to do, in one line.

    Raised for every mistake that comes from outside: a configuration, a file, a prompt, a call with
    tensors that do not fit. The command line prints the message without a traceback and exits with 1.
    """


class CompressiveWarning(UserWarning):
    """Something that is allowed but hardly meant: what it is and what to do instead."""
