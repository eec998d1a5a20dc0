"""Measure the speed and the memory of a served BERT, next to other libraries.

    python benchmarks/serving.py --quick                            (three minutes)
    python benchmarks/serving.py [--baselines=PYTHON]               (an hour per precision)

A BERT-base with random weights classifies texts into three labels, from strings to probabilities
with tokenizing, on two cores. All programs have the same weights. Before anything is timed, their
probabilities are compared with those of the trained model in float32. PYTHON is an interpreter with
torch and transformers, and for the other programs with tokenizers, onnx, onnxscript, onnxruntime,
openvino, nncf and ctranslate2. What is not installed, or has no such precision, is left out.

    bert_tf         the exported SavedModel, with tf.saved_model.load
    bert_tf, LiteRT the file of export_litert (int8: dynamic), tokens and padding by bert_tf
    keras-hub       a BertTextClassifier in a SavedModel, with 128 tokens (long texts: 512)
    transformers    on PyTorch, batches padded to their longest text
    ONNX Runtime, OpenVINO    the same model, exported by PyTorch, dynamic shapes, same padding
    CTranslate2     the same encoder, padded by CTranslate2; the head is computed in numpy

Every program, kind of text and round has a process of its own; the programs alternate. A process
receives one text, which ends its start, then all texts once for each batch size, since a running
server has seen the shapes before, and then --passes times. A latency is the median of a pass.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

# No heavy imports here: the ru_maxrss of a process starts with that of its parent.
import own_process
import results

MODELS, MEASURE = "serving_models", "serving_backends"
TITLES = {
    "ours": "bert_tf",
    "litert": "bert_tf, LiteRT",
    "keras_hub": "keras-hub",
    "transformers": "transformers",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "ctranslate2": "CTranslate2",
}
OF_TORCH = ("torch", "transformers", "tokenizers")
PACKAGES = {
    "ours": (),
    "litert": ("ai_edge_litert",),
    "keras_hub": ("keras_hub",),
    "transformers": OF_TORCH[:2],
    "onnxruntime": (*OF_TORCH, "onnx", "onnxscript", "onnxruntime"),
    "openvino": (*OF_TORCH, "openvino", "nncf"),
    "ctranslate2": (*OF_TORCH, "ctranslate2"),
}
BASELINES = ("transformers", "onnxruntime", "openvino", "ctranslate2")
WITHOUT_BFLOAT16 = ("litert", "onnxruntime", "ctranslate2")
# Kind of text: number of texts, texts per request.
QUICK = {"short": (32, (1, 16)), "long": (4, (1,))}
COMPLETE = {"short": (64, (1, 16, 64)), "mixed": (64, (1, 16, 64)), "long": (16, (1, 16))}
# Of probabilities. A BERT-base with random weights predicts nothing clearly, so roundings show:
# int8 differs by up to 0.16. Without the attention mask, with the other segment or with two layers
# swapped it is 0.36 to 0.93. Smaller mistakes are found in float32, in which the same code runs.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.25}
CHECKED = 4  # Number of texts per kind.


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--programs", default=",".join(TITLES))
    parser.add_argument("--precision", help="default: float32, and without --quick what is fast")
    parser.add_argument("--model_size", choices=("tiny", "base"), default="base")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    if options.baselines and not shutil.which(options.baselines):
        parser.error(f"--baselines={options.baselines}: no such program")
    if unknown := sorted(set(options.programs.split(",")) - set(TITLES)):
        parser.error(f"--programs={unknown[0]}: expected some of {', '.join(TITLES)}")
    kinds, rounds = (QUICK, 1) if options.quick else (COMPLETE, 3)
    precisions = options.precision.split(",") if options.precision else ["float32"]
    if not options.precision and not options.quick:
        precisions += ["bfloat16"] * results.has_feature("avx512_bf16") + ["int8"]
    measured = results.Results("serving", options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(own_process.THREADS)])
    for precision in precisions:
        backends = available(options, precision, measured)
        with tempfile.TemporaryDirectory() as directory:
            backends = prepare(directory, backends, precision, kinds, options, measured)
            measure(
                directory, backends, precision, kinds, options.rounds or rounds, options, measured
            )
        measured.save()


def available(options, precision, measured):
    """Return the available programs, and record why others are left out."""
    found = []
    for name in options.programs.split(","):
        title = f"{TITLES[name]}, {precision}"
        if precision == "bfloat16" and name in WITHOUT_BFLOAT16:
            measured.leave_out(title, "no bfloat16 on processors")
        elif precision == "int8" and name == "keras_hub":
            measured.leave_out(title, "a request of 16 short texts takes ten seconds")
        elif name in BASELINES and not options.baselines:
            measured.leave_out(title, "--baselines is not set")
        elif missing := not_installed(python_of(name, options), PACKAGES[name]):
            measured.leave_out(title, f"{', '.join(missing)} not installed")
        else:
            found.append(name)
    return found


def not_installed(python, packages):
    """Return the packages that an interpreter cannot import."""
    return own_process.call(f"{MEASURE}.not_installed", python=python, packages=packages)["missing"]


def python_of(name, options):
    """Return the interpreter of a program."""
    return options.baselines if name in BASELINES else sys.executable


def prepare(directory, backends, precision, kinds, options, measured):
    """Write texts and models, and return the programs with the expected probabilities."""
    plan = {"directory": directory, "precision": precision, "backends": backends}
    counts = {kind: count for kind, (count, _) in kinds.items()}
    own_process.call(
        f"{MODELS}.write", counts=counts, checked=CHECKED, model_size=options.model_size, **plan
    )
    if set(backends) & set(BASELINES):
        own_process.call(f"{MEASURE}.convert", python=options.baselines, **plan)
    texts = json.loads(pathlib.Path(directory, "texts.json").read_text(encoding="utf-8"))
    right = []
    for name in backends:
        differences = []
        try:
            for kind, of_kind in texts.items():
                answered = call(directory, name, kind, precision, options, "predictions")
                pairs = zip(answered["rows"], of_kind["expected"], strict=True)
                differences += [abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)]
        except own_process.Failed as failure:
            measured.leave_out(f"{TITLES[name]}, {precision}", failure)
            continue
        print(f"{TITLES[name]}, {precision}: differs by at most {max(differences):.1e}")
        if max(differences) <= TOLERANCE[precision]:
            right.append(name)
        else:
            reason = f"probabilities differ by {max(differences):.1e}"
            measured.leave_out(f"{TITLES[name]}, {precision}", reason)
    return right


def call(directory, name, kind, precision, options, function, **arguments):
    """Call a function of serving_backends.py in a process of a program."""
    model = {"keras_hub": f"keras_hub-{512 if kind == 'long' else 128}"}
    model["transformers"] = "huggingface"
    return own_process.call(
        f"{MEASURE}.{function}",
        python=python_of(name, options),
        backend=name,
        model=str(pathlib.Path(directory, model.get(name, name))),
        precision=precision,
        texts=str(pathlib.Path(directory, "texts.json")),
        kind=kind,
        **arguments,
    )


def measure(directory, backends, precision, kinds, rounds, options, measured):
    """Time all programs in turns and record their figures."""
    found = {}
    for _ in range(rounds):
        for kind, (_, batches) in kinds.items():
            for name in backends:
                timed = call(
                    directory,
                    name,
                    kind,
                    precision,
                    options,
                    "times",
                    batches=batches,
                    passes=options.passes,
                )
                for key, values in figures_of(kind, timed).items():
                    found.setdefault(key, {}).setdefault(name, []).extend(values)
    for (workload, unit), programs in found.items():
        for name, values in programs.items():
            measured.add(f"Serving, {precision}", workload, TITLES[name], unit, values)


def figures_of(kind, timed):
    """Return {(workload, unit): values} of a process."""
    figures = {}
    for batch, values in timed["batches"].items():
        if batch == "1":
            figures[f"{kind} texts, one per request", "ms"] = values["median_ms"]
        else:
            figures[f"{kind} texts, {batch} per request", "texts/s"] = values["texts_per_second"]
    if kind == "short":
        imported, _, answered = (second - timed["started"] for second in timed["clock"])
        figures["Python and imports", "s"] = [imported]
        figures["load and first answer", "s"] = [answered - imported]
        figures["peak memory, short texts", "MB"] = [timed["peak_mb"]]
    return figures


if __name__ == "__main__":
    main()
