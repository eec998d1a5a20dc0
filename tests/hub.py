"""A server on this machine with the part of the Hugging Face hub's interface that downloads use."""

import contextlib
import hashlib
import http.server
import json
import threading

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(http.server.ThreadingHTTPServer):
    """A hub.

    Attributes:
        models: Directory by id.
        gated: Ids whose files nobody may download.
        revisions: Names of the one commit that all models have.
        requests: Paths of the requests.
    """

    daemon_threads = True

    def __init__(self, models=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.gated, self.requests = dict(models or {}), set(), []
        self.revisions = {"main", "v1", COMMIT}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def downloads(self):
        """Names of the files that were downloaded, sorted."""
        return sorted(
            path.split(f"/resolve/{COMMIT}/")[1]
            for path in self.requests
            if "GET " in path[:4] and "/resolve/" in path
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")[1:]
        keys = [n for n, part in enumerate(parts) if part in ("revision", "tree", "resolve")]
        number = keys[0] if keys else len(parts)
        model_id, action = "/".join(parts[:number]), "".join(parts[number : number + 1])
        revision, name = "".join(parts[number + 1 : number + 2]), "/".join(parts[number + 2 :])
        if model_id not in hub.models:
            return self.reply(401, error="RepoNotFound")
        if action and revision not in hub.revisions:
            return self.reply(404, error="RevisionNotFound")
        directory = hub.models[model_id]
        files = {
            str(file.relative_to(directory)): file.read_bytes()
            for file in directory.rglob("*")
            if file.is_file()
        }
        if is_api and action == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in files.items()
            ]
            return self.reply(200, json.dumps(entries).encode())
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": model_id, "sha": COMMIT, "siblings": siblings}
            return self.reply(200, json.dumps(info).encode())
        if model_id in hub.gated:
            return self.reply(403, error="GatedRepo")
        if name not in files:
            return self.reply(404, error="EntryNotFound")
        return self.reply(200, files[name], ETag=f'"{_digest(files[name])}"')

    do_HEAD = do_GET

    def reply(self, status, content=b"", error=None, **headers):
        self.send_response(status)
        headers |= {"X-Error-Code": error} if error else {"X-Repo-Commit": COMMIT}
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        """Print nothing."""


def _digest(content):
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def served(models):
    """Yield a `Hub` of these models while it is served."""
    with Hub(models) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def use(monkeypatch, url, cache):
    """Let this process use a hub and a cache, and processes that it starts the cache."""
    from huggingface_hub import constants

    from bert_tf.weights import huggingface

    huggingface.download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
