"""Trainers of small tasks in float64, as the modules of the contract make them."""

from typing import Any

import keras

import ddl
from tests.conftest import make_strategy


def set_precision(policy: str) -> None:
    """Makes Keras build layers and optimizers in a precision until the end of the test."""
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)


def build(*make: Any, policy: str = "float64") -> list[Any]:
    """Calls functions, whose models begin with the same weights each time."""
    set_precision(policy)
    keras.utils.set_random_seed(3)
    return [function() for function in make]


def make_trainer(
    make: tuple[Any, Any], data: Any, where: tuple[str, int] = ("mirrored", 2), **options: Any
) -> ddl.Trainer:
    """Returns a trainer of batches of 8 rows, in order.

    Args:
      make: Functions that make the task and the optimizers.
      data: Training data.
      where: The strategy and its number of replicas.
      **options: Arguments of `ddl.Trainer`, and `policy`.
    """
    strategy = make_strategy(*where)
    with strategy.scope():
        task, optimizer = build(*make, policy=options.pop("policy", "float64"))
    options = {"global_batch_size": 8, "shuffle": False, **options}
    return ddl.Trainer(task, optimizer, data, strategy=strategy, **options)
