"""Command-line entry point: flags, one-line error messages and exit statuses.

A command is a frozen dataclass of settings and a function that accepts an instance of it. The
fields of the dataclass are the flags, so train.json can record every flag of a run.
"""

import contextlib
import ctypes
import dataclasses
import difflib
import io
import math
import operator
import os
import signal
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from absl import logging as absl_logging

from bert_tf.errors import UserError, flag_names, tensorflow_reason
from bert_tf.system.environment import has_visible_gpu
from bert_tf.system.processes import check_backend, count_processors
from bert_tf.system.progress import log

STATUS_USER_ERROR = 2
HELP_FLAGS = ("--help", "-help", "-h", "--helpfull", "--helpshort")
_PATH_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
STATUS_INTERRUPTED = 128  # Plus the signal's number, as shells report it: 130 Ctrl-C, 143 SIGTERM.
# TensorFlow and Keras import these wherever they are installed, for functions that no command uses.
# Without them a command starts a second earlier and takes 160 MB less.
_OPTIONAL_PACKAGES = ("IPython", "matplotlib", "pandas", "scipy", "sklearn")
_M_ARENA_MAX = -8  # Of mallopt(3), in malloc.h.
_KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def flag(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    choices: Sequence[str] | None = None,
    bounds: Mapping[str, float] | None = None,
    repeated: bool = False,
    **metadata: Any,
) -> Any:
    """Return a field of a settings dataclass. Without a default the flag is required.

    Args:
        help: The text in --help: a noun phrase with the unit.
        default: The value if the flag is not given.
        choices: The accepted values; by default all of the field's type.
        bounds: Range of a number, such as `{">=": 0, "<": 1}`, for `check_bounds`.
        repeated: Whether the flag may be given several times.
        **metadata: Further metadata of the field, read by the settings class.
    """
    metadata |= {
        "help": help,
        "choices": choices,
        "bounds": bounds or {},
        "repeated": repeated,
    }
    return dataclasses.field(default=default, metadata=metadata)


def defaults(settings_class: type) -> dict[str, Any]:
    """Return the default of each flag that has one, by the name of its field."""
    fields = dataclasses.fields(settings_class)
    return {of.name: of.default for of in fields if of.default is not dataclasses.MISSING}


def check_bounds(settings: Any) -> None:
    """Raise UserError unless the numbers of a settings dataclass are `None` or in their bounds."""
    for field, kind in _fields(type(settings)):
        value, bounds = getattr(settings, field.name), field.metadata["bounds"]
        if value is None:
            continue
        is_infinite = bool(bounds) and kind is float and math.isinf(value)
        if is_infinite or not all(
            _COMPARISONS[sign](value, bound) for sign, bound in bounds.items()
        ):
            expected = "a finite number" if is_infinite else _KINDS[kind]
            raise UserError(
                f"--{_flag_name(field)}={value}: expected {expected} "
                + " and ".join(f"{sign} {bound}" for sign, bound in bounds.items())
            )


