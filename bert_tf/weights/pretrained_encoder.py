"""The public `Encoder`: the encoder of bert_tf.model, with the weights of any supported source."""

import os
from typing import Self

import keras

from bert_tf.model import encoder


@keras.saving.register_keras_serializable("bert_tf")
class Encoder(encoder.Encoder):  # noqa: D101  The docstring is that of the base class.
    __doc__ = encoder.Encoder.__doc__

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        do_lower_case: bool | None = None,
        dtype: str | None = None,
        name: str = "bert",
    ) -> Self:
        """Create an encoder with pretrained weights.

        Args:
            path: Run, Hugging Face directory, Google release or keras-hub preset.
            do_lower_case: Overrides the setting of the source in `config`.
            dtype: Keras policy, "float32" or "mixed_bfloat16"; by default the global one.
            name: Layer name.

        Returns:
            The encoder, built. Heads of the source are not used.

        Raises:
            UserError: There is no model, or a tensor is missing, unknown or of the wrong shape.
        """
        # An encoder without pretrained weights needs none of the readers.
        from bert_tf.weights.sources import read_pretrained

        pretrained = read_pretrained(path, do_lower_case)
        created = cls(pretrained.config, name=name, dtype=dtype)
        created.build()
        pretrained.assign_to(created)
        return created
