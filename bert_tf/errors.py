"""Errors that users can fix."""


class UserError(ValueError):
    """Invalid input, with a one-line message: subject, expected, received, remedy.

    Commands print the message and exit with status 2.
    """


class DivergenceError(UserError):
    """Loss or gradient is not finite."""
