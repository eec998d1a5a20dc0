"""Results of the benchmarks as data: one JSON file per benchmark and kind of machine.

A file is NAME_KIND.json, such as serving_avx2.json. It has the machine, the versions, the commit,
the date and the command of one run, and a list of figures:

    table           the table that shows the figure, such as "Serving, float32"
    workload        the row: what was done
    program         the column: bert_tf, another library, or "estimate" of bert-tf plan
    unit            one of UNITS
    repetitions     how often it was measured; null if it was not recorded
    min, median, max
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from importlib import metadata

import own_process

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS, OUTPUT = ROOT / "benchmarks" / "results", ROOT / "build" / "benchmarks"
# Whether more is better, by unit.
UNITS = {
    **dict.fromkeys(("ms", "s", "MB", "GB", "difference"), False),
    **dict.fromkeys(("texts/s", "examples/s", "sequences/s", "tokens/s", "tokens"), True),
    **dict.fromkeys(("MB/s", "GB/s", "TFLOP/s", "MFU", "%"), True),
}
FEATURES = tuple("avx2 avx512f avx512_vnni avx_vnni avx512_bf16 amx_bf16 amx_int8".split())
# In this order of preference.
KINDS = {"amx": "amx_bf16", "avx512": "avx512f", "avx2": "avx2"}
PACKAGES = (
    *("python", "tensorflow", "keras", "keras-hub", "ai-edge-litert", "tokenizers"),
    *("torch", "transformers", "sentence-transformers"),
    *("onnxruntime", "openvino", "nncf", "ctranslate2"),
)
# One array per thread, larger than any cache.
BANDWIDTH_THREADS, ARRAY_BYTES, BANDWIDTH_PASSES = 2, 2**30, 9


def parser(description):
    """Return a parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a few minutes instead of hours")
    made.add_argument("--baselines", metavar="PYTHON", help="interpreter with other libraries")
    made.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    made.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    return made


class Results:
    """Results of one run of a script, whose flags `parser` has parsed."""

    def __init__(self, benchmark, options):
        self.output = pathlib.Path(options.output)
        installed = {}
        for python in filter(None, (options.baselines, sys.executable)):
            installed |= own_process.call("results.installed", python)
        self.record = {
            "benchmark": benchmark,
            "mode": "quick" if options.quick else "complete",
            "machine": own_process.call("results.describe")["machine"],
            "versions": {name: installed[name] for name in PACKAGES if name in installed},
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "command": command_line(),
            "left_out": {},
            "figures": [],
        }

    def add(self, table, workload, program, unit, values):
        """Add a figure from the values of its repetitions."""
        assert unit in UNITS, unit
        figure = {"table": table, "workload": workload, "program": program, "unit": unit}
        self.record["figures"].append({**figure, **summary(values)})
        print(" | ".join(map(str, self.record["figures"][-1].values())), flush=True)

    def leave_out(self, program, reason):
        """Record why a program was not measured."""
        self.record["left_out"][program] = str(reason)
        print(f"{program} left out: {reason}", flush=True)

    def save(self):
        """Write the file."""
        self.output.mkdir(parents=True, exist_ok=True)
        name = f"{self.record['benchmark']}_{self.record['machine']['kind']}.json"
        text = json.dumps(self.record, indent=1, ensure_ascii=False) + "\n"
        (self.output / name).write_text(text, encoding="utf-8")
        print(f"wrote {self.output / name}", flush=True)


def summary(values):
    """Return the number of values, and the least, the median and the largest one."""
    values = [float(f"{value:.4g}") for value in values]
    return {
        "repetitions": len(values),
        "min": min(values),
        "median": float(f"{statistics.median(values):.4g}"),
        "max": max(values),
    }


def installed():
    """Return the versions of this interpreter and of its packages."""
    packages = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    return {**packages, "python": platform.python_version()}


def commit():
    """Return the commit of the code, with "+" if files differ from it; `None` if unknown."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    # Results and pages that are made from them do not change what is measured.
    unmeasured = [":!benchmarks/results", ":!docs", ":!README.md"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *unmeasured])
    return head.stdout.strip() + "+" * bool(changed.returncode)


def command_line():
    """Return the command of this process, without the paths of this machine."""
    words = [word for word in sys.argv[1:] if not word.startswith("--output")]
    words = [re.sub(r"^(--baselines|--python)=.*", r"\1=PYTHON", word) for word in words]
    words = [re.sub(r"^(--\w+)=.*/.*", r"\1=DIR", word) for word in words]
    return shlex.join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *words])


def describe():
    """Return the processor, its features and read bandwidth, memory and card of this machine."""
    import numpy as np

    fields = _cpuinfo()
    present = [name for name in FEATURES if has_feature(name)]
    arrays, rates = [np.ones(ARRAY_BYTES // 8) for _ in range(BANDWIDTH_THREADS)], []
    with concurrent.futures.ThreadPoolExecutor(BANDWIDTH_THREADS) as pool:
        for _ in range(BANDWIDTH_PASSES):
            start = time.perf_counter()
            list(pool.map(np.sum, arrays))  # Releases the global interpreter lock.
            rates.append(BANDWIDTH_THREADS * ARRAY_BYTES / (time.perf_counter() - start) / 1e9)
    card = next(iter(nvidia_smi("name")), None)
    numbered = (word for word in (card or "").lower().split() if any(map(str.isdigit, word)))
    kinds = (kind for kind, feature in KINDS.items() if feature in present)
    machine = {
        # The part of a card's name that has its number, such as "h100".
        "kind": next(numbered, "gpu") if card else next(kinds, platform.machine()),
        "processor": fields.get("model name", platform.processor() or "unknown"),
        "features": present,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "read_gb_per_s": summary(rates),
        "card": card,
    }
    return {"machine": machine}


def has_feature(name):
    """Return whether the processor has a feature, by its name in /proc/cpuinfo."""
    return name in _cpuinfo().get("flags", "").split()


def _cpuinfo():
    """Return the fields of the first processor in /proc/cpuinfo."""
    first, _, _ = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def nvidia_smi(fields):
    """Return what nvidia-smi says of each GPU, if there are any."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return []
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
