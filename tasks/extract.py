"""Extract features: write one vector of a pretrained BERT per row of a file, in order.

    python -m tasks.extract --model=DIR --input=rows.csv --output=vectors.npy --layers=concat_last_4

A .npy file holds a float32 array (rows, size); a .jsonl file holds one {"vector": [...]} per line,
with --per_token {"tokens": [...], "vectors": [[...], ...]}, or {"error": ...} for a bad row.
"""

import dataclasses

from bert_tf import command, paths
from bert_tf.errors import UserError
from bert_tf.weights import sources
from tasks import inputs


@dataclasses.dataclass(frozen=True)
class ExtractSettings:
    """Flags of the command."""

    model: str = command.flag("run, Hugging Face directory, Google release or keras-nlp preset")
    input: str = command.flag("rows: .csv, .tsv or .jsonl file")
    output: str = command.flag("output file, .npy or .jsonl")
    text_column: str = command.flag("column of the text", "text")
    text_b_column: str | None = command.flag("column of the second text of a pair", None)
    unescape_html: bool = command.flag(
        "conversion of HTML character references, such as &amp;, to characters",
        False,
        former_name="html_entities",
    )
    layers: str = command.flag(
        "encoder layers that the vectors are taken from",
        "last",
        choices=("last", "second_to_last", "sum_last_4", "concat_last_4"),
    )
    pooling: str = command.flag(
        "vector of a text: that of [CLS], or the mean over all tokens, including [CLS] and [SEP]",
        "mean",
        choices=("cls", "mean"),
    )
    per_token: bool = command.flag(
        "tokens and a vector per token, instead of one vector per text", False
    )
    max_seq_length: int = command.flag(
        "maximum length of a text or pair in tokens, including [CLS] and [SEP]", 128
    )
    do_lower_case: bool | None = command.flag(
        "lowercasing of the text; by default as configured in the model", None
    )
    batch_size: int = command.flag("rows per batch", 64, former_name="global_batch_size")
    overwrite: bool = command.flag("replacement of an existing --output file", False)

    def __post_init__(self):
        for name, minimum in (("max_seq_length", 4), ("batch_size", 1)):
            if getattr(self, name) < minimum:
                raise UserError(f"--{name}={getattr(self, name)}: expected an integer >= {minimum}")
        paths.check_local_file("input", self.input)
        if not self.output.endswith((".npy", ".jsonl")):
            raise UserError(f"--output={self.output}: expected a .npy or .jsonl file")
        if self.per_token and not self.output.endswith(".jsonl"):
            raise UserError(f"--output={self.output}: expected a .jsonl file with --per_token")
        paths.check_output(self.output, [self.input, self.model], self.overwrite)

    @property
    def columns(self) -> list[str]:
        """Columns of the text or of both texts of a pair."""
        return [self.text_column, *filter(None, [self.text_b_column])]

    def check(self) -> None:
        """Check the input file and the model without TensorFlow; raises UserError."""
        rows = {"kind": "pretrained", "text_columns": self.columns}
        is_array = self.output.endswith(".npy")  # An array has no entry for a bad row.
        inputs.check_rows(rows, self.input, labelled=False, first_only=not is_array)
        sources.check(self.model)


def main(settings: ExtractSettings) -> None:
    """Write the output file."""
    from bert_tf.ownership import sole_output
    from bert_tf.weights.sources import read_pretrained
    from tasks.feature_extraction import create_embedder, extract

    with sole_output(settings.output, settings.overwrite):
        embedder = create_embedder(
            read_pretrained(settings.model, settings.do_lower_case),
            settings.layers,
            settings.pooling,
            settings.max_seq_length,
            len(settings.columns),
        )
        count, bad = extract(
            embedder,
            settings.input,
            settings.columns,
            settings.output,
            settings.unescape_html,
            settings.batch_size,
            command.log,
            settings.per_token,
        )
    errors = f", {bad} bad rows with an error instead" if bad else ""
    command.log(f"{settings.output}: {count} rows of {embedder.vector_size} numbers{errors}")


if __name__ == "__main__":
    command.run_main(main, ExtractSettings, __doc__)
