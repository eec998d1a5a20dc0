"""Fine-tuning of training.py, learning.py and retrieval.py in PyTorch: a plain loop.

It runs in the baselines' environment. The models are AutoModelFor.... They get the windows of
bert_tf, padded to the longest one of a batch, in the order that bert_tf draws. Training uses fused
AdamW, 10% warm-up, linear decay to 0, clipping and dropout 0.1.
"""

import itertools
import math
import time

import numpy as np
import torch
import transformers
from pretraining_step_torch import autocast, parameter_groups
from task_recipes import IGNORED, first_head

EVAL_BATCH_SIZE = 64
MASKED_SCORE = -1e9  # After the last token of a window.
MODELS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "conll": transformers.AutoModelForTokenClassification,
    "squad": transformers.AutoModelForQuestionAnswering,
}


class Windows:
    """Windows of a file of finetuning_tensorflow, with their labels."""

    def __init__(self, path, pad):
        with np.load(path) as arrays:
            self._arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._arrays["attention_mask"] = torch.ones_like(self._arrays["input_ids"])
        self._splits = self._arrays.pop("splits").numpy()
        self._padding = {"input_ids": pad, "labels": IGNORED}

    def __len__(self):
        return len(self._splits) - 1

    def lengths(self):
        """Return the number of tokens of each window."""
        return np.diff(self._splits)

    def batch(self, numbers):
        """Return a batch, with all values per token padded to the longest window."""
        batch = {}
        for name, values in self._arrays.items():
            if len(values) == len(self):
                batch[name] = values[numbers]
                continue
            rows = [values[self._splits[number] : self._splits[number + 1]] for number in numbers]
            batch[name] = torch.nn.utils.rnn.pad_sequence(
                rows, batch_first=True, padding_value=self._padding.get(name, 0)
            )
        return batch


def measure(kind, directory, num_labels, model, recipe, max_steps=None):
    """Train and return the Unix time after each step and its number of examples.

    Training ends after `max_steps`. After a complete one, outputs of the test rows are written to
    the directory.
    """
    torch.manual_seed(1)
    network = MODELS[kind].from_pretrained(model, num_labels=num_labels)
    pad, ends, examples = network.config.pad_token_id, [time.time()], []
    windows = Windows(f"{directory}/train.npz", pad)
    steps = updates(network, loss_of(network, windows), len(windows), recipe)
    for _, count in itertools.islice(steps, max_steps):
        ends.append(time.time())
        examples.append(count)
    if not max_steps:
        test = Windows(f"{directory}/test.npz", pad)
        outputs = outputs_of(network, test, recipe)
        np.savez(f"{directory}/outputs.npz", **outputs)
    return {"ends": ends, "examples": examples}


def updates(network, loss, count, recipe, seed=1):
    """Train a network, and yield the loss and the number of examples of each update.

    Args:
        network: Module to train.
        loss: Function from numbers of examples to the loss of a batch.
        count: Number of examples.
        recipe: Batch size, epochs, learning rate and precision.
        seed: Seed of the order.
    """
    batch, epochs = recipe["global_batch_size"], recipe["epochs"]
    total = epochs * math.ceil(count / batch)
    optimizer = torch.optim.AdamW(
        parameter_groups(network), lr=recipe["learning_rate"], eps=1e-6, fused=True
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total)
    network.train()
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for start in range(0, count, batch):
            chosen = order[start : start + batch]
            optimizer.zero_grad()
            with autocast(recipe["precision"]):
                value = loss(chosen)
            value.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            yield value.detach(), len(chosen)


def loss_of(network, windows):
    """Return the function from numbers of windows to the loss of a network."""
    return lambda chosen: network(**windows.batch(chosen)).loss


@torch.no_grad()
def outputs_of(network, windows, recipe):
    """Return the outputs of all windows by bert_tf's names, per token padded to the maximum."""
    network.eval()
    order, found = np.argsort(-windows.lengths(), kind="stable"), {}
    for start in range(0, len(order), EVAL_BATCH_SIZE):
        chosen = order[start : start + EVAL_BATCH_SIZE]
        batch = windows.batch(chosen)
        with autocast(recipe["precision"]):
            output = network(**batch)
        if "start_logits" in output:
            outputs = {"start": output.start_logits, "end": output.end_logits}
        else:
            outputs = {"label" if output.logits.dim() == 2 else "tag": output.logits}
        for name, values in outputs.items():
            values = values.float().numpy()
            shape = values.shape[1:]
            if name != "label":
                values[batch["attention_mask"].numpy() == 0] = MASKED_SCORE
                shape = (recipe["max_seq_length"], *shape[1:])
            if name not in found:
                found[name] = np.full((len(order), *shape), MASKED_SCORE, np.float32)
            found[name][(chosen, *(slice(size) for size in values.shape[1:]))] = values
    return found


def train_seeds(directory, recipe, seeds, num_labels):
    """Train with each seed, as finetuning_tensorflow does; return losses and accuracies."""
    model, trainings = f"{directory}/encoder", []
    for seed in seeds:
        network = MODELS["classification"].from_pretrained(model, num_labels=num_labels)
        pad = network.config.pad_token_id
        train, test = (Windows(f"{directory}/{part}.npz", pad) for part in ("train", "test"))
        kernel = first_head(seed, network.config.hidden_size, num_labels)
        with torch.no_grad():
            network.classifier.weight.copy_(torch.from_numpy(kernel.T))
            network.classifier.bias.zero_()
        torch.manual_seed(seed)
        steps = updates(network, loss_of(network, train), len(train), recipe, seed)
        losses = [float(loss) for loss, _ in steps]
        labels = test.batch(np.arange(len(test)))["labels"].numpy()
        hits = outputs_of(network, test, recipe)["label"].argmax(axis=1) == labels
        trainings.append({"losses": losses, "accuracy": float(100 * hits.mean())})
    return {"trainings": trainings}
