"""The bytes that a replica holds in memory."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras

from ddl.optimizers.named import by_name
from ddl.step.remat.activations import Activations
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes that a replica holds, without the data, TensorFlow and buffers.

    Attributes:
      weights: The variables of the layers.
      gradients: The gradients of a microbatch.
      summed: The sum of the gradients over the microbatches; 0 for one microbatch.
      slots: The optimizers' variables.
      averages: The averages of the weights.
      kept: Values that an update keeps, in case a gradient overflows.
      activations: Those of a microbatch; None if they could not be counted.
      copies: Copies of the weights in the dtype of the computation, if they are not activations.
    """

    weights: int
    gradients: int
    summed: int
    slots: int
    averages: int
    kept: int
    activations: int | None
    copies: int = 0

    @property
    def total(self) -> int:
        """The sum, of what is known."""
        return sum(filter(None, dataclasses.astuple(self)))


def held_by_replica(trainer: Trainer, activations: Activations) -> Held:
    """Returns what a replica holds.

    Args:
      trainer: A trainer that has traced its updates.
      activations: The observer of that trace.
    """
    trained = [v.value for v in trainer._parts.update.plan.trained]
    weights = {id(v): v.value for layer in layers_of(trainer.task) for v in layer.variables}
    slots = [v.value for one in by_name(trainer.optimizer).values() for v in one.variables]
    gradients = bytes_of(trained)
    summed = gradients if trainer.accumulation_steps > 1 else 0
    return Held(
        weights=bytes_of(weights.values()),
        gradients=gradients,
        summed=summed,
        slots=bytes_of(slots),
        averages=bytes_of(trainer.averages.variables) if trainer.averages else 0,
        kept=trainer.kept_bytes,
        activations=activations.bytes,
    )


def bytes_of(variables: Iterable[Any]) -> int:
    """Returns the bytes of one replica's copies."""
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    return sum(int(v.shape.num_elements()) * v.dtype.size for v in plain)
