"""Requests to a model by directory, REST and gRPC: equal predictions, clear errors."""

import base64
import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest

from bert_tf import UserError
from export import request
from export.clients.grpc_client import GrpcClient
from export.clients.local_client import LocalClient
from export.clients.rest_client import RestClient
from export.clients.signatures import Tensor, to_shape
from export.litert.client import LiteRTClient
from export.request import RequestSettings
from tests.conftest import ROOT
from tests.export.server import serving
from tests.export.test_optimized_graph import write_model

TEXTS = (
    "the bill is too high",
    "",
    'caf\u00e9 \U0001f600\n"\\\u2028',
    b"\xff\xe9 bad",
    "x" * 70000,
)

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def url(addresses):
    return f"{addresses.rest}/v1/models/echo"


@pytest.fixture(scope="module")
def targets(echo_dir, addresses, url):
    """Return {flags of a target: its client}."""
    return {
        f"--model_dir={echo_dir}": LocalClient(echo_dir),
        f"--url={url}": RestClient(url),
        f"--grpc={addresses.grpc} --model=echo": GrpcClient(addresses.grpc, "echo"),
    }


def test_a_model_may_be_moved_to_any_path(echo_dir, tmp_path):
    moved = shutil.copytree(echo_dir, tmp_path / "models [x]*")
    assert LocalClient(moved).predict({"text": ["a"]})["text"] == ["a"]


def test_a_damaged_model_is_reported_in_one_line(echo_dir, tmp_path):
    shutil.copytree(echo_dir, tmp_path / "echo")
    (tmp_path / "echo" / "3" / "variables" / "variables.index").unlink()
    with pytest.raises(UserError, match=r"3: not a loadable SavedModel: Unsuccessful.*\Z"):
        LocalClient(tmp_path / "echo")


