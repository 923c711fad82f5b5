"""Saving a Trainer to checkpoints, and restoring it from them."""

import dataclasses
import math
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.checkpoints import contents, directory
from ddl.checkpoints.directory import Retention, SavedCheckpoint
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.tasks.parts import layers_of
from ddl.training.checks import check_same_on_replicas
from ddl.training.trainer import Trainer

# Trainers that saved or restored a checkpoint: its JSON text, and whether with the optimizer.
_HELD: weakref.WeakKeyDictionary[Trainer, tuple[str, bool]] = weakref.WeakKeyDictionary()
_NOTHING: Future[str] = Future()
_NOTHING.set_result("")


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one run: model, optimizer and training state, numbered by step.

    The values in a checkpoint do not depend on the strategy, so a run can resume under another
    one. A thread writes the files while training continues, one checkpoint at a time. The
    constructor creates no file or folder.

    Attributes:
      folder: Folder of the checkpoints.
      trainer: The Trainer to save and restore.
      retention: Which checkpoints to keep; by default the last three.
      report: Called with a message, from any thread, when a checkpoint could not be written or a
        damaged one was skipped.
      before_write: Called by the writer thread before it writes. If it raises a
        ModelDirectoryError, the checkpoint counts as not written.
    """

    folder: str | os.PathLike[str]
    trainer: Trainer
    retention: Retention = dataclasses.field(default_factory=Retention)
    report: Callable[[str], None] = logging.warning
    before_write: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._directory = directory.CheckpointDirectory(self.folder)
        self._values = contents.values_of(self.trainer)
        self._workers = Workers(self.trainer.strategy)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        # The result is the error message, or "". An exception would keep the tensors alive.
        self._writing = _NOTHING
        self._held_step: int | None = None  # step of the last save or restore

    def saved(self) -> list[SavedCheckpoint]:
        """Waits for a write in progress, then returns the checkpoints on disk, sorted by step."""
        self.wait()
        return self._directory.saved()

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether a checkpoint with these metrics would be the best so far.

        The chief decides for all workers, and reports a folder that it cannot read. Eager,
        cross-replica context, on all workers.
        """
        improves = False
        # Only the chief can wait for its write; another worker might list the folder too early.
        if self._workers.is_chief and self.retention.best_metric is not None:
            try:
                improves = self.retention.improves(metrics, self.saved())
            except ModelDirectoryError as error:  # the others wait for an answer
                self.report(str(error))
        return bool(self._workers.broadcast(improves))

    def check(self) -> None:
        """Checks that a checkpoint holds every variable that training uses.

        Call this after the trainer has traced its loop (`Trainer.trace`); before that, no variable
        is known to be in use.

        Raises:
          ConfigError: If a variable in use is in no checkpoint.
        """
        contents.check_covers(self._values, self.trainer.variables_in_use)

    def save(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Takes a snapshot of the trainer, which a thread writes while training continues.

        Waits for the previous write. Does nothing if this step was the last one saved or restored,
        unless its write failed. A failed write is reported when it happens; `finish` raises it if
        it was the last one. Eager, cross-replica context, on all workers.

        Args:
          metrics: Metrics of an evaluation at this step.

        Returns:
          Whether it took a snapshot.

        Raises:
          ConfigError: Within the trainer's `evaluation_weights`; if model, optimizer and state are
            at different steps, or replicas differ in a variable of the task or a layer; or as
            `check` does.
        """
        trainer = self.trainer
        trainer.check_consistent()
        if self._held_step == trainer.step and not self._has_failed():
            return False
        self.wait()
        check_same_on_replicas(trainer.task, trainer.strategy)
        self.check()
        values = self._values_now()
        tensors = contents.snapshot(values, trainer.strategy, self._workers.is_chief)
        if self._workers.is_chief:
            metadata = directory.Metadata(
                metrics={k: float(v) for k, v in (metrics or {}).items() if math.isfinite(v)},
                values={value.key: value.entry for value in values},
                position=_position_of(trainer),
            )
            self._writing = self._writer.submit(self._write, trainer.step, tensors, metadata)
        self._held_step = trainer.step
        return True

    def written(self) -> Path | None:
        """Returns the path of the chief's write without endings; None if it failed. All workers."""
        return None if self._has_failed() else self._directory.path / f"step-{self._held_step}"

    def wait(self) -> None:
        """Waits until no write is in progress."""
        self._writing.result()

    def finish(self) -> None:
        """Waits for the last write, then removes the checkpoints that need not be kept.

        Raises:
          ModelDirectoryError: On the chief, if the last checkpoint could not be written.
        """
        self.wait()
        if self._workers.is_chief:
            self._tidy()
        if failure := self._writing.result():
            raise ModelDirectoryError(failure)

    def _has_failed(self) -> bool:
        """Waits for the chief's write; returns whether it failed. On all workers."""
        return self._workers.any(bool(self._writing.result()))

    def _write(self, step: int, tensors: dict[str, tf.Tensor], metadata: directory.Metadata) -> str:
        # Old checkpoints could have been removed after the last write. Removing them now frees
        # memory pages that the new file reuses (benchmarks/checkpoint_cost.py).
        self._tidy()
        try:
            self.before_write()
            self._directory.write(step, tensors, metadata)
        except ModelDirectoryError as error:
            self.report(str(error))
            return str(error)
        _HELD[self.trainer] = self._directory.at(step).text, True
        return ""

    def _tidy(self) -> None:
        """Removes the checkpoints that need not be kept; reports a failure."""
        try:
            self._directory.remove(self.retention.removable(self._directory.saved()))
        except ModelDirectoryError as error:
            self.report(f"An old checkpoint could not be removed: {error}")

    def _values_now(self) -> list[contents.Value]:
        """Returns the values of a checkpoint, with the training state as it is."""
        state = self.trainer.state._asdict().items()
        return self._values + [contents.Value(f"state/{k}", k, v, None) for k, v in state]

    def restore_latest(self, keeps: bool = False) -> SavedCheckpoint | None:
        """Restores the trainer from the newest readable checkpoint, to resume training.

        Gives newer, damaged checkpoints the ending `.damaged` and reports them. Eager,
        cross-replica context, on all workers.

        Args:
          keeps: Whether to keep a trainer as it is that saved or restored this checkpoint last and
            made no update since. It keeps the values assigned since then, such as a learning rate.

        Returns:
          The restored checkpoint; None if there is none.

        Raises:
          ModelDirectoryError: If all checkpoints are damaged, the checkpoint does not fit the
            trainer, or another worker finds another one.
          ConfigError: Within the trainer's `evaluation_weights`.
        """
        if (saved := self._agreed(self._newest)) is None:
            return None
        keeps = keeps and self._is_at(saved)
        with self._workers.failing_together():  # all workers enter, whatever each keeps
            if not keeps:
                self._assign(saved, ("",), _position_differs(saved, self.trainer))
        _HELD[self.trainer] = saved.text, True
        self._held_step, self._writing = saved.step, _NOTHING
        return saved

    def restore_model(self, checkpoint: str | int = "latest") -> SavedCheckpoint:
        """Restores weights, averages, step and data position, for evaluation or export.

        Metrics and optimizer may differ from those of the run. Changes nothing in the folder.
        Eager, cross-replica context, on all workers.

        Args:
          checkpoint: `latest`, the newest readable one; `best`, by the retention's metric; or a
            step. All workers use the chief's.

        Returns:
          The restored checkpoint.

        Raises:
          ModelDirectoryError: If there is no such checkpoint, or if on any worker it is damaged,
            removed, or does not fit the trainer, or is another one.
          ConfigError: Within the trainer's `evaluation_weights`, or if there is no metric for
            `best`.
        """
        found = self._agreed(lambda: self._find(checkpoint))
        assert found is not None  # else `_find` raises
        with self._workers.failing_together():
            self._assign(found, ("model/", "task/", "averages/", "state/step", "state/batches"))
        _HELD[self.trainer] = found.text, False
        return found

    def _find(self, checkpoint: str | int) -> SavedCheckpoint:
        """Returns the requested checkpoint."""
        saved = self.saved()
        if checkpoint == "best" and self.retention.best_metric is None:
            raise ConfigError("The best needs Retention.best_metric. Set it, or pass latest.")
        if checkpoint == "latest":
            found = self._directory.newest(self.report)
        else:
            best = self.retention.best(saved) if checkpoint == "best" else None
            found = best or next((each for each in saved if each.step == checkpoint), None)
            found = found and self._readable(found.step)
        if found is None:
            steps = contents.some([str(each.step) for each in saved]) or "none"
            raise ModelDirectoryError(
                f"There is no checkpoint {checkpoint} in {self.folder}. Train first, or pass "
                f"another model_dir, or one of the steps that it has: {steps}."
            )
        return found

    def _newest(self) -> SavedCheckpoint | None:
        """Finds the newest readable checkpoint, and cleans up after a kill."""
        self._directory.clear_partial()
        return self._directory.newest(self.report, moves=True)

    def _readable(self, step: int) -> SavedCheckpoint:
        if damage := self._directory.damage_of(saved := self._directory.at(step)):
            raise ModelDirectoryError(
                f"{saved} cannot be read: {damage}. Pass another checkpoint; all workers need "
                "the files of the chief's model_dir."
            )
        return saved

    def _agreed(self, find: Callable[[], SavedCheckpoint | None]) -> SavedCheckpoint | None:
        """Returns the checkpoint that `find` returns on the chief, verified on every worker."""
        self.trainer.check_idle("Restoring a checkpoint")
        self.wait()
        with self._workers.failing_together():
            saved = find() if self._workers.is_chief else None
        if (step := self._workers.broadcast(-1 if saved is None else saved.step)) < 0:
            return None
        with self._workers.failing_together():
            saved = saved or self._readable(step)
        digests = self._workers.gather(np.array([float(zlib.crc32(saved.text.encode()))]))[:, 0]
        for worker in np.flatnonzero(digests != digests[0])[:1]:
            self._workers.barrier()
            raise ModelDirectoryError(
                f"Step {step:,} in {self.folder} of worker {worker} has another digest than the "
                "chief's. Give all workers one model_dir on a file system that they share."
            )
        return saved

    def _is_at(self, saved: SavedCheckpoint) -> bool:
        """Returns whether the chief's trainer is at a checkpoint, and those of all are whole."""
        is_at = False
        with suppress(ConfigError):
            self.trainer.check_consistent()
            is_held = _HELD.get(self.trainer) == (saved.text, True)
            is_at = (is_held and self.trainer.step == saved.step) or not self._workers.is_chief
        return not self._workers.any(not is_at)

    def hold_updates(self) -> bool:
        """Returns whether the trainer last saved or restored one of these, that of its step."""
        text, _ = _HELD.get(self.trainer, (None, True))
        return any(each.text == text and each.step == self.trainer.step for each in self.saved())

    def _assign(self, saved: SavedCheckpoint, parts: tuple[str, ...], failure: str = "") -> None:
        """Assigns the values whose keys begin with one of `parts`; none if there is a failure."""
        values = [value for value in self._values_now() if value.key.startswith(parts)]
        there = {k: e for k, e in saved.metadata.values.items() if k.startswith(parts)}
        failure = failure or contents.differences(there, {v.key: v.entry for v in values})
        if not failure:
            try:
                with directory.reading(saved.prefix) as reader:
                    _HELD.pop(self.trainer, None)
                    state = contents.assign(values, reader, self.trainer.strategy)
            except tf.errors.OpError as error:  # the run has just removed it
                failure = error.message
        if failure:
            raise ModelDirectoryError(
                f"{saved} cannot be restored: {failure}. Pass config, data and callbacks of the "
                "run that saved it, or another model_dir, such as with these weights (WarmStart)."
            )
        for layer in layers_of(self.trainer.task):
            if isinstance(layer, keras.layers.Normalization) and layer.built:
                layer.finalize_state()  # it computes with constants made from its variables
        self.trainer.state = self.trainer.state._replace(**state)


def _position_of(trainer: Trainer) -> dict[str, int | str | None]:
    """Returns on what the position in the data and the loss scale depend, by what it is."""
    found: dict[str, int | str | None] = {"loss scaling": trainer.loss_scale is not None}
    for number, (name, one) in enumerate(trainer.pipelines.items(), 1):
        of = f" of source {number} ({name})" if name else ""  # the first one counts the epochs
        for what in ("global_batch_size", "num_examples", "batches_per_update"):
            found[f"{what.replace('_', ' ')}{of}"] = getattr(one, what)
        found[f"kind of data{of}"] = type(one.source).__name__
        digest = getattr(getattr(one.source, "items", None), "digest_of_packing", None)
        found[f"digest of lengths of documents, packed.seed and NumPy's version{of}"] = digest
    return found


def _position_differs(saved: SavedCheckpoint, trainer: Trainer) -> str:
    """Returns how steps or data positions mean something else here; "" if they do not."""
    was, now = saved.metadata.position, _position_of(trainer)
    # Counting the examples of a stream changes no position.
    counted = {k for k in was if k.startswith("num examples") and None in (was[k], now.get(k))}
    changed = [k for k in {**was, **now} if k not in counted and was.get(k) != now.get(k)]
    return contents.some([f"its {x} is {was.get(x)}, expected {now.get(x)}" for x in changed], 3)
