"""What a run computes: everything that gin configures, and nothing about where it runs."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.precision import LossScale, Precision, set_precision
from ddl.task import Task


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run, built in the strategy's scope.

    A step is one optimizer update.

    Attributes:
      task: The model and its loss.
      optimizer: Makes the updates.
      train_data: What is trained on: anything `ddl.data.as_source` takes.
      eval_data: What is evaluated on; None to train only.
      global_batch_size: Examples an update, over all replicas and microbatches.
      train_steps: Length of the run in steps; exactly one of this and `train_epochs` is given.
      train_epochs: Length of the run in passes over the training data.
      eval_every: Steps between evaluations; None evaluates at the end only.
      checkpoint_every: Steps between checkpoints; None saves at the end only.
      log_every: Steps between lines in metrics.jsonl.
      checkpoints_to_keep: How many of the latest checkpoints stay.
      seed: Seed of weights and data order.
      accumulation_steps: Microbatches a replica's share of a batch is computed in.
      clip_norm: Largest global norm of the gradient; None: no clipping.
      loss_scale: None takes a dynamic one where the model computes in float16.
      max_skipped_updates: Overflows in a row after which training counts as diverged.
    """

    task: Task
    optimizer: keras.optimizers.Optimizer
    train_data: Any
    global_batch_size: int
    eval_data: Any = None
    train_steps: int | None = None
    train_epochs: float | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    log_every: int = 100
    checkpoints_to_keep: int = 3
    seed: int = 0
    accumulation_steps: int = 1
    clip_norm: float | None = None
    loss_scale: LossScale | None = None
    max_skipped_updates: int = 50

    def __post_init__(self) -> None:
        if (self.train_steps is None) == (self.train_epochs is None):
            given = "neither" if self.train_steps is None else "both"
            raise ConfigError(
                f"TRAIN_STEPS is {self.train_steps} and TRAIN_EPOCHS is {self.train_epochs}: "
                f"{given} of them is given. Give exactly one, and None for the other."
            )
        positive = (
            "train_steps",
            "train_epochs",
            "eval_every",
            "checkpoint_every",
            "log_every",
            "checkpoints_to_keep",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it is more than 0")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"SEED is {self.seed}; it lies between 0 and 2^31 - 1")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in steps; a part of an epoch counts its last batch whole."""
        if self.train_epochs is None:
            return int(self.train_steps or 0)
        return math.ceil(self.train_epochs * steps_per_epoch)


def set_numerics(precision: Precision, seed: int) -> None:
    """What must stand before a model is built: number format, and the seed of its weights."""
    set_precision(precision)
    keras.utils.set_random_seed(seed)
    # A global seed of 0 makes tf.data fail on seeds that are tensors (ddl.data.StreamSource).
    tf.random.set_seed(seed + 1)


def global_batch_size(total: int | None = None, per_replica: int | None = None) -> int:
    """The global batch size from either form. Call it in the strategy's scope.

    Args:
      total: Examples an update, whatever the number of replicas.
      per_replica: Examples a replica and update. The global batch then grows with the number of
        replicas: this, asked for by name, is how hardware may change what is computed.

    Raises:
      ConfigError: If both are given, or neither, or one is not positive.
    """
    size = per_replica if total is None else total
    if size is None or (total is not None and per_replica is not None):
        given = "neither" if size is None else "both"
        raise ConfigError(
            f"GLOBAL_BATCH_SIZE is {total} and PER_REPLICA_BATCH_SIZE is {per_replica}: {given} "
            "of them is given. Give exactly one, and None for the other."
        )
    if size < 1:
        raise ConfigError(f"the batch size is {size}; it is 1 or more")
    if per_replica is None:
        return size
    return size * tf.distribute.get_strategy().num_replicas_in_sync
