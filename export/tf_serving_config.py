"""Two files that TF Serving can be started with, for people who know it and not Python."""

from google.protobuf import text_encoding

MAX_BATCH_SIZE = 32
BATCHING = "batching_params.pbtxt"  # The name by which TF Serving finds it in a version.

_BATCHING = """\
# Lets TF Serving answer requests that come at the same time as one batch: more answers per second
# for a little more waiting. Without it each request is answered by itself.
#
#   tensorflow_model_server ... --enable_batching --enable_per_model_batching_parameters
#
# reads this file in each version that has one, and batches no model that has none. The number of
# threads is that of the processor's cores; --batching_parameters_file sets another.
#
# TF Serving compares the shapes of requests only when it joins them. A request of another rank than
# SIGNATURES.md says fails together with those that it is joined with (FAILED_PRECONDITION): they
# can be sent again. Where clients cannot be trusted with that, do not enable batching. A request
# without rows waits until another one comes.

# The most rows of a batch. A request with more rows is refused (INVALID_ARGUMENT), it alone: send
# them in several. Not enable_large_batch_splitting: TF Serving could not put the parts together
# again, since outputs that are padded to the longest row differ in width.
max_batch_size {{ value: {max_batch_size} }}

# How long a request waits for others, in microseconds. 0: it takes along those that are waiting
# already. If clients are many and small, try 1000 to 10000.
batch_timeout_micros {{ value: 0 }}

# How many batches may wait. What comes on top is refused at once (UNAVAILABLE), so that clients can
# try again elsewhere instead of waiting ever longer.
max_enqueued_batches {{ value: 100 }}

# No allowed_batch_sizes: any size is as good to this model, and rows that fill up a batch would be
# computed for nothing. No pad_variable_length_inputs: texts of all lengths go together as they are.
"""

_MODELS = """\
# Serves {shown} from where the Docker image of TF Serving has models:
#
#   docker run -p 8500:8500 -p 8501:8501 -v MODELS:/models tensorflow/serving \\
#       --model_config_file=/models/THIS_FILE
#
# MODELS is the directory in which the model's own stands, THIS_FILE a copy of this file in it. The
# newest version is served, and a newer one once it appears. For several models put the "config"
# blocks of each into one file.
model_config_list {{
  config {{
    # What clients call it: /v1/models/NAME
    name: "{name}"
    # Where its versions are, each a directory that is a number.
    base_path: "/models/{name}"
    model_platform: "tensorflow"
  }}
}}
"""


def batching_parameters(signatures):
    """The text of batching_params.pbtxt, BatchingParameters in protobuf's text form, or None.

    None for a model that takes lists, as the choices of a question: TF Serving joins only lists of
    one length, and fails all requests of a batch where one has another.
    """
    if any(len(tensor.shape) > 1 for signature in signatures for tensor in signature.inputs):
        return None
    return _BATCHING.format(max_batch_size=MAX_BATCH_SIZE)


def models_config(name):
    """The text of models.config: a ModelServerConfig, for a model of any name."""
    return _MODELS.format(
        shown=printable(name), name=text_encoding.CEscape(name.encode(), as_utf8=False)
    )


def printable(name):
    """A name as it can stand in a line of text."""
    return "".join(character if character.isprintable() else "?" for character in name)
