"""Measure the speed and the memory of a served BERT, next to other libraries.

    python benchmarks/serving.py --quick
    python benchmarks/serving.py [--baselines=PYTHON]

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
server has seen the shapes before, and then three times. A latency is the median of a pass.
"""

import collections
import json
import os
import pathlib
import shutil
import sys
import tempfile

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
CONVERTED = BASELINES[1:]  # From the directory of transformers.
WITHOUT_BFLOAT16 = ("litert", "onnxruntime", "ctranslate2")
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
    if options.baselines and not shutil.which(options.baselines):
        parser.error(f"--baselines={options.baselines}: no such program")
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
        programs = self._write(
            [name for name in self._options.programs.split(",") if self._has(name)]
        )
        texts = json.loads((self._directory / "texts.json").read_text(encoding="utf-8"))
        programs = [name for name in programs if self._is_right(name, texts)]
        found = collections.defaultdict(list)
        for _ in range(self._rounds):
            for kind, (_, batches) in self._kinds.items():
                for name in programs:
                    for key, values in figures_of(kind, self._call(name, kind, batches)).items():
                        found[*key, name] += values
        for (workload, unit, name), values in found.items():
            table = f"Serving, {self._precision}"
            self._measured.add(table, workload, TITLES[name], unit, values)

    def _has(self, name):
        """Return whether a program can run, or record why it is left out."""
        if self._precision == "bfloat16" and name in WITHOUT_BFLOAT16:
            return self._leave_out(name, "no bfloat16 on processors")
        if self._precision == "int8" and name == "keras_hub":
            return self._leave_out(name, "a request of 16 short texts takes ten seconds")
        if name in BASELINES and not self._options.baselines:
            return self._leave_out(name, "--baselines is not set")
        return True

    def _leave_out(self, name, reason):
        self._measured.leave_out(f"{TITLES[name]}, {self._precision}", reason)
        return False

    def _write(self, programs):
        """Write texts and models; return the programs that have one."""
        common = {"directory": str(self._directory), "precision": self._precision}
        counts = {kind: count for kind, (count, _) in self._kinds.items()}
        failed = own_process.call(
            "serving_models.write",
            counts=counts,
            programs=programs,
            model_size=self._options.model_size,
            **common,
        )["failed"]
        for name in set(programs) & set(CONVERTED):
            function, python = "serving_backends.convert", self._options.baselines
            try:
                own_process.call(function, python=python, backend=name, **common)
            except own_process.Failed as failure:
                failed[name] = failure
        for name, reason in failed.items():
            self._leave_out(name, reason)
        return [name for name in programs if name not in failed]

    def _is_right(self, name, texts):
        """Return whether a program's probabilities are right, or record that they are not."""
        differences = []
        try:
            for kind, of_kind in texts.items():
                rows = zip(self._call(name, kind, ())["rows"], of_kind["expected"], strict=True)
                differences += [abs(a - b) for row in rows for a, b in zip(*row, strict=True)]
        except own_process.Failed as failure:
            return self._leave_out(name, failure)
        print(f"{TITLES[name]}, {self._precision}: differs by at most {max(differences):.1e}")
        if max(differences) > TOLERANCE[self._precision]:
            return self._leave_out(name, f"probabilities differ by {max(differences):.1e}")
        return True

    def _call(self, name, kind, batches):
        """Serve texts of a kind in a process of a program."""
        model = {"keras_hub": f"keras_hub-{512 if kind == 'long' else 128}"}
        model["transformers"] = "huggingface"
        return own_process.call(
            "serving_backends.serve",
            python=self._options.baselines if name in BASELINES else sys.executable,
            backend=name,
            model=str(self._directory / model.get(name, name)),
            precision=self._precision,
            texts=str(self._directory / "texts.json"),
            kind=kind,
            batches=batches,
        )


def figures_of(kind, timed):
    """Return {(workload, unit): values} of a process."""
    figures = {}
    for batch, values in timed["batches"].items():
        if batch == "1":
            figures[f"{kind} texts, one per request", "ms"] = values["median_ms"]
        else:
            figures[f"{kind} texts, {batch} per request", "texts/s"] = values["texts_per_second"]
    if kind == "short":
        imported, answered = (second - timed["started"] for second in timed["clock"])
        figures["Python and imports", "s"] = [imported]
        figures["load and first answer", "s"] = [answered - imported]
        figures["peak memory, short texts", "MB"] = [timed["peak_mb"]]
    return figures


if __name__ == "__main__":
    main()
