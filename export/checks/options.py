"""Checks of what an export is asked for, without TensorFlow."""

from bert_tf.errors import UserError
from bert_tf.storage import paths
from tasks.graph.published import check_versions

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
DEVICES = ("cpu", "gpu")
# In points. A classifier of banking77 lost 0.1 in int8. A tagger of WNUT17 lost 1.7 in one training
# and gained 0.1 in another, so that it has to be measured per run.
MAX_METRIC_DROP = 0.5


def check(
    output_dir: str,
    precision: str,
    portable: bool,
    device: str,
    dev: str | None,
    max_metric_drop: float,
) -> None:
    """Check arguments of `export.publish`.

    Raises:
        UserError: If two do not fit, or `dev` does not exist, or versions cannot be published in
            `output_dir`.
    """
    for name, value, known in (("precision", precision, PRECISIONS), ("device", device, DEVICES)):
        if value not in known:
            raise UserError(f"--{name}={value}: expected one of {', '.join(known)}")
    if precision == "float16" and device != "gpu":
        raise UserError("--precision=float16: expected with --device=gpu only")
    if precision == "int8" and device == "gpu":
        raise UserError("--precision=int8: has no operations for GPUs; remove --device=gpu")
    if precision == "int8" and portable:
        raise UserError("--precision=int8: has no standard operations; remove --portable")
    of_int8 = {"dev": (dev, None), "max_metric_drop": (max_metric_drop, MAX_METRIC_DROP)}
    for name, (given, default) in of_int8.items():
        if given != default and precision != "int8":
            raise UserError(f"--{name}={given}: expected with --precision=int8 only")
    if dev is not None:
        paths.check_local_file("dev", dev)
    paths.check_published("output_dir", output_dir)
    check_versions(output_dir)
