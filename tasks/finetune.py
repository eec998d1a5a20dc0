"""Fine-tune BERT on labelled text.

    bert-tf finetune --task=classification --train=train.csv --dev=dev.csv --init_from=DIR
    --output_dir=RUN

Rerun the same command to resume after an interruption. With --seeds=1,2,3 or
--learning_rates=2e-5,5e-5 it runs a sweep: one run per combination, in subdirectories of
--output_dir. With --dry_run it checks everything, creates nothing, and prints an estimate for
--devices of --device. The processor of this machine is measured for it.
"""

from bert_tf.system import command
from tasks.finetuning.settings import DataRows, FinetuneSettings


def main(settings: FinetuneSettings, data: DataRows | None = None) -> None:
    """Run one fine-tuning, a sweep, or a dry run of them; `data` are the rows of its check."""
    from tasks.finetuning.recipe import dry_run, finetune
    from tasks.finetuning.sweep import sweep

    run = dry_run if settings.dry_run else sweep if settings.is_sweep else finetune
    run(settings, command.log, data=data)


if __name__ == "__main__":
    command.run_main(main, FinetuneSettings, __doc__)
