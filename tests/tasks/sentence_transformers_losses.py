"""Train with sentence-transformers: python sentence_transformers_losses.py DIR ROWS.json OUT.npz.

Run by the interpreter of BERT_TF_SENTENCE_TRANSFORMERS_PYTHON. DIR is a Hugging Face directory,
ROWS.json holds columns of texts and scores. OUT.npz gets, by loss, the losses of 20 steps of SGD
and the embeddings of the first column after them.
"""

import json
import sys

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.models import Pooling, Transformer

STEPS, LEARNING_RATE = 20, 0.05
COSENT_RATE = 0.005  # Larger steps of CoSENT diverge, and rounding errors grow with them.


def main(directory, rows_path, output):
    with open(rows_path, encoding="utf-8") as file:
        rows = json.load(file)
    results = {}
    for name, columns, make in (
        ("contrastive", ("anchor", "positive"), losses.MultipleNegativesRankingLoss),
        (
            "negatives",
            ("anchor", "positive", "negative"),
            losses.MultipleNegativesRankingLoss,
        ),
        (
            "cached",
            ("anchor", "positive", "negative"),
            lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
        ),
        ("symmetric", ("anchor", "positive"), losses.MultipleNegativesSymmetricRankingLoss),
        ("cosent", ("anchor", "positive"), losses.CoSENTLoss),
        ("cosine", ("anchor", "positive"), losses.CosineSimilarityLoss),
        (
            "triplet",
            ("anchor", "positive", "negative"),
            lambda model: losses.TripletLoss(model, triplet_margin=1.0),
        ),
    ):
        transformer = Transformer(directory, max_seq_length=16)
        pooling = Pooling(transformer.get_word_embedding_dimension(), pooling_mode="mean")
        model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
        model.train()
        loss = make(model)
        rate = COSENT_RATE if name == "cosent" else LEARNING_RATE
        optimizer = torch.optim.SGD(model.parameters(), rate)
        texts = [rows[column] for column in columns]
        scores = torch.tensor(rows["score"])
        values = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = loss([model.tokenize(column) for column in texts], scores)
            value.backward()
            optimizer.step()
            values.append(value.item())
        results[f"{name}_losses"] = np.array(values)
        results[f"{name}_vectors"] = model.encode(rows["anchor"])
    np.savez(output, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
