"""The error that means: a person can mend this."""


class UserError(ValueError):
    """A mistake in what was given, told in one line: what arrived, what was wanted, what to do.

    Commands print it and exit with status 2; in a notebook it is an ordinary ValueError.
    """


class DivergenceError(UserError):
    """A training's loss or gradient is no longer finite."""
