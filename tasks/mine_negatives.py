"""Mine hard negatives: add to each pair the similar texts of a corpus that are not its positive.

    bert-tf mine_negatives --run=RUN --pairs=pairs.csv --corpus=rows.csv --output=out.jsonl

Each row of the output has `anchor`, `positive` and a list `negatives`, most similar first, which
--task=similarity and --task=ranking read. Prompts of the embedder for queries and documents are
used. A negative is among the --top_k texts nearest to the anchor, and less similar to it than the
positive by more than --margin. Texts that are the positive of the same anchor in any row, or that
differ from one in case or white space alone, are never negatives.
"""

import dataclasses
import json
import os
from collections.abc import Iterator

from bert_tf.errors import UserError
from bert_tf.storage import paths
from bert_tf.system import command
from tasks.data.readers.rows import (
    BadRow,
    Example,
    check_good,
    check_texts,
    raise_bad_rows,
    read_rows,
)
from tasks.prediction.retrieval import check_embedder, mine_negatives, open_embedder


@dataclasses.dataclass(frozen=True)
class MineNegativesSettings:
    """Flags of the command."""

    run: str = command.flag("run of an embedder, or another --model of bert-tf extract")
    pairs: str = command.flag("pairs: .csv, .tsv or .jsonl, also .gz, or .parquet")
    corpus: str = command.flag("texts that may become negatives, in one of these formats")
    output: str = command.flag("output file, .jsonl")
    anchor_column: str = command.flag("column of the first text of a pair", "anchor")
    positive_column: str = command.flag("column of the text that belongs to it", "positive")
    text_column: str = command.flag("column of the texts of --corpus", "text")
    num_negatives: int = command.flag("largest number of negatives per pair", 5, bounds={">=": 1})
    margin: float = command.flag(
        "cosine similarity by which a negative is less similar than the positive",
        0.05,
        bounds={">=": 0},
    )
    top_k: int = command.flag(
        "nearest texts per anchor that negatives are taken from", 100, bounds={">=": 1}
    )
    overwrite: bool = command.flag("replacement of an existing --output file", False)

    def __post_init__(self) -> None:
        command.check_bounds(self)
        paths.check_local_file("pairs", self.pairs)
        paths.check_local_file("corpus", self.corpus)
        paths.check_local("output", self.output)
        if not self.output.endswith(".jsonl"):
            raise UserError(f"--output={self.output}: expected a .jsonl file")
        if self.anchor_column == self.positive_column:
            raise UserError(
                f"--positive_column={self.positive_column}: expected another column than "
                "--anchor_column"
            )
        paths.check_output(self.output, (self.pairs, self.corpus, self.run), self.overwrite)

    def check(self) -> None:
        """Check pairs, corpus and model without TensorFlow; raises UserError."""
        check_good(self.read_pairs())
        check_good(read_rows(self.corpus, (self.text_column,)))
        check_embedder(self.run)

    def read_pairs(self) -> Iterator[Example | BadRow]:
        """Yield the rows of --pairs, whose texts are the anchor and its positive."""

        def example(values, location):
            check_texts({f"column {column!r}": text for column, text in values.items()})
            return Example(values, None, location)

        return read_rows(self.pairs, (self.anchor_column, self.positive_column), make=example)


def main(settings: MineNegativesSettings) -> None:
    """Write the output file."""
    from bert_tf.storage.files import atomic_writer
    from bert_tf.storage.ownership import sole_output

    def pairs():
        for row in raise_bad_rows(settings.read_pairs()):
            yield tuple(row.texts.values())

    rows = raise_bad_rows(read_rows(settings.corpus, (settings.text_column,)))
    corpus = [str(row.texts[settings.text_column]) for row in rows]
    count = found = incomplete = 0
    with sole_output(settings.output, settings.overwrite), atomic_writer(settings.output) as lines:
        embedder = open_embedder(settings.run)
        command.log(embedder.record["origin"])
        for mined in mine_negatives(
            embedder,
            corpus,
            pairs,
            num_negatives=settings.num_negatives,
            margin=settings.margin,
            top_k=settings.top_k,
            directory=os.path.dirname(os.path.abspath(settings.output)),
            log=command.log,
        ):
            lines.write(json.dumps(mined._asdict(), ensure_ascii=False) + "\n")
            count, found = count + 1, found + len(mined.negatives)
            incomplete += len(mined.negatives) < settings.num_negatives
    command.log(
        f"{settings.output}: {count:,} pairs with {found / count:.1f} negatives on average; "
        f"{incomplete:,} have fewer than {settings.num_negatives}"
    )


if __name__ == "__main__":
    command.run_main(main, MineNegativesSettings, __doc__)
