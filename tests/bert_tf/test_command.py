"""Start and end of commands: exit statuses, one-line errors, flags checked before TensorFlow."""

import ctypes
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import warnings

import pytest

from bert_tf.errors import UserError, argument_names, flag_names, tensorflow_reason
from bert_tf.system import command
from bert_tf.system.processes import count_processors
from tests.conftest import COMMANDS, ROOT


@pytest.fixture(scope="module")
def run_without_tensorflow(tmp_path_factory):
    """Return a function that runs a command; importing TensorFlow ends it with status 77."""
    directory = tmp_path_factory.mktemp("without_tensorflow")
    (directory / "tensorflow.py").write_text("import os\nos._exit(77)\n")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.command_forks"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(module, *arguments):
        print(json.dumps([module, arguments]), file=server.stdin, flush=True)
        status, stdout, stderr = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(module, status, stdout, stderr)

    with server:
        yield run


def test_a_command_that_imports_tensorflow_has_status_77(run_without_tensorflow):
    """Check the control of the tests below."""
    assert run_without_tensorflow("tests.bert_tf.test_encoder").returncode == 77


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_has_status_0_and_a_wrong_flag_status_2_with_one_line(run_without_tensorflow, verb):
    done = run_without_tensorflow(verb, "--help")
    assert done.returncode == 0
    assert (
        f"bert-tf {verb.split('.')[-1]}" in done.stdout and "--" in done.stdout and not done.stderr
    )
    done = run_without_tensorflow(verb, "--no_such_flag=1")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and not done.stdout
    assert done.stderr == "--no_such_flag: no such flag; see --help\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--task is required"),
        (["--task=nonsense"], "should be one of"),
        (["--task=sst2"], "--train is required"),
        (
            ["--task=sst2", "--train=a.tsv", "--init_from=x", "--output_dir=y"],
            "--train=a.tsv: no such file",
        ),
        (
            ["--task=sst2", "--train=setup.py", "--init_from=x", "--output_dir=y", "--epochs=0"],
            "--epochs=0: expected an integer >= 1",
        ),
        (
            ["--task=sst2", "--train=setup.py", "--init_from=x", "--output_dir=y", "--epochs=many"],
            "--epochs=many: invalid literal",
        ),
        (["--batch_size=8"], "--batch_size: no such flag; did you mean --global_batch_size? (see"),
        (["--train_file=x.csv"], "did you mean --train?"),
        (["--dev_file=x.csv"], "did you mean --dev?"),  # Not --device, of the same letters.
        (["--lr=1"], "did you mean --learning_rate?"),
        (["--epoch=3"], "did you mean --epochs?"),
        (
            [
                "--task=sst2",
                "--train=setup.py",
                "--init_from=x",
                "--output_dir=y",
                "--learning_rate=-1",
            ],
            "--learning_rate=-1.0",
        ),
        (
            ["--task=sst2", "--train=setup.py", "--init_from=x", "--output_dir=y", "--labels=a,a"],
            "--labels=a,a",
        ),
        (
            ["--task=sst2", "--train=setup.py", "--init_from=x", "--output_dir=y", "stray"],
            "unexpected argument 'stray'",
        ),
    ],
)
def test_flags_are_checked_before_tensorflow_is_imported(
    run_without_tensorflow, arguments, message
):
    done = run_without_tensorflow("tasks.finetune", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        (
            "tasks.predict",
            ["--run=r", "--input=setup.py", "--output=o.jsonl", "--batch_size=0"],
            "--batch_size=0",
        ),
        (
            "tasks.predict",
            ["--run=r", "--input=absent.csv", "--output=o.jsonl"],
            "--input=absent.csv: no such file",
        ),
        (
            "tasks.predict",
            ["--run=r", "--input=setup.py", "--output=absent/o.jsonl"],
            "--output=absent/o.jsonl: expected a file",
        ),
        (
            "tasks.predict",
            ["--run=r", "--input=setup.py", "--output=tests"],
            "--output=tests: expected a file",
        ),
        ("export.request", ["--model_dir=m", "--input=text"], "--input=text: expected NAME=VALUE"),
        (
            "tasks.finetune",
            [
                "--task=sst2",
                "--train=setup.py",
                "--init_from=x",
                "--output_dir=y",
                "--seed=5000000000",
            ],
            "--seed=5000000000",
        ),
    ],
)
def test_flags_of_the_other_commands_are_checked_before_tensorflow_is_imported(
    run_without_tensorflow, verb, arguments, message
):
    done = run_without_tensorflow(verb, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str = command.flag("a name")
    from_: str | None = command.flag("where from", None)
    count: int = command.flag("how many", 3)
    rate: float = command.flag("how fast", 0.5)
    really: bool | None = command.flag("whether", None)
    words: tuple[str, ...] = command.flag("words", ())
    pairs: tuple[str, ...] = command.flag("pairs", (), repeated=True)


def test_flags_become_settings():
    argv = [
        "x",
        "--name=n",
        "--from=f",
        "--count=4",
        "--noreally",
        "--words=a,b",
        "--pairs=a=1,2",
        "--pairs=b=2",
    ]
    settings, verbose = command.parse(Settings, argv)
    assert settings == Settings("n", "f", 4, 0.5, False, ("a", "b"), ("a=1,2", "b=2"))
    assert not verbose
    assert command.parse(Settings, ["x", "--name=n", "--verbosity=0"]) == (Settings("n"), True)
    with pytest.raises(UserError, match="--name is required: a name"):
        command.parse(Settings, ["x"])
    with pytest.raises(UserError, match="--name is required: a name"):
        command.parse(Settings, ["x", "--name="])
    quoted, _ = command.parse(Settings, ["x", "--name=n", '--words="a, b",c'])
    assert quoted.words == ("a, b", "c")


def test_a_list_is_given_once():
    with pytest.raises(UserError, match="^--words: given 2 times; expected one list, separated by"):
        command.parse(Settings, ["x", "--name=n", "--words=a", "--words=b,c"])
    assert command.parse(Settings, ["x", "--name=n", "--name=m"])[0].name == "m"


@dataclasses.dataclass(frozen=True)
class Bounded:
    count: int | None = command.flag("how many", None, bounds={">=": 1})
    rate: float = command.flag("how fast", 1.0, bounds={">": 0, "<=": 1})
    from_: float = command.flag("from where", 0.0, bounds={"<": 1}, unit="metre")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "--count=0: expected an integer >= 1"),
        ({"rate": 0.0}, "--rate=0.0: expected a number > 0 and <= 1"),
        ({"rate": 1.5}, "--rate=1.5: expected a number > 0 and <= 1"),
        ({"rate": float("nan")}, "--rate=nan: expected a number > 0 and <= 1"),
        ({"from_": 1.0}, "--from=1.0: expected a number < 1"),
        ({"rate": float("inf")}, "--rate=inf: expected a finite number > 0 and <= 1"),
        ({"from_": -float("inf")}, "--from=-inf: expected a finite number < 1"),
    ],
)
def test_numbers_are_checked_against_the_bounds_of_their_flags(values, message):
    command.check_bounds(Bounded())
    command.check_bounds(Bounded(count=1, rate=0.5))
    with pytest.raises(UserError) as raised:
        command.check_bounds(Bounded(**values))
    assert str(raised.value) == message