def check_text(name: str, text: str | None) -> None:
    """Raise UserError if the text of a flag is not UTF-8, as of a terminal with another locale."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise UserError(f"--{name}: expected UTF-8, received {text!r:.80}") from None


def check_types(settings: Any, settings_class: type) -> None:
    """Check types and choices of settings that are given in Python instead of as flags.

    Raises UserError for the fields of `settings_class`, a base class of the settings.
    """
    for field, kind in _fields(settings_class):
        value, choices = getattr(settings, field.name), field.metadata["choices"]
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if (value is None and field.default is None) or (is_kind and value in (choices or [value])):
            continue
        expected = f"one of {', '.join(choices)}" if choices else _KINDS[kind]
        raise UserError(f"--{_flag_name(field)}={value!r:.80}: expected {expected}")


def run_main(
    main: Callable[..., Any],
    settings_class: type,
    doc: str,
    imports_tensorflow: bool | Callable[[Any], bool] = True,
) -> None:
    """Parse `sys.argv` into `settings_class` and call `main(settings)`.

    `main` also takes what `settings.check()` returns, if that is something.

    The exit status is 0 after `main` or --help, 2 after a wrong flag or a `UserError`, which is
    printed as one line on stderr, 130 after Ctrl-C and 143 after SIGTERM. Flags, and files by
    `settings.check()` if defined, are checked before TensorFlow is imported, which takes seconds.
    The start-up messages of TensorFlow are suppressed unless --verbosity is given.

    Args:
        main: The command.
        settings_class: Frozen dataclass with fields from `flag`.
        doc: The text in --help before the flags.
        imports_tensorflow: Whether to import TensorFlow before `main`, or a function of the
            settings that returns this.
    """
    use_utf8()
    # absl's own --help would list the flags of all imported modules.
    if any(word in HELP_FLAGS for word in sys.argv[1:]):
        print(_help(settings_class, doc))
        sys.exit(0)
    verbose = False
    # A line of its own, as every message; Python adds the line of code that warns.
    warnings.showwarning = lambda message, *_: log(f"warning: {message}")
    try:
        settings, verbose = parse(settings_class, sys.argv)
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(STATUS_INTERRUPTED + signum))
        checked = settings.check() if hasattr(settings, "check") else None
        if imports_tensorflow(settings) if callable(imports_tensorflow) else imports_tensorflow:
            import_tensorflow(verbose)
        with flag_names():
            main(settings) if checked is None else main(settings, checked)
    except (UserError, flags.Error) as error:
        _fail(str(error), STATUS_USER_ERROR)
    except OSError as error:
        status = STATUS_USER_ERROR if isinstance(error, _PATH_ERRORS) else 1
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", status)
    except KeyboardInterrupt as error:  # That of the training loop explains how to resume.
        _fail(
            str(error) or "interrupted",
            STATUS_INTERRUPTED + getattr(error, "signum", signal.SIGINT),
        )
    except Exception as error:
        tf = sys.modules.get("tensorflow")
        if verbose or tf is None or not isinstance(error, tf.errors.OpError):
            raise
        reason = f"{type(error).__name__}: {tensorflow_reason(error)}"
        _fail(f"TensorFlow: {reason} (--verbosity=0 prints the traceback)", 1)


def use_utf8() -> None:
    """Write stdout in UTF-8, whatever the locale: programs read the results.

    Half of a surrogate pair becomes an escape, which is valid in JSON. Messages go to stderr, where
    Python escapes the characters that the terminal does not have.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # Not if a notebook or a test replaced it.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def parse(settings_class: type, argv: Sequence[str]) -> tuple[Any, bool]:
    """Parse the program name and its arguments.

    Returns:
        The settings, and whether --verbosity was given.

    Raises:
        absl.flags.Error: If a value is not of its flag's type.
        UserError: If a flag is unknown, a required one is missing or a list is given twice, or
            from the checks of `settings_class`.
    """
    values = flags.FlagValues()
    for field, kind in _fields(settings_class):
        _define(values, field, kind)
    flags.DEFINE_integer(
        "verbosity", None, "log verbosity of TensorFlow; 0 shows all messages", flag_values=values
    )
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        nearest = _nearest(error.flagname, values)
        hint = f"did you mean --{nearest}? (see --help)" if nearest else "see --help"
        raise UserError(f"--{error.flagname}: no such flag; {hint}") from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; expected flags of the form --name=value")
    chosen = {}
    for field, kind in _fields(settings_class):
        given = values[_flag_name(field)]
        # absl would use the last one alone.
        if kind is tuple and not field.metadata["repeated"] and given.present > 1:
            raise UserError(
                f"--{given.name}: given {given.present} times; expected one list, separated by "
                "commas"
            )
        value = given.value
        # Empty as well, as of a shell's variable that is not set.
        if value in (None, "", []) and field.default is dataclasses.MISSING:
            raise UserError(f"--{_flag_name(field)} is required: {field.metadata['help']}")
        chosen[field.name] = tuple(value) if kind is tuple and value is not None else value
    if values.verbosity is not None:
        absl_logging.set_verbosity(values.verbosity)
    return settings_class(**chosen), values.verbosity is not None


