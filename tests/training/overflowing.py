"""A task whose loss overflows on one replica, in a batch of the test's choice."""

import numpy as np
import tensorflow as tf

import ddl
from ddl import microbatch


class Overflowing(ddl.Classification):
    """A task whose loss is infinite on the replica that a schedule gives for the batch.

    The schedule returns -1 for batches without an overflow.
    """

    def __init__(self, model, schedule):
        super().__init__(model)
        self.schedule = schedule

    def per_example(self, features, training):
        output = super().per_example(features, training)
        if not training:
            return output
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        there = tf.cast(self.schedule(tf.cast(microbatch.current().counter[1], tf.int64)), tf.int32)
        return output._replace(loss=tf.where(tf.equal(here, there), np.inf, 1.0) * output.loss)
