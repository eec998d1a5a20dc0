"""The architecture: directions of imports, contents of files, and cost of importing."""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import COMMANDS, ROOT

PACKAGES = ("bert_tf", "tasks", "export")
COMMAND_MODULES = {*COMMANDS, "bert_tf.__main__", "bert_tf.text.make_tables"}
# Rooms from the bottom to the top. A module may import from its own room and from those before it;
# rooms on one floor do not know each other. Modules that are not listed are commands.
FLOORS = {
    "bert_tf": (
        {"errors"},
        {"system", "storage"},
        {"__init__", "config"},
        {"model"},
        {"planning", "text"},
        {"runs"},
        {"data", "weights"},
        {"train", "attention_maps"},
        {"pretraining"},
        {"conversion"},
    ),
    "tasks": (
        {"__init__", "metrics"},
        {"data"},
        {"base"},
        {"graph"},
        {"training"},
        {"model"},
        {"types"},
        {"finetuning", "prediction"},
    ),
    "export": (
        {"__init__", "clients", "graph"},
        {"package"},
        {"checks"},
        {"publishing"},
        {"litert"},
    ),
}
BASICS = {"errors", "system", "storage", "config"}  # One node of the drawing.
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path):
    """Return the full names of all our modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                inner = ROOT / pathlib.Path(*node.module.split("."), f"{alias.name}.py")
                found.add(f"{node.module}.{alias.name}" if inner.is_file() else node.module)
    return {name for name in found if name.split(".")[0] in PACKAGES}


def room(module):
    """Return the package and the room of a module; the room of a package itself is "__init__"."""
    package, *rest = module.split(".")
    return package, rest[0] if rest else "__init__"


def floor(module):
    package, name = room(module)
    floors = FLOORS[package]
    return next((number for number, names in enumerate(floors) if name in names), len(floors))


def test_imports_go_from_export_to_tasks_to_bert_tf():
    for path in SOURCES:
        package = PACKAGES.index(module_name(path).split(".")[0])
        for name in imports(path):
            assert PACKAGES.index(name.split(".")[0]) <= package, f"{path} imports {name}: upwards"


def test_imports_go_to_rooms_below():
    for path in SOURCES:
        module = module_name(path)
        for name in imports(path):
            if room(name)[0] == room(module)[0] and room(name) != room(module):
                assert floor(name) < floor(module), f"{path} imports {name}: upwards"


def test_no_modules_import_each_other():
    """Not even for type annotations."""
    below = {module_name(path): imports(path) - {module_name(path)} for path in SOURCES}
    above = {module: {name for name in below if module in below[name]} for module in below}
    for neighbours in (dict(below), above):  # What has none on one side is in no circle.
        while ends := {name for name in below if not neighbours[name] & below.keys()}:
            below = {name: below[name] for name in below.keys() - ends}
    assert not below, f"circles: {sorted(below)}"


def test_a_folder_is_seen_at_a_glance():
    """The root of a package also has its commands, which people start by name."""
    for directory in {path.parent for path in SOURCES}:
        entries = [
            entry for entry in directory.iterdir() if entry.suffix == ".py" or entry.is_dir()
        ]
        entries = [entry for entry in entries if not entry.name.startswith("_")]
        commands = [entry for entry in entries if module_name(entry) in COMMAND_MODULES]
        assert len(entries) - len(commands) <= 14, f"{directory}: {sorted(entries)}"


def node(module):
    """Return the node of docs/design.md that a module belongs to."""
    package, name = room(module)
    if floor(module) == len(FLOORS[package]):
        return f"{package}_commands"
    if name == "__init__" or (package == "bert_tf" and name in BASICS):
        return "basics"
    return f"{package}_{name}"


def reachable(start, arrows):
    found, waiting = set(), [start]
    while waiting:
        here = waiting.pop()
        after = {end for begin, end in arrows if begin == here} - found
        found |= after
        waiting += after
    return found


def test_the_drawing_shows_the_imports():
    drawing = re.search(r"```mermaid\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL)
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)$", drawing[1], re.MULTILINE))
    arrows = {(node(module_name(path)), node(name)) for path in SOURCES for name in imports(path)}
    arrows = {(begin, end) for begin, end in arrows if begin != end}
    # An arrow is drawn if no other arrows lead there.
    assert drawn == {
        (begin, end)
        for begin, end in arrows
        if end not in reachable(begin, arrows - {(begin, end)})
    }


# Statements in the order of a process that executes them: the first one imports the least.
IMPORTS = {
    "encoder": "import bert_tf.model.encoder",
    "pretraining": "import bert_tf.pretraining.recipe",
    "public names": "import bert_tf; [getattr(bert_tf, name) for name in bert_tf.__all__]; "
    "import tasks.finetuning.recipe, export.publishing",
}


@pytest.fixture(scope="module")
def imported():
    """Return {key of IMPORTS: names of the modules that are imported after its statement}."""
    code = (
        "import json, sys\nfor statement in json.loads(sys.argv[1]).values():\n"
        "    exec(statement)\n    print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(IMPORTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        key: set(json.loads(line))
        for key, line in zip(IMPORTS, done.stdout.splitlines(), strict=True)
    }


@pytest.mark.medium
def test_the_model_is_a_leaf(imported):
    """The encoder loads the model and its configuration, and no reader of weights or text."""
    found = {name.split(".")[1] for name in imported["encoder"] if name.startswith("bert_tf.")}
    assert "model" in found and found <= {"model", *BASICS}


def test_nothing_imports_a_command_and_only_commands_have_a_main():
    for path in SOURCES:
        assert not imports(path) & COMMAND_MODULES, path
        has_main = "__main__" in path.read_text()
        assert has_main == (
            module_name(path) in COMMAND_MODULES
            or path.name in ("isolated_runner.py", "transformers_runner.py")
        ), path


def test_gradients_keras_nlp_and_catch_all_names_are_confined():
    assert [path.name for path in SOURCES if "GradientTape" in path.read_text()] == ["step.py"]
    assert [path.name for path in SOURCES if re.search(r"import keras_nlp", path.read_text())] == [
        "keras_export.py",
        "keras_preset.py",
    ]
    assert not [
        path for path in SOURCES if path.stem in ("utils", "util", "helpers", "common", "misc")
    ]


def test_processors_are_counted_in_one_place():
    """Not every system has os.sched_getaffinity; os.cpu_count has more than a process may use."""
    counts = re.compile("sched_getaffinity|cpu_count")
    assert [path.name for path in SOURCES if counts.search(path.read_text())] == ["processes.py"]


def test_library_code_prints_nothing_reads_no_flag_and_opens_no_pickle():
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(
            r"import pickle\b|pickle\.load|allow_pickle=True|extractall\(|yaml\.load\("
            r"|saving\.load_model\(",
            # Keras executes no code of a .keras file, since safe_mode is on by default.
            text.replace("saving.load_model(path, custom_objects=custom_objects, compile=", ""),
        ), path
        if module_name(path) not in COMMAND_MODULES | {"bert_tf.system.command"}:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert not [call for call in calls if getattr(call.func, "id", "") == "print"], path
            assert not re.search(r"^(from|import) absl", text, re.MULTILINE), path


def test_one_place_opens_text():
    """Exempt two modules of a clean process, and those that read what programs write."""
    opens = re.compile(r"(?<!files)\.read_text\(|utf-8-sig|\bopen\([^)]*encoding=")
    assert [path.name for path in SOURCES if opens.search(path.read_text())] == [
        "__main__.py",
        "plots.py",
        "transformers_runner.py",
        "isolated_runner.py",
    ]


def test_importing_bert_tf_is_light():
    heavy = (
        "tensorflow",
        "keras",
        "keras_nlp",
        "keras_hub",
        "apache_beam",
        "matplotlib",
        "tensorflow_serving",
        "tensorflow_text",
    )
    code = f"import sys, bert_tf, tasks, export; print(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.medium
def test_pretraining_imports_no_tokenizer(imported):
    """Shards are token ids; TF Text would take more than 100 MB of a process."""
    assert "tensorflow" in imported["pretraining"]
    assert "tensorflow_text" not in imported["pretraining"]


def test_public_names_exist():
    import bert_tf

    for name in bert_tf.__all__:
        assert getattr(bert_tf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Bert'"):
        bert_tf.Bert  # noqa: B018


@pytest.mark.medium
def test_public_names_need_no_extra(imported):
    optional = {"keras_nlp", "keras_hub", "apache_beam", "tensorflow_serving"}
    assert not optional & imported["public names"]


def test_test_directories_mirror_the_packages():
    for directory in PACKAGES:
        assert (ROOT / "tests" / directory).is_dir()
