"""Fine-tuning of training.py, learning.py and retrieval.py in PyTorch: a plain loop.

It runs in the baselines' environment. The models are AutoModelFor.... Batches are padded to their
longest example and come in the order that bert_tf draws. Training uses fused AdamW, 10% warm-up,
linear decay to 0, clipping and dropout 0.1.
"""

import itertools
import math
import time

import numpy as np
import torch
import transformers
from pretraining_step_torch import autocast, parameter_groups
from task_recipes import first_head

IGNORED = -100
STRIDE, MAX_QUERY, MAX_ANSWER = 128, 64, 30  # Tokens.
EVAL_BATCH_SIZE = 64
MODELS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "conll": transformers.AutoModelForTokenClassification,
    "squad": transformers.AutoModelForQuestionAnswering,
}


def measure(kind, rows, model, recipe, max_steps=None):
    """Train and return the Unix time after each step and its number of examples.

    Training ends after `max_steps`. After a complete one the result also has "predictions": one
    label per row, one list of tags per sentence, or {id: answer}.
    """
    torch.manual_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    labels, windows_of = labels_of(kind, rows["train"]), WINDOWS[kind]
    windows = windows_of(rows["train"], tokenizer, recipe["max_seq_length"], labels)
    network = MODELS[kind].from_pretrained(model, num_labels=max(len(labels), 2))
    pad, ends, examples = tokenizer.pad_token_id, [time.time()], []
    steps = updates(network, loss_of(network, windows, pad), len(windows), recipe)
    for _, count in itertools.islice(steps, max_steps):
        ends.append(time.time())
        examples.append(count)
    if max_steps:
        return {"ends": ends, "examples": examples}
    test = windows_of(rows["test"], tokenizer, recipe["max_seq_length"], labels)
    outputs = outputs_of(network.eval(), test, pad, recipe["precision"])
    predictions = PREDICTIONS[kind](rows["test"], test, outputs, labels)
    return {"ends": ends, "examples": examples, "predictions": predictions}


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


def loss_of(network, windows, pad):
    """Return the function from numbers of windows to the loss of a network."""
    return lambda chosen: network(**_batch([windows[number] for number in chosen], pad)).loss


def _batch(windows, pad):
    """Return a batch, with all values per token padded to the longest window."""
    longest = max(len(window["input_ids"]) for window in windows)
    fill = {"input_ids": pad, "labels": IGNORED}
    batch = {}
    for name in windows[0].keys() - {"owner", "offsets"}:
        values = [window[name] for window in windows]
        if isinstance(values[0], list):
            tail = fill.get(name, 0)
            values = [value + [tail] * (longest - len(value)) for value in values]
        batch[name] = torch.tensor(values)
    return batch


@torch.no_grad()
def outputs_of(network, windows, pad, precision):
    """Return one array of logits per window; for questions `(L, 2)`, of starts and ends."""
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number]["input_ids"]))
    outputs = [None] * len(windows)
    for start in range(0, len(order), EVAL_BATCH_SIZE):
        chosen = order[start : start + EVAL_BATCH_SIZE]
        with autocast(precision):
            output = network(**_batch([windows[number] for number in chosen], pad))
        if "logits" in output:
            logits = output.logits
        else:
            logits = torch.stack([output.start_logits, output.end_logits], -1)
        for number, of_window in zip(chosen, logits.float().numpy(), strict=True):
            outputs[number] = of_window
    return outputs


def labels_of(kind, rows):
    """Return the sorted labels of the training rows."""
    if kind == "classification":
        return sorted({row["label"] for row in rows})
    return sorted({tag for row in rows for tag in row["tags"]}) if kind == "conll" else []


def _texts(rows, tokenizer, length, labels):
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=length)["input_ids"]
    numbers = {label: number for number, label in enumerate(labels)}
    return [
        {"input_ids": of_row, "attention_mask": [1] * len(of_row), "labels": numbers[row["label"]]}
        for of_row, row in zip(ids, rows, strict=True)
    ]


def _sentences(rows, tokenizer, length, labels):
    """Return windows in which a word's first piece has its tag. Longer sentences are truncated."""
    numbers = {label: number for number, label in enumerate(labels)}
    encoded = tokenizer(
        [row["words"] for row in rows],
        is_split_into_words=True,
        truncation=True,
        max_length=length,
    )
    windows = []
    for position, row in enumerate(rows):
        words = encoded.word_ids(position)
        owners = [
            None if word == before else word
            for word, before in zip(words, [None, *words], strict=False)
        ]
        windows.append(
            {
                "input_ids": encoded["input_ids"][position],
                "attention_mask": [1] * len(words),
                "labels": [
                    IGNORED if word is None else numbers.get(row["tags"][word], IGNORED)
                    for word in owners
                ],
                "owner": owners,
            }
        )
    return windows


