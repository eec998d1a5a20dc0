"""The test server: TF Serving's grammar of requests, responses and errors."""

import json
import urllib.error
import urllib.request

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)

NUMBERS = "[0.2, 0.333333343, -0.0, 3.0, 1e-20, 16777216.0, NaN, Infinity, -Infinity]"
CHOICES = [{"prompt": "a", "choices": ["b", "c"]}, {"prompt": "d", "choices": ["e", "ff"]}]


def asked(addresses, path, body=None):
    """Return (status, body as text) of GET, or of POST if there is a body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(addresses.rest + path, data, timeout=60) as prediction:
            return prediction.status, prediction.read().decode("utf-8", "surrogateescape")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def predicted(addresses, body):
    return asked(addresses, "/v1/models/echo:predict", body)


def test_the_model_and_its_signatures_are_described(addresses):
    status, text = asked(addresses, "/v1/models/echo")
    assert status == 200
    assert json.loads(text)["model_version_status"][0]["state"] == "AVAILABLE"
    assert asked(addresses, "/v1/models/echo/versions/3")[1] == text
    status, text = asked(addresses, "/v1/models/echo/metadata")
    signatures = json.loads(text)["metadata"]["signature_def"]["signature_def"]
    shape = {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False}
    assert signatures["one"]["inputs"] == {
        "text": {"dtype": "DT_STRING", "tensor_shape": shape, "name": "one_text:0"}
    }
    assert "__saved_model_init_op" in signatures


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"signature_name": "one", "instances": ["1", "0.1"]}, '{"predictions": [1.0, 0.1]}'),
        ({"signature_name": "one", "inputs": ["1", "0.1"]}, '{"outputs": [1.0, 0.1]}'),
        ({"signature_name": "one", "inputs": {"text": [], "more": 1}}, '{"outputs": []}'),
        (
            {"instances": [{"text": "lon\n\u00e9"}, {"text": ""}]},
            '{"predictions": [{"is_long": true, "length": 6, "text": "lon\\n\u00e9", '
            '"third": 2.0}, {"is_long": false, "length": 0, "text": "", "third": 0.0}]}',
        ),
        (
            {"inputs": ["a"]},
            '{"outputs": {"is_long": [false], "length": [1], "text": ["a"], '
            '"third": [0.333333343]}}',
        ),
        (
            {"signature_name": "choose", "instances": CHOICES},
            '{"predictions": [{"choice": 0, "joined": ["ab", "ac"]}, '
            '{"choice": 1, "joined": ["de", "dff"]}]}',
        ),
        (
            {"signature_name": "choose", "inputs": {"prompt": ["a"], "choices": [["b", "c"]]}},
            '{"outputs": {"choice": [0], "joined": [["ab", "ac"]]}}',
        ),
        (
            {"signature_name": "raw", "instances": [{"b64": "/w=="}]},
            '{"predictions": [{"text_bytes": {"b64": "//8="}, "text_size": 1}]}',
        ),
        ({"signature_name": "twice", "inputs": [[1, 2.5]]}, '{"outputs": [[2.0, 5.0]]}'),
        (
            {"signature_name": "single", "inputs": ["a"]},
            '{"outputs": {"rows": 1, "text": ["a"]}}',
        ),
    ],
)
def test_responses_have_the_format_of_their_requests(addresses, request_, expected):
    assert predicted(addresses, request_) == (200, expected)


def test_numbers_are_short_and_bytes_are_unchanged(addresses):
    text = predicted(addresses, {"signature_name": "numbers", "inputs": ["a"]})[1]
    assert f'"float": [{NUMBERS}]' in text and '"long": [[4611686018427387904]]' in text
    text = predicted(addresses, b'{"instances": ["\xff\xe9"]}')[1]
    assert text.encode("utf-8", "surrogateescape").count(b'"text": "\xff\xe9"') == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/models/other", None, 404, "Servable not found for request: Latest(other)"),
        ("/v1/models/other:predict", {}, 404, "Servable not found for request: Latest(other)"),
        ("/v1/models/echo/versions/1:predict", {}, 404, "Specific(echo, 1)"),
        ("/v1/models/echo", {}, 400, "Malformed request: POST /v1/models/echo"),
        ("/v1/models/echo:predict", b"{", 400, "JSON Parse error"),
        ("/v1/models/echo:predict", [], 400, "Is not object"),
        ("/v1/models/echo:predict", {}, 400, "Missing 'inputs' or 'instances' key"),
        ("/v1/models/echo:predict", {"inputs": [], "instances": []}, 400, "only one of"),
        ("/v1/models/echo:predict", {"instances": []}, 400, "No values in 'instances' array"),
        ("/v1/models/echo:predict", {"inputs": {"a": []}}, 400, "Missing named input: text"),
        ("/v1/models/echo:predict", {"instances": [{"a": "b"}]}, 400, "keys must be equal to: te"),
        ("/v1/models/echo:predict", {"instances": ["a", ["b"]]}, 400, "Expecting shape"),
        ("/v1/models/echo:predict", {"instances": [["a"], ["b", "c"]]}, 400, "tensor size: 1"),
        ("/v1/models/echo:predict", {"instances": ["a", {"text": "b"}]}, 400, "are mixed"),
        ("/v1/models/echo:predict", {"inputs": ["a", 1]}, 400, "not of expected type: string"),
        ("/v1/models/echo:predict", {"inputs": ["a", {"b64": "*"}]}, 400, "base64"),
        ("/v1/models/echo:predict", {"signature_name": 1, "inputs": []}, 400, "must be a string"),
        ("/v1/models/echo:predict", {"signature_name": "sing"}, 400, '"sing" not found in sig'),
        (
            "/v1/models/echo:predict",
            {"signature_name": "single", "instances": ["a"]},
            400,
            "rows has no shape information",
        ),
        (
            "/v1/models/echo:predict",
            {"signature_name": "one", "instances": ["a"]},
            400,
            "could not correctly convert string: a",
        ),
    ],
)
def test_errors_are_json_with_a_status(addresses, path, body, status, message):
    found, text = asked(addresses, path, body)
    assert found == status
    assert message in json.loads(text)["error"]


def test_prediction_service_predicts(addresses):
    with grpc.insecure_channel(addresses.grpc) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = predict_pb2.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = "echo", "raw"
        request.inputs["text"].CopyFrom(tf.make_tensor_proto([b"\xff", b""]))
        outputs = stub.Predict(request).outputs
        assert tf.make_ndarray(outputs["text_bytes"]).tolist() == [b"\xff\xff", b"\xff"]
        assert tf.make_ndarray(outputs["text_size"]).tolist() == [1, 0]
        request.model_spec.signature_name = "sing"
        with pytest.raises(grpc.RpcError) as raised:
            stub.Predict(request)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT

        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        with pytest.raises(grpc.RpcError) as raised:
            stub.GetModelMetadata(request)
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        request.model_spec.name = "echo"
        signatures = get_model_metadata_pb2.SignatureDefMap()
        assert stub.GetModelMetadata(request).metadata["signature_def"].Unpack(signatures)
        assert signatures.signature_def["one"].inputs["text"].name == "one_text:0"
