"""Figures of time and memory of a run, beside those of its training."""

from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from ddl.diagnosis.times import Times
from ddl.distribution.workers import Workers
from ddl.figures import is_measured
from ddl.run.timing.goodput import Goodput, line
from ddl.run.timing.machine import Gpus, memory_of_process
from ddl.run.timing.split import PeriodSplit, split_off
from ddl.run.writers import Writer
from ddl.training.trainer import Trainer


class Monitor:
    """Time and memory of a run. Eager, on all workers; only the chief keeps the goodput."""

    def __init__(
        self,
        trainer: Trainer,
        times: Times,
        goodput: Path | None,
        began: float,
        report: Callable[[str], None],
    ):
        """Begins to measure at the trainer's step; writes nothing.

        Args:
          trainer: The trainer, restored.
          times: The seconds of this process, counted since the run was called.
          goodput: File of the run's whole life; None on workers other than the chief, and for a run
            without a directory.
          began: When the command began, in seconds since 1970.
          report: Prints a line.
        """
        earlier = trainer.seconds_of_input or 0.0  # of calls before this run

        def seconds() -> Mapping[str, float]:
            waited = trainer.seconds_of_input
            return split_off(times.seconds(), None if waited is None else waited - earlier)

        workers = Workers(trainer.strategy)
        self._split = PeriodSplit(seconds, workers, trainer.step, report)
        self._goodput = None if goodput is None else Goodput(goodput, began, seconds, report)
        self._gpus = Gpus([device.name for device in tf.config.get_visible_devices("GPU")])
        self._shows = workers.is_chief
        self.begin(trainer.step)

    def begin(self, step: int) -> None:
        """Begins to count updates from a step on, as after a rewind."""
        if self._goodput is not None:
            self._goodput.begin(step)

    def loop_ended(self, step: int) -> None:
        """Notes that the training loop has reached a step."""
        if self._goodput is not None:
            self._goodput.loop_ended(step)

    def figures(self, step: int) -> dict[str, float]:
        """Returns the figures of the period that ends at a step. Call it on all workers."""
        found = self._split.figures(step)
        return {**found, **memory_of_process(), **self._gpus.figures()} if self._shows else found

    def close(self) -> str | None:
        """Writes the goodput, and returns it as a line; None if it is not kept."""
        if self._goodput is None:
            return None
        self._goodput.write()
        return line(self._goodput.life)


class WithoutMeasured:
    """Passes a writer the figures of the training, and not those of time and memory."""

    def __init__(self, writer: Writer):
        """Keeps the writer."""
        self._writer = writer

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        kept = {name: value for name, value in values.items() if not is_measured(name)}
        self._writer.write(step, epoch, split, kept)

    def drop_after(self, last_step: int) -> None:
        """See `Writer`."""
        self._writer.drop_after(last_step)

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()
