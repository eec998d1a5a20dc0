"""Shards on Apache Beam, where one machine ends: the same function, number -> file.

Workers read the text and write the shards themselves, so input and output have to be paths that all
of them see.
"""

import contextlib
import io
import logging
import shlex

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.runner import create_runner

from bert_tf.command import import_tensorflow
from bert_tf.errors import UserError

# In this process. Beam's own default would download a program first.
DEFAULT_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


@contextlib.contextmanager
def run_on_beam(settings, vocabulary, tokenizer, plan_sha256, num_tasks):
    """Gives a function: tasks (number, spans) -> nothing more, once all their shards are there.

    `settings.beam_args` are options as on Beam's command line, such as --runner=FlinkRunner.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()) as captured:
            options = PipelineOptions(shlex.split(settings.beam_args))
            standard = options.view_as(StandardOptions)
            standard.runner = standard.runner or DEFAULT_RUNNER
            runner = create_runner(standard.runner)
    except (ValueError, ImportError, AttributeError, SystemExit) as error:
        lines = (captured.getvalue() or str(error)).strip().splitlines()
        raise UserError(f"--beam_args={settings.beam_args}: {lines[-1]}") from None
    # Beam tells every failure four times over; it is raised, too.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)

    def make(tasks):
        arguments = (settings, vocabulary, tokenizer, plan_sha256)
        try:
            with beam.Pipeline(runner=runner, options=options) as pipeline:
                (
                    pipeline
                    | "Tasks" >> beam.Create(list(tasks))
                    | "Spread" >> beam.Reshuffle()
                    | "Write" >> beam.ParDo(_WriteShard(*arguments))
                )
        except Exception as error:
            # A runner wraps what a worker raised, in ways of its own.
            raise UserError(
                f"--runner=beam: {_last_line(error)}; the same command goes on"
            ) from error
        yield from ()

    yield make


def _last_line(error):
    """What a worker raised: the innermost cause, by its last line that says something."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1].strip()


class _WriteShard(beam.DoFn):
    """Makes a shard an element; a worker builds its tokenizer once."""

    def __init__(self, *arguments):
        self._arguments = arguments

    def setup(self):
        import_tensorflow()
        from bert_tf.data.shards import ShardWriter

        self._writer = ShardWriter(*self._arguments)

    def process(self, task):
        number, spans = task
        self._writer.write(number, spans)
        return []
