"""Write models of all BERT classes with transformers, and their outputs for texts.

    python transformers_outputs.py DIRECTORY VOCABULARY TEXTS

Run by the interpreter of BERT_TF_TRANSFORMERS_PYTHON. TEXTS is a JSON object: "texts", "pairs",
"questions" (question, context), "choices" (prompt, choices) and "masked". DIRECTORY gets NAME/ with
the model, its pytorch_model.bin as NAME_bin/, and outputs.json with what the task of each model
predicts.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # So large that every component matters.
}
NAMES = ["north", "east", "south", "west", "up"]
TAGS = ["O", "B-THING", "I-THING"]
MAX_ANSWER_LENGTH = 30
MODELS = {
    "encoder": ("BertModel", {}),
    "pretraining": ("BertForPreTraining", {}),
    "masked_lm": ("BertForMaskedLM", {}),
    "next_sentence": ("BertForNextSentencePrediction", {}),
    "regression": ("BertForSequenceClassification", {"num_labels": 1}),
    "two_labels": ("BertForSequenceClassification", {"names": NAMES[:2]}),
    "five_labels": ("BertForSequenceClassification", {"names": NAMES}),
    "multi_label": (
        "BertForSequenceClassification",
        {"names": NAMES, "problem_type": "multi_label_classification"},
    ),
    "tokens": ("BertForTokenClassification", {"names": TAGS}),
    "answers": ("BertForQuestionAnswering", {}),
    "choices": ("BertForMultipleChoice", {}),
}


class Outputs:
    """Predictions of a model in plain Python, by a method per model."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model.eval(), tokenizer

    def __call__(self, *texts):
        batch = self.tokenizer(*texts, return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            return batch, self.model(**batch)

    def encoder(self, rows):
        outputs = [self(text)[1] for text in rows["texts"]]
        return {
            "mean": [output.last_hidden_state[0].mean(0).tolist() for output in outputs],
            "pooled": [output.pooler_output[0].tolist() for output in outputs],
        }

    def masked_lm(self, rows):
        found = {"token": [], "score": []}
        for text in rows["masked"]:
            batch, output = self(text)
            logits = output.logits if "logits" in output else output.prediction_logits
            (position,) = torch.where(batch["input_ids"][0] == self.tokenizer.mask_token_id)
            scores, ids = logits[0, position[0]].softmax(-1).topk(5)
            found["token"].append(self.tokenizer.convert_ids_to_tokens(ids.tolist()))
            found["score"].append(scores.tolist())
        return found

    def next_sentence(self, rows):
        found = []
        for pair in rows["pairs"]:
            output = self(*pair)[1]
            logits = output.logits if "logits" in output else output.seq_relationship_logits
            found.append(logits[0].softmax(-1)[0].item())
        return {"is_next": found}

    def pretraining(self, rows):
        return {**self.masked_lm(rows), **self.next_sentence(rows)}

    def regression(self, rows):
        return {"value": [self(text)[1].logits[0, 0].item() for text in rows["texts"]]}

    def five_labels(self, rows):
        return {
            "probabilities": [
                self(text)[1].logits[0].softmax(-1).tolist() for text in rows["texts"]
            ]
        }

    two_labels = five_labels

    def multi_label(self, rows):
        return {
            "probabilities": [self(text)[1].logits[0].sigmoid().tolist() for text in rows["texts"]]
        }

    def tokens(self, rows):
        """Return start, end and score of the runs of words that are labelled B- or I-."""
        found = []
        for text in rows["texts"]:
            scores = self(text)[1].logits[0].softmax(-1).max(-1)
            encoded = self.tokenizer(text, return_offsets_mapping=True)
            pieces = self.tokenizer.convert_ids_to_tokens(encoded["input_ids"])
            words = []
            for n in range(1, len(pieces) - 1):
                start, end = encoded["offset_mapping"][n]
                if pieces[n].startswith("##"):
                    words[-1][1] = end
                else:
                    words.append([start, end, scores.values[n].item(), TAGS[scores.indices[n]]])
            entities, tag_before = [], "O"
            for start, end, score, tag in words:
                if tag == "I-THING" and tag_before != "O":
                    entities[-1][1] = end
                    entities[-1][2].append(score)
                elif tag != "O":
                    entities.append([start, end, [score]])
                tag_before = tag
            found.append([[start, end, sum(of) / len(of)] for start, end, of in entities])
        return {"entities": found}

    def answers(self, rows):
        """Return the best span and the logit of each span's text, by brute force."""
        found = {"answer": [], "score": []}
        for question, context in rows["questions"]:
            _, output = self(question, context)
            encoded = self.tokenizer(question, context, return_offsets_mapping=True)
            start, end = output.start_logits[0].tolist(), output.end_logits[0].tolist()
            there = [n for n, of in enumerate(encoded.sequence_ids()) if of == 1]
            logits = {}
            for first in there:
                for last in there:
                    if first <= last < first + MAX_ANSWER_LENGTH:
                        offsets = encoded["offset_mapping"]
                        text = context[offsets[first][0] : offsets[last][1]]
                        key = text.lower().strip()
                        logit = start[first] + end[last]
                        if key not in logits or logits[key][0] < logit:
                            logits[key] = (logit, text)
            best = sorted(logits.values(), reverse=True)[:20]
            scores = torch.tensor([logit for logit, _ in best]).softmax(0)
            found["answer"].append(best[0][1])
            found["score"].append(scores[0].item())
        return found

    def choices(self, rows):
        found = []
        for prompt, choices in rows["choices"]:
            batch = self.tokenizer(
                [prompt] * len(choices), choices, return_tensors="pt", padding=True
            )
            with torch.no_grad():
                logits = self.model(**{name: value[None] for name, value in batch.items()}).logits
            found.append(logits[0].softmax(-1).tolist())
        return {"probabilities": found}


def main(directory, vocabulary, texts):
    directory = pathlib.Path(directory)
    rows = json.loads(pathlib.Path(texts).read_text(encoding="utf-8"))
    tokenizer = transformers.BertTokenizer(vocabulary)
    outputs = {}
    for number, (name, (class_name, options)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        options = dict(options)
        if names := options.pop("names", None):
            options["id2label"] = dict(enumerate(names))
            options["label2id"] = {label: index for index, label in enumerate(names)}
        config = transformers.BertConfig(vocab_size=len(tokenizer), **SIZES, **options)
        model = getattr(transformers, class_name)(config)
        for weight_name, weight in model.named_parameters():
            if weight.ndim == 1:  # Otherwise 0, or 1 in LayerNorm.
                offset = float(weight_name.endswith("LayerNorm.weight"))
                weight.data = offset + 0.3 * torch.randn_like(weight)
        if name == "tokens":  # Each tag is predicted as often as the others.
            texts = tokenizer(rows["texts"], return_tensors="pt", padding=True)
            with torch.no_grad():
                logits = model.eval()(**texts).logits[texts["attention_mask"] == 1]
            model.classifier.bias.data -= logits.mean(0)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
        shutil.copytree(directory / name, directory / f"{name}_bin")
        (directory / f"{name}_bin" / "model.safetensors").unlink()
        torch.save(model.state_dict(), directory / f"{name}_bin" / "pytorch_model.bin")
        outputs[name] = getattr(Outputs(model, tokenizer), name)(rows)
    (directory / "outputs.json").write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
