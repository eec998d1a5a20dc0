"""Settings of the command: the flags of fine-tuning, of sweeps and of dry runs.

The module is free of TensorFlow, as tasks/finetuning/settings.py.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.planning.devices import PlannedDevices
from bert_tf.runs.run import Run
from bert_tf.system.command import flag
from tasks.finetuning.settings import FinetuneSettings
from tasks.training.settings import format_number


@dataclasses.dataclass(frozen=True)
class SweepSettings(PlannedDevices, FinetuneSettings):
    """Settings of tasks.finetune: one run, or a sweep over `seeds` and `learning_rates`.

    The runs of a sweep are subdirectories of `output_dir`, named after the values that differ.
    """

    seeds: tuple[int, ...] = flag(
        "seeds of a sweep: one run per seed, with mean and standard deviation of the dev scores", ()
    )
    learning_rates: tuple[float, ...] = flag(
        "learning rates of a sweep, each combined with every seed", ()
    )
    dry_run: bool = flag(
        "check files, weights and the output directory, create nothing, and print an estimate",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_planned(self.dry_run, self.strategy, self.global_batch_size)
        for name, of_one, number, expected in (
            ("seeds", "seed", int, "integers"),
            ("learning_rates", "learning_rate", float, "numbers"),
        ):
            given = getattr(self, name)
            if not given:
                continue
            try:
                values = tuple(number(value) for value in given)
            except ValueError:
                raise UserError(
                    f"--{name}={','.join(map(str, given))}: expected {expected}, joined by commas"
                ) from None
            if len(set(values)) < len(values):
                raise UserError(f"--{name}={','.join(map(str, given))}: expected distinct values")
            if of_one in self._given():
                raise UserError(f"--{of_one}: cannot be combined with --{name}")
            if not self.dev:
                raise UserError(f"--{name}: requires --dev, on which the runs are compared")
            object.__setattr__(self, name, values)
        self.runs()  # Reports a value that is invalid for a run now, not when its turn comes.

    def _check_output(self):
        if self.is_sweep:
            self.check_is_no_run()
        for settings in self.runs().values():
            FinetuneSettings._check_output(settings)

    def check_is_no_run(self) -> None:
        """Check the output directory of a sweep.

        Raises:
            UserError: If it contains a single run.
        """
        if Run.exists(self.output_dir):
            raise UserError(
                f"--output_dir={self.output_dir}: contains a single run; choose a new directory"
            )

    @property
    def is_sweep(self) -> bool:
        """Whether the flags ask for several runs."""
        return bool(self.seeds or self.learning_rates)

    def runs(self) -> dict[str, FinetuneSettings]:
        """Return the settings per run, by the run's name.

        They are in the order of the flags, learning rates first. A single run has the name "".
        """
        if not self.is_sweep:
            return {"": FinetuneSettings(**self.recorded(), output_dir=self.output_dir)}
        runs = {}
        for rate in self.learning_rates or (self.learning_rate,):
            for seed in self.seeds or (self.seed,):
                name = f"seed-{seed}"
                if self.learning_rates:
                    name = f"learning_rate-{format_number(rate)}-{name}"
                output_dir = os.path.join(self.output_dir, name)
                changes = {"learning_rate": rate, "seed": seed, "output_dir": output_dir}
                runs[name] = FinetuneSettings(**{**self.recorded(), **changes})
        return runs
