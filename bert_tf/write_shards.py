"""Writes pretraining shards of any amount of text, and goes on where it was stopped.

    python -m bert_tf.write_shards --input='corpus/*.txt' --vocab=vocab.txt --output_dir=SHARDS

Shards are TFRecord files of google-research/bert's seven features; manifest.json tells what they
were made of. The same command makes only what is missing.
"""

from bert_tf import command
from bert_tf.data.settings import WriteShardsSettings


def main(settings):
    from bert_tf.data.writing import write_shards

    write_shards(settings, command.log)


if __name__ == "__main__":
    command.run_main(main, WriteShardsSettings, __doc__, imports_tensorflow=False)
