"""Saving and restoring a Trainer."""

import os
from pathlib import Path

import tensorflow as tf

from ddl.errors import ModelDirectoryError
from ddl.step import TrainingState
from ddl.trainer import Trainer


class Checkpoints:
    """The checkpoints of one run: model, optimizer and training state, numbered by step.

    What is saved does not depend on the strategy, so that a run may go on elsewhere.
    """

    def __init__(self, directory: str | os.PathLike[str], trainer: Trainer, keep: int = 3):
        """Looks what is there; creates nothing.

        Args:
          directory: Holds the checkpoints.
          trainer: Is saved from and restored to.
          keep: How many of the latest checkpoints stay.
        """
        self._trainer = trainer
        # The state lives as tensors in the loop; these variables are its form on disk.
        self._state = TrainingState(
            *(tf.Variable(value, trainable=False) for value in trainer.state)
        )
        # What an evaluation or an export needs, and what going on needs besides.
        self._model = {"model": trainer.model}
        if trainer.averages is not None:
            self._model["averages"] = trainer.averages.variables
        self._checkpoint = tf.train.Checkpoint(
            **self._model,
            optimizer=trainer.optimizer,
            state=self._state._asdict(),
            random_generators=trainer.generator_states,
        )
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(Path(directory)), max_to_keep=keep, checkpoint_name="step"
        )

    @property
    def latest(self) -> str | None:
        """Path prefix of the newest checkpoint; None if there is none."""
        return self._manager.latest_checkpoint

    def save(self) -> str:
        """Saves the trainer as it is; returns the checkpoint's path prefix.

        Raises:
          ModelDirectoryError: If it cannot be written.
        """
        self._trainer.check_has_own_weights()
        self._trainer.synchronize_statistics()
        for variable, value in zip(self._state, self._trainer.state, strict=True):
            variable.assign(value)
        # TensorFlow stores how often it saved, too. Made to follow the step, a checkpoint holds
        # the same whether the run was interrupted or not.
        self._checkpoint.save_counter.assign(self._trainer.step - 1)
        try:
            return self._manager.save(checkpoint_number=self._trainer.step)
        except (tf.errors.OpError, OSError) as error:
            raise ModelDirectoryError(
                f"the checkpoint of step {self._trainer.step} could not be written to "
                f"{self._manager.directory}: {error}"
            ) from error

    def restore_latest(self, model_only: bool = False) -> bool:
        """Sets the trainer to the newest checkpoint; returns whether there was one.

        Args:
          model_only: Restore weights and step alone, for looking at a model and not for training
            on; then metrics and optimizer need not be those of the run.

        Raises:
          ModelDirectoryError: If it does not fit the trainer or cannot be read.
        """
        self._trainer.check_has_own_weights()
        path = self.latest
        if path is None:
            return False
        checkpoint = self._checkpoint
        if model_only:
            state = {"step": self._state.step, "batches": self._state.batches}
            checkpoint = tf.train.Checkpoint(**self._model, state=state)
        try:
            status = checkpoint.restore(path).expect_partial()
            status.assert_existing_objects_matched()
        except (tf.errors.OpError, AssertionError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelDirectoryError(
                f"{path} cannot be restored into this model and optimizer: {reason}. Give "
                "another --model_dir, or the config that the checkpoint was made with."
            ) from error
        self._trainer.restore(TrainingState(*(tf.identity(value) for value in self._state)))
        return True
