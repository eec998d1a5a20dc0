"""Measure the memory of a pretraining step by component.

    python benchmarks/training_memory.py [--precision=float32|bfloat16]

The model and the batch are those of pretraining_step.py. Resident memory is read between the
stages of a process. TensorFlow's allocator reports its peak within a step. Its events, recorded by
TensorFlow's profiler, tell which tensors are alive then. Prints a Markdown table in MB.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import tempfile

import own_process
from pretraining_batch import WARMUP_STEPS, Sizes

PRECISIONS = ("float32", "bfloat16")
MODULE = pathlib.Path(__file__).stem


def measure(sizes, precision):
    """Return the components of a step as a dict of MB; called in a separate process."""
    components = {"Python": _resident_mb()}
    from bert_tf.system.command import import_tensorflow

    import_tensorflow()  # As in the commands.
    import tensorflow as tf

    components["import of TensorFlow and Keras"] = _resident_mb()
    import keras
    import pretraining_step_tensorflow as backend

    sizes = Sizes(**sizes)
    components["import of bert_tf"] = _resident_mb()
    keras.utils.set_random_seed(0)
    model = backend.PretrainingModel(backend.config_of(sizes), backend.use_precision(precision))
    components["weights"] = _resident_mb()
    optimizer = backend.AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    components["moments of AdamW"] = _resident_mb()
    strategy = tf.distribute.get_strategy()
    step = backend.TrainStep(model, backend.LOSSES, optimizer, strategy, 0, backend.METRICS)
    batches = tf.data.Dataset.from_tensors(backend.examples(sizes))
    batches = batches.map(backend.LAYOUTS["flat"]).map(backend.to_batch)
    iterator = iter(batches.cache().repeat().prefetch(1))
    losses = [float(step(iterator)["loss"]) for _ in range(WARMUP_STEPS)]
    memory = tf.config.experimental.get_memory_info("CPU:0")
    components["first steps"] = _resident_mb()
    names, before = list(components), [0, *components.values()]
    stages = {name: components[name] - total for name, total in zip(names, before, strict=False)}
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory):
            losses.append(float(step(iterator)["loss"]))
        tensors = _at_peak(next(pathlib.Path(directory).rglob("*.xplane.pb")), sizes, precision)
    in_step = (memory["peak"] - memory["current"]) / 1e6
    return {
        "stages": stages,
        "in_step": in_step,
        "other": stages["first steps"] - in_step,
        "tensors": tensors,
        "losses": losses,
    }


def _resident_mb():
    """Return the resident memory of this process in MB."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024 / 1e6


def _at_peak(trace, sizes, precision):
    """Return {kind: MB} of the tensors that a step has allocated at its peak."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    alive, peak, at_peak = {}, 0, {}
    for name, event in sorted(_events(space), key=lambda pair: pair[1]["time"]):
        if name == "MemoryDeallocation":
            alive.pop(event["addr"], None)
        elif name == "MemoryAllocation":
            alive[event["addr"]] = event
            if event["bytes_allocated"] > peak:
                peak, at_peak = event["bytes_allocated"], dict(alive)
    kinds = collections.Counter()
    for event in at_peak.values():
        kinds[_kind(event, sizes, precision)] += event["requested_bytes"] / 1e6
    return dict(kinds.most_common())


def _events(space):
    """Yield (name, statistics) of all events of a trace."""
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                found = {"time": 1000 * line.timestamp_ns + event.offset_ps}
                for stat in event.stats:
                    which = stat.WhichOneof("value")
                    value = getattr(stat, which)
                    key = names[stat.metadata_id]
                    found[key] = names[value] if which == "ref_value" else value
                yield plane.event_metadata[event.metadata_id].name, found


def _kind(event, sizes, precision):
    """Return the kind of a tensor by its operation, or by its size if XLA allocated it."""
    operation, width = event.get("tf_op") or "", 4 if precision == "float32" else 2
    if "gradient_tape" in operation:
        return "gradients of weights"
    if "attention" in operation:
        return "queries, keys, values, contexts"
    if re.search(r"layer_\d+(_\d+)?/(BiasAdd|add)", operation):
        return "inputs of GELU"
    by_size = {
        sizes.tokens * sizes.hidden * width: "inputs and outputs of LayerNorm",
        sizes.batch * sizes.predictions * sizes.vocabulary * 4: "gradient of the logits",
    }
    return by_size.get(event["requested_bytes"], "others")


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    options = parser.parse_args()
    sizes = dataclasses.asdict(Sizes())
    found = own_process.call(f"{MODULE}.measure", sizes=sizes, precision=options.precision)
    print("| component | MB |\n|---|---|")
    for name, megabytes in list(found["stages"].items())[:-1]:
        print(f"| {name} | {megabytes:,.0f} |")
    print(f"| tensors of a step at its peak | {found['in_step']:,.0f} |")
    for kind, megabytes in found["tensors"].items():
        print(f"| - {kind} | {megabytes:,.0f} |")
    print(f"| graph and kernels of the step | {found['other']:,.0f} |")
    print(f"| peak of the process, with the profiler | {found['peak_mb']:,} |")
    print(f"\nlosses: {', '.join(map(str, found['losses']))}")


if __name__ == "__main__":
    main()
