"""A task whose weights record what each example drew, and in which update it was read."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.contract import builders
from tests.contract.cases import BATCH, Where

EXAMPLES = 131
STREAMS = ("normal", "uniform", "shared", "again", "unknown")


class Noise(keras.layers.Layer):
    """A layer of a user's that draws five numbers for each example, by its position."""

    def call(self, ids):
        rows = ids.shape[0]
        unknown = tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[])  # as of TextVectorization
        drawn = [
            ddl.random.normal(self, [rows, 1]),
            1 + ddl.random.uniform(self, [rows, 1]),
            tf.repeat(ddl.random.normal(self, [1, 1]), rows, axis=0),
            ddl.random.normal(self, [rows, 1]),
            tf.ensure_shape(ddl.random.normal(self, [unknown, 1]), [rows, 1]),
        ]
        return tf.cast(tf.concat(drawn, axis=1), tf.float64)


class Recording:
    """The gradient of an example's row of the table is what the example drew.

    SGD at rate 1 subtracts it, divided by the number of examples in the batch.
    """

    def __init__(self) -> None:
        ids = keras.Input((), dtype="int64")
        self.table = keras.layers.Embedding(EXAMPLES, len(STREAMS), embeddings_initializer="zeros")
        self.model = keras.Model(ids, self.table(ids))
        self.noise = Noise()

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        rows = self.model(features["id"], training=training)
        drawn = self.noise(features["id"]) if training else 1.0
        return ddl.PerExample(tf.reduce_sum(rows * drawn, axis=1))


class Record(NamedTuple):
    """What an update read.

    Attributes:
      examples: The examples of the batch, in ascending order.
      drawn: What each drew, [examples, streams].
    """

    examples: np.ndarray
    drawn: np.ndarray


def record(where: Where, updates: int, rate: Any = 1.0, **arguments: Any) -> list[Record]:
    """Trains the task; returns what each update read."""
    make, data = (Recording, lambda: keras.optimizers.SGD(rate)), {"id": np.arange(EXAMPLES)}
    options = {"global_batch_size": BATCH, "shuffle": True, **arguments}
    trainer = builders.make_trainer(make, data, where, **options)
    records, before = [], np.zeros([EXAMPLES, len(STREAMS)])
    for _ in range(updates):
        trainer.train(1, progress=False)
        after = trainer.model.get_weights()[0]
        (examples,) = np.nonzero(after[:, STREAMS.index("uniform")] != before[:, 1])
        records.append(Record(examples, (before - after)[examples] * len(examples)))
        before = after
    return records
