"""The rows of a shard."""

import tensorflow as tf

from ddl.layers.shards.lockstep import Shard
from ddl.microbatch import Microbatch


def rows_of(
    shard: Shard, features: dict[str, tf.Tensor], of_replica: Microbatch, always_full: bool
) -> tuple[dict[str, tf.Tensor], Microbatch]:
    """Returns the rows of a shard. Replica context.

    Args:
      shard: The shard.
      features: Features and "weight" of the rows of the replica, [rows, …] each.
      of_replica: Their microbatch.
      always_full: Whether all weights are 1.

    Returns:
      The features [rows / shards of a replica, …], and a microbatch that draws the same numbers for
      them as one of all rows.
    """
    rows = of_replica.rows // shard.count
    first = shard.number * rows
    own = {name: values[first : first + rows] for name, values in features.items()}
    if always_full:
        own["weight"] = tf.ones([rows])  # a constant, as of a replica with a single shard
    microbatch = of_replica.copied()
    microbatch.gathers = []
    microbatch.first_row = of_replica.first_row + first
    microbatch.rows = rows
    microbatch.weight = own["weight"]
    microbatch.mask = None if of_replica.mask is None else own["weight"] > 0
    return own, microbatch
