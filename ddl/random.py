"""Random numbers by position in the global batch, independent of the number of replicas.

The numbers of an example are a function of (seed, batch, layer, position in the global batch).
Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") computes the words of
a stream from their place in it, so each replica starts at its own rows and draws only those. N
replicas or microbatches draw bit for bit the same numbers as one device. The numbers do not depend
on a run's precision.

A custom layer draws with `uniform`, `normal` and `bernoulli`, and declares it with the attribute
`draws_by_position = True`:

    class Jitter(keras.layers.Layer):
        draws_by_position = True

        def call(self, x, training=False):
            return x + ddl.random.normal(self, x.shape) if training else x

XLA draws other numbers than TensorFlow from the operations for uniform and normal numbers, but the
same words of Philox. Where XLA compiles a function, the numbers are therefore computed from words.

Keras's own layers and `keras.random` cannot draw by position: each replica and microbatch gets its
own stream.
"""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.seeds import PHILOX, counter_at, seed_at

Shape: TypeAlias = Sequence[Any] | tf.TensorShape

_SPREAD = -7046029254386353131  # 2^64 over the golden ratio, odd, as an int64
_WORDS = 4  # 32-bit words for each count of Philox, each one float32
_MANTISSA, _ONE = 0x7FFFFF, 0x3F800000  # bits of float32: the last 23; those of 1.0
_SMALLEST = np.float32(1e-7)  # TensorFlow replaces smaller numbers before the logarithm


def batch_counter(batch: tf.Tensor) -> tf.Tensor:
    """Returns Philox's counter at the first row of a global batch, uint64 [2].

    A training loop computes the counter of the next batch during an update, so that it is ready
    when the next update begins. The random numbers are then computed in parallel with the layers
    before them; a few operations ahead of the draw would make one wait for the other.

    Args:
      batch: Index of the global batch, int64 [], counted from 0 over the whole run.
    """
    return tf.cast(tf.stack([tf.zeros([], tf.int64), batch]), tf.uint64)


def uniform(owner: Any, shape: Shape, *, shared: bool = False) -> tf.Tensor:
    """Draws numbers uniform in [0, 1), one row for each example. Replica context.

    Args:
      owner: The layer that draws. Each draw of each layer has its own stream; the layer's `seed`,
        if it has one, also selects the stream. Outside of a trainer, the numbers come from the
        layer's `seed_generator`, or else from Keras's global one.
      shape: Shape of the result. The first dimension is a Python integer: the rows of the
        microbatch, or a multiple of them if the model splits each example into consecutive parts.
      shared: Whether all examples of the global batch get the same numbers. The shape is then
        arbitrary.

    Returns:
      float32 of that shape.

    Raises:
      ConfigError: If the first dimension is unknown or not a multiple of the microbatch's rows; or
        in a `tf.while_loop`, such as that of a recurrent layer, where every iteration would draw
        the same numbers. (`tf.vectorized_map` is not detected: its function draws the same numbers
        for each element.)
    """
    if microbatch.current() is None:
        return _outside(keras.random.uniform, owner, shape)
    return _draw(_uniform, 1, owner, shape, shared)


def normal(owner: Any, shape: Shape, *, shared: bool = False) -> tf.Tensor:
    """Draws standard normal numbers, float32; otherwise like `uniform`. Replica context.

    Where XLA compiles the function, a few numbers differ in their last bits.
    """
    if microbatch.current() is None:
        return _outside(keras.random.normal, owner, shape)
    return _draw(_normal, 1, owner, shape, shared)


def bernoulli(owner: Any, shape: Shape, probability: float, *, shared: bool = False) -> tf.Tensor:
    """Draws True with `as_drawn(probability)`; otherwise like `uniform`. Replica context.

    Needs half as many random bits as a comparison of `uniform` with a number.

    Returns:
      bool of that shape.
    """
    if microbatch.current() is None:
        return _outside(keras.random.uniform, owner, shape) < as_drawn(probability)
    # The int16 values from `least` on have this share of all; 2^15 is not an int16.
    least = round((1 - as_drawn(probability)) * 2**16) - 2**15
    if least == 2**15:
        return tf.zeros(shape, tf.bool)
    return _draw(_words, 2, owner, shape, shared) >= tf.constant(least, tf.int16)


def leave_out(owner: Any) -> None:
    """Counts a draw whose numbers nobody needs, so that later draws keep theirs. Replica context.

    Args:
      owner: As in `uniform`.
    """
    if (current := microbatch.current()) is not None:
        current.call_number(owner)


def as_drawn(probability: float) -> float:
    """Returns the nearest multiple of 2^-16, a probability that 16 random bits can realize."""
    return round(probability * 2**16) / 2**16


def _outside(draw: Callable[..., tf.Tensor], owner: Any, shape: Shape) -> tf.Tensor:
    return draw(shape, dtype="float32", seed=getattr(owner, "seed_generator", None))


