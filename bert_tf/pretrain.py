"""Pretrain BERT on shards with masked language modeling and next sentence prediction.

    bert-tf pretrain --shards=SHARDS --model_size=base --output_dir=RUN

Rerun the command to resume after an interruption. --shards=A,B --phase_steps=900000,100000 trains
on one directory after the other. With --dry_run the estimate is for --devices of --device.
"""

from bert_tf.pretraining.settings import PretrainCommandSettings
from bert_tf.system import command


def main(settings: PretrainCommandSettings) -> None:
    """Run pretraining, or its dry run."""
    from bert_tf.pretraining.recipe import dry_run, pretrain

    run = dry_run if settings.dry_run else pretrain
    run(settings, command.log)


if __name__ == "__main__":
    command.run_main(main, PretrainCommandSettings, __doc__)
