"""Write docs/commands.md and docs/api.md from the code.

    python docs/make_reference.py

The commands are described by their docstrings and settings classes, the Python API by its
docstrings and signatures. Only the API needs TensorFlow.
"""

import dataclasses
import importlib
import inspect
import pathlib
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("bert_tf", "tasks", "export")
WIDTH = 100
TYPES = {str: "string", int: "integer", float: "number", bool: "true or false", tuple: "list"}
# Methods that Keras calls.
HOOKS = {
    "build",
    "call",
    "compile_from_config",
    "encode_examples",
    "from_config",
    "get_compile_config",
    "get_config",
    "load_own_variables",
    "metrics",
    "non_trainable_variables",
    "non_trainable_weights",
    "scale_loss",
    "test_step",
    "train_step",
    "trainable_variables",
    "trainable_weights",
}
SECTIONS = re.compile(r"^(Args|Call arguments|Returns|Raises|Attributes|Options of `\w+`):$")
NAMED = re.compile(r"(\*{0,2}\w[\w., ]*): ")

COMMANDS_PAGE = """# Commands

```bash
bert-tf finetune --help
```

Flags have a value, such as `--epochs=5`. A switch such as `--calibrate` needs none. Lists are
separated by commas; a value with a comma is in double quotes: `--labels='"yes, please",no'`. A flag
without a default is optional, unless it is marked as required. Every command also has `--help`, and
`--verbosity=0`, which shows all messages of TensorFlow.
"""
API_PAGE = """# Python API

```python
from bert_tf import BertConfig, Encoder, Tokenizer
from tasks import TextClassifier, load_model, read_examples
from export import LocalClient, publish
```

These are the public names. They are imported lazily: TensorFlow is loaded with the first one that
needs it. [Python and Keras](python.md) shows how they are used. In the examples, `PATH` is the path
of [pretrained weights](checkpoints.md), `texts` and `labels` are lists of strings, and `RUN` is the
run of a classifier.
"""


def command_modules() -> list[str]:
    """Return the names of the command modules by package, in alphabetical order."""
    from bert_tf.__main__ import COMMANDS

    return sorted(COMMANDS, key=lambda module: (PACKAGES.index(module.partition(".")[0]), module))


def settings_of(module: str) -> type:
    """Return the settings class of a command module."""
    classes = [
        value
        for name, value in vars(importlib.import_module(module)).items()
        if name.endswith("Settings") and dataclasses.is_dataclass(value)
    ]
    # A module may import the base classes of its settings.
    (found,) = (of for of in classes if not any(of in other.__mro__[1:] for other in classes))
    return found


def cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return with_code(" ".join(text.split()).replace("|", "\\|"))


def with_code(text: str) -> str:
    """Put the flags and [tokens] of a plain text into code spans."""
    return re.sub(
        r"`[^`]*`|(?<![\w-])--[a-z]\w*(?:=[^\s,;:)]+(?:,[^\s,;:)]+)*)?|\[[A-Z]+\]|\{\"[^}]*\}",
        lambda match: match[0] if match[0].startswith("`") else f"`{match[0]}`",
        text,
    )


def flag_row(field: dataclasses.Field, hint: typing.Any) -> str:
    """Return the row of a flag: name, type, default and meaning."""
    metadata, default = field.metadata, field.default
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    kind = typing.get_origin(kind) or kind
    expected = ", ".join(f"`{choice}`" for choice in metadata["choices"] or ()) or TYPES[kind]
    expected += "".join(f" {sign} {bound}" for sign, bound in metadata["bounds"].items())
    if metadata["repeated"]:
        expected = "string, repeatable"
    if default is dataclasses.MISSING:
        shown = "required"
    elif kind is bool and default is not None:
        shown = f"`{str(default).lower()}`"
    else:
        shown = f"`{default}`" if default not in (None, (), "") else ""
    meaning = cell(metadata["help"])
    if "tasks" in metadata:
        meaning += f" ({', '.join(metadata['tasks'])})"
    return f"| `--{field.name.rstrip('_')}` | {expected} | {shown} | {meaning} |"