@pytest.fixture
def closed_port():
    """Return a port that is bound but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def silent_port():
    """Return a port that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def stranger():
    """Yield the address of another web server, and its {path: (status, type, body)}."""
    pages = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            pages["sent"] = self.headers
            status, kind, body = pages.get(self.path, (404, "text/html", b"<h1>Not found</h1>"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status == 301:
                self.send_header("Location", f"https://{self.headers['Host']}{self.path}")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("signature", "inputs"),
    [
        ("serving_default", {"text": TEXTS}),
        ("serving_default", {"text": []}),
        ("tokenize", {"text": TEXTS[:4]}),
        ("choose", {"prompt": ["a", "b"], "choices": [["c", b"\xff", "ee"], ["d"]]}),
        ("choose", {"prompt": ["a"], "choices": ["c", "\u00e9"]}),
        ("one", {"text": ["0.1", "-7", "nan", "inf", "-inf", "3e38", "1e-42", "16777217"]}),
        ("raw", {"text": TEXTS}),
        ("numbers", {"text": ["a", "b"]}),
        ("single", {"text": ["a"]}),
    ],
)
def test_the_three_targets_return_one_prediction(targets, signature, inputs):
    directory, *others = (model.predict(inputs, signature) for model in targets.values())
    for other in others:
        assert json.dumps(other) == json.dumps(directory)
    assert list(directory) == sorted(targets[next(iter(targets))].signatures[signature].outputs)


def test_no_rows_of_lists_have_no_outputs_by_rest(url):
    """As by the other targets; those of `targets` have a maximum of no values there."""
    expected = {"choice": [], "joined": []}
    assert RestClient(url).predict({"prompt": [], "choices": []}, "choose") == expected


def test_bytes_arrive_unchanged(targets):
    for model in targets.values():
        prediction = model.predict({"text": [b"\xff", "\u00e9", b"\xe2\x82"]})
        assert prediction["length"] == [1, 2, 2]
        assert prediction["text"] == ["\ufffd", "\u00e9", "\ufffd"]


def test_signatures_are_the_same(targets):
    directory, *others = (model.signatures for model in targets.values())
    assert others == [directory, directory]
    assert "twice" in directory and not [name for name in directory if name.startswith("_")]


def test_sizes_and_ranks_of_a_signature_may_be_unknown(targets):
    for model in targets.values():
        assert model.signatures["twice"].inputs == {"x": Tensor("x", "float32", (None, 2))}
        assert model.signatures["single"].outputs["rows"].shape == ()
    assert to_shape([], unknown_rank=True) is None
    assert Tensor("x", "float32", None).rank is None


@pytest.mark.parametrize(
    ("signature", "inputs", "message"),
    [
        ("sing", {"text": ["a"]}, "^signature=sing: expected one of choose, number"),
        ("one", {"texts": ["a"]}, "^input: signature one: expected text; received texts"),
        (
            "one",
            {"text": ["a"], "more": ["b"]},
            "^input: signature one: expected text; received more, text",
        ),
        (
            "choose",
            {"prompt": ["a"]},
            "signature choose: expected choices, prompt; received prompt",
        ),
        (
            "choose",
            {"prompt": ["a", "b"], "choices": ["c", "d"]},
            "the same number of values per name, received 2 of prompt, 1 of choices",
        ),
        ("twice", {"x": ["a"]}, "^signature=twice: x is float32 of rank 2; only strings"),
        ("one", {"text": ["many"]}, "could not correctly convert string: many"),
        (
            "choose",
            {"prompt": ["a"], "choices": [["b"] * 10]},
            r"^\S+: choices: too many. Expected: <= 9$",
        ),
    ],
)
def test_a_wrong_request_is_reported_alike(targets, signature, inputs, message):
    for model in targets.values():
        with pytest.raises(UserError, match=message):
            model.predict(inputs, signature)


@pytest.mark.parametrize(
    ("signature", "inputs", "message"),
    [
        ("one", {"text": "1"}, "^input: text: expected a list of strings, received str '1'"),
        ("one", {"text": None}, "^input: text: expected a list of strings, received NoneType None"),
        ("one", {"text": ["1", 2]}, r"^input: text\[1\]: expected a string, received int 2"),
        ("one", {"text": [["1"]]}, r"^input: text\[0\]: expected a string, received list"),
        ("one", {"text": ["\ud800"]}, r"^input: text\[0\]: contains half of a surrogate pair"),
        (
            "choose",
            {"prompt": ["a"], "choices": [["b", None]]},
            r"^input: choices\[0\]\[1\]: expected a string, received NoneType None",
        ),
        (
            "choose",
            {"prompt": ["a", "b"], "choices": [["c"], "d"]},
            r"^input: choices\[1\]: expected a list of strings, received str 'd'",
        ),
    ],
)
def test_inputs_of_another_type_are_reported(targets, signature, inputs, message):
    for model in targets.values():
        with pytest.raises(UserError, match=message):
            model.predict(inputs, signature)


def test_arrays_are_lists(targets):
    inputs = {"prompt": np.array(["a", "b"]), "choices": np.array([["c", "d"], ["e", "f"]])}
    for model in targets.values():
        assert model.predict(inputs, "choose")["joined"] == [["ac", "ad"], ["be", "bf"]]


def test_the_command_works_with_each_target(targets, capsys):
    printed = set()
    for flags in targets:
        target = dict(flag.removeprefix("--").split("=", 1) for flag in flags.split())
        inputs = ("prompt=the bill", "choices=is high", "choices=broken")
        request.main(RequestSettings(inputs, signature="choose", **target))
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1
    assert json.loads(printed.pop()) == {
        "choice": [0],
        "joined": [["the billis high", "the billbroken"]],
    }


EXACTLY_ONE = "expected exactly one of --model_dir, --url, --grpc and --litert"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, EXACTLY_ONE),
        ({"model_dir": "m", "url": "u"}, EXACTLY_ONE),
        ({"grpc": "localhost:8500"}, "--grpc, --model: expected both or neither"),
        ({"model_dir": "m", "model": "n"}, "--grpc, --model: expected both or neither"),
        ({"model_dir": "m", "timeout": 0.0}, "--timeout=0: expected a finite number > 0"),
    ],
)
def test_wrong_flags_are_reported(settings, message):
    with pytest.raises(UserError, match=message):
        RequestSettings(("text=a",), **settings)


@pytest.mark.parametrize(
    "url",
    (
        "localhost:8501",
        "http://localhost:8501",
        "http://h/v1/models/",
        "http://h/v1/models/a:predict",
    ),
)
def test_a_wrong_address_is_reported(url):
    with pytest.raises(UserError, match=f"^url={url}: expected http://HOST:PORT/v1/models/NAME"):
        RestClient(url)
    with pytest.raises(UserError, match="^grpc=http://h:8500: expected HOST:PORT"):
        GrpcClient("http://h:8500", "name")


@pytest.mark.parametrize(
    "timeout", [0, -1.0, "5", True, None, float("nan"), float("inf"), 1e10, np.float32(-1)]
)
def test_a_wrong_time_limit_is_reported(url, addresses, timeout):
    expected = "^timeout=[-\\w.+']+: expected a finite number > 0 of seconds, at most 1,000,000$"
    with pytest.raises(UserError, match=expected):
        RestClient(url, timeout)
    with pytest.raises(UserError, match=expected):
        GrpcClient(addresses.grpc, "echo", timeout)


def test_the_longest_time_limit_and_those_of_numpy_are_accepted(url, addresses):
    for timeout in (1_000_000, np.int64(9), np.float32(9)):
        assert RestClient(url, timeout).predict({"text": ["1"]}, "one") == {"value": [1.0]}
        client = GrpcClient(addresses.grpc, "echo", timeout)
        assert client.predict({"text": ["1"]}, "one") == {"value": [1.0]}


