"""A global batch on its way to the replicas."""

from typing import Any, NamedTuple

import tensorflow as tf

from ddl.errors import ConfigError


class Batch(NamedTuple):
    """A global batch: what `BatchPipeline.examples` and `microbatch` need of it.

    It is a structure of tensors, so `strategy.run` gives each replica its part.

    Attributes:
      rows: Features or "index" by name, and "weight", of all replicas of this process or of one.
      arrays: `BatchPipeline.resident_arrays` that "index" refers to; {} if `rows` holds features.
      counter: `ddl.random.batch_counter` of the batch's number, uint64 [2].
    """

    rows: Any
    arrays: Any
    counter: tf.Tensor

    def __getitem__(self, index: Any) -> Any:
        """Raises ConfigError for a feature's name, as in a step that reads examples itself."""
        if isinstance(index, str):
            raise ConfigError(
                f"A step cannot read batch[{index!r}]: each replica has its own rows of the batch. "
                "Read the features in a loss, a method of (features, training) that returns "
                "a ddl.PerExample, and pass it: update.minimize(self.loss, batch). See "
                "docs/own-step.md."
            )
        return tuple.__getitem__(self, index)
