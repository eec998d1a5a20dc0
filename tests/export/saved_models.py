"""A handwritten SavedModel, saved in a second, with each kind of signature a server may have."""

import tensorflow as tf
import tensorflow_text as tf_text

NUMBERS = [0.2, 1 / 3, -0.0, 3.0, 1e-20, 16777216.0, float("nan"), float("inf"), float("-inf")]


def _strings(*shape):
    return tf.TensorSpec(shape, tf.string)


class Echo(tf.Module):
    @tf.function(input_signature=[_strings(None)])
    def answer(self, text):
        lengths = tf.strings.length(text)
        return {
            "text": tf.identity(text),
            "length": lengths,
            "is_long": lengths > 5,
            "third": tf.cast(lengths, tf.float32) / 3,
        }

    @tf.function(input_signature=[_strings(None)])
    def tokenize(self, text):
        """Tokenize with an operation of TF Text."""
        words = tf_text.WhitespaceTokenizer().tokenize(text)
        return {"words": words.to_tensor(""), "count": words.row_lengths()}

    @tf.function(input_signature=[_strings(None), _strings(None, None)])
    def choose(self, prompt, choices):
        tf.debugging.assert_less_equal(tf.shape(choices)[1], 9, "choices: too many. Expected: <= 9")
        lengths = tf.strings.length(choices)
        return {"joined": prompt[:, None] + choices, "choice": tf.argmax(lengths, 1, tf.int32)}

    @tf.function(input_signature=[_strings(None)])
    def one(self, text):
        return {"value": tf.strings.to_number(text)}

    @tf.function(input_signature=[_strings(None)])
    def raw(self, text):
        return {"text_bytes": text + b"\xff", "text_size": tf.strings.length(text)}

    @tf.function(input_signature=[_strings(None)])
    def numbers(self, text):
        rows = tf.ones([tf.size(text), 1])
        return {
            "float": rows * tf.constant([NUMBERS]),
            "double": tf.cast(rows, tf.float64) * tf.constant([NUMBERS], tf.float64),
            "long": tf.cast(rows, tf.int64) * (2**62),
        }

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, "x")])
    def twice(self, x):
        return {"y": x * 2}

    @tf.function(input_signature=[_strings(None)])
    def single(self, text):
        """Return an output without a row dimension."""
        return {"rows": tf.size(text), "text": tf.identity(text)}


def write_echo(directory):
    """Write MODELS/name with version 3."""
    echo = Echo()
    functions = ("tokenize", "choose", "one", "raw", "numbers", "twice", "single")
    signatures = {name: getattr(echo, name) for name in functions}
    tf.saved_model.save(
        echo, str(directory / "3"), signatures={"serving_default": echo.answer, **signatures}
    )
    return directory
