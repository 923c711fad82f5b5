"""--fast_run: each part of a run once, on two batches."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ModelDirectoryError
from ddl.optimizers.named import by_name
from ddl.run.plan import RunPlan
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer

UPDATES = 2
"""Updates that the mode makes."""


def plan_of(run_plan: RunPlan) -> RunPlan:
    """Returns the plan of the mode: two updates, each logged, evaluated and saved.

    Args:
      run_plan: The plan of the run.
    """
    return dataclasses.replace(
        run_plan,
        train_steps=UPDATES,
        train_epochs=None,
        eval_every=1,
        checkpoint_every=1,
        log_every=1,
        on_divergence="stop",
        early_stopping=None,
    )


def check_restoring(trainer: Trainer, checkpoints: Checkpoints) -> int:
    """Sets all weights and slots to zero, and restores them from the last checkpoint.

    Eager, cross-replica context.

    Args:
      trainer: The trainer, at the step of its last checkpoint.
      checkpoints: Its checkpoints.

    Returns:
      Number of variables restored.

    Raises:
      ModelDirectoryError: If a variable has another value than before, or as `restore_latest`.
    """
    variables = _variables(trainer)
    step, before = trainer.step, [_value(v) for v in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(np.zeros_like(value))
    checkpoints.restore_latest()
    # Bytes are compared, since a NaN differs from itself.
    other = [
        variable.path
        for variable, value in zip(variables, before, strict=True)
        if _value(variable).tobytes() != value.tobytes()
    ]
    if other or trainer.step != step:
        raise ModelDirectoryError(
            f"The checkpoint of step {step} must restore every variable bit for bit, got step "
            f"{trainer.step} and other values of {', '.join(other) or 'none'}. Keep the layers of "
            "these variables in attributes of the task, which checkpoints follow."
        )
    return len(variables)


def _variables(trainer: Trainer) -> Sequence[keras.Variable]:
    """Returns the numeric variables of the task's layers and of the optimizers, each once."""
    holders = [*layers_of(trainer.task), *by_name(trainer.optimizer).values()]
    every = {id(v): v for holder in holders for v in holder.variables}
    return [v for v in every.values() if v.dtype != "string"]


def _value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))
