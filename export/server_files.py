"""Two files that TF Serving can be started with, for people who know it and not Python."""

from google.protobuf import text_encoding

MAX_BATCH_SIZE = 32
# Nearer to each other than powers of two: a row that only fills up costs as much as a text.
ALLOWED_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

_BATCHING = """\
# Lets TF Serving answer requests that come at the same time as one batch: more answers a second for
# a little more waiting. Nothing of it is needed; without it each request is answered by itself.
#
#   tensorflow_model_server ... --enable_batching --batching_parameters_file=THIS_FILE

# The most rows of a batch. A request with more rows is refused: send them in several.
max_batch_size {{ value: {max_batch_size} }}

# How long a request waits for others, in millionths of a second. 0: it takes along those that are
# waiting already. If clients are many and small, try 1000 to 10000.
batch_timeout_micros {{ value: 0 }}

# How many batches may wait. What comes on top is refused at once (status UNAVAILABLE), so that
# clients can try again elsewhere instead of waiting ever longer.
max_enqueued_batches {{ value: 100 }}

# How many batches are computed at a time: write the number of the server's processor cores here.
num_batch_threads {{ value: 4 }}

# A batch is filled up to the next of these sizes, with copies of a row whose answers are dropped.
# They have to grow, and end with max_batch_size.
{sizes}

# Texts of all lengths go together as they are: there is no padding to configure here.
{remark}"""

_OF_LISTS = """\
#
# {names}: a list a row. With batching, requests that meet in a batch need lists of the same
# length: fill them up with "" in the client, or leave batching off.
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
    """The text of batching_parameters.txt: BatchingParameters in protobuf's text form."""
    lists = sorted(
        {
            tensor.name
            for signature in signatures
            for tensor in signature.inputs
            if len(tensor.shape) == 2
        }
    )
    return _BATCHING.format(
        max_batch_size=MAX_BATCH_SIZE,
        sizes="\n".join(f"allowed_batch_sizes: {size}" for size in ALLOWED_BATCH_SIZES),
        remark=_OF_LISTS.format(names=", ".join(lists)) if lists else "",
    )


def models_config(name):
    """The text of models.config: a ModelServerConfig, for a model of any name."""
    return _MODELS.format(
        shown=printable(name), name=text_encoding.CEscape(name.encode(), as_utf8=False)
    )


def printable(name):
    """A name as it can stand in a line of text."""
    return "".join(character if character.isprintable() else "?" for character in name)
