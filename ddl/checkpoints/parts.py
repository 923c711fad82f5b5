"""The parts of a trainer and its run that a checkpoint holds, beside the training state."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ddl.checkpoints.contents import model_parts, saved_variables
from ddl.checkpoints.of_callbacks import parts_of_callbacks
from ddl.checkpoints.slots import with_whole_slots
from ddl.optimizers.groups import ONLY, by_name
from ddl.optimizers.plateau import plateaus_of
from ddl.training.trainer import Trainer

TRAINING_ALONE = (
    *("optimizer", "state", "plateau", "averages"),
    *("replay", "callbacks"),
)
"""Parts of a checkpoint that an evaluation may leave unread."""


def parts_for_evaluation(trainer: Trainer) -> dict[str, Any]:
    """Returns the parts that evaluation and export need, as `tf.train.Checkpoint` takes them.

    Raises:
      ConfigError: If a variable of the task has no name that is the same in every process.
    """
    parts = model_parts(trainer.task)
    if trainer.averages is not None:
        parts["averages"] = trainer.averages.variables
    return parts


def parts_for_training(trainer: Trainer, callbacks: Sequence[object]) -> dict[str, Any]:
    """Returns the parts that only training needs.

    Args:
      trainer: The trainer.
      callbacks: Objects whose variables are saved under the names of their classes.

    Raises:
      ConfigError: If two variables of a callback would have the same name.
    """
    plateaus = {name: own.state for name, own in plateaus_of(trainer.optimizer).items()}
    optimizers: Any = {
        name: with_whole_slots(optimizer, trainer.sharding)
        for name, optimizer in by_name(trainer.optimizer).items()
    }
    if ONLY in optimizers:
        parts = {"optimizer": optimizers[ONLY], "plateau": plateaus.get(ONLY)}
    else:
        parts = {"optimizer": optimizers, "plateau": plateaus}
    parts = {name: part for name, part in parts.items() if part}
    if callbacks:
        others = saved_variables(tf.train.Checkpoint(**parts_for_evaluation(trainer), **parts))
        if of_callbacks := parts_of_callbacks(callbacks, others):
            parts["callbacks"] = of_callbacks
    return parts