def _questions(rows, tokenizer, length, labels):
    """Return windows of contexts, STRIDE tokens apart, labelled if they contain the answer."""
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    plain = {"add_special_tokens": False, "return_offsets_mapping": True}
    questions = tokenizer([row["question"] for row in rows], **plain)["input_ids"]
    contexts = tokenizer([row["context"] for row in rows], **plain)
    windows = []
    for position, row in enumerate(rows):
        question = questions[position][:MAX_QUERY]
        ids, offsets = contexts["input_ids"][position], contexts["offset_mapping"][position]
        text, begin = row["answers"][0] if row["answers"] else ("", 0)
        answer = [
            number
            for number, (start, end) in enumerate(offsets)
            if start < begin + len(text) and end > begin
        ]
        room = length - len(question) - 3
        front = [cls, *question, sep]
        for first in range(0, max(len(ids) - room, 0) + STRIDE, STRIDE):
            piece = ids[first : first + room]
            is_complete = answer and answer[0] >= first and answer[-1] < first + len(piece)
            shift = len(front) - first
            windows.append(
                {
                    "input_ids": [*front, *piece, sep],
                    "attention_mask": [1] * (len(front) + len(piece) + 1),
                    "token_type_ids": [0] * len(front) + [1] * (len(piece) + 1),
                    "start_positions": answer[0] + shift if is_complete else 0,
                    "end_positions": answer[-1] + shift if is_complete else 0,
                    "owner": position,
                    "offsets": (len(front), offsets[first : first + room]),
                }
            )
    return windows


def _classes(rows, windows, outputs, labels):
    return [labels[int(scores.argmax())] for scores in outputs]


def _tags(rows, windows, outputs, labels):
    """Return one tag per word, O for truncated words."""
    result = []
    for row, window, scores in zip(rows, windows, outputs, strict=True):
        tags = ["O"] * len(row["words"])
        for position, word in enumerate(window["owner"]):
            if word is not None:
                tags[word] = labels[int(scores[position].argmax())]
        result.append(tags)
    return result


def _answers(rows, windows, outputs, labels):
    """Return {id: text of the span with the highest sum of logits} over all windows."""
    best = {}
    for window, scores in zip(windows, outputs, strict=True):
        front, offsets = window["offsets"]
        start, end = scores[front : front + len(offsets)].T
        sums = start[:, None] + end[None, :]
        is_span = np.triu(np.ones_like(sums, bool)) & ~np.triu(np.ones_like(sums, bool), MAX_ANSWER)
        sums = np.where(is_span, sums, -np.inf)
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        row = rows[window["owner"]]
        found = (float(sums[first, last]), row["context"][offsets[first][0] : offsets[last][1]])
        best[row["id"]] = max(best.get(row["id"], found), found)
    return {name: text for name, (_, text) in best.items()}


WINDOWS = {"classification": _texts, "conll": _sentences, "squad": _questions}
PREDICTIONS = {"classification": _classes, "conll": _tags, "squad": _answers}


def train_seeds(directory, rows, recipe, seeds):
    """Train with each seed, as finetuning_tensorflow does; return losses and accuracies."""
    model, kind, trainings = f"{directory}/encoder", "classification", []
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    labels, pad = labels_of(kind, rows["train"]), tokenizer.pad_token_id
    train, test = (
        WINDOWS[kind](rows[part], tokenizer, recipe["max_seq_length"], labels)
        for part in ("train", "test")
    )
    for seed in seeds:
        network = MODELS[kind].from_pretrained(model, num_labels=len(labels))
        kernel = first_head(seed, network.config.hidden_size, len(labels))
        with torch.no_grad():
            network.classifier.weight.copy_(torch.from_numpy(kernel.T))
            network.classifier.bias.zero_()
        torch.manual_seed(seed)
        steps = updates(network, loss_of(network, train, pad), len(train), recipe, seed)
        losses = [float(loss) for loss, _ in steps]
        logits = np.stack(outputs_of(network.eval(), test, pad, recipe["precision"]))
        hits = logits.argmax(axis=1) == np.array([window["labels"] for window in test])
        trainings.append({"losses": losses, "accuracy": float(100 * hits.mean())})
    return {"trainings": trainings}
