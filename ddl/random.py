"""Random numbers by position: the rows of one stream, whichever replica draws them.

What is drawn for an example is a function of (seed, batch, layer, position in the global batch).
Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") computes the words of
a stream from their place in it, so a replica begins where its rows lie and draws no more than
them: N replicas, or microbatches, draw bit for bit what one device does. What is drawn does not
depend on a run's precision.

A layer of one's own draws with `uniform`, `normal` and `bernoulli`, and says so by its attribute
`draws_by_position = True`:

    class Jitter(keras.layers.Layer):
        draws_by_position = True

        def call(self, x, training=False):
            return x + ddl.random.normal(self, x.shape) if training else x

Keras's own layers cannot do this: they get a stream for each replica and microbatch.
"""

import functools
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError

PHILOX = tf.random.Algorithm.PHILOX.value
_SPREAD = -7046029254386353131  # 2^64 over the golden ratio, odd, as an int64
_WORDS = 4  # what one count of Philox gives: as many float32


def batch_counter(batch: tf.Tensor) -> tf.Tensor:
    """Where Philox begins for the first row of a global batch: uint64 [2].

    A loop makes it for the next batch beside an update, so that it is there when that begins: what
    is drawn is then computed while the layers before it are, where a few operations ahead of the
    draw would make them wait for each other.

    Args:
      batch: Number of the global batch, int64 [], counted over the whole run.
    """
    return tf.cast(tf.stack([tf.zeros([], tf.int64), batch]), tf.uint64)


def uniform(owner: Any, shape: Sequence[Any], *, shared: bool = False) -> tf.Tensor:
    """Numbers in [0, 1), one row an example. Replica context.

    Args:
      owner: The layer that draws. Each layer, and each of its draws, has a stream of its own;
        its `seed`, where it has one, makes it another. Outside of a trainer its `seed_generator`
        draws, where it has one, or Keras's global one.
      shape: Of what is drawn. The first dimension is a Python integer, the batch,
        or a multiple of it where the model splits examples into parts, example by example.
      shared: Whether all examples of the global batch get the same numbers, of any shape.

    Returns:
      float32 of that shape.

    Raises:
      ConfigError: If the first dimension is unknown, or no multiple of the microbatch; or in a
        loop on tensors, such as that of a recurrent layer, whose every turn would draw the same.
        (`tf.vectorized_map` is not noticed: what it maps draws the same for each element.)
    """
    if microbatch.current() is None:
        return _outside(keras.random.uniform, owner, shape)
    return _draw(tf.raw_ops.StatelessRandomUniformV2, tf.float32, 1, owner, shape, shared)


def normal(owner: Any, shape: Sequence[Any], *, shared: bool = False) -> tf.Tensor:
    """Standard normal numbers, one row an example; as `uniform` in all else."""
    if microbatch.current() is None:
        return _outside(keras.random.normal, owner, shape)
    return _draw(tf.raw_ops.StatelessRandomNormalV2, tf.float32, 1, owner, shape, shared)


def bernoulli(
    owner: Any, shape: Sequence[Any], probability: float, *, shared: bool = False
) -> tf.Tensor:
    """True with `as_drawn(probability)`, one row an example; as `uniform` in all else.

    Takes half as many random bits as comparing `uniform` with a number.

    Returns:
      bool of that shape.
    """
    if microbatch.current() is None:
        return _outside(keras.random.uniform, owner, shape) < as_drawn(probability)
    # From `least` on lies the share of all int16 that is asked for; 2^15 is none of them.
    least = round((1 - as_drawn(probability)) * 2**16) - 2**15
    if least == 2**15:
        return tf.zeros(shape, tf.bool)
    words = tf.raw_ops.StatelessRandomUniformFullIntV2
    return _draw(words, tf.int32, 2, owner, shape, shared) >= tf.constant(least, tf.int16)


def as_drawn(probability: float) -> float:
    """The probability of 16 random bits that comes next to a given one."""
    return round(probability * 2**16) / 2**16


