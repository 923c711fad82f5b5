"""The checkpoint that a trainer is at: the one that it saved or restored last."""

import os
import weakref
from typing import Any, NamedTuple

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.training.trainer import Trainer


class Point(NamedTuple):
    """Where a trainer is: different after an update, after a skipped batch, and after a restore."""

    step: int
    batches: int
    restores: int

    @classmethod
    def of(cls, trainer: Trainer) -> "Point":
        """Returns the point that a trainer is at."""
        return cls(trainer.step, int(trainer.state.batches), trainer.restores)


# Trainers that saved or restored a checkpoint, with the point and the file of the last one.
_HELD: weakref.WeakKeyDictionary[Trainer, tuple[Point, Any]] = weakref.WeakKeyDictionary()


def note(trainer: Trainer, point: Point, prefix: str) -> None:
    """Notes that a trainer had the values of a checkpoint.

    Args:
      trainer: The trainer.
      point: The point that the trainer was at.
      prefix: Path of the checkpoint on disk, without the file endings.
    """
    _HELD[trainer] = (point, _file(prefix))


def are_at(trainer: Trainer, prefix: str, workers: Workers) -> bool:
    """Returns whether the trainer of the chief is at a checkpoint, and those of all are whole.

    A trainer is at a checkpoint if it saved or restored it, and has not moved since. Variables that
    were assigned by hand, such as the learning rate, do not count. Call it on all workers.

    Args:
      trainer: The trainer of this worker.
      prefix: Path of the checkpoint on disk, without the file endings.
      workers: The workers of the trainer's strategy.
    """
    is_at = _HELD.get(trainer) == (Point.of(trainer), _file(prefix))
    return bool(workers.broadcast(is_at)) and not workers.any(not _is_whole(trainer))


def _is_whole(trainer: Trainer) -> bool:
    """Returns whether model, optimizer and state of a trainer belong to the same step."""
    try:
        trainer.check_consistent()
    except ConfigError:
        return False
    return True


def _file(prefix: str) -> Any:
    """Returns what differs if another run has written the checkpoint of this step anew."""
    try:
        stat = os.stat(f"{prefix}.index")
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
