"""SQuAD as retrieval: find the paragraph that answers a question, before and after training.

    python benchmarks/retrieval.py --model=DIR --squad=DIR --pairs=2000
    python benchmarks/retrieval.py --model=DIR --squad=DIR --pairs=2000 --python=PYTHON

The corpus is all paragraphs of dev-v1.1.json, the queries are every 10th of its questions. The
pairs are evenly spaced questions of train-v1.1.json and their paragraphs. With --python, an
interpreter with sentence-transformers trains on the same rows, with the same batch size and rate.
Prints a line of JSON per model.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import time

TRAIN_IN_TORCH = """
import json, sys, time
import numpy as np
import torch
from sentence_transformers import SentenceTransformer, losses

model_dir, folder, batch_size, rate, seed, length = sys.argv[1:]
batch_size, rate = int(batch_size), float(rate)
rows = json.load(open(folder + "/rows.json"))
torch.manual_seed(int(seed))
model = SentenceTransformer(model_dir, device="cpu")
model.max_seq_length = int(length)
start = time.time()
model.train()
loss = losses.MultipleNegativesRankingLoss(model)
order = np.random.default_rng(int(seed)).permutation(len(rows["anchor"]))
steps = -(-len(order) // batch_size)
warmup = max(1, int(0.1 * steps))
optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
)
for step in range(steps):
    numbers = order[step * batch_size : (step + 1) * batch_size]
    texts = [[rows[name][number] for number in numbers] for name in ("anchor", "positive")]
    optimizer.zero_grad()
    loss([model.tokenize(column) for column in texts], None).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
seconds = time.time() - start
model.eval()
start = time.time()
vectors = [model.encode(rows[name], batch_size=64) for name in ("queries", "corpus")]
np.savez(folder + "/vectors.npz", *vectors, seconds=[seconds, time.time() - start])
"""


def paragraphs(path):
    """Yield (question, paragraph) of a SQuAD file."""
    for article in json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question["question"], paragraph["context"]


def metrics_of(queries_ND, corpus_MD, own_N):
    """Return recall@1, recall@10 and MRR@10 of the right paragraph."""
    import numpy as np
    import sklearn.preprocessing

    queries_ND, corpus_MD = map(sklearn.preprocessing.normalize, (queries_ND, corpus_MD))
    scores_NM = queries_ND @ corpus_MD.T
    best_N1 = scores_NM[np.arange(len(own_N)), own_N, np.newaxis]
    ranks_N = 1 + np.sum(scores_NM > best_N1, axis=1)
    return {
        "recall@1": round(float(np.mean(ranks_N <= 1)), 4),
        "recall@10": round(float(np.mean(ranks_N <= 10)), 4),
        "mrr@10": round(float(np.mean(np.where(ranks_N <= 10, 1 / ranks_N, 0))), 4),
    }


def in_seconds(trained, encoded):
    return {"train_seconds": round(trained, 1), "encode_seconds": round(encoded, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("model", None), ("squad", None), ("python", None)):
        parser.add_argument(f"--{name}", default=default, required=name in ("model", "squad"))
    for name, default in (("pairs", 2000), ("batch_size", 32), ("seeds", 1), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-5)
    arguments = parser.parse_args()
    squad = pathlib.Path(arguments.squad)
    train, dev = (
        list(paragraphs(squad / "train-v1.1.json")),
        list(paragraphs(squad / "dev-v1.1.json")),
    )
    train = train[:: len(train) // arguments.pairs][: arguments.pairs]
    questions = dev[::10]
    corpus = list(dict.fromkeys(text for _, text in dev))
    rows = {
        "anchor": [question for question, _ in train],
        "positive": [text for _, text in train],
        "queries": [question for question, _ in questions],
        "corpus": corpus,
    }
    places = {text: number for number, text in enumerate(corpus)}
    own_N = [places[text] for _, text in questions]

    def report(name, queries_ND, corpus_MD, **more):
        print(
            json.dumps({"model": name, **metrics_of(queries_ND, corpus_MD, own_N), **more}),
            flush=True,
        )

    from tasks import TextEmbedder

    for seed in range(arguments.seeds):
        model = TextEmbedder.from_pretrained(
            arguments.model, max_seq_length=arguments.length, seed=seed, normalize=True
        )
        if seed == 0:
            report("as it is", model.predict(rows["queries"]), model.predict(corpus))
        model.compile(learning_rate=arguments.rate, schedule="continuous")
        start = time.time()
        model.fit(
            (rows["anchor"], rows["positive"]),
            batch_size=arguments.batch_size,
            epochs=1,
            verbose=0,
        )
        trained, start = time.time() - start, time.time()
        vectors = model.predict(rows["queries"]), model.predict(corpus)
        seconds = {
            "train_seconds": round(trained, 1),
            "encode_seconds": round(time.time() - start, 1),
        }
        report("bert_tf", *vectors, seed=seed, **seconds)
        if not arguments.python:
            continue
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "rows.json").write_text(json.dumps(rows))
            given = [arguments.model, folder, arguments.batch_size, arguments.rate, seed]
            command = [
                arguments.python,
                "-c",
                TRAIN_IN_TORCH,
                *map(str, given),
                str(arguments.length),
            ]
            subprocess.run(command, check=True, capture_output=True)
            with np.load(pathlib.Path(folder, "vectors.npz")) as found:
                trained, encoded = map(float, found["seconds"])
                vectors = found["arr_0"], found["arr_1"]
            report("sentence-transformers", *vectors, seed=seed, **in_seconds(trained, encoded))


if __name__ == "__main__":
    main()
