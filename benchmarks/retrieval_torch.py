"""Embedders and cross-encoders of retrieval.py in sentence-transformers, in its environment."""

import time

import numpy as np
import torch
from finetuning_torch import updates
from sentence_transformers import CrossEncoder, SentenceTransformer, losses

RECIPE = {"epochs": 1, "precision": "float32"}


def embed(model, columns, queries, corpus, recipe, seed, output):
    """Train an embedder; write the vectors of queries and corpus."""
    start = time.time()
    torch.manual_seed(seed)
    model = SentenceTransformer(model, device="cpu")
    model.max_seq_length = recipe["max_seq_length"]
    loss = losses.MultipleNegativesRankingLoss(model)

    def loss_of(texts):
        return loss([model.tokenize(column) for column in texts], None)

    trained = _train(model, columns, recipe, seed, loss_of)
    vectors = [model.encode(texts, batch_size=64) for texts in (queries, corpus)]
    np.savez(output, *vectors)
    seconds = {"train_seconds": trained - start, "encode_seconds": time.time() - trained}
    return {"seconds": seconds}


def rank(model, columns, queries, texts, recipe, seed, output):
    """Train a cross-encoder; write the scores of the texts of each query."""
    start = time.time()
    torch.manual_seed(seed)
    length = recipe["max_seq_length"]
    model = CrossEncoder(model, num_labels=1, max_length=length, device="cpu")

    def loss(texts):
        queries, *texts = texts
        pairs = [pair for of_query in texts for pair in zip(queries, of_query, strict=True)]
        logits = model(model.preprocess(pairs))["scores"].squeeze(-1)
        labels = torch.zeros_like(logits)
        labels[: len(queries)] = 1.0  # The first text of each query.
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    trained = _train(model, columns, recipe, seed, loss)
    pairs = [(query, text) for query, row in zip(queries, texts, strict=True) for text in row]
    np.savez(output, np.reshape(model.predict(pairs, batch_size=64), (len(queries), -1)))
    seconds = {"train_seconds": trained - start, "rank_seconds": time.time() - trained}
    return {"seconds": seconds}


def _train(model, columns, recipe, seed, loss):
    """Train on rows of columns of texts; return the time of the end."""

    def loss_of(chosen):
        return loss([[column[number] for number in chosen] for column in columns])

    for _ in updates(model, loss_of, len(columns[0]), {**RECIPE, **recipe}, seed):
        pass
    model.eval()
    return time.time()
