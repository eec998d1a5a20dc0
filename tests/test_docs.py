"""The documentation: its length, links, paths and commands.

Commands are checked against the settings dataclasses that define their flags. Nothing is run, and
the checks themselves need no TensorFlow.
"""

import dataclasses
import importlib
import re
import shlex
import types
import typing

import pytest

from bert_tf.__main__ import MODULES
from tests.conftest import COMMANDS, ROOT

MAX_README_LINES = 160
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
# Flags in the text that belong to pip, to benchmarks and to TensorFlow Serving.
OTHER_FLAGS = {
    "batching_parameters_file",
    "editable",
    "enable_batching",
    "enable_per_model_batching_parameters",
    "hlo",
    "model_config_file_poll_wait_seconds",
    "rows",
    "tf_xla_auto_jit",
    "xla_gpu_autotune_level",
    "xla_gpu_deterministic_ops",
}
# Pages whose readers want a row or a rule of them, and no command.
LOOKED_UP = {
    "design.md",
    "jobs.md",
    "limits.md",
    "request-limits.md",
    "run-directories.md",
    "tested-versions.md",
    "troubleshooting.md",
}
# Pages where `predict` and others are methods, and the table of the commands.
OTHER_NAMES = {
    "api.md",
    "commands.md",
    "fit-or-train.md",
    "gpu.md",
    "keras.md",
    "labels.md",
    "large-data.md",
    "performance.md",
    "python.md",
    "tasks/similarity.md",
}
ELLIPSIS = "..."
ANY_COMMAND = {"help", "verbosity"}
ANY_PROGRAM = {"--help", "--version"}


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def split_fences(text):
    """Return the text without fenced blocks, and the blocks as (language, lines)."""
    prose, blocks, block = [], [], None
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            if block is None:
                block = (line.strip().removeprefix("```"), [])
            else:
                blocks.append(block)
                block = None
        else:
            (prose if block is None else block[1]).append(line)
    assert block is None, "a fenced block is not closed"
    return "\n".join(prose), blocks


def anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", split_fences(text)[0], re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {
        slug + (f"-{number}" if number else "")
        for slug, count in found.items()
        for number in range(count + 1)
    }


def broken_links(page, text):
    """Return the relative links of a page that lead nowhere."""
    prose = re.sub(r"`[^`\n]*`", "", split_fences(text)[0])
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.resolve().is_relative_to(ROOT) or not file.exists():
            problems.append(f"{page}: {target}: no such file")
        elif anchor and anchor not in anchors(text if not path else file.read_text("utf-8")):
            problems.append(f"{page}: {target}: no such heading")
    return problems


def missing_paths(page, text):
    """Return the paths of this repository in code spans that do not exist."""
    prose, _ = split_fences(text)
    paths = re.findall(r"`((?:bert_tf|tasks|export|tests|benchmarks|examples)/[\w./]+)`", prose)
    return [
        f"{page}: {path}: no such file"
        for path in paths
        if not re.search(r"[A-Z]{4}", path) and not (ROOT / path).exists()
    ]


