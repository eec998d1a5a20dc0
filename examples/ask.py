"""Send texts to an exported classifier, with TensorFlow and TF Text only.

python -I ask.py MODELS/name/1 "First text" "Second text"
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations of the tokenizer.

model = tf.saved_model.load(sys.argv[1])
outputs = model.signatures["serving_default"](text=tf.constant(sys.argv[2:]))
for text, label, score in zip(sys.argv[2:], outputs["label"], outputs["score"], strict=True):
    print(f"{label.numpy().decode():10} {score:.3f}  {text}")
assert not {"bert_tf", "tasks", "export"} & set(sys.modules)