def _nearest(given, names):
    """Return the name that has the given initials, else most of the words, then letters, if any."""

    def likeness(name):
        words = name.split("_")
        return (
            given == "".join(word[0] for word in words),
            len({*words} & {*given.split("_")}),
            difflib.SequenceMatcher(None, given, name).ratio(),
        )

    nearest = max(names, key=likeness)
    return nearest if likeness(nearest) > (False, 0, 0.6) else None


def _fields(settings_class):
    """Yield each field and its type without "| None" and type arguments."""
    hints = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        kinds = [kind for kind in typing.get_args(hints[field.name]) if kind is not types.NoneType]
        is_union = isinstance(hints[field.name], types.UnionType)
        kind = kinds[0] if is_union else hints[field.name]
        yield field, typing.get_origin(kind) or kind


def _flag_name(field):
    return field.name.rstrip("_")  # `from_`, since `from` is a Python keyword.


def _define(values, field, kind):
    name, help, choices = _flag_name(field), field.metadata["help"], field.metadata["choices"]
    default = None if field.default is dataclasses.MISSING else field.default
    default = list(default) if isinstance(default, tuple) else default
    if choices:
        flags.DEFINE_enum(name, default, list(choices), help, flag_values=values)
    else:
        define = {
            str: flags.DEFINE_string,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            bool: flags.DEFINE_bool,
            tuple: flags.DEFINE_multi_string if field.metadata["repeated"] else flags.DEFINE_list,
        }[kind]
        define(name, default, help, flag_values=values)


def _help(settings_class, doc):
    lines = [doc.strip(), "", "Flags:"]
    for field, kind in _fields(settings_class):
        if field.default is dataclasses.MISSING:
            note = "required"
        elif field.default in (None, ()):
            note = "optional"
        else:
            note = (
                f"default {','.join(map(str, field.default)) if kind is tuple else field.default}"
            )
        choices = field.metadata["choices"]
        lines.append(
            f"  --{_flag_name(field)}  ({note}) {field.metadata['help']}"
            + (f" [{'|'.join(choices)}]" if choices else "")
        )
    lines.append("  --verbosity  (optional) log verbosity of TensorFlow; 0 shows all messages")
    return "\n".join(lines)


def import_tensorflow(verbose: bool = False) -> None:
    """Import TensorFlow and Keras for a command.

    Start-up messages are printed only if the import fails or `verbose`. Threads share arenas of
    malloc, unless the variable MALLOC_ARENA_MAX says otherwise, and optional packages are not
    imported.

    Raises:
        UserError: If the environment names another backend of Keras.
    """
    check_backend()
    _limit_arenas()
    with optional_packages_hidden():
        if verbose:
            import tensorflow  # noqa: F401
        else:
            _import_silently()


def _import_silently():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # C++ code writes the first messages before any log level applies, so the file descriptor is
    # redirected.
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 2)
        try:
            import tensorflow as tf

            gpus = tf.config.list_physical_devices("GPU")
        except BaseException:
            noise.seek(0)
            os.write(kept, noise.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    if has_visible_gpu() and not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        raise UserError(
            "this machine has an NVIDIA GPU that TensorFlow cannot use, because libraries of CUDA "
            f"are missing or CUDA_VISIBLE_DEVICES={visible} names no GPU of it; run pip install "
            "'tensorflow[and-cuda]', or set CUDA_VISIBLE_DEVICES=-1 "
            "to run on the processor"
        )


def _limit_arenas():
    """Let glibc allocate from one arena per two processors, instead of eight per processor.

    XLA compiles in several threads. What a thread frees stays in its arena, up to 100 MB in all.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Not in other C libraries.
    if mallopt and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, max(1, count_processors() // 2))


@contextlib.contextmanager
def optional_packages_hidden() -> Iterator[None]:
    """Let TensorFlow and Keras be imported in the block without their optional packages.

    Only for the processes of commands: in a notebook Keras accepts tables of pandas. Packages that
    were imported before are not hidden, and all can be imported after the block.
    """
    hidden = [name for name in _OPTIONAL_PACKAGES if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Its import fails.
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _fail(message, status):
    # One line, in which white space inside of names is kept.
    log(" ".join(filter(None, map(str.strip, message.splitlines()))))
    sys.exit(status)
