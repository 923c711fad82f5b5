"""Saving a Trainer to checkpoints, and restoring it from them."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import tensorflow as tf
from absl import logging

from ddl.checkpoints import current
from ddl.checkpoints.contents import check_covers
from ddl.checkpoints.directory import CheckpointDirectory, Metadata, SavedCheckpoint
from ddl.checkpoints.durable_files import be_polite
from ddl.checkpoints.finding import checked_or_newest, newest_undamaged
from ddl.checkpoints.of_callbacks import OfCallbacks
from ddl.checkpoints.parts import TRAINING_ALONE, parts_for_evaluation, parts_for_training
from ddl.checkpoints.restoring import assign, check_fits, metadata_of, take_over
from ddl.checkpoints.retention import Retention
from ddl.checkpoints.snapshot import Snapshots
from ddl.distribution.workers import Workers
from ddl.errors import ModelDirectoryError
from ddl.step.state import TrainingState
from ddl.training.state_checks import check_same_on_replicas
from ddl.training.trainer import Trainer


class Checkpoints:
    """The checkpoints of one run: model, optimizer and training state, numbered by step.

    The variables in a checkpoint do not depend on the strategy, so a run can resume under another
    one. A thread writes the files while training continues, one checkpoint at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        trainer: Trainer,
        retention: Retention | None = None,
        report: Callable[[str], None] = logging.warning,
        before_write: Callable[[], None] = lambda: None,
        callbacks: Sequence[object] = (),
    ):
        """Sets up saving and restoring. Creates no file or folder.

        Args:
          directory: Folder of the checkpoints.
          trainer: The Trainer to save and restore.
          retention: Which checkpoints to keep; None keeps the last three.
          report: Called with a message, from any thread, when a checkpoint could not be written
            or a damaged one was skipped or set aside.
          before_write: Called by the writer thread before it writes. If it raises a
            ModelDirectoryError, the checkpoint counts as not written.
          callbacks: Objects of the run whose variables are saved too.

        Raises:
          ConfigError: If a variable of the task has no name that is the same in every process.
        """
        self._directory = CheckpointDirectory(directory)
        self._trainer = trainer
        self._retention = retention or Retention()
        self._report = report
        self._before_write = before_write
        # The loop keeps the state in tensors; a checkpoint can only save variables.
        self._state = TrainingState(*(tf.Variable(v, trainable=False) for v in trainer.state))
        # The model parts are enough for evaluation and export; training needs the rest too.
        self._model = parts_for_evaluation(trainer)
        self._checkpoint = tf.train.Checkpoint(
            **self._model,
            **parts_for_training(trainer, callbacks),
            state=self._state._asdict(),
        )
        self._of_callbacks = OfCallbacks(callbacks, self._checkpoint)
        self._snapshots: Snapshots | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint", be_polite)
        # The result is the error message, if any. An exception would keep the tensors alive.
        self._writing: Future[str | None] | None = None
        self._held_step: int | None = None  # step of the last save or restore
        self._workers = Workers(trainer.strategy)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self._directory.path

    def saved(self) -> list[SavedCheckpoint]:
        """Waits for a write in progress, then returns the checkpoints on disk, sorted by step."""
        self.wait()
        return self._directory.saved()

    def best(self) -> SavedCheckpoint | None:
        """Returns the best checkpoint by the retention's metric; None if none was evaluated."""
        return self._retention.best(self.saved())

    @property
    def keeps_best(self) -> bool:
        """Whether the retention has a `best_metric`."""
        return self._retention.best_metric is not None

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether a checkpoint with these metrics would be the best so far.

        The chief decides for all workers. Eager, cross-replica context, on all workers.
        """
        if not self.keeps_best:
            return False
        # Only the chief can wait for its write; another worker might list the folder too early.
        improves = self._workers.is_chief
        with suppress(ModelDirectoryError):  # the save reports it
            improves = improves and self._retention.improves(metrics, self.saved())
        return bool(self._workers.broadcast(improves))

    def has_any(self) -> bool:
        """Returns whether the chief finds a checkpoint. Eager, cross-replica, on all workers."""
        return bool(self._workers.broadcast(self._workers.is_chief and bool(self.saved())))

    def check(self) -> None:
        """Checks that a checkpoint holds every variable that training uses.

        Call this after the trainer has traced its loop (`Trainer.trace`); before that, no variable
        is known to be in use.

        Raises:
          ConfigError: If a variable in use, or of a callback, is in no checkpoint.
        """
        self._of_callbacks.check()
        check_covers(self._checkpoint, self._trainer.variables_in_use)

    def save(
        self,
        metrics: Mapping[str, float] | None = None,
        scheduled: bool = True,
        ended_by: str | None = None,
    ) -> bool:
        """Takes a snapshot of the trainer, which a thread writes while training continues.

        Waits for the previous write. Does nothing if this step was the last one saved or restored,
        unless its write failed. A failed write is reported when it happens; `finish` raises it if
        it was the last one. Eager, cross-replica context, on all workers.

        Args:
          metrics: Metrics of an evaluation at this step.
          scheduled: Whether the run plan saves at this step. A rewind skips the other checkpoints,
            so a signal does not change the step that a diverged run rewinds to.
          ended_by: Name of the callback that ends the run here, if any.

        Returns:
          Whether it took a snapshot.

        Raises:
          ConfigError: Within the trainer's `evaluation_weights`; if model, optimizer and state are
            at different steps, or replicas differ in a variable of the task or a layer; or as
            `check` does.
        """
        trainer = self._trainer
        trainer.check_consistent()
        self.wait()
        failed = self._writing is not None and self._writing.result() is not None
        if self._held_step == trainer.step and not self._workers.any(failed):
            return False
        check_same_on_replicas(trainer.task, trainer.strategy)
        metadata = metadata_of(trainer, dict(metrics or {}), scheduled, ended_by)
        tensors = self.take()
        if self._workers.is_chief:
            at = current.Point.of(trainer)
            self._writing = self._writer.submit(self._write, at, tensors, metadata)
        self._held_step = trainer.step
        return True

    def written(self) -> Path | None:
        """Waits for the chief's write; returns its path without endings, or None if it failed."""
        self.wait()
        failed = self._writing is not None and self._writing.result() is not None
        return None if self._workers.any(failed) else self.folder / f"step-{self._held_step}"

    def wait(self) -> None:
        """Waits until no write is in progress."""
        if self._writing is not None:
            self._writing.result()

    def finish(self) -> None:
        """Waits for the last write, then removes the checkpoints that need not be kept.

        Raises:
          ModelDirectoryError: On the chief, if the last checkpoint could not be written.
        """
        self.wait()
        if self._workers.is_chief:
            self._tidy()
        if self._writing is not None and (failure := self._writing.result()):
            raise ModelDirectoryError(failure)

    def take(self) -> dict[str, tf.Tensor]:
        """Returns the tensors by name, of variables on the chief alone. Call on all workers."""
        trainer = self._trainer
        for variable, value in zip(self._state, trainer.state, strict=True):
            variable.assign(value)
        self._checkpoint.save_counter.assign(trainer.step)  # not the number of saves since a start
        if self._snapshots is None:
            self.check()
            self._snapshots = Snapshots(self._checkpoint)
        self._of_callbacks.check()
        return self._snapshots.take(self._workers.is_chief)

    def _write(
        self, point: current.Point, tensors: dict[str, tf.Tensor], metadata: Metadata
    ) -> str | None:
        # Old checkpoints could have been removed after the last write. Removing them now frees
        # memory pages that the new file reuses (benchmarks/checkpoint_cost.py).
        self._tidy()
        try:
            self._before_write()
            self._directory.write(point.step, tensors, metadata)
        except ModelDirectoryError as error:
            self._report(str(error))
            return str(error)
        current.note(self._trainer, point, self._directory.at(point.step).prefix)
        return None

    def _tidy(self) -> None:
        """Removes the checkpoints that need not be kept; reports a failure."""
        try:
            self._directory.remove(self._retention.removable(self._directory.saved()))
        except (OSError, ModelDirectoryError) as error:
            self._report(f"An old checkpoint could not be removed: {error}. Remove it by hand.")

    def restore_latest(self, scheduled: bool = False) -> SavedCheckpoint | None:
        """Restores the trainer from the newest readable checkpoint, to resume training.

        Moves newer, damaged checkpoints to `damaged/` and reports them. Eager, cross-replica
        context, on all workers.

        Args:
          scheduled: For a rewind: skip checkpoints saved on a signal, and remove all checkpoints
            newer than the restored one, since training continues differently from there.

        Returns:
          The restored checkpoint; None if there is none.

        Raises:
          ModelDirectoryError: If all checkpoints are damaged, a damaged one cannot be moved, or
            the checkpoint does not fit the trainer.
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        return self._restore(lambda: self._find_latest(scheduled), scheduled)[0]

    def resume(self) -> tuple[SavedCheckpoint | None, bool]:
        """Does as `restore_latest`, but keeps a trainer that is at the newest checkpoint as it is.

        Such a trainer saved or restored it last, and made no update since. It keeps the values
        assigned since then, such as a learning rate. The callbacks may be new and are restored.

        Returns:
          The checkpoint, or None; and whether the trainer was kept.
        """
        return self._restore(lambda: self._find_latest(False), False, keeps=True)

    def restore_best(self) -> SavedCheckpoint | None:
        """Restores the trainer from the best checkpoint by the retention's metric.

        Training can continue from there. Returns, raises and is called as `restore_latest`; None if
        no checkpoint was evaluated.
        """
        return self._restore(self.best, False)[0]

    def _restore(
        self, find: Callable[[], SavedCheckpoint | None], scheduled: bool, keeps: bool = False
    ) -> tuple[SavedCheckpoint | None, bool]:
        """Restores the checkpoint that `find` returns on the chief."""
        trainer = self._trainer
        trainer.check_idle("Restoring a checkpoint")
        trainer.check_has_own_weights()
        self.wait()
        with self._workers.failing_together():
            saved = find() if self._workers.is_chief else None
        step = self._workers.broadcast(-1 if saved is None else saved.step)
        if step < 0:
            return None, False
        saved = saved or self._directory.at(step)
        check_fits(saved, trainer)
        keeps = keeps and current.are_at(trainer, saved.prefix, self._workers)
        if keeps:
            assign(self._checkpoint, saved, alone=self._of_callbacks.parts)
        else:
            assign(self._checkpoint, saved)
            take_over(self._state, trainer)
            current.note(trainer, current.Point.of(trainer), saved.prefix)
        if scheduled and self._workers.is_chief:
            self._directory.remove(s for s in self._directory.saved() if s.step > saved.step)
        trainer.pace.total_seconds = max(trainer.pace.total_seconds, saved.metadata.seconds)
        self._held_step, self._writing = saved.step, None
        return saved, keeps

    def _find_latest(self, scheduled: bool) -> SavedCheckpoint | None:
        """Finds the newest readable checkpoint, moves damaged ones, and cleans up after a kill."""
        saved = newest_undamaged(self._directory, scheduled, self._report)
        if self._directory.path.exists():
            self._directory.clear_partial()
            self._tidy()
            self._directory.write_list()
        return saved

    def restore_model(self, saved: SavedCheckpoint | None = None) -> SavedCheckpoint:
        """Restores weights, averages, step and data position, for evaluation or export.

        Metrics and optimizer may differ from those of the run. Changes nothing in the folder.
        Eager, cross-replica context, on all workers.

        Args:
          saved: The checkpoint; None takes the newest readable one. All workers use the chief's.

        Returns:
          The restored checkpoint.

        Raises:
          ModelDirectoryError: If there is no checkpoint, or if on any worker it is damaged,
            removed, or does not fit the trainer.
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        self._trainer.check_idle("Restoring a checkpoint")
        self._trainer.check_has_own_weights()
        with self._workers.failing_together():
            if self._workers.is_chief:
                saved = checked_or_newest(self._directory, saved, self._report)
            else:
                saved = None
        step = self._workers.broadcast(-1 if saved is None else saved.step)
        if step < 0:
            self._workers.barrier()
            raise ModelDirectoryError(
                f"There is no checkpoint in {self.folder}. Train first, or pass another "
                "--model_dir."
            )
        with self._workers.failing_together():
            saved = saved or self._directory.at(step)
            position = {"step": self._state.step, "batches": self._state.batches}
            parts = {**self._model, "state": position}
            assign(tf.train.Checkpoint(**parts), saved, partial=TRAINING_ALONE)
            take_over(self._state, self._trainer)
        return saved
