"""Ten jobs in transformers, as docs/python-compared.md counts them; it writes no SavedModel."""

# ruff: noqa: B905

import numpy as np
import torch
from sklearn.metrics import f1_score, precision_recall_curve
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    pipeline,
)


def fit(path, texts, labels, directory):
    names = sorted(set(labels))
    id2label = dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, id2label=id2label)
    encoded = tokenizer(texts, truncation=True)["input_ids"]
    rows = [{"input_ids": row, "label": names.index(name)} for row, name in zip(encoded, labels)]
    arguments = TrainingArguments(directory, per_device_train_batch_size=32)
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return (trainer,)


def fit_with_schedule(path, texts, labels, directory):
    names = sorted(set(labels))
    id2label = dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, id2label=id2label)
    encoded = tokenizer(texts, truncation=True)["input_ids"]
    rows = [{"input_ids": row, "label": names.index(name)} for row, name in zip(encoded, labels)]
    arguments = TrainingArguments(
        directory, per_device_train_batch_size=32, warmup_steps=0.1, weight_decay=0.01
    )
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return (trainer,)


def fit_until_best(path, texts, labels, dev_texts, dev_labels, directory):
    names = sorted(set(labels))
    id2label = dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, id2label=id2label)
    encoded = tokenizer(texts, truncation=True)["input_ids"]
    rows = [{"input_ids": row, "label": names.index(name)} for row, name in zip(encoded, labels)]
    encoded = tokenizer(dev_texts, truncation=True)["input_ids"]
    dev = [{"input_ids": row, "label": names.index(name)} for row, name in zip(encoded, dev_labels)]
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=32,
        num_train_epochs=9,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
    )

    def macro_f1(result):
        predicted = result.predictions.argmax(-1)
        return {"macro_f1": f1_score(result.label_ids, predicted, average="macro")}

    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=dev,
        processing_class=tokenizer,
        compute_metrics=macro_f1,
        callbacks=[EarlyStoppingCallback(1)],
    )
    trainer.train()
    return (trainer,)


def predict_labels(trainer, texts):
    classify = pipeline("text-classification", trainer.model, tokenizer=trainer.processing_class)
    return [row["label"] for row in classify(texts, truncation=True)]


def save_and_load(trainer, directory):
    trainer.save_model(directory)
    loaded = pipeline("text-classification", directory)
    return (loaded,)


def entities(path, texts, spans, directory):
    types = sorted({span["type"] for of_text in spans for span in of_text})
    names = ["O", *(f"{part}-{name}" for name in types for part in "BI")]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForTokenClassification.from_pretrained(path, id2label=dict(enumerate(names)))
    rows = []
    for text, of_text in zip(texts, spans):
        windows = tokenizer(
            text,
            truncation=True,
            stride=16,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for tokens, offsets in zip(windows["input_ids"], windows["offset_mapping"]):
            tags = [0 if start < end else -100 for start, end in offsets]
            for span in of_text:
                for position, (start, end) in enumerate(offsets):
                    if span["start"] < end and start < min(end, span["end"]):
                        part = "B" if start <= span["start"] else "I"
                        tags[position] = names.index(f"{part}-{span['type']}")
            rows.append({"input_ids": tokens, "labels": tags})
    arguments = TrainingArguments(directory, num_train_epochs=60)
    collator = DataCollatorForTokenClassification(tokenizer)
    Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    tag = pipeline(
        "token-classification", model, tokenizer=tokenizer, aggregation_strategy="simple", stride=16
    )
    return [
        [text[entity["start"] : entity["end"]] for entity in of_text]
        for text, of_text in zip(texts, tag(texts))
    ]


def answers(path, questions, contexts, gold, directory):
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForQuestionAnswering.from_pretrained(path)
    windows = tokenizer(
        questions,
        contexts,
        truncation="only_second",
        stride=16,
        padding="max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = windows.pop("overflow_to_sample_mapping")
    offsets = [
        [offset if part == 1 else None for offset, part in zip(of_window, windows.sequence_ids(n))]
        for n, of_window in enumerate(windows.pop("offset_mapping"))
    ]
    rows = []
    for number, owner in enumerate(owners):
        row = {name: values[number] for name, values in windows.items()}
        first = gold[owner][0]["start"]
        last = first + len(gold[owner][0]["text"])
        inside = [
            position
            for position, offset in enumerate(offsets[number])
            if offset and offset[0] < last and offset[1] > first
        ]
        is_complete = (
            inside
            and offsets[number][inside[0]][0] <= first
            and offsets[number][inside[-1]][1] >= last
        )
        row["start_positions"] = inside[0] if is_complete else 0
        row["end_positions"] = inside[-1] if is_complete else 0
        rows.append(row)
    arguments = TrainingArguments(directory, num_train_epochs=20)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    starts, ends = trainer.predict(rows).predictions
    best = [(-np.inf, "")] * len(questions)
    for number, owner in enumerate(owners):
        sums = starts[number][:, None] + ends[number][None, :]
        is_context = np.array([offset is not None for offset in offsets[number]])
        is_span = np.triu(np.outer(is_context, is_context)) & ~np.triu(np.ones_like(sums, bool), 30)
        sums = np.where(is_span, sums, -np.inf)
        start, end = np.unravel_index(sums.argmax(), sums.shape)
        text = contexts[owner][offsets[number][start][0] : offsets[number][end][1]]
        best[owner] = max(best[owner], (sums[start, end], text))
    return [text for _, text in best]


def fill_mask(path, texts):
    fill = pipeline("fill-mask", path)
    return [candidates[0]["token_str"] for candidates in fill(texts)]


def fit_with_threshold(path, texts, labels, dev_texts, dev_labels, positive, directory):
    names = sorted(set(labels))
    id2label = dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, id2label=id2label)
    encoded = tokenizer(texts, truncation=True)["input_ids"]
    rows = [{"input_ids": row, "label": names.index(name)} for row, name in zip(encoded, labels)]
    arguments = TrainingArguments(directory, per_device_train_batch_size=32)
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    dev_rows = [tokenizer(text, truncation=True) for text in dev_texts]
    logits = torch.tensor(trainer.predict(dev_rows).predictions)
    scores = logits.softmax(-1)[:, names.index(positive)].numpy()
    is_positive = np.array(dev_labels) == positive
    _, recall, thresholds = precision_recall_curve(is_positive, scores)
    model.config.threshold = float(thresholds[recall[:-1] >= 0.9][-1])
    trainer.save_model(directory)
    loaded = pipeline("text-classification", directory)
    threshold = loaded.model.config.threshold
    other = next(name for name in names if name != positive)
    scores = [
        {row["label"]: row["score"] for row in of_text}[positive]
        for of_text in loaded(dev_texts, top_k=None)
    ]
    return [positive if score >= threshold else other for score in scores]
