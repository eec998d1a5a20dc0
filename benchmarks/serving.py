"""Measure the speed and the memory of a served BERT, next to other libraries.

    python benchmarks/serving.py --quick
    python benchmarks/serving.py [--baselines=PYTHON]

A BERT-base with random weights classifies texts into three labels, from strings to probabilities
with tokenizing, on two cores. All programs have the same weights, and before anything is timed,
their probabilities are compared with those of the trained model in float32. PYTHON is an
interpreter with torch and transformers, and for the other programs with tokenizers, onnx,
onnxscript, onnxruntime, openvino, nncf and ctranslate2. What fails is left out.

    bert_tf         the exported SavedModel, with tf.saved_model.load
    bert_tf, LiteRT the file of export_litert (int8: dynamic), tokens and padding by bert_tf
    keras-hub       a BertTextClassifier in a SavedModel, with 128 tokens (long texts: 512)
    transformers    on PyTorch, batches padded to their longest text
    ONNX Runtime, OpenVINO    the same model, exported by PyTorch, dynamic shapes, same padding
    CTranslate2     the same encoder, padded by CTranslate2; the head is computed in numpy

Every program, kind of text and round has a process of its own; the programs alternate. A process
receives one text, which ends its start, then all texts once for each batch size, since a running
server has seen the shapes before, and then three times. A latency is the median of a pass.
"""

import collections
import json
import os
import pathlib
import sys
import tempfile
import time

# No heavy imports here: the ru_maxrss of a process starts with that of its parent.
import own_process
import results

TITLES = {
    "ours": "bert_tf",
    "litert": "bert_tf, LiteRT",
    "keras_hub": "keras-hub",
    "transformers": "transformers",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "ctranslate2": "CTranslate2",
}
BASELINES = ("transformers", "onnxruntime", "openvino", "ctranslate2")
# Programs without a precision, and why.
NO_BFLOAT16 = dict.fromkeys(("litert", "onnxruntime", "ctranslate2"), "no bfloat16 on processors")
LACKING = {
    "bfloat16": NO_BFLOAT16,
    "int8": {"keras_hub": "a request of 16 short texts takes ten seconds"},
}
# Kind of text: number of texts, texts per request.
QUICK = {"short": (32, (1, 16)), "long": (4, (1,))}
COMPLETE = {"short": (64, (1, 16, 64)), "mixed": (64, (1, 16, 64)), "long": (16, (1, 16))}
# Of probabilities. A BERT-base with random weights predicts nothing clearly, so roundings show:
# int8 differs by up to 0.16. Without the attention mask, with the other segment or with two layers
# swapped it is 0.36 to 0.93. Smaller mistakes are found in float32, in which the same code runs.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.25}


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--programs", default=",".join(TITLES))
    parser.add_argument("--precision", help="default: float32, and without --quick what is fast")
    parser.add_argument("--model_size", choices=("tiny", "base"), default="base")
    options = parser.parse_args()
    if unknown := sorted(set(options.programs.split(",")) - set(TITLES)):
        parser.error(f"--programs={unknown[0]}: expected some of {', '.join(TITLES)}")
    precisions = options.precision.split(",") if options.precision else ["float32"]
    if not options.precision and not options.quick:
        precisions += ["bfloat16"] * results.has_feature("avx512_bf16") + ["int8"]
    measured = results.Results("serving", options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: own_process.THREADS])
    for precision in precisions:
        with tempfile.TemporaryDirectory() as directory:
            Comparison(pathlib.Path(directory), precision, options, measured).run()
        measured.save()


class Comparison:
    """Comparison of all programs in one precision."""

    def __init__(self, directory, precision, options, measured):
        self._directory, self._precision = directory, precision
        self._options, self._measured = options, measured
        self._kinds, self._rounds = (QUICK, 1) if options.quick else (COMPLETE, 3)

    def run(self):
        """Write the models, compare their probabilities, time requests and record figures."""
        counts = {kind: count for kind, (count, _) in self._kinds.items()}
        size, directory = self._options.model_size, str(self._directory)
        own_process.call("serving_models.write", directory=directory, counts=counts, size=size)
        texts = json.loads((self._directory / "texts.json").read_text(encoding="utf-8"))
        programs = []
        for name in self._options.programs.split(","):
            try:
                self._check(name, texts)
                programs.append(name)
            except own_process.Failed as failure:
                self._measured.leave_out(f"{TITLES[name]}, {self._precision}", failure)
        found = collections.defaultdict(list)
        for _ in range(self._rounds):
            for kind, (_, batches) in self._kinds.items():
                for name in programs:
                    for *key, values in self._serve(name, kind, batches)["figures"]:
                        found[*key, name] += values
        for (workload, unit, name), values in found.items():
            table = f"Serving, {self._precision}"
            self._measured.add(table, workload, TITLES[name], unit, values)

    def _check(self, name, texts):
        """Write the model of a program and compare its probabilities; raises `Failed`."""
        if reason := LACKING.get(self._precision, {}).get(name):
            raise own_process.Failed(reason)
        if name in BASELINES and not self._options.baselines:
            raise own_process.Failed("--baselines is not set")
        if name != "transformers":
            module = "serving_backends" if name in BASELINES else "serving_models"
            self._call(f"{module}.convert", name, directory=str(self._directory))
        differences = []
        for kind, of_kind in texts.items():
            rows = zip(self._serve(name, kind, ())["rows"], of_kind["expected"], strict=True)
            differences += [abs(a - b) for row in rows for a, b in zip(*row, strict=True)]
        print(f"{TITLES[name]}, {self._precision}: differs by at most {max(differences):.1e}")
        if max(differences) > TOLERANCE[self._precision]:
            raise own_process.Failed(f"probabilities differ by {max(differences):.1e}")

    def _serve(self, name, kind, batches):
        """Serve texts of a kind in a process of a program."""
        model = {"keras_hub": f"keras_hub-{512 if kind == 'long' else 128}"}
        model["transformers"] = "huggingface"
        return self._call(
            "serving_backends.serve",
            name,
            model=str(self._directory / model.get(name, name)),
            texts=str(self._directory / "texts.json"),
            kind=kind,
            batches=batches,
            started=time.time(),
        )

    def _call(self, function, name, **arguments):
        python = self._options.baselines if name in BASELINES else sys.executable
        shared = {"backend": name, "precision": self._precision}
        return own_process.call(function, python=python, **shared, **arguments)


if __name__ == "__main__":
    main()