def command_section(module: str) -> Iterator[str]:
    """Yield the lines of a command's section."""
    paragraphs = inspect.cleandoc(importlib.import_module(module).__doc__ or "").split("\n\n")
    yield from (f"## {module.rpartition('.')[2]}", "")
    for paragraph in paragraphs:
        text = textwrap.dedent(paragraph)
        if text.startswith("bert-tf "):
            continued = re.sub(r"\n(?!bert-tf )", " \\\\\n    ", text)
            yield from ("```bash", *continued.split("\n"), "```", "")
        else:
            yield from (*wrap(with_code(" ".join(text.split()))), "")
    yield from ("| flag | type | default | meaning |", "|---|---|---|---|")
    settings = settings_of(module)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        yield flag_row(field, hints[field.name])
    yield ""


def commands() -> str:
    """Return the page of the commands. No module that it imports needs TensorFlow."""
    lines = [COMMANDS_PAGE, "| command | purpose |", "|---|---|"]
    modules = command_modules()
    for module in modules:
        purpose = (importlib.import_module(module).__doc__ or "").split("\n\n")[0]
        name = module.rpartition(".")[2]
        lines.append(f"| [`{name}`](#{name}) | {cell(purpose).rstrip('.')} |")
    lines.append("")
    for module in modules:
        lines += command_section(module)
    return "\n".join(lines).rstrip() + "\n"


