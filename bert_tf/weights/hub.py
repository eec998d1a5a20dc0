"""Local cache of the Hugging Face hub."""

import os
import pathlib
import re

from bert_tf.errors import UserError

_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")


def find(model_id: str) -> tuple[pathlib.Path, str] | None:
    """Return the directory of a model that was downloaded from the hub, and its revision.

    It is that of the main revision, or of the only one in the cache if none is known as main.

    Args:
        model_id: Id such as "google-bert/bert-base-uncased". Some old ids have no "/".

    Returns:
        The directory, and "" for the main revision, otherwise the commit; or `None` if the id
        contains no "/" and is not in the cache.

    Raises:
        UserError: An id with a "/" is not in the cache, or is none, or only other revisions are in
            the cache.
    """
    if not _ID.fullmatch(model_id):
        raise UserError(f"{model_id}: no such directory")
    cache = _cache()
    model = cache / f"models--{model_id.replace('/', '--')}"
    snapshots = {path.name: path for path in sorted(model.glob("snapshots/*")) if path.is_dir()}
    main = _main_commit(model)
    if main in snapshots:
        return snapshots[main], ""
    if not main and len(snapshots) == 1:
        ((commit, directory),) = snapshots.items()
        return directory, commit
    download = f"to download it, run: {download_command(model_id)}"
    if snapshots:
        raise UserError(
            f"{model_id}: the Hugging Face cache has other revisions than main only; pass the "
            f"directory of one, such as {min(snapshots.values())}; {download}"
        )
    if "/" not in model_id:
        return None
    raise UserError(
        f"{model_id}: no such directory, and the Hugging Face cache {cache} has no such model; "
        f"{download}"
    )


def download_command(model_id: str) -> str:
    """Return the command that downloads a model."""
    return f"hf download {model_id}"


def _cache():
    """Return the directory of the cache, as huggingface_hub finds it."""
    variables = os.environ
    home = variables.get("HF_HOME") or os.path.join(
        variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE")
    # Unlike that of pathlib, this does not fail where the user has no home directory.
    return pathlib.Path(os.path.expanduser(cache or os.path.join(home, "hub")))


def _main_commit(model):
    """Return the commit of the main revision, or `None` if it is not known."""
    reference = model / "refs" / "main"
    if not reference.is_file():
        return None
    return reference.read_text(encoding="utf-8", errors="replace").strip()
