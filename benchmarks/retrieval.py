"""SQuAD as retrieval and banking77 as neighbours, before and after training.

    python benchmarks/retrieval.py --model=DIR --squad=DIR --seeds=1,2,3
    python benchmarks/retrieval.py --model=DIR --squad=DIR --seeds=1,2,3 --python=PYTHON
    python benchmarks/retrieval.py --model=DIR --banking77=DIR --seeds=1,2,3

SQuAD: the corpus is all paragraphs of dev-v1.1.json, the queries are its questions; every 10th with
--query_step=10, since reranking for all of them takes long. The pairs are evenly spaced questions
of train-v1.1.json and their paragraphs. Cases, in this order; --until names the last one:

    as it is    the model without training
    trained     an embedder trained on the pairs
    mined       an embedder trained on the pairs and the hard negatives that "trained" finds
                among the paragraphs of train-v1.1.json
    reranked    a cross-encoder, trained on the pairs with mined negatives, orders the --rerank_k
                paragraphs that "mined" finds

With --python, an interpreter with sentence-transformers trains on the same rows, with the same
batch sizes and rates. It gets the negatives that bert_tf has mined. A pair without enough mined
negatives gets random paragraphs.

banking77: the fraction of the texts of test.csv whose 5 nearest texts of train.csv vote for its
class, before and after training on train.csv with the classes as positives.

Prints a line of JSON per result. The file of results.py in --output is rewritten after each.
"""

import argparse
import collections
import csv
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import results

CASES = ("as it is", "trained", "mined", "reranked")
# Ranks up to this one are counted; rerank_k may be less.
CUTOFFS = (1, 10)
NEIGHBORS = 5

IN_TORCH = """
import json, sys, time
import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, losses

folder, = sys.argv[1:]
rows = json.load(open(folder + "/rows.json"))
options, columns = rows["options"], rows["train"]
torch.manual_seed(options["seed"])


def train(model, size, loss_of):
    order = np.random.default_rng(options["seed"]).permutation(len(columns[0]))
    steps = -(-len(order) // size)
    warmup = max(1, int(0.1 * steps))
    optimizer = torch.optim.AdamW(model.parameters(), options["rate"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    model.train()
    for step in range(steps):
        numbers = order[step * size : (step + 1) * size]
        optimizer.zero_grad()
        loss_of([[column[number] for number in numbers] for column in columns]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


start = time.time()
if rows["kind"] == "embedder":
    model = SentenceTransformer(options["model"], device="cpu")
    model.max_seq_length = options["length"]
    loss = losses.MultipleNegativesRankingLoss(model)
    tokenize = model.tokenize
    train(model, options["size"], lambda texts: loss(list(map(tokenize, texts)), None))
    trained, start = time.time() - start, time.time()
    arrays = [model.encode(texts, batch_size=64) for texts in rows["encode"]]
else:
    model = CrossEncoder(
        options["model"], num_labels=1, max_length=options["length"], device="cpu"
    )

    def loss_of(texts):
        queries, *texts = texts
        pairs = [pair for each in texts for pair in zip(queries, each)]
        logits = model(model.preprocess(pairs))["scores"].squeeze(-1)
        labels = torch.zeros_like(logits)
        labels[: len(queries)] = 1.0  # The first text of each query.
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    train(model, options["size"], loss_of)
    trained, start = time.time() - start, time.time()
    pairs = [(query, text) for query, texts in zip(*rows["encode"]) for text in texts]
    scores = model.predict(pairs, batch_size=64)
    arrays = [np.reshape(scores, (len(rows["encode"][0]), -1))]
np.savez(folder + "/arrays.npz", *arrays, seconds=[trained, time.time() - start])
"""


class Results:
    """Results, on stdout and in a file; the repetitions of a figure are seeds.

    Args:
        arguments: Arguments of the command.
    """

    def __init__(self, arguments):
        arguments.quick, arguments.baselines = False, arguments.python
        self._measured, self._figures = results.Results("retrieval", arguments), {}

    def add(self, data, library, case, seed, **metrics):
        """Add a result and write the file."""
        print(json.dumps({"data": data, "library": library, "case": case, **metrics}), flush=True)
        for name, value in metrics.items():
            if name.endswith("_seconds"):
                workload, unit = f"{data}, {case}: {name.removesuffix('_seconds')}", "s"
            else:
                workload, unit, value = f"{data}, {case}: {name}", "%", 100 * value
            self._figures.setdefault((workload, library, unit), []).append(value)
        self._measured.record["figures"] = []
        for (workload, program, unit), values in self._figures.items():
            row = {"table": "Retrieval", "workload": workload, "program": program, "unit": unit}
            self._measured.record["figures"].append({**row, **results.summary(values)})
        self._measured.save()


