"""Run a Hugging Face directory in transformers on PyTorch, for the check of a conversion.

    PYTHON -I transformers_runner.py MODEL TEXTS RESULTS

PYTHON is an interpreter with torch and transformers. TEXTS is a JSON list of strings. RESULTS is
written as .npz: output "name" of text i as "i/name", its token ids as "i/ids", and all warnings as
"warnings", a JSON list in UTF-8. This file imports nothing from the project.
"""

import json
import logging
import sys
import warnings

import numpy as np


def main(model_path: str, texts_path: str, results_path: str) -> None:
    """Run the texts in a file and write the outputs to another file."""
    import torch
    import transformers

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    with open(texts_path, encoding="utf-8") as file:
        texts = json.load(file)
    results = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        config = transformers.AutoConfig.from_pretrained(model_path)
        model = getattr(transformers, config.architectures[0]).from_pretrained(model_path).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
        for number, text in enumerate(texts):
            inputs = tokenizer(
                text,
                truncation=True,
                max_length=config.max_position_embeddings,
                return_tensors="pt",
            )
            results[f"{number}/ids"] = inputs["input_ids"][0].numpy()
            if config.architectures[0] == "BertForMultipleChoice":
                inputs = {name: tensor[None] for name, tensor in inputs.items()}
            with torch.no_grad():
                outputs = model(**inputs)
            for name, tensor in outputs.items():
                results[f"{number}/{name}"] = tensor[0].numpy()
    lines += [str(warning.message) for warning in caught]
    results["warnings"] = np.frombuffer(json.dumps(lines).encode(), np.uint8)
    results["versions"] = np.frombuffer(
        f"transformers {transformers.__version__}, torch {torch.__version__}".encode(), np.uint8
    )
    np.savez(results_path, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