def test_a_flag_keeps_the_metadata_of_the_settings_class():
    *_, field = dataclasses.fields(Bounded)
    assert field.metadata["unit"] == "metre"


def test_sigterm_and_ctrl_c_outside_of_training_end_with_the_statuses_of_a_shell():
    code = (
        "from bert_tf.system import command; import dataclasses, time\n"
        "@dataclasses.dataclass\nclass Nothing: pass\n"
        # Short ones: a signal just before the call of sleep takes effect after it.
        "def main(settings):\n    print('ready', flush=True)\n"
        "    for _ in range(600): time.sleep(0.1)\n"
        "command.import_tensorflow = lambda verbose: None\n"
        "command.run_main(main, Nothing, 'doc')"
    )
    for signum, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell makes its background jobs ignore SIGINT, and these tests may be such a job.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        assert process.wait(timeout=60) == status
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
    ],
    ids=["io", "locale"],
)
def test_results_are_utf8_in_any_locale_and_messages_are_escaped(locale):
    """A dash, a letter of another script, an emoji, and half of a surrogate pair."""
    text = "\u2013 \u0436 \U0001f600"
    code = (
        "from bert_tf.system import command; import dataclasses, json\n"
        "@dataclasses.dataclass\nclass Nothing: pass\n"
        f"text = {text!a}\n"
        "def main(settings):\n"
        "    print(text)\n"
        "    print(json.dumps([text, '\\ud83d'], ensure_ascii=False))\n"
        "    raise command.UserError(text)\n"
        "command.run_main(main, Nothing, text, imports_tensorflow=False)"
    )
    arguments = {"env": {**os.environ, **locale}, "cwd": ROOT, "capture_output": True}
    done = subprocess.run([sys.executable, "-c", code], **arguments)
    assert done.returncode == 2 and done.stderr == ascii(text)[1:-1].encode() + b"\n"
    first, second = done.stdout.decode("utf-8").splitlines()
    assert first == text and json.loads(second) == [text, "\ud83d"]
    done = subprocess.run([sys.executable, "-c", code, "--help"], **arguments)
    assert done.returncode == 0 and done.stdout.decode("utf-8").startswith(text)


