"""The one error that means: a person can mend this."""


class UserError(ValueError):
    """A mistake in what was given. The message is one line: what arrived, what was wanted, where,
    what to do.

    Commands print it and exit with status 2; in a notebook it is an ordinary ValueError.
    """