@pytest.mark.parametrize(
    ("client", "arguments", "message"),
    [
        (RestClient, (None,), "^url=None: expected http://HOST"),
        (GrpcClient, (None, "echo"), "^grpc=None: expected HOST:PORT"),
        (GrpcClient, ("host:8500", None), "^model=None: expected the name of a model"),
        (LocalClient, (None,), "^model_dir: expected a directory, received None"),
        (LocalClient, ("",), "^model_dir: expected a directory, received ''"),
        (LiteRTClient, (None,), "^path: expected a file of bert-tf export_litert, received None"),
    ],
)
def test_an_address_of_another_type_is_reported(client, arguments, message):
    with pytest.raises(UserError, match=message):
        client(*arguments)


def test_the_address_may_contain_a_version(url):
    assert RestClient(f"{url}/versions/3/").predict({"text": ["1"]}, "one") == {"value": [1.0]}
    with pytest.raises(UserError, match=r"Servable not found for request: Specific\(echo, 1\)"):
        RestClient(f"{url}/versions/1")


def test_a_missing_model_is_reported(addresses):
    with pytest.raises(UserError, match=r"Servable not found for request: Latest\(other\)"):
        RestClient(f"{addresses.rest}/v1/models/other")
    with pytest.raises(UserError, match=r"Servable not found for request: Latest\(other\)"):
        GrpcClient(addresses.grpc, "other")


def test_a_missing_or_silent_server_is_reported(closed_port, silent_port):
    with pytest.raises(UserError, match="no response from a server: Connection refused"):
        RestClient(f"http://127.0.0.1:{closed_port}/v1/models/echo")
    with pytest.raises(UserError, match=r"no response from a server: .*Connection refused"):
        GrpcClient(f"127.0.0.1:{closed_port}", "echo")
    with pytest.raises(UserError, match="no response within 0.1 seconds"):
        RestClient(f"http://127.0.0.1:{silent_port}/v1/models/echo", 0.1)
    with pytest.raises(UserError, match="no response within 0.1 seconds"):
        GrpcClient(f"127.0.0.1:{silent_port}", "echo", 0.1)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"])
def test_a_response_byte_by_byte_has_the_same_time_limit(start):
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip():
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(start)
                for _ in range(100):
                    if is_over.wait(0.05):
                        break
                    connection.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(UserError, match="no response within 0.2 seconds"):
                RestClient(f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models/echo", 0.2)
        finally:
            is_over.set()
            thread.join()


def test_a_server_other_than_tf_serving_is_reported(stranger, addresses):
    address, pages = stranger
    path = "/v1/models/echo/metadata"
    for status, kind, body in (
        (404, "text/html", b"<h1>Not found</h1>"),
        (200, "text/html", b"<h1>Welcome</h1>"),
        (200, "application/json", b'{"metadata": {}}'),
        (502, "application/json", b"[]"),
    ):
        pages[path] = status, kind, body
        with pytest.raises(
            UserError, match=f"not a TensorFlow Serving API: HTTP status {status}, "
        ):
            RestClient(f"http://{address}/v1/models/echo")
    with pytest.raises(UserError, match="no response from a server|not a TensorFlow Serving API"):
        GrpcClient(address, "echo")
    # This is the port of gRPC.
    with pytest.raises(UserError, match="no response .*: the response is not HTTP$"):
        RestClient(f"http://{addresses.grpc}/v1/models/echo")
    with urllib.request.urlopen(f"{addresses.rest}/v1/models/echo/metadata") as prediction:
        pages[path] = 200, "application/json", prediction.read()
    pages["/v1/models/echo:predict"] = 200, "application/json", b'{"outputs": "none"}'
    with pytest.raises(UserError, match="not a TensorFlow Serving API: HTTP status 200"):
        RestClient(f"http://{address}/v1/models/echo").predict({"text": ["a"]})


def test_a_redirection_is_reported_with_its_address(stranger):
    address, pages = stranger
    pages["/v1/models/echo/metadata"] = 301, "text/html", b""
    expected = f"/metadata is redirected to https://{address}/v1/models/echo/metadata; expected"
    with pytest.raises(UserError, match=expected):
        RestClient(f"http://{address}/v1/models/echo")


def test_the_client_uses_neither_all_proxy_nor_netrc(stranger, closed_port, tmp_path, monkeypatch):
    address, pages = stranger
    path = tmp_path / "netrc"
    path.write_text("default login ann password secret")
    monkeypatch.setenv("NETRC", str(path))
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(UserError, match="not a TensorFlow Serving API: HTTP status 404, text/html"):
        RestClient(f"http://{address}/v1/models/echo")
    assert pages["sent"]["Host"] == address and "Authorization" not in pages["sent"]
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(UserError, match="no response from a server: Connection refused"):
        RestClient(f"http://{address}/v1/models/echo")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UserError, match="HTTP status 404"):
        RestClient(f"http://{address}/v1/models/echo")


