"""The pages that are generated from the code."""

import importlib.util
import inspect
import re
import subprocess
import sys

import pytest

from bert_tf.__main__ import MODULES
from tests.conftest import COMMANDS, ROOT

SCRIPT = ROOT / "docs" / "make_reference.py"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("make_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands", "api"])
def test_reference_pages_are_up_to_date(reference, page):
    path = ROOT / "docs" / f"{page}.md"
    is_equal = getattr(reference, page)() == path.read_text(encoding="utf-8")
    assert is_equal, f"{path.name} is out of date; run python docs/make_reference.py"


def test_the_reference_has_every_command_and_public_name(reference):
    assert {*reference.command_modules()} == {*COMMANDS}
    headings = {line for line in reference.api().split("\n") if line.startswith("### ")}
    for package in reference.PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert f"### {name}" in headings


def test_each_model_has_an_example_and_typed_options(reference):
    import tasks
    from tasks.model.task_model import TaskModel

    sections = dict(re.findall(r"(?s)\n### (\w+)\n(.*?)(?=\n###? |$)", reference.api()))
    for name in tasks.__all__:
        owner = getattr(tasks, name)
        if isinstance(owner, type) and issubclass(owner, TaskModel):
            section = sections[name]
            assert f"model = {name}.from_pretrained(PATH" in section
            options = section.partition("Options of `from_pretrained`:")[2].partition("\n####")[0]
            assert {*re.findall(r"^- `(\w+)`: `", options, re.MULTILINE)} == {*owner.options}


def test_each_argument_of_a_public_name_is_described(reference):
    from tasks.model.task_model import TaskModel

    sections = dict(re.findall(r"(?s)\n### (\w+)\n(.*?)(?=\n###? |$)", reference.api()))
    for package in map(importlib.import_module, reference.PACKAGES):
        for name in package.__all__:
            value = getattr(package, name)
            is_class = isinstance(value, type)
            if callable(value) and not (is_class and issubclass(value, TaskModel | Exception)):
                described = re.findall(r"^- `\**(\w+)`: ", sections[name], re.MULTILINE)
                assert {*inspect.signature(value).parameters} <= {*described}, name


def test_each_command_is_shown_with_an_example(reference):
    page = reference.commands()
    for name in MODULES:
        assert f"\n## {name}\n" in page and f"\n```bash\nbert-tf {name} --" in page, name


def test_the_commands_are_described_without_tensorflow():
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(SCRIPT.parent)!r}];"
        "import make_reference; make_reference.commands(); print('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
