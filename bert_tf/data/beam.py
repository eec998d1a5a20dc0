"""Shards on Apache Beam, where one machine ends: the same function, number -> file.

Workers read the text and write the shards themselves, so input and output have to be paths that all
of them see.
"""

import contextlib
import shlex

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from bert_tf.command import import_tensorflow

# In this process. Beam's own default would download a program first.
DEFAULT_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


@contextlib.contextmanager
def on_beam(settings, vocabulary, tokenizer):
    """Gives a function: tasks (number, spans) -> nothing more, once all their shards are there.

    `settings.beam_args` are options as on Beam's command line, such as --runner=FlinkRunner.
    """
    options = PipelineOptions(shlex.split(settings.beam_args))
    standard = options.view_as(StandardOptions)
    standard.runner = standard.runner or DEFAULT_RUNNER

    def make(tasks):
        with beam.Pipeline(options=options) as pipeline:
            (
                pipeline
                | "Tasks" >> beam.Create(list(tasks))
                | "Spread" >> beam.Reshuffle()
                | "Write" >> beam.ParDo(_WriteShard(settings, vocabulary, tokenizer))
            )
        yield from ()

    yield make


class _WriteShard(beam.DoFn):
    """Makes a shard an element; a worker builds its tokenizer once."""

    def __init__(self, settings, vocabulary, tokenizer):
        self._arguments = (settings, vocabulary, tokenizer)

    def setup(self):
        import_tensorflow()
        from bert_tf.data.shards import ShardWriter

        self._writer = ShardWriter(*self._arguments)

    def process(self, task):
        number, spans = task
        self._writer.write(number, spans)
        return []