def _outside(draw: Callable[..., tf.Tensor], owner: Any, shape: Sequence[Any]) -> tf.Tensor:
    return draw(shape, dtype="float32", seed=getattr(owner, "seed_generator", None))


def _draw(
    operation: Callable[..., tf.Tensor],
    dtype: tf.DType,
    values_per_word: int,
    owner: Any,
    shape: Sequence[Any],
    shared: bool,
) -> tf.Tensor:
    """Draws words of Philox, of 32 bits; with two values a word each is split into two int16."""
    current = microbatch.current()
    assert current is not None
    name = f"the layer {getattr(owner, 'name', owner)!r} draws random numbers"
    if current.in_loop:
        raise ConfigError(
            f"{name} in a loop (tf.while_loop, tf.map_fn, a recurrent layer), whose every turn "
            "would draw the same. Draw for all turns before the loop."
        )
    rows, features = shape[0], math.prod(shape[1:])
    first_row: tf.Tensor | int = 0
    if not shared:
        first_row = current.first_row * current.rows_per_example(rows, f"{name} and")
    # Rows begin at whole counts, so that any row can be begun with.
    counts_per_row = -(-features // (_WORDS * values_per_word))
    if not isinstance(counts_per_row, int):
        counts_per_row = tf.cast(counts_per_row, tf.int64)
    seed = getattr(owner, "seed", None)
    own_seed = int(seed) if isinstance(seed, numbers.Integral) else None
    key = _hashed(current.seed, current.training, *current.call_number(owner), own_seed)
    values = operation(
        shape=[rows, counts_per_row * _WORDS],
        key=tf.bitcast(tf.constant([key], tf.int64), tf.uint64),
        counter=_counter(current, first_row * counts_per_row),
        alg=PHILOX,
        dtype=dtype,
    )
    if values_per_word > 1:
        values = tf.reshape(tf.bitcast(values, tf.int16), [rows, -1])
    return tf.reshape(values[:, :features], shape)


def _hashed(*identity: int | None) -> int:
    """An int64 that looks unrelated for any two identities."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _counter(current: microbatch.Microbatch, place: tf.Tensor | int) -> tf.Tensor:
    """Where Philox begins for what lies at a place of the batch: uint64 [2]."""
    if isinstance(place, int):
        return current.counter + tf.constant([place, 0], tf.uint64) if place else current.counter
    return current.counter + tf.cast(tf.stack([place, tf.zeros_like(place)]), tf.uint64)


def seed_by_replica(layers: Iterable[keras.layers.Layer]) -> list[tf.Variable]:
    """Lets the generators of Keras's layers give each replica and microbatch its own seeds.

    Keras moves a generator's state at each draw, in lockstep on all replicas, so that these draw
    the same. Within a trainer the state stays, and a seed is a function of it, the batch and the
    rows: replicas and steps differ, and a restored run goes on with the seeds it would have had.

    Returns:
      The states, int64 [2] each, which a checkpoint must hold and Keras leaves out.
    """
    generators = [generator for layer in layers for generator in layer._seed_generators]
    for generator in generators:
        generator.next = functools.partial(_next_seed, generator)
    return [generator.state.value for generator in generators]


def _next_seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    current = microbatch.current()
    if current is None:
        return type(generator).next(generator, ordered=ordered)
    state = generator.state.value
    # In a loop the call's number stays while tensors change; then the state moves, as in Keras.
    turn = type(generator).next(generator, ordered=True)[1] if current.in_loop else 0
    turn *= _SPREAD  # lest a turn look like the next one of a neighbouring seed
    _, call = current.call_number(generator)
    key = state[:1] + tf.constant(_hashed(current.training, call), tf.int64) + turn
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2],
        key=tf.bitcast(tf.cast(key, tf.int64), tf.uint64),
        counter=_counter(current, current.first_row),
        alg=PHILOX,
        dtype=tf.int64,
    )
