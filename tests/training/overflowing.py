"""A loss that overflows on one replica, in batches of the test's choice."""

import numpy as np
import tensorflow as tf

from ddl import microbatch


def overflowing(task, schedule):
    """Makes the loss of a task infinite on the replica that a schedule gives for the batch.

    The schedule returns -1 for batches without an overflow.
    """
    of_task = task.per_example

    def per_example(features, training):
        output, current = of_task(features, training), microbatch.current()
        context = tf.distribute.get_replica_context()
        if current is None or current.seed is None or context is None:
            return output
        there = tf.cast(schedule(tf.cast(current.counter[1], tf.int64)), tf.int32)
        is_there = tf.equal(context.replica_id_in_sync_group, there)
        factor = tf.cast(tf.where(is_there, np.inf, 1.0), output.loss.dtype)
        return output._replace(loss=output.loss * factor)

    task.per_example = per_example
    return task
