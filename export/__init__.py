"""Export of trained models as SavedModels and LiteRT files, and clients for them.

Both are published only if their predictions match the trained model's. Names are imported
lazily: TensorFlow is loaded with the first name that needs it.
"""

from bert_tf.system.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GrpcClient": "export.clients.grpc_client",
        "LiteRTClient": "export.litert.client",
        "LocalClient": "export.clients.local_client",
        "RestClient": "export.clients.rest_client",
        "publish": "export.publishing",
        "write_litert": "export.litert.writer",
    },
)
