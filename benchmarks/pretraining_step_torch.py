"""Training steps of training.py and gpu.py in PyTorch, with the same mathematics.

It runs in the baselines' environment. It has both heads, of which the masked LM's runs on the
gathered positions only, fused AdamW, and clipping by the global norm.
"""

import contextlib
import shutil

import torch
from pretraining_batch import Sizes, examples, timed
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers.models.bert.modeling_bert import BertPreTrainingHeads

UNDECAYED = ("bias", "LayerNorm.weight")


class Pretraining(torch.nn.Module):
    """BERT with its two pretraining heads; returns the sum of both losses."""

    def __init__(self, sizes, **config):
        super().__init__()
        # As "gelu_new", in one kernel instead of eight.
        config = BertConfig(**{**sizes.config, **config}, hidden_act="gelu_pytorch_tanh")
        self.bert, self.heads = BertModel(config), BertPreTrainingHeads(config)
        self.heads.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, batch):
        """Return the sum of the losses of both heads."""
        output = self.bert(
            batch["input_ids"],
            attention_mask=batch["input_mask"],
            token_type_ids=batch["segment_ids"],
        )
        rows, hidden = output.last_hidden_state, output.last_hidden_state.shape[-1]
        positions = batch["masked_lm_positions"][:, :, None].expand(-1, -1, hidden)
        masked = torch.gather(rows, 1, positions).reshape(-1, hidden)
        masked_lm, next_sentence = self.heads(masked, output.pooler_output)
        return cross_entropy(masked_lm.float(), batch["masked_lm_ids"].reshape(-1)) + cross_entropy(
            next_sentence.float(), batch["next_sentence_labels"][:, 0]
        )


class Classifier(torch.nn.Module):
    """BERT with a classifier of 3 labels; returns the loss."""

    def __init__(self, sizes, **config):
        super().__init__()
        config = BertConfig(
            **{**sizes.config, **config}, hidden_act="gelu_pytorch_tanh", num_labels=3
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, batch):
        """Return the loss."""
        names = ("input_ids", "token_type_ids", "attention_mask")
        inputs = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
        logits = self.model(**dict(zip(names, inputs, strict=True))).logits
        return cross_entropy(logits.float(), batch["label"])


def parameter_groups(model, decay=0.01):
    """Return parameter groups for AdamW without decay of biases and LayerNorm."""
    named = dict(model.named_parameters())
    decayed = [value for name, value in named.items() if not name.endswith(UNDECAYED)]
    others = [value for name, value in named.items() if name.endswith(UNDECAYED)]
    return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def autocast(precision, device="cpu"):
    """Return the autocast context of a precision."""
    if precision == "bfloat16":
        return torch.autocast(device, torch.bfloat16)
    return contextlib.nullcontext()


def prepare(sizes, precision, compiled, device="cpu", **config):
    """Return a function that takes a training step, eager or compiled, and returns the loss.

    `config` are further keyword arguments of the BertConfig.
    """
    torch.manual_seed(0)
    return _step(Pretraining(sizes, **config), _batch(sizes, device), precision, compiled, device)


def prepare_classifier(sizes, precision, compiled, device="cpu", **config):
    """Do what `prepare` does, for a classifier of 3 labels."""
    torch.manual_seed(0)
    model = Classifier(sizes, **config)
    batch = _batch(sizes, device)
    batch["label"] = torch.arange(sizes.batch, device=device) % 3
    return _step(model, batch, precision, compiled, device, rate=1e-5)


def _batch(sizes, device):
    batch = {
        name: torch.from_numpy(values if values.dtype.kind == "f" else values.astype("int64"))
        for name, values in examples(sizes).items()
    }
    return {name: values.to(device) for name, values in batch.items()}


def _step(model, batch, precision, compiled, device, rate=1e-4):
    model = model.train().to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=rate, eps=1e-6, fused=True)
    forward = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad()
        with autocast(precision, device):
            loss = forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def measure(sizes, precision, steps, compiled):
    """Time the training step."""
    if compiled and not shutil.which("g++"):
        raise RuntimeError("g++ not found: torch.compile needs a C++ compiler")
    step = prepare(Sizes(**sizes), precision, compiled)
    return timed(lambda: step().item(), steps)
