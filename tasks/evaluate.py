"""Evaluate a fine-tuned run on labelled rows; the last line of stdout is a JSON object of metrics.

    bert-tf evaluate --run=RUN --data=dev.csv
    bert-tf evaluate --run=RUN --data=scifact

A directory of BEIR (corpus.jsonl, queries.jsonl, qrels/test.tsv) evaluates an embedder by an exact
search of all documents.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.storage import paths, strict_json
from bert_tf.system import command
from tasks.base.task_types import check_run, read_file
from tasks.data.readers.retrieval import RetrievalDataset, read_qrels
from tasks.data.readers.rows import FileRows, check_good
from tasks.prediction.retrieval import check_embedder, evaluate_retrieval, open_embedder


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """Flags of the command."""

    run: str = command.flag("run directory, or another fine-tuned model: a --from of convert")
    data: str = command.flag(
        "labelled rows in the format of the training file, or a directory of BEIR"
    )
    qrels: str | None = command.flag(
        "relevance judgements, of BEIR or TREC; by default qrels/test.tsv in --data", None
    )
    checkpoint: str | None = command.flag(
        "directory name in RUN/checkpoints; by default the best, else the latest", None
    )

    def __post_init__(self):
        paths.check_local("data", self.data)
        if self.is_retrieval:
            RetrievalDataset.open(self.data, self.qrels)
            return
        paths.check_local_file("data", self.data)
        if self.qrels is not None:
            raise UserError(f"--qrels: expected a directory of BEIR, received --data={self.data}")

    @property
    def is_retrieval(self) -> bool:
        """Whether the data are queries and documents."""
        return os.path.isdir(self.data)

    def check(self) -> FileRows | None:
        """Check the run and the data without TensorFlow; raises UserError.

        Returns:
            The rows of the file, or `None` for retrieval and for models that are read later: of
            other libraries, and remote ones.
        """
        if self.is_retrieval:
            check_embedder(self.run, self.checkpoint)
            dataset = RetrievalDataset.open(self.data, self.qrels)
            relevance = read_qrels(dataset.qrels)
            dataset.judged_queries(relevance)
            if warning := dataset.check_documents(relevance):
                command.log(f"warning: {warning}")
            return None
        run = check_run(self.run, self.checkpoint)
        if run is None or run.task is None:
            return None
        rows = read_file(run.task, self.data)
        check_good(rows)
        return rows


def main(settings: EvaluateSettings, rows: FileRows | None = None) -> None:
    """Print the metrics and tables of the run on the data, of which `rows` have been read."""
    if settings.is_retrieval:
        _evaluate_retrieval(settings)
        return
    from bert_tf.train.distribution import use_precision
    from tasks.model.loading import load_model

    use_precision("float32")
    model = load_model(settings.run, checkpoint=settings.checkpoint)
    where = model.source.path if model.source else model.record["origin"]
    command.log(f"{where}: evaluating on {settings.data}")
    if model.source and model.source.untuned:
        command.log(f"warning: {model.source.untuned}")
    examples = model.task.load_examples(rows or settings.data)
    if examples.skipped_rows:
        command.log(examples.skipped_rows_message())
    encoded = model.encode_examples(examples)
    for line in encoded.token_counts.warnings(settings.data, allows_unknown=True):
        command.log(f"warning: {line}")
    for line in model.task.label_warnings(encoded):
        command.log(f"{settings.data}: {line}")
    evaluator = model.evaluator()
    evaluator.log = command.log
    report = evaluator.report(encoded)
    warning = model.task.warning(report)
    if warning:
        command.log(f"warning: {warning}")
    print(strict_json.dumps_result(report, where))


def _evaluate_retrieval(settings):
    dataset = RetrievalDataset.open(settings.data, settings.qrels)
    relevance = read_qrels(dataset.qrels)
    command.log(f"{settings.run}: evaluating on {len(relevance):,} queries of {dataset.qrels}")
    embedder = open_embedder(settings.run, settings.checkpoint)
    command.log(embedder.record["origin"])
    metrics = evaluate_retrieval(embedder, dataset, relevance, command.log)
    print(strict_json.dumps_result(metrics, settings.run))


if __name__ == "__main__":
    command.run_main(main, EvaluateSettings, __doc__)
