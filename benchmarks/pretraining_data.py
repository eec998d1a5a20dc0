"""Measure the speed and memory of writing shards, of a text and of four times that text.

    python benchmarks/pretraining_data.py --text=FILE --vocab=vocab.txt [--num_workers=2]

Memory is the peak of the summed PSS (proportional set size) of the command's processes, sampled
five times per second. Start-up time is reported separately.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--num_shards", type=int, default=64)
    arguments = parser.parse_args()
    text = pathlib.Path(arguments.text).read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        for copies in (1, 4):
            path = directory / f"text{copies}.txt"
            path.write_bytes((text + b"\n\n") * copies)
            print(f"{copies}x  {json.dumps(measure(arguments, path, directory / str(copies)))}")


def measure(arguments, path, shards):
    """Run write_shards once and return seconds, MB/s and MB of memory."""
    command = [sys.executable, "-m", "bert_tf.write_shards", f"--input={path}"]
    command += [f"--vocab={arguments.vocab}", f"--output_dir={shards}"]
    command += [f"--num_workers={arguments.num_workers}", f"--num_shards={arguments.num_shards}"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    peak = {"all": 0, "parent": 0, "worker": 0}
    while process.poll() is None:
        sizes = {pid: pss(pid) for pid in tree(process.pid)}
        own = sizes.pop(process.pid, 0)
        workers = max(sizes.values(), default=0)
        for name, size in (
            ("all", own + sum(sizes.values())),
            ("parent", own),
            ("worker", workers),
        ):
            peak[name] = max(peak[name], size)
        time.sleep(0.2)
    seconds, lines = time.monotonic() - began, process.stderr.read()
    if process.returncode:
        raise SystemExit(lines)
    ready = float(re.search(r"ready after ([\d.]+) s", lines)[1])
    size = path.stat().st_size / 1e6
    return {
        "MB": round(size, 1),
        "seconds": round(seconds, 1),
        "start_up": ready,
        "MB_a_second": round(size / (seconds - ready), 1),
        **{f"MB_{name}": round(value / 1e3) for name, value in peak.items()},
    }


def tree(pid):
    """Return the PIDs of a process and of all its descendants."""
    found = [pid]
    for number in found:
        try:
            for task in pathlib.Path(f"/proc/{number}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # It has ended.
    return found


def pss(pid):
    """Return the PSS of a process in kilobytes, 0 if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
