"""Functions of the user's that a run calls between its loops, and the early end of a run."""

import dataclasses
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.checkpoints.contents import checksums, some, values_of
from ddl.choices import check_count
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, check_takes, definition_of
from ddl.figures import Direction, direction_of, is_reserved
from ddl.metrics.history import History
from ddl.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of a run at which a callback is called. Eager, cross-replica context.

    `tf.summary.image`, `text`, `histogram` and `scalar` write to the TensorBoard files of the run,
    at its step; on workers other than the chief they do nothing.

    Attributes:
      trainer: The trainer. A callback may read it, evaluate, predict, and assign to the variables
        of its task and to the learning rate; it must not train or restore.
      step: Number of updates made.
      epoch: Passes over the training data.
      is_chief: Whether this process writes the run's files.
      figures: Loss and metrics: of the evaluation, or of training since the last log.
      checkpoint: After a save, the checkpoint's path without the endings of its files; else None.
    """

    trainer: Trainer
    step: int
    epoch: float
    is_chief: bool
    figures: dict[str, float]
    checkpoint: Path | None = None


Function = Callable[[Event], Mapping[str, float] | None]


class Callback:
    """A function that a run calls between loops on the devices.

    Attributes:
      function: The function, of an `Event`. It may return figures by name, which are logged.
    """

    def __init__(self, function: Function):
        """Checks the function.

        Args:
          function: A function of one argument, an `Event`. An object may be one, by `__call__`.
            Checkpoints hold none of its attributes: keep a state in a `tf.Variable` of the task.
            All workers of a cluster call it and must make the same changes; for work that one
            process does, such as a message, check `event.is_chief`.

        Raises:
          ConfigError: If the function takes other arguments, or its object has variables.
        """
        if isinstance(function, type):
            raise ConfigError(
                f"{type(self).__name__}.function must be a function of (event), got the class "
                f"{function.__name__}. Pass an object of it; in gin, write @{function.__name__}()."
            )
        check_takes(f"{type(self).__name__}.function", function, ("event",))
        own = getattr(getattr(function, "__self__", function), "__dict__", {}).items()
        if lost := [name for name, value in own if isinstance(value, tf.Variable | keras.Variable)]:
            raise ConfigError(
                f"{definition_of(function)} has the variable {lost[0]}, which no checkpoint holds. "
                "Keep it in an attribute of the task, and reach it by event.trainer.task."
            )
        self.function = function

    def __call__(self, event: Event) -> dict[str, float]:
        """Calls the function, and returns its figures.

        Raises:
          ConfigError: If it returned something else than None or numbers by name, a figure has the
            name of one of the run's own, an `AfterSave` returned any, or the function trained.
        """
        trainer = event.trainer
        returned = self.function(event)
        own = {*trainer.metric_names, *trainer.eval_metric_names}
        try:
            figures = {name: float(value) for name, value in dict(returned or {}).items()}
            fault = next((f"the name {n!r}" for n in figures if n in own or is_reserved(n)), "")
        except (TypeError, ValueError):
            fault = f"{returned!r:.60}"
        if returned and event.checkpoint is not None:
            fault = "figures of an AfterSave, which a killed run would lose"
        if fault:
            raise ConfigError(
                f"{definition_of(self.function)} must return None, or a dict from names that the "
                f"run does not use, such as 'other/loss', to numbers, got {fault}."
            )
        return figures


class Every(Callback):
    """Calls a function at each multiple of a number of steps.

        ddl.fit(trainer, train_epochs=5, callbacks=[Every(1000, show)])

    The loop on the devices ends at these steps, and nowhere else for it. The function is called
    after an evaluation of the same step and before a save, so a checkpoint holds what it changed.
    """

    def __init__(self, steps: int, function: Function):
        """Checks the arguments.

        Args:
          steps: Number of updates between calls, at least 1.
          function: See `Callback`.

        Raises:
          ConfigError: If `steps` is not an integer of at least 1, or as `Callback`.
        """
        check_count("Every.steps", steps)
        super().__init__(function)
        self.steps = steps


class AfterEvaluation(Callback):
    """Calls a function after each evaluation of the run, also after the one at its end."""


class AfterSave(Callback):
    """Calls a function after each save, when the checkpoint's files are on disk.

    The run waits for the files. A function that changes a variable of the trainer, or returns
    figures, is an error: the checkpoint would not hold them.
    """


@contextmanager
def checked_changes(callback: Callback, event: Event) -> Iterator[None]:
    """Compares what a checkpoint holds before and after the `with` block, which calls a callback.

    Eager, cross-replica context, on all workers. Slots in shares are not compared.

    Args:
      callback: The callback.
      event: Its event.

    Raises:
      ConfigError: On all workers, if an `AfterSave` changed a variable on one, or the changes
        differ between workers.
    """
    trainer, workers = event.trainer, Workers(event.trainer.strategy)
    if event.checkpoint is None and workers.number == 1:
        yield
        return
    values = values_of(trainer)
    before = checksums(values)
    yield
    of_each = zip(values, before, checksums(values), strict=True)
    changes = [(value.path, now) for value, was, now in of_each if was != now]
    name = f"The callback {definition_of(callback.function)}"
    changed = some([path for path, _ in changes], 3) or "nothing"
    with workers.failing_together():
        if changes and event.checkpoint is not None:
            raise ConfigError(
                f"{name} changed {changed} after the save, which a resumed run would lose. Change "
                "it in Every or AfterEvaluation, which come before the save."
            )
    own = zlib.crc32(repr(changes).encode())
    of_workers = workers.gather(np.array([float(own)]))[:, 0]
    for worker in np.flatnonzero(of_workers != of_workers[0])[:1]:
        workers.barrier()
        raise ConfigError(
            f"{name} must make the same changes on all workers, but those of worker {worker} and 0 "
            f"differ, here {changed}. Use no time, no event.is_chief and no draw without a seed."
        )


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` evaluations in a row that do not improve on the best before.

    A resumed run counts the earlier evaluations too: those of metrics.jsonl, or those of the
    trainer's history in a run without a directory.

    Attributes:
      metric: Figure of the evaluations, such as `accuracy`.
      patience: Number of evaluations, at least 1.
      mode: `max` or `min`; None takes the smallest loss or the largest accuracy. Any other metric
        requires it.

    Raises:
      ConfigError: If `patience` is not an integer of at least 1, or `mode` is missing or wrong.
    """

    metric: str = "loss"
    patience: int = 3
    mode: Direction | None = None

    def __post_init__(self) -> None:
        check_count("EarlyStopping.patience", self.patience)
        direction_of(self.metric, self.mode, "EarlyStopping.mode")

    def reason_to_end(self, history: History, every: int) -> str:
        """Returns why a run ends now; "" if it does not.

        Args:
          history: The figures of the run. Counted are evaluations at multiples of `every`, of
            updates.
          every: Period of the evaluations.
        """
        due = range(every, sys.maxsize, every)
        rows = [x for x in history if x["split"] == "eval" and x["step"] in due]
        values = [float(row.get(self.metric, math.nan)) for row in rows]
        falls = direction_of(self.metric, self.mode, "EarlyStopping.mode") == "min"
        finite = [place for place, value in enumerate(values) if math.isfinite(value)]
        best = max(finite, key=lambda place: (1 - 2 * falls) * values[place], default=-1)
        if len(rows) - 1 - best < self.patience:
            return ""
        if best < 0:
            return f"{self.metric} was not a number in {self.patience} evaluations"
        return (
            f"{self.metric} has not improved on {values[best]:.6g}, of step "
            f"{rows[best]['step']:,}, in {self.patience} evaluations"
        )


def checked_callbacks(callbacks: Any) -> tuple[Callback | EarlyStopping, ...]:
    """Returns callbacks as a tuple.

    Raises:
      ConfigError: If it holds something else, such as a function.
    """
    given = tuple(callbacks) if isinstance(callbacks, list | tuple) else (callbacks,)
    other = next((one for one in given if not isinstance(one, Callback | EarlyStopping)), None)
    if other is not None or not isinstance(callbacks, list | tuple):
        raise ConfigError(
            "callbacks must be a list of Every, AfterEvaluation, AfterSave or EarlyStopping, "
            f"got {other or callbacks!r:.60}. Keras's do not work: see docs/migrating.md. For a "
            "function, write [Every(100, function)]."
        )
    return given