@pytest.mark.medium
def test_a_command_imports_keras_without_its_optional_packages():
    code = (
        "from bert_tf.system import command; import dataclasses, sys\n"
        "@dataclasses.dataclass\nclass Nothing: pass\n"
        "def main(settings):\n"
        "    print('keras' in sys.modules, [name for name in names if name in sys.modules])\n"
        "    import pandas, sklearn; print(pandas.DataFrame({'a': [1, 2]}).a.sum())\n"
        "names = ('IPython', 'matplotlib', 'pandas', 'scipy', 'sklearn')\n"
        "command.run_main(main, Nothing, 'doc')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True []\n3\n" and not done.stderr


def run_code(code, name, value):
    """Run Python code with a variable of the environment set, or unset with `None`."""
    environment = {key: kept for key, kept in os.environ.items() if key != name}
    if value is not None:
        environment[name] = value
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )


# In place of TensorFlow, which takes seconds to import, in tests of what is done around its import.
NO_TENSORFLOW = (
    "import sys, types\n"
    "config = types.SimpleNamespace(list_physical_devices=lambda kind: [])\n"
    "sys.modules['tensorflow'] = types.SimpleNamespace(config=config)\n"
)


@pytest.mark.parametrize(("has_gpu", "given"), [(False, None), (False, "0"), (True, None)])
def test_onednn_is_on_unless_the_environment_decides_or_a_gpu_is_there(has_gpu, given):
    code = (
        "import os\nos.path.exists = lambda path: 'nvidia' in str(path) and "
        f"{has_gpu}\nimport bert_tf\nprint(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n"
    )
    is_set = platform.machine() == "x86_64" and not has_gpu
    expected = given or ("1" if is_set else None)
    assert run_code(code, "TF_ENABLE_ONEDNN_OPTS", given).stdout.split() == [str(expected)]


@pytest.mark.parametrize("given", [None, "false"])
def test_the_memory_of_a_gpu_grows_unless_the_environment_decides(given):
    """TensorFlow reads it when it starts, which the package does not let it do."""
    code = (
        "import os, sys\nimport bert_tf\n"
        "print('tensorflow' in sys.modules, os.environ.get('TF_FORCE_GPU_ALLOW_GROWTH'))\n"
    )
    printed = run_code(code, "TF_FORCE_GPU_ALLOW_GROWTH", given).stdout.split()
    assert printed == ["False", given or "true"]


def test_a_gpu_that_tensorflow_cannot_use_is_reported():
    code = NO_TENSORFLOW + (
        "from bert_tf import UserError\nfrom bert_tf.system import command, environment\n"
        "environment.os.path.exists = lambda path: path == '/usr/lib/wsl/lib/libcuda.so.1'\n"
        "try:\n    command.import_tensorflow()\nexcept UserError as error:\n    print(error)\n"
    )
    assert "tensorflow[and-cuda]" in run_code(code, "CUDA_VISIBLE_DEVICES", None).stdout
    assert "CUDA_VISIBLE_DEVICES=7 names" in run_code(code, "CUDA_VISIBLE_DEVICES", "7").stdout
    assert run_code(code, "CUDA_VISIBLE_DEVICES", "-1").stdout == ""
    assert run_code(code, "CUDA_VISIBLE_DEVICES", "NoDevFiles").stdout == ""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="not glibc")