def wrap(text: str, bullet: str = "") -> list[str]:
    """Wrap a paragraph or a list item."""
    return textwrap.wrap(
        bullet + text,
        WIDTH,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def docstring(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs, code, and a list per section of arguments."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(text).split("\n"):
        heading, block = blocks[-1]
        match = SECTIONS.match(line)
        if match:
            blocks.append((match[1], []))
        elif line and heading and not line.startswith(" "):
            blocks.append(("", [line]))
        elif not line and not heading:
            blocks.append(("", []))
        else:
            block.append(line)
    for heading, block in blocks:
        body = textwrap.dedent("\n".join(block)).strip("\n")
        if heading:
            yield from (f"{heading}:", "", *section(body, named=heading != "Returns"), "")
        elif block and block[0].startswith("    "):
            yield from ("```python", body, "```", "")
        elif block:
            yield from (*wrap(with_code(" ".join(body.split()))), "")


def section(body: str, named: bool) -> Iterator[str]:
    """Yield the list of a section of a docstring, and the paragraphs below it."""
    for chunk in re.split(r"\n\n(?=\S)", body):
        if not named or not NAMED.match(chunk):
            text = with_code(" ".join(chunk.split()))
            yield from wrap(text) if named else wrap(text, "- ")
            continue
        for entry in re.split(r"\n(?=\S)", chunk):
            item, *nested = re.split(r"\n\s+- ", entry)
            name, _, meaning = " ".join(item.split()).partition(": ")
            yield from wrap(f"`{name}`: {with_code(meaning)}", "- ")
            for line in nested:
                yield from wrap(with_code(" ".join(line.split())), "    - ")
        yield ""


def annotation(value: typing.Any) -> str:
    """Return an annotation without the names of modules."""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"(?:[a-zA-Z_]\w*\.)+(\w+)", r"\1", text)


def signature(name: str, function: typing.Any, bound: bool) -> list[str]:
    """Return the signature in lines of code, one per parameter if it is long."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return [f"{name}(...)"]
    parameters, star = [], False
    for parameter in list(found.parameters.values())[1 if bound else 0 :]:
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        if parameter.kind == parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        shown = prefix + parameter.name
        if parameter.annotation is not parameter.empty and not prefix:
            shown += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            is_code = callable(parameter.default)
            shown += f" = {'...' if is_code else repr(parameter.default)}"
        parameters.append(shown)
    result = found.return_annotation
    arrow = "" if result in (found.empty, None, "None") else f" -> {annotation(result)}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{name}(", *(f"    {shown}," for shown in parameters), f"){arrow}"]


def is_of_project(value: typing.Any) -> bool:
    """Return whether a class or function is part of this project."""
    return str(getattr(value, "__module__", "")).split(".")[0] in PACKAGES


def methods(owner: type, without: tuple[type, ...]) -> Iterator[tuple[str, typing.Any]]:
    """Yield the documented public methods and properties of a class, inherited ones included."""
    seen = set(HOOKS)
    for base in owner.__mro__:
        if base in without or not is_of_project(base):
            continue
        for name, value in vars(base).items():
            inner = getattr(value, "__func__", value)
            is_function = isinstance(inner, types.FunctionType | property)
            if name.startswith("_") or name in seen or not is_function or not inner.__doc__:
                continue
            seen.add(name)
            hints = getattr(inner, "__annotations__", {})
            if "NoReturn" not in str(hints.get("return")):  # Rejects a method of Keras.
                yield name, value


def arguments(text: str) -> str:
    """Return a docstring from its arguments on."""
    _, heading, rest = inspect.cleandoc(text).partition("Args:\n")
    return heading + rest


def with_types(text: str, task_class: type) -> str:
    """Return a docstring with the types and defaults of the options of `from_pretrained`."""
    before, heading, options = text.partition("Options of `from_pretrained`:\n")
    found = inspect.signature(task_class).parameters
    makers = [
        vars(base)["from_options"]
        for base in reversed(task_class.__mro__)
        if "from_options" in vars(base)
    ]
    for maker in makers:  # What it converts has another type than the field.
        found = {**found, **inspect.signature(maker.__func__).parameters}

    def typed(match: re.Match[str]) -> str:
        name, meaning = match.groups()
        option = found[name]
        is_shown = isinstance(option.default, str | int | float) and "by default" not in meaning
        default = f", by default {option.default!r}" if is_shown else ""
        return f"    {name}: `{annotation(option.annotation)}`{default}. {meaning}"

    entry = r"(?m)^    (\w+): (.*(?:\n        .*)*)"
    return before + heading + re.sub(entry, typed, options)


def class_section(name: str, owner: type, without: tuple[type, ...]) -> Iterator[str]:
    """Yield the lines of a class: constructor, docstring, methods."""
    text = inspect.cleandoc(owner.__doc__ or "")
    made_by = next((base for base in owner.__mro__ if "__init__" in vars(base)), object)
    if is_of_project(made_by) and not without:
        yield from ("```python", *signature(name, owner, bound=False), "```", "")
        if made_by.__doc__ != owner.__doc__:
            text += "\n\n" + arguments(made_by.__doc__ or "")
        if "Args:\n" not in text:
            text += "\n\n" + arguments(vars(made_by)["__init__"].__doc__ or "")
    yield from docstring(with_types(text, owner.task_class) if without else text)
    for method, value in methods(owner, without):
        inner = getattr(value, "__func__", value)
        yield from (f"#### {name}.{method}", "")
        if not isinstance(inner, property):
            bound = not isinstance(value, staticmethod)
            yield from ("```python", *signature(f"{name}.{method}", inner, bound), "```", "")
        yield from docstring(inspect.cleandoc(inner.__doc__))


def api() -> str:
    """Return the page of the Python API. Imports TensorFlow."""
    from tasks.model.task_model import TaskModel

    lines = [API_PAGE]
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", ""]
        if package == "tasks":
            lines += ["### Methods of all models", ""]
            lines += ["The models of this package are `keras.Model`s with these methods.", ""]
            lines += class_section("TaskModel", TaskModel, ())
        for name in module.__all__:
            value = getattr(module, name)
            lines += [f"### {name}", ""]
            if isinstance(value, type):
                is_model = issubclass(value, TaskModel)
                lines += class_section(name, value, TaskModel.__mro__ if is_model else ())
            elif callable(value):
                lines += ["```python", *signature(name, value, bound=False), "```", ""]
                lines += docstring(value.__doc__ or "")
            else:
                lines += [f"A {type(value).__name__} with the keys {', '.join(value)}.", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    """Write both pages."""
    for name, page in (("commands", commands), ("api", api)):
        (ROOT / "docs" / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
