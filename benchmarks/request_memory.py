"""Measure the peak memory of expensive requests, each in a separate process.

    python benchmarks/request_memory.py --vocab=vocab.txt [--only=WORD]

Exports a small BERT with random weights for each task. Each request is run in a new process, after
a request of one short text. Prints a Markdown table: the size of the request in gRPC (2 additional
bytes per string), the peak memory above that of the short request, its excess over CONSTANT_MB per
byte, seconds, and the outcome. The peak includes the strings of the request, which TensorFlow
stores.
"""

import argparse
import pathlib
import tempfile

import own_process

CONSTANT_MB = 512
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


def filled(unit, size=MEBIBYTE):
    """Return a string of about `size` bytes."""
    return unit * (size // len(unit.encode()))


def requests():
    """Return {name: (task, signature, strings of the only input or {input: strings})}."""
    short, long = ["a"] * 1000, filled(ENGLISH)
    marks, punctuation = filled("e\u0301\u0302\u0323"), filled("!")
    context = {"question": ["Who?"] * 1001, "context": [*short, long]}
    return {
        "1 long among 1,000 short": ("classification", "serving_default", [*short, long]),
        "32 long": ("classification", "serving_default", [long] * 32),
        "32 long, last tokens kept": ("tail", "serving_default", [long] * 32),
        "32 of one token repeated": ("classification", "serving_default", [filled("a ")] * 32),
        "32 of one word": ("classification", "serving_default", [filled("a")] * 32),
        "32 of spaces": ("classification", "serving_default", [filled(" ")] * 32),
        "32 of 4-byte characters": (
            "classification",
            "serving_default",
            [filled("\U0001f600")] * 32,
        ),
        "32 of combining marks": ("classification", "serving_default", [marks] * 32),
        "1 of 100 MiB": ("classification", "serving_default", [filled(ENGLISH, 100 * MEBIBYTE)]),
        "100,000 empty": ("classification", "serving_default", [""] * 100_000),
        "223,000 empty, the largest output of strings": (
            "classification",
            "serving_default",
            [""] * 223_000,
        ),
        "tokenize: 1 long among 50,000 empty": (
            "classification",
            "tokenize",
            [""] * 50_000 + [long],
        ),
        "embed: 100,000 empty": ("classification", "embed", [""] * 100_000),
        "tagging: 1 long among 1,000 short": ("tagging", "serving_default", [*short, long]),
        "tagging: 2 of punctuation": ("tagging", "serving_default", [punctuation] * 2),
        "tagging: 1 of 4-byte ideographs among 100,000 empty": (
            "tagging",
            "serving_default",
            [""] * 100_000 + [filled("\U00020000", 100_000)],
        ),
        "tagging: 2 of combining marks": ("tagging", "serving_default", [marks] * 2),
        "tagging, tokenize: 100 KB among 200 short": (
            "tagging",
            "tokenize",
            [*short[:200], filled(ENGLISH, 100_000)],
        ),
        "tagging, tokenize: 1 of punctuation among 1,000 short": (
            "tagging",
            "tokenize",
            [*short, punctuation],
        ),
        "tagging, tokenize: the largest output, 1 of punctuation and 31 short": (
            "tagging",
            "tokenize",
            [*short[:31], punctuation],
        ),
        "span_qa: 1 long among 1,000 short": ("span_qa", "serving_default", context),
        "span_qa: 1 of punctuation": (
            "span_qa",
            "serving_default",
            {"question": ["Who?"], "context": [punctuation]},
        ),
        "span_qa: 4 of one word": (
            "span_qa",
            "serving_default",
            {"question": ["Who?"] * 4, "context": [filled("a")] * 4},
        ),
        "span_qa: 32 long questions": (
            "span_qa",
            "serving_default",
            {"question": [long] * 32, "context": ["a"] * 32},
        ),
        "multiple_choice: long prompt, 1,000 choices": (
            "multiple_choice",
            "serving_default",
            {"prompt": [long], "choices": [short]},
        ),
        "multiple_choice: 1,000 of 4 choices, 1 long": (
            "multiple_choice",
            "serving_default",
            {"prompt": short, "choices": [["a", "b", "c", long], *[["a", "b", "c", "d"]] * 999]},
        ),
    }


def inputs_of(name):
    """Return the task, the signature and {input: strings} of a request."""
    task, signature, inputs = requests()[name]
    return task, signature, inputs if isinstance(inputs, dict) else {"text": inputs}


def export(directory, vocab):
    """Write the SavedModel of each task to DIRECTORY/TASK."""
    import keras

    from bert_tf import BertConfig, Vocabulary
    from bert_tf.runs.checkpoints import model_variables
    from bert_tf.runs.run import Run
    from export.graph.saved_model import write_saved_model
    from tasks.model.loading import load_model
    from tasks.types.classification.text_classifier import ClassificationTask
    from tasks.types.multiple_choice import MultipleChoiceTask
    from tasks.types.question_answering.question_answerer import QuestionAnsweringTask
    from tasks.types.tagging.token_classifier import TaggingTask

    labels = tuple(f"intent_{number}" for number in range(150))
    tags = ("O", *(f"{prefix}-{name}" for name in ("PER", "LOC", "ORG", "MISC") for prefix in "BI"))
    tasks = {
        "classification": ClassificationTask(labels=labels, max_seq_length=128),
        "tail": ClassificationTask(labels=labels, max_seq_length=128, truncation="tail"),
        "tagging": TaggingTask(labels=tags, max_seq_length=128, doc_stride=63),
        "span_qa": QuestionAnsweringTask(max_seq_length=384),
        "multiple_choice": MultipleChoiceTask(max_seq_length=128),
    }
    vocabulary = Vocabulary.load(vocab)
    config = BertConfig(vocab_size=len(vocabulary), **SIZES)
    for name, task in tasks.items():
        keras.utils.set_random_seed(0)
        model = task.build_model(config)
        run = Run.create(f"{directory}/run-{name}", config, vocabulary, {}, task.to_dict())
        run.checkpoints.save(0, model_variables(model))
        write_saved_model(load_model(run.path), f"{directory}/{name}")
    return {}


def ask(directory, name):
    """Run one request and return its size, memory before and after, seconds and outcome."""
    import resource
    import time

    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GB * 2**30,) * 2)

    def peak_mb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    task, signature, inputs = inputs_of(name)
    served = tf.saved_model.load(f"{directory}/{task}").signatures[signature]
    served(**{key: tf.constant([["a"]] if key == "choices" else ["a"]) for key in inputs})
    before, start = peak_mb(), time.perf_counter()
    tensors = {key: tf.constant(values) for key, values in inputs.items()}
    try:
        served(**tensors)
        outcome = "response"
    except tf.errors.OpError as error:
        lines = [line.strip() for line in error.message.splitlines()]
        outcome = next((line for line in lines if "assertion" in line or "OOM" in line), lines[-1])
    return {
        "bytes": sum(
            int(tf.reduce_sum(tf.strings.length(values))) + 2 * int(tf.size(values))
            for values in tensors.values()
        ),
        "before_mb": before,
        "after_mb": peak_mb(),
        "seconds": time.perf_counter() - start,
        "outcome": outcome,
    }


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        vocab = str(pathlib.Path(arguments.vocab).resolve())
        own_process.call("request_memory.export", directory=directory, vocab=vocab)
        print("| request | MB | peak, MB | factor | seconds | outcome |\n|---|---|---|---|---|---|")
        for name in requests():
            if arguments.only not in name:
                continue
            try:
                found = own_process.call("request_memory.ask", directory=directory, name=name)
            except own_process.Failed as error:
                print(f"| {name} | | | | | {error} |", flush=True)
                continue
            grown = found["after_mb"] - found["before_mb"]
            size = found["bytes"] / MEBIBYTE
            factor = max(grown - CONSTANT_MB, 0) / size
            print(
                f"| {name} | {size:.2f} | {grown:,.0f} | {factor:.0f} | {found['seconds']:.1f} | "
                f"{found['outcome']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
