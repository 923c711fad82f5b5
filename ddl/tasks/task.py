"""Interface between a task and the Trainer."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_takes
from ddl.metrics.values import Value


class PerExample(NamedTuple):
    """Loss, metrics and weight of each example (or token) of a batch.

    The trainer sums weight·loss and weight over the global batch and divides once, which is exact
    for any number of replicas and microbatches. A mean over one replica's batch cannot be
    corrected afterwards, so `loss` must have at least rank 1.

    Attributes:
      loss: float [batch, …], one value per example or token, not reduced.
      metrics: Further values by name. Tensors of the shape of `loss` are reported as weighted
        means; `ddl.metrics` returns values of other metrics, such as an AUC. The names may differ
        between training and evaluation.
      weight: float, broadcastable to `loss` from the left, such as a mask of real tokens. None
        weighs each entry 1. The trainer multiplies it by the example weight of the data.
    """

    loss: tf.Tensor
    metrics: dict[str, Value] = {}  # noqa: RUF012 (read, never written)
    weight: tf.Tensor | None = None


class LossFunction(Protocol):
    """A loss of a task: `Task.per_example`, or a method with the same arguments and result."""

    def __call__(self, features: dict[str, Any], training: bool) -> PerExample:
        """Computes the loss and metrics of a replica-local batch; see `Task.per_example`."""
        ...


@runtime_checkable
class Task(Protocol):
    """A model with its loss and metrics. Any class with these two members is a task.

    A task may have a method `step(update, batch)`, which replaces the built-in update; see
    `ddl.Update`. It then needs no `per_example`, and no `model` if it keeps its models in other
    attributes. `per_example`, or else a method `evaluate(features)` with the same result, defines
    what an evaluation reports.

    A task may have a method `predict(features)`, which returns a tensor [batch, …], or a dict or
    tuple of such tensors: `Trainer.predict` returns them for all examples of a data set.

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


class StepTask(Protocol):
    """A task with a step of its own; see `Task` and `ddl.Update`."""

    def step(self, update: Any, batch: Any) -> None:
        """Makes one update with the methods of `update`. Cross-replica context, in a graph.

        Args:
          update: The `ddl.Update`.
          batch: The global batch, to pass to these methods.
        """
        ...


def has_step(task: Any) -> bool:
    """Returns whether a task replaces the built-in update by a step of its own."""
    return callable(getattr(task, "step", None))


def check_has_outputs(task: Any, what: str) -> None:
    """Raises ConfigError if a task has no `predict`.

    Args:
      task: The task.
      what: Name of what needs the outputs, for the error.
    """
    if not callable(getattr(task, "predict", None)):
        raise ConfigError(
            f"{type(task).__name__} has no outputs to predict. Give it a method predict(features) "
            f"that returns a tensor [batch, …], or a dict or tuple of such tensors, for {what}."
        )


def evaluation_loss(task: Any) -> LossFunction | None:
    """Returns a task's `evaluate` with the arguments of a loss; None if it has no such method."""
    if not hasattr(task, "evaluate"):
        return None

    def evaluate(features: Any, training: bool) -> PerExample:  # its name stands in errors
        return task.evaluate(features)

    return evaluate


def check_task(task: Any) -> None:
    """Checks that an object has the members of a task.

    Raises:
      ConfigError: If it has no `step` and lacks `model` or `per_example`, or if a method takes
        other arguments.
    """
    if isinstance(task, type):
        raise ConfigError(f"Trainer.task must be a task, got {task.__name__} without parentheses.")
    if not hasattr(task, "per_example") and isinstance(task, keras.Model):
        raise ConfigError(
            f"Trainer.task must be a model with its loss, got the Keras model {task.name!r} alone, "
            "whose `compile` is not read. Pass ddl.Classification(model), or ddl.Supervised(model, "
            "loss, metrics=[…]) with a loss of reduction=None, and a new optimizer."
        )
    name = type(task).__name__
    if has_step(task):
        check_takes(f"{name}.step", task.step, ("update", "batch"))
    else:
        for member in ("model", "per_example"):
            if not hasattr(task, member):
                raise ConfigError(
                    f"Trainer.task must have `model` and `per_example`, or a `step`, but {name} "
                    f"has no `{member}`. See ddl.Task."
                )
    if hasattr(task, "per_example"):
        check_takes(f"{name}.per_example", task.per_example, ("features",), ("training",))
    elif hasattr(task, "evaluate"):
        check_takes(f"{name}.evaluate", task.evaluate, ("features",))


# Only the feature "weight" weighs its example. Under Keras's name, sample_weight, or a similar one,
# weights would have no effect, nor would those of entries in a task that does not read them.
_LIKE_WEIGHT = re.compile(
    r"(sample|example|instance|loss|entry)?[^a-z]*weights?[^a-z]*|entry_weight_.*", re.IGNORECASE
)


def names_resembling_weight(names: Iterable[str]) -> list[str]:
    """Returns the names that look like "weight", such as sample_weight or exampleWeights."""
    return [name for name in names if name != "weight" and _LIKE_WEIGHT.fullmatch(name)]
