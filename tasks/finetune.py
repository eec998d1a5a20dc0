"""Fine-tunes BERT on labelled text.

    python -m tasks.finetune --task=classification --train=train.csv --dev=dev.csv --init_from=DIR
    --output_dir=RUN

The same command goes on where it was stopped.
"""

from bert_tf import command
from tasks.settings import FinetuneSettings


def main(settings):
    from tasks.finetuning import finetune

    finetune(settings, command.say)


if __name__ == "__main__":
    command.start(main, FinetuneSettings, __doc__)