# SQuAD. Q queries, P paragraphs of the corpus, K candidates of a query.


class Squad:
    """Pairs to train on, queries and corpus.

    Attributes:
        pairs: (question, paragraph) to train on.
        paragraphs: Paragraphs of the training file, where negatives are mined.
        queries: Questions to evaluate.
        corpus: Paragraphs that are searched.
        own_Q: Index of the paragraph of each query.
    """

    def __init__(self, directory, num_pairs, query_step):
        train, dev = (
            list(_questions(pathlib.Path(directory, f"{name}-v1.1.json")))
            for name in ("train", "dev")
        )
        self.pairs = train[:: max(1, len(train) // num_pairs)][:num_pairs]
        self.paragraphs = list(dict.fromkeys(text for _, text in train))
        evaluated = dev[::query_step]
        self.queries = [question for question, _ in evaluated]
        self.corpus = list(dict.fromkeys(text for _, text in dev))
        numbers = {text: number for number, text in enumerate(self.corpus)}
        self.own_Q = [numbers[text] for _, text in evaluated]


def _questions(path):
    """Yield (question, paragraph) of a SQuAD file."""
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question["question"], paragraph["context"]


def measure_squad(arguments, measured):
    """Run all cases with both libraries."""
    data = Squad(arguments.squad, arguments.pairs, arguments.query_step)
    cases = CASES[: CASES.index(arguments.until) + 1]
    libraries = {"bert_tf": BertTf(arguments)}
    if arguments.python:
        libraries["sentence-transformers"] = Torch(arguments)

    def report(library, case, seed, ranks_Q, **seconds):
        seconds = {name: round(value, 1) for name, value in seconds.items()}
        metrics = metrics_of(ranks_Q)
        measured.add(data="squad", library=library, case=case, seed=seed, **metrics, **seconds)

    start = time.time()
    vectors = libraries["bert_tf"].encode(data)
    seconds = {"encode_seconds": time.time() - start}
    report("bert_tf", "as it is", None, ranks(_order(*vectors), data.own_Q), **seconds)
    for seed in arguments.seeds:
        negatives = []
        for name, library in libraries.items():
            for case in cases[1:3]:
                columns = [*zip(*data.pairs, strict=True)]
                if case == "mined":
                    columns.append([texts[0] for texts in negatives])
                vectors, seconds = library.embed(columns, data, seed)
                order_QP = _order(*vectors)
                report(name, case, seed, ranks(order_QP, data.own_Q), **seconds)
                if not negatives and len(cases) > 2:
                    negatives = _mined(libraries["bert_tf"], data, arguments, seed)
            if "reranked" in cases:
                candidates_QK = order_QP[:, : arguments.rerank_k]
                columns = [*zip(*data.pairs, strict=True), *zip(*negatives, strict=True)]
                scores_QK, seconds = library.rank(columns, data, candidates_QK, seed)
                best_QK = (-scores_QK).argsort(axis=1, kind="stable")
                order_QP = order_QP.copy()
                order_QP[:, : best_QK.shape[1]] = _take(candidates_QK, best_QK)
                report(name, "reranked", seed, ranks(order_QP, data.own_Q), **seconds)


def _order(queries_QD, corpus_PD):
    """Return the paragraphs of each query by descending cosine, `(Q, P)`."""
    import sklearn.preprocessing

    queries_QD, corpus_PD = map(sklearn.preprocessing.normalize, (queries_QD, corpus_PD))
    return (-queries_QD @ corpus_PD.T).argsort(axis=1, kind="stable")


def _take(values, indices):
    import numpy as np

    return np.take_along_axis(values, indices, axis=1)


def ranks(order_QP, own_Q):
    """Return the rank of each query's own paragraph, from 1."""
    import numpy as np

    return 1 + np.argmax(order_QP == np.reshape(own_Q, (-1, 1)), axis=1)


def metrics_of(ranks_Q):
    """Return recall@1, recall@10 and MRR@10."""
    import numpy as np

    last = CUTOFFS[-1]
    return {
        **{f"recall@{rank}": round(float(np.mean(ranks_Q <= rank)), 4) for rank in CUTOFFS},
        f"mrr@{last}": round(float(np.mean(np.where(ranks_Q <= last, 1 / ranks_Q, 0))), 4),
    }


def _mined(library, data, arguments, seed):
    """Return --negatives paragraphs per pair: mined ones, then random ones."""
    import numpy as np

    start = time.time()
    mined = library.mine(data, arguments.negatives)
    rng, random_ones = np.random.default_rng(seed), 0
    for (_, positive), texts in zip(data.pairs, mined, strict=True):
        while len(texts) < arguments.negatives:
            text = data.paragraphs[rng.integers(len(data.paragraphs))]
            if text != positive:
                texts.append(text)
                random_ones += 1
    seconds = time.time() - start
    print(f"mined in {seconds:.0f} s; {random_ones} random negatives", file=sys.stderr)
    return mined


class BertTf:
    """Training with this project."""

    def __init__(self, arguments):
        self._arguments, self._embedder = arguments, None

    def _new_embedder(self, seed):
        from tasks import TextEmbedder

        arguments = self._arguments
        return TextEmbedder.from_pretrained(
            arguments.model, max_seq_length=arguments.length, seed=seed, normalize=True
        )

    def encode(self, data):
        """Return the vectors of queries and corpus without training."""
        model = self._new_embedder(0)
        return model.predict(data.queries), model.predict(data.corpus)

    def embed(self, columns, data, seed):
        """Train an embedder; return the vectors of queries and corpus, and seconds."""
        arguments, start = self._arguments, time.time()
        self._embedder = model = self._new_embedder(seed)
        model.compile(learning_rate=arguments.rate, schedule="continuous")
        columns = tuple(map(list, columns))
        model.fit(columns, batch_size=arguments.batch_size, epochs=1, verbose=0)
        trained, start = time.time() - start, time.time()
        vectors = model.predict(data.queries), model.predict(data.corpus)
        return vectors, {"train_seconds": trained, "encode_seconds": time.time() - start}

    def mine(self, data, num_negatives):
        """Return up to `num_negatives` negatives per pair, of the embedder trained last."""
        from tasks.prediction.hard_negatives import NegativeMiner

        with tempfile.TemporaryDirectory() as folder:
            miner = NegativeMiner(
                self._embedder, data.paragraphs, lambda: data.pairs, folder, lambda line: None
            )
            mined = miner.mine(num_negatives, margin=0.05, top_k=100)
            return [list(pair.negatives) for pair in mined]

    def rank(self, columns, data, candidates_QK, seed):
        """Train a ranker; return the scores of the candidates, `(Q, K)`, and seconds."""
        from tasks import TextRanker

        arguments, start = self._arguments, time.time()
        model = TextRanker.from_pretrained(
            arguments.model, max_seq_length=arguments.ranker_length, seed=seed
        )
        model.compile(learning_rate=arguments.ranker_rate, schedule="continuous")
        queries, *texts = map(list, columns)
        rows = {"query": queries, "texts": list(map(list, zip(*texts, strict=True)))}
        labels = [[1.0] + [0.0] * (len(texts) - 1)] * len(queries)
        model.fit(rows, labels, batch_size=arguments.ranker_batch_size, epochs=1, verbose=0)
        trained, start = time.time() - start, time.time()
        rows = {"query": data.queries, "texts": _texts(data, candidates_QK)}
        scores_QK = model.predict(rows)["scores"]
        return scores_QK, {"train_seconds": trained, "rank_seconds": time.time() - start}


class Torch:
    """Training with sentence-transformers, in a process of another interpreter."""

    def __init__(self, arguments):
        self._arguments = arguments

    def embed(self, columns, data, seed):
        """See `BertTf.embed`."""
        arguments = self._arguments
        options = {"rate": arguments.rate, "size": arguments.batch_size}
        options |= {"length": arguments.length, "seed": seed}
        encoded = [data.queries, data.corpus]
        vectors, trained, seconds = self._run("embedder", columns, encoded, options)
        return vectors, {"train_seconds": trained, "encode_seconds": seconds}

    def rank(self, columns, data, candidates_QK, seed):
        """See `BertTf.rank`."""
        arguments = self._arguments
        options = {"rate": arguments.ranker_rate, "size": arguments.ranker_batch_size}
        options |= {"length": arguments.ranker_length, "seed": seed}
        encoded = [data.queries, _texts(data, candidates_QK)]
        (scores_QK,), trained, seconds = self._run("ranker", columns, encoded, options)
        return scores_QK, {"train_seconds": trained, "rank_seconds": seconds}

    def _run(self, kind, columns, encoded, options):
        """Return the arrays of IN_TORCH, and its seconds for training and for the rest."""
        import numpy as np

        options = {"model": self._arguments.model, **options}
        rows = {"kind": kind, "train": columns, "encode": encoded, "options": options}
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
            command = [self._arguments.python, "-c", IN_TORCH, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            with np.load(pathlib.Path(folder, "arrays.npz")) as found:
                arrays = [found[name] for name in found.files if name != "seconds"]
                return arrays, *map(float, found["seconds"])


def _texts(data, candidates_QK):
    return [[data.corpus[number] for number in row] for row in candidates_QK.tolist()]


# banking77


def measure_banking77(arguments, measured):
    """Report the accuracy of the nearest neighbours before and after training."""
    (train, labels), (test, expected) = (
        _texts_and_classes(pathlib.Path(arguments.banking77, f"{name}.csv"))
        for name in ("train", "test")
    )
    num_texts = arguments.texts or len(train)
    step = max(1, len(train) // num_texts)  # Rows are sorted by class.
    chosen = slice(0, step * num_texts, step)
    from tasks import TextEmbedder

    def report(model, case, **more):
        vectors = model.predict(train), model.predict(test)
        accuracy = round(_accuracy(*vectors, labels, expected), 4)
        measured.add(data="banking77", library="bert_tf", case=case, accuracy=accuracy, **more)

    for seed in arguments.seeds:
        model = TextEmbedder.from_pretrained(
            arguments.model, max_seq_length=64, seed=seed, normalize=True
        )
        if seed == arguments.seeds[0]:
            report(model, "as it is", seed=None)
        model.compile(learning_rate=arguments.rate, schedule="continuous")
        start = time.time()
        model.fit(
            train[chosen], labels[chosen], batch_size=arguments.batch_size, epochs=1, verbose=0
        )
        report(model, "trained", seed=seed, train_seconds=round(time.time() - start, 1))


def _texts_and_classes(path):
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [row["text"] for row in rows], [row["category"] for row in rows]


def _accuracy(train_ND, test_MD, labels, expected):
    """Return the accuracy of the vote of the 5 nearest texts; the nearest class wins ties."""
    import numpy as np

    order_Mk = _order(test_MD, train_ND)[:, :NEIGHBORS]
    votes = (collections.Counter(labels[number] for number in row) for row in order_Mk.tolist())
    found = [vote.most_common(1)[0][0] for vote in votes]
    return float(np.mean([a == b for a, b in zip(found, expected, strict=True)]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    for name in ("squad", "banking77", "python"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--output", default=results.OUTPUT)
    parser.add_argument("--seeds", type=_integers, default=[1])
    parser.add_argument("--until", choices=CASES[1:], default=CASES[-1])
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--query_step", type=int, default=1)
    parser.add_argument("--texts", type=int, help="texts of banking77 to train on; default: all")
    for name, default in (("batch_size", 32), ("length", 128), ("rate", 5e-5)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in (("batch_size", 8), ("length", 160), ("rate", 1e-4)):
        parser.add_argument(f"--ranker_{name}", type=type(default), default=default)
    parser.add_argument("--negatives", type=int, default=3, help="of the embedder the first one")
    parser.add_argument("--rerank_k", type=int, default=20)
    arguments = parser.parse_args()
    measured = Results(arguments)
    if arguments.squad:
        measure_squad(arguments, measured)
    if arguments.banking77:
        measure_banking77(arguments, measured)


def _integers(text):
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
