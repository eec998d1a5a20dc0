"""Print processor, features and read bandwidth of the machine of benchmarks/serving.py as JSON.

The bandwidth is that of two threads. Each adds up a float64 array of its own with numpy, which is
twice as large as the last-level cache and has at least 512 MiB. It is the median of several passes.
"""

import concurrent.futures
import json
import pathlib
import statistics
import time

import numpy as np
from serving_process import THREADS

FEATURES = tuple("avx2 avx512f avx512_vnni avx_vnni avx512_bf16 amx_bf16 amx_int8".split())
MIN_ARRAY_BYTES, PASSES = 512 * 2**20, 9


def describe():
    """Return name, present and missing features, cache size and bandwidth of the processor."""
    fields = _cpuinfo()
    present = fields.get("flags", "").split()
    cache = last_level_cache()
    return {
        "processor": fields.get("model name", "unknown processor"),
        "features": [name for name in FEATURES if name in present],
        "missing": [name for name in FEATURES if name not in present],
        "cache_mb": cache / 2**20,
        "read_gb_per_s": read_bandwidth(max(MIN_ARRAY_BYTES, 2 * cache)) / 1e9,
    }


def has_feature(name):
    """Return whether the processor has a feature, by its name in /proc/cpuinfo."""
    return name in _cpuinfo().get("flags", "").split()


def last_level_cache():
    """Return the size of the largest cache of the first processor, in bytes; 0 if unknown."""
    caches = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20}
    texts = [path.read_text().strip() for path in caches]
    return max((int(text[:-1]) * units[text[-1]] for text in texts), default=0)


def read_bandwidth(array_bytes):
    """Return the bytes per second that `THREADS` threads read from arrays of `array_bytes`."""
    arrays = [np.ones(array_bytes // 8) for _ in range(THREADS)]
    seconds = []
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.sum, arrays))  # Releases the global interpreter lock.
            seconds.append(time.perf_counter() - start)
    return THREADS * array_bytes / statistics.median(seconds)


def _cpuinfo():
    """Return the fields of the first processor in /proc/cpuinfo."""
    first, _, _ = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


if __name__ == "__main__":
    print(json.dumps(describe()))
