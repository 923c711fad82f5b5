"""Calls of a run's callbacks, and what a run does with their results."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddl.callbacks.fingerprint import fingerprint
from ddl.callbacks.moment import Media, MediaWriter, Moment
from ddl.callbacks.schedule import AfterEvaluation, AfterSave, Callback, Every
from ddl.distribution.workers import Workers, alone
from ddl.errors import ConfigError, definition_of
from ddl.figures import is_reserved
from ddl.training.actions import Action
from ddl.training.trainer import Trainer

_Log = Callable[[int, str, Mapping[str, float]], None]


def checked_callbacks(callbacks: Any, where: str, *others: type) -> tuple[Any, ...]:
    """Returns callbacks as a tuple.

    Args:
      callbacks: A sequence of callbacks.
      where: Name of the argument for the error.
      *others: Further types that the sequence may hold.

    Raises:
      ConfigError: If it holds something else, such as a function.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"{where} must be a list of callbacks, got {callbacks!r:.60}.")
    for one in callbacks:
        if not isinstance(one, (Callback, *others)):
            raise ConfigError(
                f"{where} must hold Every, AfterEvaluation, AfterSave and other classes of "
                f"ddl.callbacks, got {one!r:.60}. For a function, write Every(100, function)."
            )
    return tuple(callbacks)


def holders_of(callbacks: Sequence[Callback]) -> list[object]:
    """Returns the objects of callbacks whose variables are saved, each once."""
    found = {id(one.holder): one.holder for one in callbacks if one.holder is not None}
    return list(found.values())


class Calls:
    """The callbacks of a run. Eager, cross-replica context, on all workers.

    Attributes:
      actions: The callbacks between loops, as `Trainer.train` takes them.
      reason: Why a callback ends the run, as it told this worker.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        trainer: Trainer,
        media: MediaWriter | None,
        log: _Log,
        training_figures: Callable[[], Mapping[str, float]],
    ):
        """Keeps the arguments.

        Args:
          callbacks: The callbacks, in the order of their calls.
          trainer: The trainer.
          media: Writes to TensorBoard on the chief; None writes nothing.
          log: Logs figures that a callback returns, of a step and a split.
          training_figures: Returns the figures of training since the last log.
        """
        self._trainer = trainer
        self._workers = Workers(trainer.strategy)
        self._media = media if self._workers.is_chief else None
        self._log = log
        self._training_figures = training_figures
        self._after_evaluation = [x for x in callbacks if isinstance(x, AfterEvaluation)]
        self._after_save = [x for x in callbacks if isinstance(x, AfterSave)]
        periodic = [x for x in callbacks if isinstance(x, Every)]
        self.actions: list[Action] = [_Multiples(x.steps, self._caller(x)) for x in periodic]
        self._any = bool(callbacks)
        self._ended_by: str | None = None
        self.reason = "a callback of another worker ends it"

    @property
    def follow_saves(self) -> bool:
        """Whether a callback is called after saves."""
        return bool(self._after_save)

    def ending(self) -> str | None:
        """Returns the name of the callback that ends the run, on any worker; None if none does."""
        if not self._any or not self._workers.any(self._ended_by is not None):
            return None
        return self._ended_by or "a callback"

    def after_evaluation(self, figures: Mapping[str, float]) -> None:
        """Calls the callbacks after an evaluation, with its figures."""
        for callback in self._after_evaluation:
            self._call(callback, "eval", lambda: figures)

    def after_save(self, checkpoint: Path) -> None:
        """Calls the callbacks after a save, whose files are on disk.

        Raises:
          ConfigError: If one changed what is trained, or returned figures.
        """
        for callback in self._after_save:
            self._call(callback, "train", self._training_figures, checkpoint)

    def forget_end(self) -> None:
        """Drops a request to end the run, as a rewind does."""
        self._ended_by = None

    def _caller(self, callback: Callback) -> Callable[[], None]:
        return lambda: self._call(callback, "train", self._training_figures)

    def _call(
        self,
        callback: Callback,
        split: str,
        figures: Callable[[], Mapping[str, float]],
        checkpoint: Path | None = None,
    ) -> None:
        """Calls a callback on the workers that it names, and logs its figures."""
        by_chief = callback.on == "chief" and self._workers.number > 1
        if callback.on == "chief" and not self._workers.is_chief:
            return
        trainer, name = self._trainer, callback.name

        def end(reason: str) -> None:
            if checkpoint is not None:
                raise ConfigError(
                    f"The callback {name} ends the run after a save, which the checkpoint does "
                    "not hold. End it in Every or AfterEvaluation."
                )
            self._ended_by, self.reason = name, f"{name}: {reason}"
            trainer.request_stop()

        media = Media(self._media, trainer.step, split)
        moment = Moment(trainer, figures, media, end, name, checkpoint)
        must_keep = by_chief or checkpoint is not None
        holder = callback.holder
        before = fingerprint(trainer, holder) if must_keep else None
        with ExitStack() as stack:
            stack.enter_context(trainer.busy())
            if by_chief:
                stack.enter_context(alone(trainer.strategy, f"the callback {name} (on='chief')"))
            returned = callback.function(moment)
        if must_keep and fingerprint(trainer, holder) != before:
            raise ConfigError(
                f"The callback {name} changed what a checkpoint holds, but "
                + (
                    "runs on the chief alone, so the workers would differ. Pass on='all'."
                    if by_chief
                    else "after the save, so a resumed run would lose it. Use Every."
                )
            )
        values = _checked(callback, returned, trainer)
        if values and checkpoint is not None:
            raise ConfigError(
                f"The callback {name} returned figures after a save; a killed run would lose "
                "them. Return them from Every or AfterEvaluation."
            )
        if values:
            self._log(trainer.step, split, values)


class _Multiples:
    """Calls a function at the multiples of a number of steps alone; an `Action`."""

    def __init__(self, steps: int, function: Callable[[], None]):
        self._steps = steps
        self._function = function

    def next_step(self, step: int) -> int:
        return (step // self._steps + 1) * self._steps

    def __call__(self, step: int) -> None:
        if step % self._steps == 0:
            self._function()


def _checked(callback: Callback, returned: Any, trainer: Trainer) -> dict[str, float]:
    """Returns the figures that a callback returned, as floats.

    Raises:
      ConfigError: If it returned something else than None or numbers by name, or a figure of the
        name of one of the run's own.
    """
    if returned is None:
        return {}
    wanted = f"{definition_of(callback.function)} must return None, or a dict from name to number"
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{wanted}, got {returned!r:.60}.")
    own = {*trainer.metric_names, *trainer.eval_metric_names}
    values = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{wanted}, got the name {name!r:.60}. Use another name.")
        if name in own or is_reserved(name):
            raise ConfigError(
                f"{wanted}, got the name {name!r:.60}, which a figure of the run itself has. "
                f"Return it with a prefix, such as 'other/{name:.60}'."
            )
        try:
            values[name] = float(value)
        except (TypeError, ValueError):
            values[name] = math.nan
            is_number = False
        else:
            is_number = isinstance(value, numbers.Number) or hasattr(value, "dtype")
        if not is_number:
            raise ConfigError(f"{wanted}, got {value!r:.60} for {name!r}.")
    return values
