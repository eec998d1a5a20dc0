"""Training of training.py, learning.py, retrieval.py and gpu.py in PyTorch: a plain loop.

It runs in the baselines' environment. Fine-tuning gets the windows of bert_tf, padded to the
longest one of a batch, in the order that bert_tf draws.
"""

import functools
import itertools
import math
import shutil
import time

import numpy as np
import torch
import transformers
from pretraining_batch import Sizes, examples, timed
from torch.nn.functional import cross_entropy
from transformers.models.bert.modeling_bert import BertPreTrainingHeads

UNDECAYED = ("bias", "LayerNorm.weight")
MASKED_SCORE = -1e9  # After the last token of a window.
MODELS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "conll": transformers.AutoModelForTokenClassification,
    "squad": transformers.AutoModelForQuestionAnswering,
}


def optimizer_of(model, rate):
    """Return fused AdamW without decay of biases and LayerNorm."""
    decayed, others = [], []
    for name, value in model.named_parameters():
        (others if name.endswith(UNDECAYED) else decayed).append(value)
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, eps=1e-6, fused=True)


def autocast(precision, device="cpu"):
    """Return the autocast context of a precision."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")


def update(model, optimizer, loss, precision, device="cpu"):
    """Take a training step, clipped by the global norm; `loss` computes the loss, which returns."""
    optimizer.zero_grad()
    with autocast(precision, device):
        value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value.detach()


class Pretraining(torch.nn.Module):
    """BERT with both heads; that of the masked LM runs on the gathered positions only."""

    def __init__(self, config):
        super().__init__()
        self.bert, self.heads = transformers.BertModel(config), BertPreTrainingHeads(config)
        self.heads.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, masked_lm_positions, masked_lm_ids, next_sentence_labels, **inputs):
        """Return a tuple of the sum of both losses."""
        output = self.bert(**inputs)
        rows, hidden = output.last_hidden_state, output.last_hidden_state.shape[-1]
        positions = masked_lm_positions[:, :, None].expand(-1, -1, hidden)
        masked = torch.gather(rows, 1, positions).reshape(-1, hidden)
        masked_lm, next_sentence = self.heads(masked, output.pooler_output)
        loss = cross_entropy(masked_lm.float(), masked_lm_ids.reshape(-1))
        return (loss + cross_entropy(next_sentence.float(), next_sentence_labels[:, 0]),)


def prepare(sizes, precision, compiled, device="cpu", is_classifier=False, **config):
    """Return a function that takes a training step, eager or compiled, and returns the loss.

    It pretrains, or trains a classifier of 3 labels. `config` are further arguments of BertConfig.
    """
    torch.manual_seed(0)
    # As "gelu_new", in one kernel instead of eight.
    config = {**sizes.config, **config, "hidden_act": "gelu_pytorch_tanh", "num_labels": 3}
    config = transformers.BertConfig(**config, problem_type="single_label_classification")
    batch = {name: torch.from_numpy(values) for name, values in examples(sizes).items()}
    batch = {name: values.long().to(device) for name, values in batch.items()}
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["input_mask"]}
    inputs["token_type_ids"] = batch["segment_ids"]
    if is_classifier:
        model, rate = transformers.BertForSequenceClassification(config), 1e-5
        inputs["labels"] = torch.arange(sizes.batch, device=device) % 3
    else:
        model, rate = Pretraining(config), 1e-4
        for name in ("masked_lm_positions", "masked_lm_ids", "next_sentence_labels"):
            inputs[name] = batch[name]
    model = model.train().to(device)
    forward, optimizer = torch.compile(model) if compiled else model, optimizer_of(model, rate)
    return lambda: update(model, optimizer, lambda: forward(**inputs)[0], precision, device)


def pretrain(sizes, precision, steps, compiled):
    """Time the pretraining step."""
    if compiled and not shutil.which("g++"):
        raise RuntimeError("g++ not found: torch.compile needs a C++ compiler")
    step = prepare(Sizes(**sizes), precision, compiled)
    return timed(lambda: step().item(), steps)


def load_windows(path):
    """Return a function from numbers of windows of a file to a batch, and the number of windows."""
    with np.load(path) as arrays:
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    mask = tensors["attention_mask"]

    def batch(numbers):
        longest = mask[numbers].sum(dim=1).max()
        rows = {name: values[numbers].long() for name, values in tensors.items()}
        return {name: of[:, :longest] if of.dim() > 1 else of for name, of in rows.items()}

    return batch, len(mask)


def finetune(directory, num_labels, recipe, max_steps):
    """Train on windows; return the Unix time after each step, all losses, and the windows' number.

    After a complete training, outputs of the test rows are written to the directory.
    """
    torch.manual_seed(recipe["seed"])
    kind = MODELS[recipe["task"]]
    network = kind.from_pretrained(recipe["init_from"], num_labels=num_labels)
    ends, losses = [time.time()], []
    batch, count = load_windows(f"{directory}/train.npz")
    steps = updates(network, lambda chosen: network(**batch(chosen)).loss, count, recipe)
    for loss in itertools.islice(steps, max_steps):
        losses.append(float(loss))
        ends.append(time.time())
    if not max_steps:
        outputs = outputs_of(network, *load_windows(f"{directory}/test.npz"), recipe)
        np.savez(f"{directory}/outputs.npz", **outputs)
    return {"ends": ends, "count": count, "losses": losses}


def updates(network, loss, count, recipe):
    """Train a network with 10% warm-up and linear decay to 0, and yield the loss of each update.

    `loss` returns the loss of a batch, given the numbers of its examples, of which there are
    `count`. The seed of the recipe is that of their order.
    """
    batch, epochs = recipe["global_batch_size"], recipe["epochs"]
    total = epochs * math.ceil(count / batch)
    optimizer = optimizer_of(network, recipe["learning_rate"])
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total)
    network.train()
    for epoch in range(epochs):
        order = np.random.default_rng([recipe["seed"], epoch]).permutation(count)
        for start in range(0, count, batch):
            loss_of_batch = functools.partial(loss, order[start : start + batch])
            yield update(network, optimizer, loss_of_batch, recipe["precision"])
            schedule.step()


@torch.no_grad()
def outputs_of(network, batch_of, count, recipe):
    """Return the outputs of all windows by bert_tf's names, per token padded to the maximum."""
    network.eval()
    found = {}
    for chosen in np.array_split(np.arange(count), math.ceil(count / 64)):
        batch = batch_of(chosen)
        with autocast(recipe["precision"]):
            output = network(**batch)
        if "start_logits" in output:
            outputs = {"start": output.start_logits, "end": output.end_logits}
        else:
            outputs = {"label" if output.logits.dim() == 2 else "tag": output.logits}
        for name, values in outputs.items():
            values = values.float().numpy()
            if name != "label":
                values[batch["attention_mask"].numpy() == 0] = MASKED_SCORE
                after = recipe["max_seq_length"] - values.shape[1]
                widths = [(0, 0), (0, after), (0, 0)][: values.ndim]
                values = np.pad(values, widths, constant_values=MASKED_SCORE)
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in found.items()}
