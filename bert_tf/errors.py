"""Errors that users can fix."""

import contextlib
import re
from collections.abc import Iterator


class UserError(ValueError):
    """Invalid input, with a one-line message: subject, expected, received, remedy.

    Commands print the message and exit with status 2. Line breaks, such as those of an array or a
    table in the message, become spaces.
    """

    # Otherwise Keras adds lines with the arguments of the layer that raises the error.
    _keras_call_info_injected = True

    def __init__(self, message: str) -> None:
        lines = map(str.strip, str(message).split("\n"))
        super().__init__(" ".join(filter(None, lines)) if "\n" in str(message) else message)


class DivergenceError(UserError):
    """Loss, gradient or outputs of a model are not finite."""


# Lines of TensorFlow's messages that are about its graph.
_OF_GRAPH = re.compile(r"Graph execution error:|Detected at node |<stack traces |\d+ root err|\s|$")
# What `tf.debugging.Assert` prints: its data, perhaps the condition, and then nodes of the graph.
_ASSERTION = re.compile(
    r"assertion failed: \[(.+?)\](?: \[Condition |\s*\n\s*\[\[|\s*$)", re.DOTALL
)


def tensorflow_reason(error: Exception | str) -> str:
    """Return in one line why TensorFlow failed, without the names in its graph.

    Args:
        error: Error that it raised, or the message of a server that runs it.
    """
    message = str(getattr(error, "message", error) or "no reason available")
    if found := _ASSERTION.search(message):
        return " ".join(found[1].replace("] [", " ").split())
    message = re.sub(r"\n +\(0\) [A-Z_]+: +", "\n", message)  # The first of several errors.
    lines = [line for line in message.splitlines() if not _OF_GRAPH.match(line)]
    reason = re.sub(r"\{\{\w+ \S+?\}\} ?| *\[Op:.*", "", (lines or message.split("\n"))[0])
    return reason.strip() or "no reason available"


_is_command = False


@contextlib.contextmanager
def flag_names() -> Iterator[None]:
    """Let `argument_names` keep flags: the functions of the Python API are called by a command."""
    global _is_command
    before, _is_command = _is_command, True
    try:
        yield
    finally:
        _is_command = before


@contextlib.contextmanager
def argument_names() -> Iterator[None]:
    """Name arguments in the messages of UserErrors, not flags of commands.

    For the functions of the Python API, also as a decorator: they share checks with commands.
    """
    try:
        yield
    except UserError as error:
        if _is_command:
            raise
        message = re.sub(r"(?<![\w-])--(?=[a-z])", "", str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None
