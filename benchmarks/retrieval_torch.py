"""Embedders and cross-encoders of retrieval.py in sentence-transformers, in its environment."""

import time

import numpy as np
import torch
from retrieval import rate_of_steps
from sentence_transformers import CrossEncoder, SentenceTransformer, losses
from training_torch import updates


def embed(source, columns, queries, corpus, recipe, seed, output):
    """Train an embedder, write the vectors of queries and corpus, and return rates."""
    torch.manual_seed(seed)
    model = SentenceTransformer(source, device="cpu")
    model.max_seq_length = recipe["max_seq_length"]
    loss = losses.MultipleNegativesRankingLoss(model)

    def loss_of(texts):
        return loss([model.tokenize(column) for column in texts], None)

    rate = _train(model, columns, recipe, seed, loss_of)
    model.encode(queries[:8])
    start, count = time.time(), len(queries) + len(corpus)
    vectors = [model.encode(texts, batch_size=64) for texts in (queries, corpus)]
    rates = rate, count / (time.time() - start)
    np.savez(output, *vectors)
    return {"rates": rates}


def rank(source, columns, queries, texts, recipe, seed, output):
    """Train a cross-encoder, write the scores of the texts of each query, and return rates."""
    torch.manual_seed(seed)
    length = recipe["max_seq_length"]
    model = CrossEncoder(source, num_labels=1, max_length=length, device="cpu")

    def loss_of(texts):
        queries, *texts = texts
        pairs = [pair for of_query in texts for pair in zip(queries, of_query, strict=True)]
        logits = model(model.preprocess(pairs))["scores"].reshape(len(texts), len(queries)).T
        relevant = torch.zeros(len(queries), dtype=torch.long)  # The first text of each query.
        return torch.nn.functional.cross_entropy(logits, relevant)

    rate = _train(model, columns, recipe, seed, loss_of)
    pairs = [(query, text) for query, row in zip(queries, texts, strict=True) for text in row]
    model.predict(pairs[:8])
    start = time.time()
    scores = model.predict(pairs, batch_size=64)
    rates = rate, len(pairs) / (time.time() - start)
    np.savez(output, np.reshape(scores, (len(queries), -1)))
    return {"rates": rates}


def _train(model, columns, recipe, seed, loss):
    """Train on rows of columns of texts; return the rate."""

    def loss_of(chosen):
        return loss([[column[number] for number in chosen] for column in columns])

    count = len(columns[0])
    steps = updates(
        model, loss_of, count, {**recipe, "epochs": 1, "precision": "float32", "seed": seed}
    )
    times = [time.time() for _ in steps]
    model.eval()
    return rate_of_steps(times, count, recipe["global_batch_size"])
