"""Interface between a task and the Trainer."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_takes


class PerExample(NamedTuple):
    """Loss, metrics and weight of each example (or token) of a batch.

    The trainer sums weight·loss and weight over the global batch and divides once, which is exact
    for any number of replicas and microbatches. A mean over one replica's batch cannot be
    corrected afterwards, so `loss` must have at least rank 1.

    Attributes:
      loss: float [batch, …], one value per example or token, not reduced.
      metrics: Further values by name, of the shape of `loss`; reported as weighted means. The
        names may differ between training and evaluation.
      weight: float, broadcastable to `loss` from the left, such as a mask of real tokens. None
        weighs each entry 1. The trainer multiplies it by the example weight of the data.
    """

    loss: tf.Tensor
    metrics: dict[str, tf.Tensor] = {}  # noqa: RUF012 (read, never written)
    weight: tf.Tensor | None = None


@runtime_checkable
class Task(Protocol):
    """A model with its loss and metrics. Any class with these two members is a task.

    A task may hold further Keras layers, such as augmentations, as attributes or in lists and
    dicts.

    A task may have a method `check(source)`. The trainer calls it once with each data source
    before training; it raises `ddl.errors.DataError` if the source does not fit the task.

    Attributes:
      model: The model to train.
    """

    model: keras.Model

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a replica-local batch. Replica context, graph mode.

        Args:
          features: The batch by feature name, each [batch, …], in the dtype of the data source.
          training: Whether to run the model in training mode (dropout, batch statistics).

        Returns:
          The loss, metrics and weight of each example, not reduced.
        """
        ...


def check_task(task: Any) -> None:
    """Checks that an object has the members of a task.

    Raises:
      ConfigError: If it lacks `model` or `per_example`, or `per_example` takes other arguments.
    """
    if isinstance(task, type):
        raise ConfigError(
            f"Trainer.task must be a task, got the class {task.__name__}. Create it, with "
            "parentheses."
        )
    if not hasattr(task, "per_example") and isinstance(task, keras.Model):
        raise ConfigError(
            f"Trainer.task must be a model with its loss, got the Keras model {task.name!r} alone. "
            "Pass ddl.Classification(model), or a class with `model` and `per_example`."
        )
    for member in ("model", "per_example"):
        if not hasattr(task, member):
            raise ConfigError(
                f"Trainer.task must have `model` and `per_example`, but {type(task).__name__} has "
                f"no `{member}`. See ddl.Task."
            )
    check_takes(f"{type(task).__name__}.per_example", task.per_example, ("features", "training"))
