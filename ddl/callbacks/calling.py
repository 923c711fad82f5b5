"""Calls of a run's callbacks, and what a run does with their results."""

import math
import numbers
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ddl.callbacks.fingerprint import Fingerprint
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
        raise ConfigError(
            f"{where} must be a list of callbacks, got {callbacks!r:.60}. Write [callback] for one."
        )
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


def names_of(callbacks: Sequence[Callback]) -> list[str]:
    """Returns the name of each callback; a number follows the name of a further one."""
    names = [one.name for one in callbacks]
    counts = [names[:index].count(name) + 1 for index, name in enumerate(names)]
    return [name if n == 1 else f"{name} {n}" for name, n in zip(names, counts, strict=True)]


class Calls:
    """The callbacks of a run. Eager, cross-replica context, on all workers.

    Attributes:
      actions: The callbacks between loops, as `Trainer.train` takes them.
      reason: Why a callback ends the run, as it told this worker; valid after `ending`.
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
        self._fingerprint = Fingerprint(trainer)
        self._workers = Workers(trainer.strategy)
        self._media = media if self._workers.is_chief else None
        self._log = log
        self._training_figures = training_figures
        self._after_evaluation = [x for x in callbacks if isinstance(x, AfterEvaluation)]
        self._after_save = [x for x in callbacks if isinstance(x, AfterSave)]
        periodic = [x for x in callbacks if isinstance(x, Every)]
        self.actions: list[Action] = [_Multiples(x.steps, self._caller(x)) for x in periodic]
        self._callbacks = callbacks
        self._ended_by: int | None = None  # index of a callback
        self._stops = False
        self.reason = ""

    @property
    def follow_saves(self) -> bool:
        """Whether a callback is called after saves."""
        return bool(self._after_save)

    def ending(self) -> str | None:
        """Returns the name of the callback that ends the run, on any worker; None if none does.

        The name, of `names_of`, is the same on all workers.
        """
        if not self._callbacks:
            return None
        own = -1 if self._ended_by is None else self._ended_by
        of_workers = self._workers.gather(np.array([own]))[:, 0]
        if (of_workers < 0).all():
            return None
        name = names_of(self._callbacks)[int(of_workers[of_workers >= 0][0])]
        if self._ended_by is None:
            self.reason = f"the callback {name} of another worker ends it"
        return name

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

    def stop(self) -> None:
        """Ends the loop after this step, to end the run: a rewind to an earlier step forgets it."""
        self._stops = True
        self._trainer.request_stop()

    def forget_end(self) -> None:
        """Drops this worker's requests by callbacks and `stop` to end the run, as a rewind does.

        A request from elsewhere, such as a signal's, stays if there are no others; else repeat it.
        """
        self._ended_by = None
        if self._stops:
            self._stops = False
            self._trainer.withdraw_stop()

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
        place = next(i for i, one in enumerate(self._callbacks) if one is callback)

        def end(reason: str) -> None:
            if checkpoint is not None:
                raise ConfigError(
                    f"The callback {name} ends the run after a save, which the checkpoint does "
                    "not hold. End it in Every or AfterEvaluation."
                )
            self._ended_by = place
            self.reason = f"{name}: {reason}"
            self.stop()

        media = Media(self._media, trainer.step, split, name)
        draws_as = names_of(self._callbacks)[place]  # two of one name draw other numbers
        moment = Moment(trainer, figures, media, end, draws_as, checkpoint)
        must_keep = by_chief or checkpoint is not None
        holder = callback.holder
        compares = callback.on == "all" and self._workers.number > 1 and not must_keep
        before = self._fingerprint(holder) if must_keep or compares else []
        with ExitStack() as stack:
            stack.enter_context(trainer.busy())
            if by_chief:
                stack.enter_context(alone(trainer.strategy, f"the callback {name} (on='chief')"))
            returned = callback.function(moment)
        if must_keep and self._fingerprint(holder) != before:
            raise ConfigError(
                f"The callback {name} changed what a checkpoint holds, but "
                + (
                    "runs on the chief alone, so the workers would differ. Pass on='all'."
                    if by_chief
                    else "after the save, so a resumed run would lose it. Use Every."
                )
            )
        if compares:
            self._check_same(name, before, self._fingerprint(holder))
        values = _checked(callback, returned, trainer)
        if values and checkpoint is not None:
            raise ConfigError(
                f"The callback {name} returned figures after a save; a killed run would lose "
                "them. Return them from Every or AfterEvaluation."
            )
        if values:
            self._log(trainer.step, split, values)

    def _check_same(self, name: str, before: Sequence[float], after: Sequence[float]) -> None:
        """Checks that a callback has made the same changes on all workers.

        Raises:
          ConfigError: On all workers, if one made others.
        """
        # What it did not change may differ, such as a statistic that each worker keeps.
        changes = [
            (index, value)
            for index, value in enumerate(after)
            if index >= len(before) or value != before[index]
        ]
        own = zlib.crc32(repr((len(after), changes)).encode())
        of_workers = self._workers.gather(np.array([own]))[:, 0]
        if (of_workers == of_workers[0]).all():
            return
        self._workers.barrier()
        other = int(np.argmax(of_workers != of_workers[0]))
        raise ConfigError(
            f"The callback {name} changed what a checkpoint holds on worker {other} otherwise than "
            "on worker 0, so each would train on its own. Make the same changes on all workers: "
            "draw random numbers from moment.random, and use neither the time nor "
            "moment.is_chief."
        )


class _Multiples:
    """Calls a function only at the multiples of a number of steps; an `Action`."""

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