def _words(**place: Any) -> tf.Tensor:
    """Draws words of Philox, int32 [rows, words]; see `_draw`."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=tf.int32, **place)


def _uniform(**place: Any) -> tf.Tensor:
    """Draws numbers uniform in [0, 1), float32 [rows, words]; the same bits where XLA compiles."""
    if not microbatch.is_compiled():
        return tf.raw_ops.StatelessRandomUniformV2(dtype=tf.float32, **place)
    return _uniform_of(_words(**place))


def _uniform_of(words: tf.Tensor) -> tf.Tensor:
    """Returns the numbers that TensorFlow computes from words, float32 of the same shape."""
    between_1_and_2 = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(words, _MANTISSA), _ONE)
    return tf.bitcast(between_1_and_2, tf.float32) - 1.0


def _normal(**place: Any) -> tf.Tensor:
    """Draws standard normal numbers, float32 [rows, words]."""
    if not microbatch.is_compiled():
        return tf.raw_ops.StatelessRandomNormalV2(dtype=tf.float32, **place)
    return _normal_of(_words(**place))


def _normal_of(words: tf.Tensor) -> tf.Tensor:
    """Returns the normal numbers that TensorFlow computes from words, but for their last bits.

    Box and Muller 1958. Two words give two numbers. Float64 makes the functions equal on all
    devices, and rounds as TensorFlow does where its own functions are exact.

    Args:
      words: int32 [rows, words], an even number of words.

    Returns:
      float32 of the same shape. 98% of the numbers have TensorFlow's bits; the others differ by up
      to 3 units in the last place.
    """
    pairs = tf.reshape(_uniform_of(words), [tf.shape(words)[0], -1, 2])

    def rounded(values: tf.Tensor) -> tf.Tensor:
        return tf.cast(values, tf.float32)

    first, second = tf.unstack(tf.cast(tf.maximum(pairs, [_SMALLEST, 0.0]), tf.float64), axis=-1)
    radius = tf.sqrt(-2.0 * rounded(tf.math.log(first)))
    angle = tf.cast(rounded(2 * math.pi * second), tf.float64)
    both = tf.stack([rounded(tf.sin(angle)) * radius, rounded(tf.cos(angle)) * radius], axis=-1)
    return tf.reshape(both, tf.shape(words))


def _draw(
    numbers_at: Callable[..., tf.Tensor],
    values_per_word: int,
    owner: Any,
    shape: Shape,
    shared: bool,
) -> tf.Tensor:
    """Draws one number for each 32-bit word of Philox, or splits each word into two int16.

    Args:
      numbers_at: Draws an array [rows, words] at a place: shape, key, counter and algorithm.
      values_per_word: 1, or 2 to split words.
      owner: As in `uniform`, like the other arguments.
      shape: See `uniform`.
      shared: See `uniform`.
    """
    current = microbatch.current()
    assert current is not None
    name = f"Layer {getattr(owner, 'name', owner)!r}, which draws random numbers,"
    if current.in_loop:
        raise ConfigError(
            f"{name} must not run inside a loop (tf.while_loop, tf.map_fn, a recurrent layer): "
            "every iteration would draw the same numbers. Draw the numbers for all iterations "
            "before the loop."
        )
    rows, features = shape[0], math.prod(shape[1:])
    first_row: tf.Tensor | int = 0
    if not shared:
        first_row = current.first_row * current.rows_per_example(rows, name)
    # Each row begins at a whole count of Philox, so that a draw can begin at any row.
    counts_per_row = -(-features // (_WORDS * values_per_word))
    if not isinstance(counts_per_row, int):
        counts_per_row = tf.cast(counts_per_row, tf.int64)
    seed = getattr(owner, "seed", None)
    own_seed = int(seed) if isinstance(seed, numbers.Integral) else None
    key = current.stream(current.seed, current.training, *current.call_number(owner), own_seed)
    values = numbers_at(
        shape=[rows, counts_per_row * _WORDS],
        key=tf.bitcast(tf.constant([key], tf.int64), tf.uint64),
        counter=_counter(current, first_row * counts_per_row),
        alg=PHILOX,
    )
    if values_per_word > 1:
        values = tf.reshape(tf.bitcast(values, tf.int16), [rows, -1])
    return tf.reshape(values[:, :features], shape)


def _counter(current: microbatch.Microbatch, place: tf.Tensor | int) -> tf.Tensor:
    """Returns Philox's counter at a place of the global batch, uint64 [2]."""
    return counter_at(current.counter, place)


def seed_by_replica(
    layers: Iterable[keras.layers.Layer], others: Iterable[keras.random.SeedGenerator] = ()
) -> list[tf.Variable]:
    """Makes the seed generators of Keras's layers return seeds by replica and microbatch.

    Keras advances a generator's state at each draw, in lockstep on all replicas, so all replicas
    draw the same numbers. Within a trainer the state stays fixed, and a seed is a function of the
    state, the batch and the rows: replicas and steps differ, and a resumed run draws the same seeds
    as an uninterrupted one.

    Args:
      layers: The layers; their generators are patched in place.
      others: Generators that a task keeps outside of its layers, patched too. Their states are
        variables of the task.

    Returns:
      The states of the layers' generators, int64 [2] each. A checkpoint must hold them, and Keras
      leaves them out.
    """
    generators = [generator for layer in layers for generator in layer._seed_generators]
    for generator in [*generators, *others]:
        generator.next = functools.partial(_next_seed, generator)
    return [generator.state.value for generator in generators]


def _next_seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    current = microbatch.current()
    if current is None:
        return type(generator).next(generator, ordered=ordered)
    state = generator.state.value
    if current.repeats and current.in_loop:
        raise ConfigError(
            "A layer that the backward pass computes again must not draw from keras.random in a "
            "loop (tf.while_loop, tf.map_fn, a recurrent layer): it would draw other numbers. Use "
            "a layer of ddl.layers, or leave the layer out of Remat.layers."
        )
    # Every iteration of a loop has the same call number, so the state advances, as in Keras.
    turn = type(generator).next(generator, ordered=True)[1] if current.in_loop else 0
    turn *= _SPREAD  # keeps the iterations of neighbouring seeds apart
    _, call = current.call_number(generator)
    key = state[:1] + tf.constant(current.stream(current.training, call), tf.int64) + turn
    return seed_at(tf.cast(key, tf.int64), _counter(current, current.first_row))
