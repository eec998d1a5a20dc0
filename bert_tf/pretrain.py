"""Pretrain BERT on shards with masked language modeling and next sentence prediction.

    python -m bert_tf.pretrain --shards=SHARDS --model_size=base --output_dir=RUN

Rerun the command to resume after an interruption. --shards=A,B --phase_steps=900000,100000 trains
on one directory after the other.
"""

from bert_tf import command
from bert_tf.pretraining.settings import PretrainSettings


def main(settings: PretrainSettings) -> None:
    """Run pretraining, or one step of it with --dry_run."""
    from bert_tf.pretraining import recipe

    run = recipe.dry_run if settings.dry_run else recipe.pretrain
    run(settings, command.log)


if __name__ == "__main__":
    command.run_main(main, PretrainSettings, __doc__)
