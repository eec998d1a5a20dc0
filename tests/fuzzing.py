"""Mutates valid files of every format and reads them like the commands.

    python -m tests.fuzzing --count=300 [FORMAT ...]

An input has to end in a result or in an error that a command reports in one line. Anything else is
a finding and is saved with its seed: another exception, more than SECONDS, more than MEMORY_MB.
"""

import contextlib
import json
import pathlib
import random
import re
import signal
import sys
import tempfile

SECONDS = 20
TOO_LONG = f"no end after {SECONDS} s"
MEMORY_MB = 1_000
HOSTILE = (
    *(b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\r", b"\n\n"),
    *(b"\t", b" ", b'"', b"[", b"{", b"}", b"]", b",", b"\\", b"NaN", b"-Infinity", b"1e999"),
    *(b"9" * 5_000, b"x" * 70_000, b"[" * 3_000, b'{"a":' * 3_000, b" " * 70_000, b'"' * 5_001),
    *("\u2028".encode(), "e\u0301".encode(), "\U0001f600".encode(), b"null", b"-1", b"0", b"1e3"),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 3.5, 2**31, 2**63, 10**12, 10**4_000, 1e308, float("nan")),
    *("", "x", "\0", "\ud800", "x" * 70_000, "../../etc/passwd", "1", [], {}, [[]], [1, "a", None]),
)


def mutate(rng, data):
    """Return bytes that differ from `data` at one to three positions."""
    for _ in range(rng.randint(1, 3)):
        change = rng.choice((_flip, _cut, _insert, _insert, _repeat, _delete, _swap, _json, _json))
        data = change(rng, data)
    return data


def _flip(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 40)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(rng, data):
    return data[: rng.randint(0, len(data))]


def _insert(rng, data):
    frame = rng.randint(0, len(data))
    return data[:frame] + rng.choice(HOSTILE) + data[frame:]


def _repeat(rng, data):
    begin, end = _span(rng, data)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 50)) + data[end:]


def _delete(rng, data):
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def _swap(rng, data):
    """Swap two lines, which also damages structures that span lines."""
    lines = data.split(b"\n")
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"\n".join(lines)


def _span(rng, data):
    begin = rng.randint(0, len(data))
    return begin, min(len(data), begin + rng.choice((1, 4, 30, 300)))


def _json(rng, data):
    """Replace, remove or duplicate a value of a JSON text or of one of its lines."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    try:
        complete = json.loads(data)
    except (ValueError, RecursionError):
        complete = None
    try:
        value = json.loads(lines[number]) if complete is None else complete
    except (ValueError, RecursionError):
        return _insert(rng, data)
    node = holder = value
    while isinstance(node, dict | list) and node and rng.random() < 0.8:
        holder, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[key]
    if isinstance(holder, dict | list) and holder is not node:
        if rng.random() < 0.25:
            del holder[key]
        elif isinstance(holder, list) and rng.random() < 0.3:
            holder.insert(key, node)
        else:
            holder[key] = rng.choice(VALUES)
    sys.set_int_max_str_digits(0)
    try:
        changed = json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(4_300)
    if complete is not None:
        return changed
    return b"\n".join([*lines[:number], changed, *lines[number + 1 :]])


class Timeout(BaseException):
    """Raised by the watchdog."""


@contextlib.contextmanager
def watchdog(seconds=SECONDS):
    def ring(signum, frame):
        raise Timeout

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(read, path):
    """Return ("accepted", result), ("rejected", message), or ("finding", description)."""
    from bert_tf.errors import UserError

    before = _peak_mb(reset=True)
    try:
        with watchdog():
            outcome = "accepted", read(path)
    except UserError as error:
        message = str(error)
        is_line = "\n" not in message.strip() and len(message) < 3_000
        outcome = "rejected" if is_line else "finding", message[:3_000]
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        outcome = "rejected", str(error)
    except Timeout:
        outcome = "finding", TOO_LONG
    except Exception as error:
        frame = error.__traceback__
        while frame.tb_next:
            frame = frame.tb_next
        code = frame.tb_frame.f_code
        where = f"{pathlib.Path(code.co_filename).name}:{frame.tb_lineno} {code.co_name}"
        outcome = "finding", f"{type(error).__name__} at {where}: {error!s:.300}"
    grown = _peak_mb() - before
    if grown > MEMORY_MB:
        outcome = "finding", f"{grown} MB more of memory"
    return outcome


def _peak_mb(reset=False) -> int:
    """Return the peak memory of this process in MB, since its start or the last reset."""
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) >> 10


def fuzz(sample, read, seed, count, check=lambda path, result: True):
    """Read `count` mutations of the file `sample`.

    Args:
        sample: Path of a valid file, which is restored in the end.
        read: Callable from the path to the result.
        seed: Seed of the mutations.
        count: Number of mutations.
        check: Callable from path and result to whether an independent reader agrees.

    Returns:
        Number of accepted and of rejected inputs, and a list of findings.
    """
    original = sample.read_bytes()
    accepted, rejected, findings = 0, 0, []
    try:
        assert attempt(read, sample)[0] == "accepted", attempt(read, sample)
        for number in range(count):
            data = mutate(random.Random(f"{seed} {number}"), original)
            sample.write_bytes(data)
            outcome, detail = attempt(read, sample)
            if detail == TOO_LONG:  # A timeout may be due to a busy machine, so it is tried again.
                outcome, detail = attempt(read, sample)
            if outcome == "accepted" and not check(sample, detail):
                outcome, detail = "finding", f"another result: {detail!r:.200}"
            accepted += outcome == "accepted"
            rejected += outcome == "rejected"
            if outcome == "finding":
                findings.append((number, detail))
    finally:
        sample.write_bytes(original)
    return accepted, rejected, findings


def main(arguments):
    from tests import fuzzed

    counts = [word for word in arguments if re.fullmatch(r"--count=\d+", word)]
    count = int(counts[0].partition("=")[2]) if counts else 300
    names = [word for word in arguments if word not in counts] or list(fuzzed.FORMATS)
    print("| format | inputs | accepted | rejected | findings |\n|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            sample, *rest = fuzzed.FORMATS[name](pathlib.Path(directory))
            accepted, rejected, findings = fuzz(sample, rest[0], name, count, *rest[1:])
        print(f"| {name} | {count} | {accepted} | {rejected} | {len(findings)} |", flush=True)
        for number, what in findings:
            print(f"    {name} {number}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
