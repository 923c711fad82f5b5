"""Documents of varying length, for tests."""

import numpy as np
import tensorflow as tf
from ddl.data.decoded import DecodedSource

import ddl

COUNT, LONGEST = 41, 12
LENGTHS = np.random.default_rng(0).integers(1, LONGEST + 1, COUNT)
TOKENS = np.where(
    np.arange(LONGEST) < LENGTHS[:, np.newaxis],
    1 + np.arange(COUNT)[:, np.newaxis] * 100 + np.arange(LONGEST),
    0,
)
"""Token t of document n is 1 + 100·n + t."""


def arrays(**features) -> ddl.data.ArraySource:
    return ddl.data.ArraySource(token=TOKENS, length=LENGTHS, **features)


class Decoded(DecodedSource):
    """The same documents, read one by one."""

    def __len__(self):
        return COUNT

    @property
    def element_spec(self):
        return {
            "token": tf.TensorSpec([LONGEST], tf.int64),
            "length": tf.TensorSpec([], tf.int64),
        }

    def example(self, index, seed):
        return {"token": tf.constant(TOKENS)[index], "length": tf.constant(LENGTHS)[index]}


def lines(folder) -> ddl.data.RandomAccessSource:
    """The same documents, as the lines of a file that a function encodes."""
    file = folder / "lines.txt"
    file.write_text("\n".join(str(number) for number in range(COUNT)))

    def encode(numbers):
        return [TOKENS[int(number)][: LENGTHS[int(number)]] for number in numbers]

    return ddl.data.token_lines(str(file), encode=encode)


def an_epoch(source, batch, epoch=0, shuffle=True, rows=None, seed=3):
    """Returns the batches of an epoch, as arrays."""
    steps = source.steps_per_epoch(batch)
    batches = source.batches(batch, epoch * steps, seed=seed, shuffle=shuffle, rows=rows)
    return list(batches.take(steps).as_numpy_iterator())
