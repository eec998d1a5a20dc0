"""Fine-tunes BERT on labelled text.

    python -m tasks.finetune --task=classification --train=train.csv --dev=dev.csv --init_from=DIR
    --output_dir=RUN

The same command goes on where it was stopped. With --seeds=1,2,3 or --learning_rates=2e-5,5e-5 it
makes a sweep: a run each, in folders of --output_dir.
"""

from bert_tf import command
from tasks.settings import SweepSettings


def main(settings):
    from tasks.finetuning import finetune
    from tasks.sweep import sweep

    if settings.is_sweep:
        sweep(settings, command.log)
    else:
        finetune(settings.runs()[""], command.log)


if __name__ == "__main__":
    command.run_main(main, SweepSettings, __doc__)
