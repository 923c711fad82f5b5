"""Partners of the rows of a batch, for layers that mix examples.

The rows at the positions 2k and 2k + 1 of the global batch are partners. The order of the examples
is shuffled, so a partner is a random other example. Both rows of a pair are in one microbatch, on
one replica, so that mixing moves no rows between devices and has the same result for any number of
replicas and microbatches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError


class Partners(NamedTuple):
    """The partners of the rows of a microbatch.

    Attributes:
      values: The values of the partners, each tensor [rows, …].
      mask: bool [rows], False for a row whose partner is padding or has weight 0, and for a last
        row without a partner.
    """

    values: list[tf.Tensor]
    mask: tf.Tensor


def partners(values: Sequence[tf.Tensor], asking: str) -> Partners:
    """Returns the values of the partner of each row. Replica context.

    Args:
      values: Tensors [rows, …], with one row for each row of the microbatch.
      asking: Name of the layer, for the error.

    Raises:
      ConfigError: If the number of rows is not static, is not that of the microbatch, or is odd on
        one of several replicas or microbatches.
    """
    current = microbatch.current()
    rows = values[0].shape[0]
    if rows is None or any(each.shape[0] != rows for each in values):
        raise ConfigError(
            f"{asking} takes tensors of one static number of rows, got the shapes "
            f"{', '.join(str(each.shape) for each in values)}. Keep one row for each example, and "
            "set a shape that is lost by tf.ensure_shape."
        )
    if current is None:
        return _neighbours(values, None)
    if current.rows != rows:
        raise ConfigError(
            f"{asking} must get one row for each of the {current.rows} examples, got {rows} rows. "
            "Mix before the model splits examples into parts."
        )
    # Of a single microbatch on a single replica, the first row is known to be 0.
    if rows % 2 and not (isinstance(current.first_row, int) and current.first_row == 0):
        raise ConfigError(
            f"{asking} mixes the rows 2k and 2k + 1 of a batch, so each replica must have an even "
            f"number of rows in a microbatch, got {rows}. Set GLOBAL_BATCH_SIZE to a multiple of "
            f"2 × replicas × ACCUMULATION_STEPS."
        )
    if current.pairing is not None:
        return current.pairing(values, current.mask)
    return _neighbours(values, current.mask)


class HeldPartners:
    """Finds partners in one pass, and gives the same to later passes, whatever they compute.

    Attributes:
      found: The partners that each call got, in the order of the calls.
    """

    def __init__(self, found: Sequence[Partners] | None = None):
        """Takes what to give.

        Args:
          found: `found` of an earlier pass; None to record.
        """
        self.found: list[Partners] = list(found or [])
        self._given = None if found is None else iter(found)

    def __call__(self, values: Sequence[tf.Tensor], mask: tf.Tensor | None) -> Partners:
        """Returns the given partners, or else finds and records them."""
        if self._given is not None:
            return next(self._given)
        self.found.append(_neighbours(values, mask))
        return self.found[-1]


def _neighbours(values: Sequence[tf.Tensor], mask: tf.Tensor | None) -> Partners:
    """Swaps the rows 2k and 2k + 1; an odd last row gets itself, and is masked."""
    rows = values[0].shape[0]
    order = tf.constant([min(row ^ 1, rows - 1) for row in range(rows)], tf.int64)
    found = [_taken(each, order) for each in values]
    has_partner = tf.constant([(row ^ 1) < rows for row in range(rows)])
    if mask is not None:
        has_partner &= tf.gather(mask, order)
    return Partners(found, has_partner)


def _taken(values: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    if values.dtype.size > 1 or not values.dtype.is_integer:
        return tf.gather(values, order)
    # Bytes, which TensorFlow cannot gather on GPUs.
    return tf.cast(tf.gather(tf.cast(values, tf.float32), order), values.dtype)
