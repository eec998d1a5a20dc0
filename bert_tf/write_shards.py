"""Write pretraining shards of any amount of text.

    bert-tf write_shards --input='corpus/*.txt' --vocab=vocab.txt --output_dir=SHARDS

Shards are TFRecord files with the seven features of google-research/bert. manifest.json records
text, vocabulary and settings. Rerun the command after an interruption to write missing shards.
"""

from bert_tf.data.settings import WriteShardsSettings
from bert_tf.system import command


def main(settings: WriteShardsSettings) -> None:
    """Write the shards."""
    from bert_tf.data.writing import write_shards

    write_shards(settings, command.log)


if __name__ == "__main__":
    command.run_main(main, WriteShardsSettings, __doc__, imports_tensorflow=False)
