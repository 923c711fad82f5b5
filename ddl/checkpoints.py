"""Saving and restoring a Trainer: what a checkpoint consists of, and when it is written."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import tensorflow as tf
from absl import logging

from ddl.checkpoint_directory import (
    CheckpointDamagedError,
    CheckpointDirectory,
    Metadata,
    SavedCheckpoint,
    first_line,
)
from ddl.errors import ModelDirectoryError
from ddl.plateau import plateau_of
from ddl.replica_statistics import ReplicaStatistics
from ddl.retention import Retention
from ddl.snapshot import Snapshots
from ddl.trainer import Trainer
from ddl.training_state import TrainingState
from ddl.workers import Workers


class Checkpoints:
    """The checkpoints of one run: model, optimizer and training state, numbered by step.

    What is saved does not depend on the strategy, so that a run may go on elsewhere. Files are
    written by a thread while training goes on, one checkpoint at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        trainer: Trainer,
        retention: Retention | None = None,
        report: Callable[[str], None] = logging.warning,
        before_write: Callable[[], None] = lambda: None,
    ):
        """Creates nothing.

        Args:
          directory: Holds the checkpoints.
          trainer: Is saved from and restored to.
          retention: Which checkpoints stay; None keeps the last three.
          report: Called, from any thread, with what a person should know: a checkpoint that
            could not be written, or was damaged and set aside.
          before_write: Called by the thread before it writes; a ModelDirectoryError that it raises
            stands for a checkpoint that could not be written.
        """
        self._directory = CheckpointDirectory(directory)
        self._trainer = trainer
        self._retention = retention or Retention()
        self._report = report
        self._before_write = before_write
        # The state lives as tensors in the loop; these variables are its form on disk.
        self._state = TrainingState(*(tf.Variable(v, trainable=False) for v in trainer.state))
        # What an evaluation or an export needs, and what going on needs besides.
        self._model = {"model": trainer.model}
        if trainer.averages is not None:
            self._model["averages"] = trainer.averages.variables
        self._checkpoint = tf.train.Checkpoint(
            **self._model,
            optimizer=trainer.optimizer,
            state=self._state._asdict(),
            random_generators=trainer.generator_states,
            **({"plateau": own.state} if (own := plateau_of(trainer.optimizer)) else {}),
        )
        self._snapshots: Snapshots | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint", _be_polite)
        # Its result says why it failed. An exception would hold on to the tensors.
        self._writing: Future[str | None] | None = None
        self._held_step: int | None = None  # the one that was saved or restored last
        self._workers = Workers(trainer.strategy)
        self._of_replicas = ReplicaStatistics(trainer.replica_statistics, self._workers)

    # ------------------------------------------------------------ what is there

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self._directory.path

    def saved(self) -> list[SavedCheckpoint]:
        """The checkpoints there are, by step, once none is being written any more."""
        self.wait()
        return self._directory.saved()

    def best(self) -> SavedCheckpoint | None:
        """The best by the metric of the retention; None if none was evaluated."""
        return self._retention.best(self.saved())

    @property
    def keeps_best(self) -> bool:
        """Whether there is a metric for it."""
        return self._retention.best_metric is not None

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these figures would be the best so far, by the chief."""
        if not self.keeps_best:
            return False
        # The chief alone waits for what it writes: others might list the folder too early.
        improves = self._workers.is_chief and self._retention.improves(metrics, self.saved())
        return bool(self._workers.of_chief(improves))

    def has_any(self) -> bool:
        """Whether there is one, as the chief sees it."""
        return bool(self._workers.of_chief(self._workers.is_chief and bool(self.saved())))

    # ------------------------------------------------------------ saving

    def save(self, metrics: Mapping[str, float] | None = None, scheduled: bool = True) -> None:
        """Takes the trainer as it is, and has that written while training goes on.

        Does nothing if this step is saved. A failure to write is reported when it happens, and
        raised by `finish`. Eager, cross-replica context.

        Args:
          metrics: What an evaluation at this step gave.
          scheduled: Whether a run always saves at this step. Others are no place to go back to,
            lest a signal change where a run that diverges goes on.

        Raises:
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        trainer = self._trainer
        trainer.check_has_own_weights()
        self.wait()
        failed = self._writing is not None and self._writing.result() is not None
        if self._held_step == trainer.step and not self._workers.any(failed):
            return
        metadata = Metadata(
            metrics=dict(metrics or {}),
            global_batch_size=trainer.global_batch_size,
            num_examples=trainer.num_examples,
            replicas=trainer.strategy.num_replicas_in_sync,
            seconds=trainer.pace.total_seconds,
            scheduled=scheduled,
        )
        tensors = self._take()
        if self._workers.is_chief:
            self._writing = self._writer.submit(self._write, trainer.step, tensors, metadata)
        self._held_step = trainer.step

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._writing is not None:
            self._writing.result()

    def finish(self) -> None:
        """Waits until all is written, and what need not stay is gone.

        Raises:
          ModelDirectoryError: If the checkpoint saved last could not be.
        """
        self.wait()
        if self._workers.is_chief:
            self._tidy()
        if self._writing is not None and (failure := self._writing.result()):
            raise ModelDirectoryError(failure)

    def _take(self) -> dict[str, tf.Tensor]:
        """All tensors; none on another worker than the chief, which has to take part."""
        trainer = self._trainer
        for variable, value in zip(self._state, trainer.state, strict=True):
            variable.assign(value)
        # TensorFlow stores how often it saved, too. Made to follow the step, a checkpoint holds
        # the same whether the run was interrupted or not.
        self._checkpoint.save_counter.assign(trainer.step)
        if self._snapshots is None:
            self._snapshots = Snapshots(self._checkpoint)
        of_replicas = self._of_replicas.tensors()
        with trainer.evaluation_weights(averaged=False):
            return self._snapshots.take() | of_replicas if self._workers.is_chief else {}

    def _write(self, step: int, tensors: dict[str, tf.Tensor], metadata: Metadata) -> str | None:
        # What need not stay goes only now, though it could have gone when the last one was whole:
        # its pages in memory are at hand for the new file (benchmarks/checkpoint_cost.py).
        self._tidy()
        try:
            self._before_write()
            self._directory.write(step, tensors, metadata)
        except ModelDirectoryError as error:
            self._report(str(error))
            return str(error)
        return None

    def _tidy(self) -> None:
        """Removes what need not stay."""
        try:
            self._directory.remove(self._retention.superfluous(self._directory.saved()))
        except OSError as error:
            self._report(f"an old checkpoint could not be removed: {error}")

    # ------------------------------------------------------------ restoring

    def restore_latest(self, scheduled: bool = False) -> SavedCheckpoint | None:
        """Sets the trainer to the newest checkpoint that can be read, to train on from it.

        Newer ones that are damaged are set aside, and reported. Eager, cross-replica context.

        Args:
          scheduled: Pass over those that were saved on a signal, and remove what is newer: training
            is to take another way from there.

        Returns:
          Which one that was; None if there is none at all.

        Raises:
          ModelDirectoryError: If all are damaged, or it does not fit the trainer.
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        self._trainer.check_has_own_weights()
        self.wait()
        with self._workers.failing_together():
            saved = self._find_latest(scheduled) if self._workers.is_chief else None
        step = self._workers.of_chief(-1 if saved is None else saved.step)
        if step < 0:
            return None
        saved = saved or self._directory.at(step)
        self._check_fits(saved)
        self._restore(self._checkpoint, saved)
        self._of_replicas.restore(saved.prefix)
        if scheduled and self._workers.is_chief:
            self._directory.remove(s for s in self._directory.saved() if s.step > saved.step)
        pace = self._trainer.pace
        pace.total_seconds = max(pace.total_seconds, saved.metadata.seconds)
        self._held_step, self._writing = saved.step, None
        return saved

    def _find_latest(self, scheduled: bool) -> SavedCheckpoint | None:
        """The newest that can be read; sets damaged ones aside, and mends what a kill left."""
        saved, damaged = self._newest_readable(scheduled)
        for each, error in damaged:
            where = self._directory.set_aside(each)
            self._report(f"{each} is damaged ({error}); it was set aside in {where}")
        if self._directory.path.exists():
            self._directory.clear_partial()
            self._tidy()
            self._directory.write_list()
        return saved

    def restore_model(self, saved: SavedCheckpoint | None = None) -> SavedCheckpoint | None:
        """Sets weights and step alone, to look at a model and not to train on.

        Metrics and optimizer need not be those of the run, and nothing in the folder is changed.
        Eager, cross-replica context.

        Args:
          saved: Which one, of which the chief's counts; None takes the newest that can be read.

        Returns:
          Which one it was; None if there is none at all.

        Raises:
          ModelDirectoryError: If on any worker it is damaged, gone, or does not fit the trainer.
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        self._trainer.check_has_own_weights()
        with self._workers.failing_together():
            saved = self._readable(saved) if self._workers.is_chief else None
        step = self._workers.of_chief(-1 if saved is None else saved.step)
        if step < 0:
            return None
        with self._workers.failing_together():
            saved = saved or self._directory.at(step)
            only_step = {"step": self._state.step}
            self._restore(tf.train.Checkpoint(**self._model, state=only_step), saved)
        return saved

    def _readable(self, saved: SavedCheckpoint | None) -> SavedCheckpoint | None:
        """The one given, or the newest that can be read, if there is one."""
        if saved is None:
            saved, damaged = self._newest_readable()
            for each, error in damaged:
                self._report(f"{each} is damaged ({error}); taking the one before")
            return saved
        try:
            self._directory.check(saved)
        except CheckpointDamagedError as error:
            raise ModelDirectoryError(f"{saved} cannot be read: {error}") from error
        return saved

    def _newest_readable(
        self, scheduled: bool = False
    ) -> tuple[SavedCheckpoint | None, list[tuple[SavedCheckpoint, CheckpointDamagedError]]]:
        """The newest checkpoint that can be read, and the damaged ones after it.

        Raises:
          ModelDirectoryError: If there are some and all are damaged.
        """
        damaged = []
        for saved in reversed(self._directory.saved()):
            if scheduled and not saved.metadata.scheduled:
                continue
            try:
                self._directory.check(saved)
            except CheckpointDamagedError as error:
                if saved.step not in [each.step for each in self._directory.saved()]:
                    # The run that it belongs to has just removed it, and has newer ones.
                    return self._newest_readable(scheduled)
                damaged.append((saved, error))
            else:
                return saved, damaged
        if damaged:
            listing = "\n".join(f"  {saved}: {error}" for saved, error in damaged)
            raise ModelDirectoryError(
                f"no checkpoint in {self._directory.path} can be read:\n{listing}\n"
                "Bring one back from a copy, or begin again in another --model_dir."
            )
        return None, []

    def _check_fits(self, saved: SavedCheckpoint) -> None:
        """What a step and a position in the data mean must not change on the way."""
        trainer, metadata = self._trainer, saved.metadata
        for name, was, now in (
            ("global batch size", metadata.global_batch_size, trainer.global_batch_size),
            ("number of training examples", metadata.num_examples, trainer.num_examples),
        ):
            if was is not None and was != now:
                raise ModelDirectoryError(
                    f"{saved} is of a run whose {name} is {was:,}; here it is {now:,}. Its step "
                    "and its place in the data mean something else then. Keep the number, or "
                    "begin a run in another --model_dir from its weights (WarmStart)."
                )

    def _restore(self, checkpoint: tf.train.Checkpoint, saved: SavedCheckpoint) -> None:
        try:
            status = checkpoint.restore(saved.prefix).expect_partial()
            status.assert_existing_objects_matched()
        except (tf.errors.OpError, AssertionError, ValueError) as error:
            raise ModelDirectoryError(
                f"{saved} cannot be restored into this model and optimizer: {first_line(error)}. "
                "Give another --model_dir, or the config that the checkpoint was made with."
            ) from error
        self._trainer.restore(TrainingState(*(tf.identity(value) for value in self._state)))


def _be_polite() -> None:
    """Leaves the cores to updates, which are computed on all and wait for the slowest."""
    if sys.platform == "linux":  # where a priority is that of a thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
