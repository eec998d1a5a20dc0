"""Former names of the keys in train.json, task.json and metrics.jsonl.

Keys of earlier versions are renamed when a file is read, so that all other code sees only the new
names.
"""

from typing import Any

# Former keys to new ones. A key that ends in _ is a prefix.
RENAMED_KEYS = {
    "preset": "model_size",
    "steps_per_call": "steps_per_execution",
    "aim": "threshold_objective",
    "code_size": "latent_dim",
    "form": "file_format",
    "html_entities": "unescape_html",
    "ordinary_labels": "normal_labels",
    "stride": "doc_stride",
    "decided_": "tuned_",
}


def with_new_names(node: Any) -> Any:
    """Return an object, or a list of objects, with former keys renamed."""
    if isinstance(node, list):
        return [with_new_names(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {_new_name(name): value for name, value in node.items()}


def _new_name(name):
    for former, new in RENAMED_KEYS.items():
        if name == former or (former.endswith("_") and name.startswith(former)):
            return new + name.removeprefix(former)
    return name