@pytest.mark.parametrize(
    ("user", "sent"),
    [
        ("ann:secret@", "ann:secret"),
        ("ann:s%3Acr%2Fet%40%C3%A9@", "ann:s:cr/et@\u00e9"),
        ("token@", "token:"),
    ],
)
def test_user_and_password_of_the_address_are_sent_and_not_shown(stranger, user, sent):
    address, pages = stranger
    url = f"http://{address}/v1/models/echo"
    with pytest.raises(UserError, match=f"^url={url}: not a TensorFlow Serving API: HTTP status 4"):
        RestClient(url.replace("//", f"//{user}"))
    kind, _, encoded = pages["sent"]["Authorization"].partition(" ")
    assert (kind, base64.b64decode(encoded).decode()) == ("Basic", sent)


@pytest.mark.parametrize("scheme", ["http://", "ftp://", ""])
def test_a_wrong_address_is_shown_without_user_and_password(scheme):
    with pytest.raises(UserError, match=f"^url={scheme}host:8501/v1/models: expected http://HOST"):
        RestClient(f"{scheme}ann:secret@host:8501/v1/models")


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    with pytest.raises(UserError, match=r"is missing; run pip install 'bert_tf\[serving\]'"):
        GrpcClient("localhost:8500", "name")


def test_by_rest_the_command_needs_no_tensorflow_and_fails_in_one_line(url, closed_port):
    code = """import runpy, sys
try:
    runpy.run_module("export.request", run_name="__main__", alter_sys=True)
finally:
    print(sorted({"tensorflow", "numpy", "grpc"} & set(sys.modules)))"""

    def run(url, value):
        flags = [f"--url={url}", "--signature=one", "--input", f"text={value}"]
        return subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True
        )

    done = run(url, "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == '{\n  "value": [\n    2.0\n  ]\n}\n[]\n'
    done = run(url, "two")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "could not correctly convert string: two" in done.stderr
    done = run(f"http://127.0.0.1:{closed_port}/v1/models/echo", "2")
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.endswith("/v1/models/echo: no response from a server: Connection refused\n")


def answers_strings(url):
    """Request two rows from each signature, as columns and as rows; return the names."""
    model = RestClient(url)
    for name, signature in model.signatures.items():
        inputs = {
            key: [["the bill", "a"], ["b", b"\xff"]] if spec.rank == 2 else ["the bill", b"\xff"]
            for key, spec in signature.inputs.items()
        }
        answer = model.predict(inputs, name)
        assert set(answer) == set(signature.outputs)
        assert {len(values) for values in answer.values()} == {2}
        row = {key: "a" if spec.rank == 1 else ["a"] for key, spec in signature.inputs.items()}
        body = json.dumps({"signature_name": name, "instances": [row]}).encode()
        with urllib.request.urlopen(f"{model.url}:predict", body, timeout=60) as response:
            [prediction] = json.load(response)["predictions"]
        assert len(signature.outputs) == 1 or set(prediction) == set(signature.outputs)
    return set(model.signatures)


def test_a_real_tf_serving_answers():
    """Use the server at BERT_TF_SERVING_URL, with a model published by export_saved_model."""
    if "BERT_TF_SERVING_URL" not in os.environ:
        pytest.skip("BERT_TF_SERVING_URL is not set")
    assert answers_strings(os.environ["BERT_TF_SERVING_URL"]) >= {"serving_default", "tokenize"}


@pytest.mark.slow
def test_a_bert_model_returns_one_prediction_by_all_targets(tmp_path, config, vocabulary):
    version = tmp_path / "models" / "bert" / "1"
    version.parent.mkdir(parents=True)
    write_model(tmp_path, config, vocabulary).rename(version)
    with serving(version.parent) as addresses:
        url = f"{addresses.rest}/v1/models/bert"
        assert answers_strings(url) == {"serving_default", "tokenize", "embed"}
        directory = LocalClient(version.parent)
        rest, grpc = RestClient(url), GrpcClient(addresses.grpc, "bert")
        for signature in rest.signatures:
            prediction = rest.predict({"text": TEXTS}, signature)
            assert json.dumps(grpc.predict({"text": TEXTS}, signature)) == json.dumps(prediction)
            expected = directory.predict({"text": TEXTS}, signature)
            assert list(expected) == list(prediction)
            for name, spec in rest.signatures[signature].outputs.items():
                if spec.dtype == "float32":  # Another graph is optimized in another way.
                    np.testing.assert_allclose(prediction[name], expected[name], atol=1e-6)
                else:
                    assert prediction[name] == expected[name]
