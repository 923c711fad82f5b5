"""Values of the first run of the row-independence check that later runs reuse."""

from typing import NamedTuple

import tensorflow as tf

from ddl.layers.transforms.mixing import Partners
from ddl.tasks.gather import Gathered


class FirstRun(NamedTuple):
    """Values of the first run that do not follow the rows of the later runs.

    Attributes:
      moments: Moments of the normalization layers.
      rows: The values that `ddl.gather` returned.
      partners: The partners of rows, which layers mixed them with.
      mask: bool [rows], False for rows that count as padding; None if there are none.
    """

    moments: list[tf.Tensor]
    rows: list[Gathered]
    partners: list[Partners]
    mask: tf.Tensor | None = None

    def with_padding(self) -> "tuple[FirstRun, ...]":
        """Returns the same with every third row as padding, and again with other rows there."""
        (rows,) = self.rows[0].mask.shape
        mask = tf.range(rows) % 3 != 2

        def replaced(values: tf.Tensor) -> tf.Tensor:
            kept = tf.reshape(mask, [rows] + [1] * (values.shape.rank - 1))
            return tf.where(kept, values, tf.roll(values, 1, axis=0))

        masked = [one._replace(mask=mask) for one in self.rows]
        others = [one._replace(rows=[replaced(x) for x in one.rows]) for one in masked]
        return tuple(FirstRun(self.moments, one, self.partners, mask) for one in (masked, others))
