"""A search service: a query is embedded, looked up in the index, and its results are reranked.

    python search_service.py --texts=rows.csv --index=VECTORS/vectors.usearch \
        --embedder=http://localhost:8501/v1/models/embedder --ranker=localhost:8500/ranker

Both models are served by TensorFlow Serving, by REST (http://HOST:PORT/v1/models/NAME) or gRPC
(HOST:PORT/NAME), or loaded here from their directories. The index is mapped into memory. The
service answers GET /search?q=QUERY&k=10.
"""

import argparse
import http.server
import json
import os
import urllib.parse

import numpy as np
import usearch.index

from bert_tf import UserError
from export import GrpcClient, LocalClient, RestClient
from tasks.data.readers.rows import raise_bad_rows, read_rows


class SearchService:
    """Finds texts by meaning; `candidates` of them are reranked."""

    def __init__(self, embedder, ranker, index, texts, query_prompt="", candidates=50):
        self.embedder, self.ranker = embedder, ranker
        self.index, self.texts = index, texts
        self.query_prompt, self.candidates = query_prompt, candidates

    def search(self, query, count=10):
        """Return the best rows, as dicts of score, row and text."""
        inputs, signature = {"text": [query]}, "serving_default"
        if self.query_prompt:
            inputs, signature = {**inputs, "prompt": [self.query_prompt]}, "with_prompt"
        (vector,) = self.embedder.predict(inputs, signature)["embedding"]
        rows = self.index.search(np.array(vector, np.float32), self.candidates).keys.tolist()
        rows = [row for row in rows if self.texts[row].strip()]  # To a ranker "" is no text.
        ranked = self.ranker.predict(
            {"query": [query], "texts": [[self.texts[row] for row in rows]]}
        )
        (scores,), (order,) = ranked["scores"], ranked["order"]
        return [
            {"score": scores[place], "row": rows[place], "text": self.texts[rows[place]]}
            for place in order[:count]
        ]


def client(address):
    """Return the client of a model: by REST, by gRPC, or of a directory in this process."""
    if "://" in address:
        return RestClient(address)
    if os.path.isdir(address):
        return LocalClient(address)
    server, _, model = address.partition("/")
    return GrpcClient(server, model)


def read_texts(path):
    """Return the column text of a file, read as by bert-tf extract."""
    try:
        return [row.texts["text"] for row in raise_bad_rows(read_rows(path, ("text",)))]
    except UserError as error:
        raise SystemExit(f"--texts: {error}") from None


def open_index(path, texts):
    """Return the index of the vectors of texts, mapped into memory."""
    try:
        index = usearch.index.Index.restore(path, view=True)
    except (ValueError, RuntimeError):
        index = None
    if index is None or len(index) != len(texts):
        raise SystemExit(f"--index={path}: expected the index of {len(texts)} texts")
    return index


class Handler(http.server.BaseHTTPRequestHandler):
    service: SearchService

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        values = dict(urllib.parse.parse_qsl(url.query))
        count = values.get("k", "10")
        try:
            if url.path != "/search" or not values.get("q", "").strip():
                status, answer = 400, {"error": "expected /search?q=QUERY"}
            elif not (count.isdecimal() and len(count) < 10 and int(count)):
                status, answer = 400, {"error": f"k={count:.20}: expected an integer >= 1"}
            else:
                status, answer = 200, self.service.search(values["q"], int(count))
        except UserError as error:  # A model does not answer.
            status, answer = 502, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--texts", "--index", "--embedder", "--ranker"):
        parser.add_argument(name, required=True)
    parser.add_argument("--query_prompt", default="")
    parser.add_argument("--port", type=int, default=8080)
    flags = parser.parse_args()
    texts = read_texts(flags.texts)
    index = open_index(flags.index, texts)
    try:
        models = client(flags.embedder), client(flags.ranker)
    except UserError as error:
        raise SystemExit(str(error)) from None
    Handler.service = SearchService(*models, index, texts, flags.query_prompt)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", flags.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/search?q=", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
