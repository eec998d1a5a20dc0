"""Client of TensorFlow Serving's gRPC API."""

import os
import re

import tensorflow as tf

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from export.clients.client import ModelClient, check_timeout
from export.clients.signature_defs import from_definitions
from tasks.data.examples import as_tensor
from tasks.data.readers.memory import jsonable


class GrpcClient(ModelClient):
    """Client of the newest version of a model on a TensorFlow Serving gRPC server."""

    @argument_names()
    def __init__(self, address: str, model: str, timeout: float = 60.0) -> None:
        """Connect and read the model's signatures.

        Args:
            address: HOST:PORT of the gRPC API.
            model: Name of the model.
            timeout: Time limit per request, in seconds.

        Raises:
            UserError: If an argument is malformed, if tensorflow-serving-api is not installed, or
                if the server does not respond.
        """
        if not re.fullmatch(r"[^/\s]+:\d+", str(address)):
            raise UserError(f"--grpc={address}: expected HOST:PORT")
        if not isinstance(model, str):
            raise UserError(f"--model={model!r:.80}: expected the name of a model")
        timeout = check_timeout(timeout)
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Errors are reported once, as UserError.
        try:
            import grpc
            from tensorflow_serving.apis import (
                get_model_metadata_pb2,
                predict_pb2,
                prediction_service_pb2_grpc,
            )
        except ImportError as error:
            raise UserError(
                f"--grpc={address}: {error.name} is missing; run pip install 'bert_tf[serving]'"
            ) from None
        self._grpc, self._predict_pb2 = grpc, predict_pb2
        self.address, self.model, self.timeout = address, model, timeout
        self._service = prediction_service_pb2_grpc.PredictionServiceStub(
            grpc.insecure_channel(
                address,
                [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
            )
        )
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        response = self._called(self._service.GetModelMetadata, request)
        found = get_model_metadata_pb2.SignatureDefMap()
        response.metadata["signature_def"].Unpack(found)
        super().__init__(from_definitions(found.signature_def))

    def _predict(self, inputs, signature):
        request = self._predict_pb2.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = self.model, signature.name
        for name, values in inputs.items():
            tensor = as_tensor(values, signature.inputs[name].rank)
            request.inputs[name].CopyFrom(tf.make_tensor_proto(tensor.numpy()))
        response = self._called(self._service.Predict, request)
        return {name: jsonable(tf.make_ndarray(proto)) for name, proto in response.outputs.items()}

    def _called(self, method, request):
        try:
            return method(request, timeout=self.timeout)
        except self._grpc.RpcError as error:
            code, message = error.code(), tensorflow_reason(error.details())
        if code == self._grpc.StatusCode.DEADLINE_EXCEEDED:
            message = f"no response within {self.timeout:g} seconds"
        elif code == self._grpc.StatusCode.UNAVAILABLE:
            message = f"no response from a server: {message}"
        elif code == self._grpc.StatusCode.UNIMPLEMENTED:
            message = f"not a TensorFlow Serving API: {message}"
        raise UserError(f"--grpc={self.address}: {message}")
