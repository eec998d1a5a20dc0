"""Local cache of the Hugging Face hub."""

import os
import pathlib
import re

from bert_tf.errors import UserError

_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find(model_id: str) -> pathlib.Path | None:
    """Return the directory of a model that was downloaded from the hub.

    The cache is $HF_HUB_CACHE, otherwise $HF_HOME/hub, otherwise ~/.cache/huggingface/hub.

    Args:
        model_id: Id such as "google-bert/bert-base-uncased". Some old ids have no "/".

    Returns:
        Directory of the main revision, or `None` if the id contains no "/" and is not in the cache.

    Raises:
        UserError: An id with a "/" is not in the cache, or is none.
    """
    if not _ID.fullmatch(model_id):
        raise UserError(f"{model_id}: no such directory")
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = pathlib.Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    model = cache / f"models--{model_id.replace('/', '--')}"
    reference = model / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        snapshot = model / "snapshots" / commit
        if _COMMIT.fullmatch(commit) and snapshot.is_dir():
            return snapshot
    if "/" not in model_id:
        return None
    raise UserError(
        f"{model_id}: no such directory, and the Hugging Face cache {cache} has no such model; "
        f"to download it, run: hf download {model_id}"
    )