@pytest.mark.parametrize("given", [None, "3"])
def test_threads_of_a_command_share_arenas(given):
    code = (
        "import ctypes, threading\nfrom bert_tf.system import command\ncommand._limit_arenas()\n"
        "libc, barrier = ctypes.CDLL(None), threading.Barrier(9)\n"
        "def allocate():\n    libc.malloc(100)\n    barrier.wait()\n    barrier.wait()\n"
        "for _ in range(8): threading.Thread(target=allocate).start()\n"
        "barrier.wait()\nlibc.malloc_stats()\nbarrier.wait()\n"
    )
    arenas = run_code(code, "MALLOC_ARENA_MAX", given).stderr.count("Arena ")
    limit = max(1, count_processors() // 2) if given is None else int(given)
    assert arenas == min(limit, 9)  # The main thread has one too.


def test_packages_that_were_imported_before_are_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", sys)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with command.optional_packages_hidden():
        import pandas

        assert pandas is sys
        with pytest.raises(ImportError):
            import IPython  # noqa: F401
    assert "IPython" not in sys.modules and sys.modules["pandas"] is sys


def test_a_warning_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # Restored afterwards.
    monkeypatch.setattr(sys, "argv", ["x", "--name=n"])
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)

    def warn(settings):
        warnings.warn("config.json: ignored the unknown key x", stacklevel=1)

    command.run_main(warn, Settings, "doc", imports_tensorflow=False)
    assert capsys.readouterr().err == "warning: config.json: ignored the unknown key x\n"


def test_a_tensorflow_error_is_reported_in_one_line(monkeypatch, capsys):
    import tensorflow as tf

    def fail(settings):
        raise tf.errors.OutOfRangeError(None, None, "variables; File too large\nmore of it")

    monkeypatch.setattr(sys, "argv", ["x", "--name=n"])
    monkeypatch.setattr(command, "import_tensorflow", lambda verbose: None)
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    with pytest.raises(SystemExit) as raised:
        command.run_main(fail, Settings, "doc")
    assert raised.value.code == 1
    assert capsys.readouterr().err == (
        "TensorFlow: OutOfRangeError: variables; File too large "
        "(--verbosity=0 prints the traceback)\n"
    )
    monkeypatch.setattr(sys, "argv", ["x", "--name=n", "--verbosity=0"])
    with pytest.raises(tf.errors.OutOfRangeError):
        command.run_main(fail, Settings, "doc")


GRAPH_ERROR = (
    "Graph execution error:\n\nDetected at node f/g defined at (most recent call last):\n"
    '<stack traces unavailable>\n  File "x.py", line 3, in f\n\n'
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "no reason available"),
        ("", "no reason available"),
        ("a; No such file\n You may set `experimental_io_device`", "a; No such file"),
        ("{{function_node __wrapped__A_device_/job:b/task:0}} a {{b}} [Op:A] name: ", "a {{b}}"),
        (f"{GRAPH_ERROR}rows differ\n\t [[{{{{node f/g}}}}]] [Op:__inference_f_2]", "rows differ"),
        (f"{GRAPH_ERROR}assertion failed: [a: too\nmany] [Condition x <= y] [4]\n", "a: too many"),
        ("assertion failed: [sizes [1, 2] differ]\n\t [[{{node g}}]]", "sizes [1, 2] differ"),
        (f"{GRAPH_ERROR}2 root error(s) found.\n  (0) INTERNAL:  bad\n  (1) INTERNAL:  b", "bad"),
        (
            "assertion failed: [x [rows]: wrong [a] [b] end] [Condition c]",
            "x [rows]: wrong [a b] end",
        ),
        ("assertion failed: [bad rows] [1 2]\n\t [[{{node g}}]]", "bad rows 1 2"),
        ("bad {{node f/g}}[Op:A]", "bad"),
        (" \n", "no reason available"),
    ],
)
def test_a_reason_of_tensorflow_is_its_own_text_in_one_line(message, reason):
    import tensorflow as tf

    assert tensorflow_reason(tf.errors.InternalError(None, None, message)) == reason
    assert tensorflow_reason(message) == reason


def test_the_python_api_names_flags_in_a_command_only():
    @argument_names()
    def publish():
        raise UserError("--output_dir=x: expected a directory")

    with pytest.raises(UserError, match="^output_dir=x: expected"):
        publish()
    with flag_names(), pytest.raises(UserError, match="^--output_dir=x: expected"):
        publish()
