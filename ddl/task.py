"""What is learned: the contract between a task and the Trainer."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf


class PerExample(NamedTuple):
    """What a task says of each example (or token) of a batch.

    The trainer forms Σ weight·loss and Σ weight over the global batch and divides once, which
    is exact for any number of replicas and microbatches; a mean taken here could not be put
    right any more. That is why `loss` is a tensor of at least rank 1.

    Attributes:
      loss: float [batch, …], one value an example or token, not reduced.
      metrics: Further values of the same shape as `loss` by name; reported as weighted means.
      weight: float, broadcastable to `loss` from the left, such as a mask of real tokens.
        None counts each entry once. It multiplies the weight that the data give an example.
    """

    loss: tf.Tensor
    metrics: dict[str, tf.Tensor] = {}  # noqa: RUF012 (read, never written)
    weight: tf.Tensor | None = None


@runtime_checkable
class Task(Protocol):
    """A model and what is asked of it. Any class with these two members is a task.

    It may hold further Keras layers, such as augmentations, as attributes or in lists and dicts.

    A task may also have a method `check(source)`, called once with each data source before
    training, which raises `ddl.errors.DataError` if the source is not what the task needs.
    """

    model: keras.Model

    def per_example(self, features: dict[str, Any], training: bool) -> PerExample:
        """Runs the model on a replica's batch. Called in replica context, in graph mode.

        Args:
          features: The batch by feature name, each [batch, …], as the data source gives it.
          training: Whether dropout and batch statistics are as in training.
        """
        ...