def command_lines(text):
    """Return the command lines of a page, continuation lines joined."""
    lines = []
    for language, block in split_fences(text)[1]:
        joined = re.sub(r"\\\n\s*", "", "\n".join(block)).split("\n")
        if language == "bash":
            lines += joined
        elif language == "console":
            lines += [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    return [line for line in lines if line.strip()]


def settings_class(module):
    """Return the settings dataclass of a command, whose fields are its flags."""
    assert module in COMMANDS, f"{module} is no command"
    classes = [
        value
        for name, value in vars(importlib.import_module(module)).items()
        if name.endswith("Settings") and dataclasses.is_dataclass(value)
    ]
    # A module may import the base classes of its settings.
    (found,) = (of for of in classes if not any(of in other.__mro__[1:] for other in classes))
    return found


def flags_of(module):
    """Return the fields of a command by flag name."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(settings_class(module))}


def wrong_flags(line):
    """Return what a command would reject in a command line, without running it."""
    program, *words = shlex.split(line)
    if program == "bert-tf":
        name, *words = words
        if name in ANY_PROGRAM:
            return []
        module = MODULES.get(name, name)
    else:
        _, module, *words = words
    if module not in COMMANDS:
        return [f"{module} is no command"]
    fields, hints = flags_of(module), typing.get_type_hints(settings_class(module))
    problems, given, words = [], set(), iter(words)
    for word in words:
        if word == ELLIPSIS:
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in fields.keys() | ANY_COMMAND:
            problems.append(f"{module} has no flag {word}")
            continue
        given.add(name)
        if name in ANY_COMMAND:
            continue
        field = fields[name]
        if not equals and bool not in _types(hints[field.name]):
            value = next(words, "")
        problems += _wrong_value(name, value, field, _types(hints[field.name]))
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if ELLIPSIS not in line and "--help" not in line:
        problems += [f"{module} requires --{name}" for name in sorted(required - given)]
    return problems


def _types(hint):
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return {typing.get_origin(kind) or kind for kind in kinds}


def _wrong_value(name, value, field, kinds):
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        return [f"--{name}={value}: none of {', '.join(choices)}"]
    for kind in kinds & {int, float}:
        try:
            kind(value)
        except ValueError:
            return [f"--{name}={value}: expected {kind.__name__}"]
    if bool in kinds and value not in ("", "true", "false"):
        return [f"--{name}={value}: expected true or false"]
    if not value and bool not in kinds:
        return [f"--{name}: expected a value"]
    return []


def wrong_commands(page, text):
    """Return the commands of a page that would be rejected."""
    problems = []
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    for line in command_lines(text):
        words = shlex.split(line)
        if words[:3] == ["python", "-m", "pytest"]:
            problems += [f"{page}: {name}: no such file" for name in words[3:] if not _exists(name)]
        elif words[:2] == ["python", "-m"] or words[0] == "bert-tf":
            problems += [f"{page}: {line}: {problem}" for problem in wrong_flags(line)]
        elif words[0] == "make" and words[1] not in targets:
            problems.append(f"{page}: {line}: no such target")
        elif words[0] == "python":
            script = next(word for word in words[1:] if not word.startswith("-"))
            if f" as {script}" not in text:  # The page shows the others; its test runs them.
                problems += [f"{page}: {problem}" for problem in _wrong_script(script, words)]
    return problems


def _wrong_script(script, words):
    """Return what is wrong with a call of a benchmark or an example."""
    if not _exists(script):
        return [f"{script}: no such file"]
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    code = read(script)
    if "results.parser(" in code:
        code += read("benchmarks/results.py")
    return [f"{script} has no flag {flag}" for flag in flags if f'"{flag}"' not in code]


def _exists(path):
    return (ROOT / path).exists()


def unknown_flags(page, text):
    """Return the flags in code spans that no command has."""
    known = OTHER_FLAGS | ANY_COMMAND | {"version"}
    known |= {name for module in COMMANDS for name in flags_of(module)}
    problems = []
    for span in re.findall(r"`([^`]*)`", split_fences(text)[0]):
        script = ROOT / "benchmarks" / span.split(" ")[0]
        of_span = known
        if script.suffix == ".py" and script.is_file():
            sources = (script.read_text(), script.with_name("results.py").read_text())
            of_span = {flag for source in sources for flag in re.findall(r'"--([a-z]\w*)"', source)}
        found = {*re.findall(r"--([a-z]\w*)", span)} - of_span
        problems += [f"{page}: no command has --{flag}" for flag in sorted(found)]
    return problems


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_commands_and_flags_are_right(page):
    checks = (broken_links, missing_paths, wrong_commands, unknown_flags)
    problems = [problem for check in checks for problem in check(page, read(page))]
    assert not problems, "\n".join(problems)


def test_every_page_of_a_task_is_linked_from_their_index():
    links = re.findall(r"\]\(([^)#]+)", read("docs/tasks/README.md"))
    linked = {(ROOT / "docs/tasks" / link).resolve() for link in links}
    assert set((ROOT / "docs/tasks").glob("*.md")) <= linked | {ROOT / "docs/tasks/README.md"}


def test_every_page_is_in_the_navigation_of_the_site_once():
    hooks = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs/mkdocs_hooks.py")
    module = importlib.util.module_from_spec(hooks)
    hooks.loader.exec_module(module)
    listed = [page for pages in module.NAVIGATION.values() for page in pages]
    assert len(listed) == len(set(listed))
    assert {page for page in PAGES if page.startswith("docs/") and "/tasks/" not in page} <= {
        *listed
    }
    assert all((ROOT / page).exists() for page in listed)


def test_every_command_is_documented():
    pages = set(PAGES) - {"docs/commands.md"}
    lines = [line for page in pages for line in command_lines(read(page))]
    for name in MODULES:
        assert any(line.startswith(f"bert-tf {name} ") for line in lines), name


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_called_in_one_way(page):
    names = "|".join(MODULES)
    found = re.findall(rf"\b(?:bert_tf|tasks|export)\.(?:{names})\b(?!\.)", read(page))
    if page.removeprefix("docs/") not in OTHER_NAMES:
        found += re.findall(rf"`((?:{names})[` ])", read(page))
    expected = ["tasks.finetune"] if page == "docs/installation.md" else []
    assert found == expected


def test_pages_start_with_a_command_or_code_unless_they_are_looked_up():
    for page in PAGES:
        if page.startswith("docs/"):
            has_opener = bool(re.match(r"# .*\n\n```(bash|python)\n", read(page)))
            assert has_opener == (page.removeprefix("docs/") not in LOOKED_UP), page


def test_each_of_75_jobs_has_an_answer():
    sections = read("docs/jobs.md").split("\n## ")[1:]
    assert len(sections) == 5
    for section in sections:
        rows = [line for line in section.split("\n") if line.startswith("| ")][1:]
        assert len(rows) == 15, section
        assert all("](" in row.split(" | ")[1] for row in rows), section


BROKEN_LINKS = "# Title\n[a](nothing.md) [b](README.md#nothing) [c](#nothing) [d](../../x)\n"
BROKEN_COMMANDS = {
    "python -m tasks.finetune --task=unknown --train=a --init_from=b --output_dir=c": "none of",
    "python -m tasks.finetune --task=anomaly --train=a --init_from=b": "requires --output_dir",
    "python -m tasks.finetune --nothing=1 ...": "has no flag",
    "python -m tasks.finetune --epochs=many ...": "expected int",
    "python -m tasks.finetune --calibrate=maybe ...": "expected true or false",
    "python -m tasks.evaluate --run RUN --data": "expected a value",
    "python -m tasks.nothing --run=RUN": "is no command",
    "bert-tf evaluate --run=RUN": "requires --data",
    "bert-tf nothing --run=RUN": "is no command",
}


def test_broken_links_paths_and_flags_are_found():
    assert len(broken_links("README.md", BROKEN_LINKS)) == 4
    assert missing_paths("README.md", "`tasks/nothing.py`")
    assert unknown_flags("README.md", "`--nothing=1`")
    scale = "python benchmarks/scale.py"
    for line in ("make nothing", f"{scale}/nothing", f"{scale} --nothing=1"):
        assert wrong_commands("README.md", f"```bash\n{line}\n```"), line


@pytest.mark.parametrize("command", BROKEN_COMMANDS)
def test_broken_commands_are_found(command):
    problems = wrong_commands("README.md", f"```bash\n{command}\n```")
    assert BROKEN_COMMANDS[command] in " ".join(problems)
