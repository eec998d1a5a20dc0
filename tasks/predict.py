"""Answers rows of text, in their order, as JSON lines whose fields are those of the served model.

python -m tasks.predict --run=RUN --input=rows.csv --output=answers.jsonl
"""

import dataclasses

from bert_tf import command


@dataclasses.dataclass(frozen=True)
class PredictSettings:
    run: str = command.setting("run directory")
    input: str = command.setting(
        "rows of text: .csv, .tsv or .jsonl, with the text columns of the training"
    )
    output: str = command.setting(".jsonl file to write")
    checkpoint: str | None = command.setting(
        "a folder of RUN/checkpoints; by default the best, else the newest", None
    )
    global_batch_size: int = command.setting("rows answered at a time", 64)


def main(settings):
    from tasks.prediction import predict
    from tasks.trained import Trained

    trained = Trained.open(settings.run, settings.checkpoint)
    count = predict(
        trained, settings.input, settings.output, settings.global_batch_size, command.say
    )
    command.say(f"{settings.output}: {count} rows")


if __name__ == "__main__":
    command.start(main, PredictSettings, __doc__)
