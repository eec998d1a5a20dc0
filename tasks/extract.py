"""Writes the vectors that a pretrained BERT gives the texts of a file, a row a row, in their order.

    python -m tasks.extract --model=DIR --input=rows.csv --output=vectors.npy --layers=concat_last_4

To .npy an array float32 [rows, size]; to .jsonl lines {"vector": [...]}, and {"error": ...} for a
row that cannot be read.
"""

import dataclasses

from bert_tf import command, paths
from bert_tf.errors import UserError
from bert_tf.weights import sources
from tasks import inputs


@dataclasses.dataclass(frozen=True)
class ExtractSettings:
    model: str = command.flag(
        "a run, a Hugging Face directory, a Google release, a keras-nlp preset"
    )
    input: str = command.flag("rows: .csv, .tsv or .jsonl")
    output: str = command.flag(".npy or .jsonl file to write")
    text_column: str = command.flag("column of the text", "text")
    text_b_column: str | None = command.flag("column of the second text of a pair", None)
    unescape_html: bool = command.flag(
        "texts hold &amp; and the like, to be taken as characters",
        False,
        former_name="html_entities",
    )
    layers: str = command.flag(
        "which layers' vectors",
        "last",
        choices=("last", "second_to_last", "sum_last_4", "concat_last_4"),
    )
    pooling: str = command.flag(
        "a text's vector: that of [CLS], or the mean of all tokens', [CLS] and [SEP] among them",
        "mean",
        choices=("cls", "mean"),
    )
    max_seq_length: int = command.flag("tokens a text or pair is cut to, with [CLS] and [SEP]", 128)
    do_lower_case: bool | None = command.flag(
        "lower-case the text; by default what the weights' source says", None
    )
    batch_size: int = command.flag("rows read at a time", 64, former_name="global_batch_size")
    overwrite: bool = command.flag("replace the file of --output", False)

    def __post_init__(self):
        for name, minimum in (("max_seq_length", 4), ("batch_size", 1)):
            if getattr(self, name) < minimum:
                raise UserError(f"--{name}={getattr(self, name)}: wanted at least {minimum}")
        paths.check_local_file("input", self.input)
        if not self.output.endswith((".npy", ".jsonl")):
            raise UserError(f"--output={self.output}: wanted a file that ends in .npy or .jsonl")
        paths.check_output(self.output, [self.input, self.model], self.overwrite)

    @property
    def columns(self):
        return [self.text_column, *filter(None, [self.text_b_column])]

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        rows = {"kind": "pretrained", "text_columns": self.columns}
        is_array = self.output.endswith(".npy")  # For which every row has to be good.
        inputs.check_rows(rows, self.input, labelled=False, first_only=not is_array)
        sources.check(self.model)


def main(settings):
    from bert_tf.ownership import sole_output
    from bert_tf.weights.sources import read_pretrained
    from tasks.feature_extraction import FeatureExtractor, extract

    with sole_output(settings.output, settings.overwrite):
        extractor = FeatureExtractor(
            read_pretrained(settings.model, settings.do_lower_case),
            settings.layers,
            settings.pooling,
            settings.max_seq_length,
            len(settings.columns),
        )
        count, bad = extract(
            extractor,
            settings.input,
            settings.columns,
            settings.output,
            settings.unescape_html,
            settings.batch_size,
            command.log,
        )
    wrong = f", {bad} of them bad, with their error in place" if bad else ""
    command.log(f"{settings.output}: {count} rows of {extractor.vector_size} numbers{wrong}")


if __name__ == "__main__":
    command.run_main(main, ExtractSettings, __doc__)
