"""Train a masked language model with transformers on given batches, in a plain loop.

    python transformers_masked_lm.py DIR OPTIONS

Run by the interpreter of BERT_TF_TRANSFORMERS_PYTHON. DIR/hf is the model, DIR/batches.npz the
batches, DIR/texts.txt a text per line. OPTIONS is a JSON object of rate,
warmup, decay and length. Writes DIR/transformers.npz: losses, weights by name, and the token ids of
all texts, cut to the length.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, get_linear_schedule_with_warmup


def main(directory, options):
    directory = pathlib.Path(directory)
    model = AutoModelForMaskedLM.from_pretrained(directory / "hf").train()
    batches = dict(np.load(directory / "batches.npz"))
    groups = [{"params": [], "weight_decay": options["decay"]}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups["bias" in name or "LayerNorm" in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=options["rate"], eps=1e-6)
    steps = len(batches["input_ids"])
    schedule = get_linear_schedule_with_warmup(optimizer, options["warmup"], steps)
    losses = []
    for step in range(steps):
        batch = {name: torch.tensor(values[step]).long() for name, values in batches.items()}
        labels = torch.full_like(batch["input_ids"], -100)
        rows, columns = batch["masked_lm_weights"].nonzero(as_tuple=True)
        labels[rows, batch["masked_lm_positions"][rows, columns]] = batch["masked_lm_ids"][
            rows, columns
        ]
        loss = model(
            input_ids=batch["input_ids"], attention_mask=batch["input_mask"], labels=labels
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tokenizer = AutoTokenizer.from_pretrained(directory / "hf")
    texts = (directory / "texts.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ids = tokenizer(
        texts,
        truncation=True,
        max_length=options["length"],
        return_overflowing_tokens=True,
        padding="max_length",
    )["input_ids"]
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    np.savez(directory / "transformers.npz", losses=losses, input_ids=ids, **weights)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
