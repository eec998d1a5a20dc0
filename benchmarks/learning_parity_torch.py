"""Baseline of learning_parity.py in PyTorch, with the plain loop of finetuning_torch.py.

It runs in the baselines' environment.
"""

import json
import pathlib
import shutil
import time

import numpy as np
import torch
import transformers
from finetuning_torch import MODELS, WINDOWS, labels_of, outputs_of, updates
from learning_parity import dropout_seed_of, first_head, metrics_of
from own_process import append
from safetensors.torch import save_file

KIND = "classification"


def adapt(directory, recipe, kept):
    """Train the encoder in `directory` on the other rows, without dropout, or copy `kept`.

    Without this, pooled vectors carry little information, and the step at which a small model
    starts to learn is random.
    """
    directory, kept = pathlib.Path(directory), pathlib.Path(kept)
    if not kept.exists():
        rows = json.loads((directory / "rows.json").read_text(encoding="utf-8"))["others"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "encoder")
        labels = labels_of(KIND, rows)
        windows = WINDOWS[KIND](rows, tokenizer, recipe["max_seq_length"], labels)
        torch.manual_seed(0)
        network = MODELS[KIND].from_pretrained(
            directory / "encoder",
            num_labels=len(labels),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        for _ in updates(network, windows, tokenizer.pad_token_id, recipe, 0):
            pass
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(network.bert.state_dict(), kept, metadata={"format": "pt"})
    shutil.copyfile(kept, directory / "encoder" / "model.safetensors")
    return {}


def measure(backend, directory, recipe, trainings, output, keeps_losses):
    """Train, and append one record per training to `output`, as learning_parity_bert_tf does."""
    directory = pathlib.Path(directory)
    rows = json.loads((directory / "rows.json").read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "encoder")
    labels = labels_of(KIND, rows["train"])
    train, test = (
        WINDOWS[KIND](rows[name], tokenizer, recipe["max_seq_length"], labels)
        for name in ("train", "test")
    )
    numbers = np.array([window["labels"] for window in test])
    for training in trainings:
        start = time.process_time()
        network = MODELS[KIND].from_pretrained(directory / "encoder", num_labels=len(labels))
        kernel = first_head(training[0], network.config.hidden_size, len(labels))
        with torch.no_grad():
            network.classifier.weight.copy_(torch.from_numpy(kernel.T))
            network.classifier.bias.zero_()
        torch.manual_seed(dropout_seed_of(training))
        pad = tokenizer.pad_token_id
        losses = [float(loss) for loss, _ in updates(network, train, pad, recipe, training[0])]
        logits = outputs_of(network.eval(), test, pad, recipe["precision"])
        record = {
            "backend": backend,
            "seed": training[0],
            "dropout": training[1],
            **recipe,
            **metrics_of(losses, np.stack(logits), numbers),
            "processor_seconds": round(time.process_time() - start, 1),
        }
        if keeps_losses:
            record["losses"] = losses
        append(pathlib.Path(output), record)
    return {"trainings": len(trainings)}
