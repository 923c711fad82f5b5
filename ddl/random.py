"""Random numbers by position: the rows of one stream, whichever replica draws them.

What is drawn for an example is a function of (seed, batch, layer, position in the global batch).
Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") computes the words of
a stream from their place in it, so a replica begins where its rows lie and draws no more than
them: N replicas, or microbatches, draw bit for bit what one device does. All is drawn in
float32, so that a run in another precision draws the same too.

Keras's own layers cannot do this: they get a stream for each replica and microbatch.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.microbatch import Microbatch

_PHILOX = 1
_WORDS = 4  # what one count of Philox gives: as many float32


def uniform(
    owner: Any, shape: Sequence[Any], *, seed: int | None = None, shared: bool = False
) -> tf.Tensor:
    """Numbers in [0, 1), one row an example. Replica context.

    Args:
      owner: The layer that draws. Each layer, and each of its calls, draws from a stream of its
        own; outside of a trainer its `seed_generator` draws, where it has one.
      shape: Of what is drawn, as Python integers or int32 []. The first dimension is the batch,
        or a multiple of it where the model splits examples into parts, example by example.
      seed: Tells this stream from another one of the same owner.
      shared: Whether all examples of the global batch get the same numbers, of any shape.

    Returns:
      float32 of that shape.

    Raises:
      ConfigError: If the first dimension is not a multiple of the microbatch.
    """
    operation = tf.raw_ops.StatelessRandomUniformV2
    return _draw(operation, keras.random.uniform, owner, shape, seed, shared)


def normal(
    owner: Any, shape: Sequence[Any], *, seed: int | None = None, shared: bool = False
) -> tf.Tensor:
    """Standard normal numbers, one row an example; as `uniform` in all else."""
    operation = tf.raw_ops.StatelessRandomNormalV2
    return _draw(operation, keras.random.normal, owner, shape, seed, shared)


def _draw(
    operation: Callable[..., tf.Tensor],
    outside: Callable[..., tf.Tensor],
    owner: Any,
    shape: Sequence[Any],
    seed: int | None,
    shared: bool,
) -> tf.Tensor:
    current = microbatch.current()
    if current is None:
        return outside(shape, dtype="float32", seed=getattr(owner, "seed_generator", None))
    rows, features = shape[0], math.prod(shape[1:])
    first_row = tf.zeros([], tf.int64) if shared else _first_row(current, owner, rows)
    # Rows begin at whole counts, so that any row can be begun with.
    counts = -(-features // _WORDS)
    values = operation(
        shape=[rows, counts * _WORDS],
        key=tf.constant([_stream_key(current, owner, seed)], tf.uint64),
        counter=_words(first_row * tf.cast(counts, tf.int64), current.batch),
        alg=_PHILOX,
        dtype=tf.float32,
    )
    return tf.reshape(values[:, :features], shape)


def _first_row(current: Microbatch, owner: Any, rows: Any) -> tf.Tensor:
    if isinstance(rows, int) and rows % current.rows:
        raise ConfigError(
            f"the layer {getattr(owner, 'name', owner)!r} draws {rows} rows of random numbers "
            f"for {current.rows} examples: which example they belong to cannot be known. "
            "Keep the batch as the first dimension."
        )
    return current.first_row * tf.cast(rows // current.rows, tf.int64)


def _words(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
    """A counter of Philox: uint64 [2]."""
    return tf.cast(tf.stack([low, high]), tf.uint64)


def _stream_key(current: Microbatch, owner: Any, seed: int | None) -> int:
    """64 bits that look unrelated from stream to stream."""
    identity = (current.seed, current.training, *current.call_number(owner), seed)
    return int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=8).digest(), "big")


def seed_by_replica(generators: Iterable[keras.random.SeedGenerator]) -> None:
    """Lets Keras's generators give each replica and microbatch seeds of their own in a trainer.

    Keras moves a generator's state at each draw, in lockstep on all replicas, so that these draw
    the same. Within a trainer the state stays, and a seed is a function of it, the batch and the
    rows: replicas and steps differ, and a restored run goes on with the seeds it would have had.
    """
    for generator in generators:
        generator.next = functools.partial(_next_seed, generator)


def _next_seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    current = microbatch.current()
    if current is None:
        return type(generator).next(generator, ordered=ordered)
    _, call = current.call_number(generator)
    seeds = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[call + 1, 2],
        key=tf.bitcast(tf.cast(generator.state.value[:1], tf.int64), tf.uint64),
        counter=_words(current.first_row, current.batch),
        alg=_PHILOX,
        dtype=tf.int64,
    )
    # int64 as the state is; the training flag keeps evaluation apart.
    return seeds[call] + tf.cast(not current.training, tf.int64)
