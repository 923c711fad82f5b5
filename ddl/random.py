"""Random numbers by position in the global batch, independent of the number of replicas.

`keras.random` and Keras's layers draw like this in a trainer. The public functions give each
owner a stream of its own without a `keras.random.SeedGenerator`:

    class Jitter(keras.layers.Layer):
        def call(self, x, training=False):
            return x + ddl.random.normal(self, x.shape) if training else x

Keras's layers, `keras.random` and layers of users draw through the functions of one module of
Keras, which looks them up at each call. This module replaces them once. In a trainer's pass they
draw the numbers of an example as a function of (seed, batch, stream, position in the global
batch); outside of one they are Keras's own. Philox (Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3") computes the words of a stream from their place in it, so each replica starts
at its own rows and draws only those. N replicas or microbatches draw bit for bit the same numbers
as one device.

- Each `keras.random.SeedGenerator` has a stream, by its seed if the user gave one, else by the
  trainer's. Its state stays as it is, and no checkpoint needs it. An integer seed gives the same
  numbers in each update, different for each example. All draws without a seed share a stream.
- Two traces of a loss with different numbers of rows, before training, tell which draws follow the
  rows (`placing`). All other draws are the same for all examples.
- The numbers are float32 and cast to the dtype that is asked for: they do not depend on a run's
  precision.
- XLA draws other numbers than TensorFlow from the operation for uniform numbers, but the same words
  of Philox. Where XLA compiles a function, uniform numbers are computed from words.

The module of Keras is private to it; tests/test_random.py guards it.
"""

import dataclasses
import functools
import hashlib
import math
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import random as of_keras

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.microbatch import Drawn, Microbatch

__all__ = ["normal", "uniform"]

_UNSEEDED = types.SimpleNamespace(name="keras.random")
"""The owner of draws without a seed."""

PHILOX = tf.random.Algorithm.PHILOX.value
PROBED = (2, 4)
"""Numbers of rows of the traces of `predict` that place draws."""

_WORDS = 4  # 32-bit words for each count of Philox, each one float32
_MANTISSA, _ONE = 0x7FFFFF, 0x3F800000  # bits of float32: the last 23; those of 1.0
_SMALLEST = np.float32(1e-7)  # TensorFlow replaces smaller numbers before the logarithm
_TWO_DEVIATIONS = math.erf(math.sqrt(2))  # part of normal numbers within two deviations
_TRIES = 16  # of a rejection that accepts at least 95%: all fail for one number in 10^20
_BITS = {tf.float16: 10, tf.bfloat16: 7}  # of the mantissa


def batch_counter(batch: tf.Tensor) -> tf.Tensor:
    """Returns Philox's counter at the first row of an update's batches, uint64 [2].

    A training loop computes the counter before the update begins. The random numbers are then
    computed in parallel with the layers before them; a few operations ahead of the draw would make
    one wait for the other.

    Args:
      batch: Number of the update, int64 [], counted from 0 over the whole run.
    """
    return tf.cast(tf.stack([tf.zeros([], tf.int64), batch]), tf.uint64)


def uniform(owner: Any, shape: Any) -> tf.Tensor:
    """Draws numbers uniform in [0, 1). Replica context, or in a step cross-replica context.

    Args:
      owner: The layer or task that draws. Each draw of each owner has its own stream; an integer
        `seed` of the owner selects the stream in place of the trainer's seed. Outside of a trainer
        the numbers come from the owner's `seed_generator`, or else from Keras's global one.
      shape: Shape of the result. In a loss, a first dimension that follows the rows of the
        microbatch gives each example its own numbers; else all examples share them. In a step,
        which has no rows, the numbers are the same on all replicas.

    Returns:
      float32 of that shape.

    Raises:
      ConfigError: If a dimension other than the first follows the rows; or in a `tf.while_loop`,
        `tf.map_fn` or `tf.vectorized_map`, where every iteration would draw the same numbers.
    """
    return keras.random.uniform(shape, dtype="float32", seed=_seed(owner))


def normal(owner: Any, shape: Any) -> tf.Tensor:
    """Draws standard normal numbers, float32; otherwise like `uniform`."""
    return keras.random.normal(shape, dtype="float32", seed=_seed(owner))


def _seed(owner: Any) -> Any:
    generator = getattr(owner, "seed_generator", None)
    return owner if generator is None and microbatch.current() is not None else generator


def placing(
    of_few: Mapping[Any, Drawn], of_more: Mapping[Any, Drawn], few: int, more: int
) -> dict[Any, int]:
    """Returns how many rows of each draw belong to each example; 0: all examples share the draw.

    Args:
      of_few: The draws of a trace with few rows, by place and number (`Microbatch.drawn`).
      of_more: The draws of a trace with more rows.
      few: Number of rows of the first trace.
      more: Number of rows of the second.

    Raises:
      ConfigError: If another dimension of a draw follows the rows, or if the traces draw
        differently.
    """
    found = {}
    for key, one in of_few.items():
        other = of_more.get(key, Drawn(one.layer, ()))
        if one.shape == other.shape:  # a first size that only the run knows is that of the rows
            found[key] = int(one.shape[:1] == (None,))
            continue
        whole, left = divmod(one.shape[0] or 1, few) if one.shape else (0, 1)
        if left or other.shape != (whole * more, *one.shape[1:]):
            raise ConfigError(
                f"{one.layer!r} draws random numbers of shape {list(one.shape)} for {few} examples "
                f"and {list(other.shape)} for {more}. The first dimension must be the examples, or "
                "a multiple of them, and no other may depend on their number: transpose the draw."
            )
        found[key] = whole
    if len(of_more) != len(of_few):
        raise ConfigError(
            f"The loss draws {len(of_few)} times for {few} examples and {len(of_more)} times for "
            f"{more}. Draw for all examples at once."
        )
    return found


def placing_of(call: Callable[[Any], Any], features: Mapping[str, tf.Tensor]) -> dict[Any, int]:
    """Returns the placing of the draws of a function, traced with 2 and 4 examples. In a pass.

    Args:
      call: Takes features of any number of examples.
      features: Features that say which shapes `call` takes.
    """
    current = microbatch.current()
    assert current is not None
    specs = {name: (value.shape[1:], value.dtype) for name, value in features.items()}
    found: list[dict[Any, Drawn]] = [{}, {}]
    for rows, drawn in zip(PROBED, found, strict=True):
        probe = dataclasses.replace(
            current, rows=rows, mask=None, weight=None, drawn=drawn, _calls={}
        )
        traced = tf.function(functools.partial(_called, probe, call), autograph=False)
        traced.get_concrete_function(
            {name: tf.TensorSpec([rows, *shape], dtype) for name, (shape, dtype) in specs.items()}
        )
    return placing(found[0], found[1], *PROBED)


def _called(probe: Microbatch, call: Callable[[Any], Any], features: Any) -> None:
    with probe.forward():
        call(features)


def draws_by_position() -> bool:
    """Returns whether draws are by position here: in a pass, but not in tf.init_scope.

    Nor in a graph within an eager pass, in which Keras builds a model.
    """
    current = microbatch.current()
    return current is not None and current.is_eager == tf.executing_eagerly()


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Replaces a function of Keras's module in passes of a trainer."""
    own = getattr(of_keras, name)

    @functools.wraps(own)
    def draw(*args: Any, **kwargs: Any) -> Any:
        return (function if draws_by_position() else own)(*args, **kwargs)

    setattr(of_keras, name, draw)


def _keras_uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
) -> tf.Tensor:
    """Draws as `keras.random.uniform`; `seed` may be any object, the owner of a stream."""
    kind = _dtype(dtype)
    drawn = _draw(_uniform, seed, shape)
    if kind in _BITS:  # 1 must not be reached by rounding
        drawn = tf.floor(drawn * 2.0 ** _BITS[kind]) * 2.0 ** -_BITS[kind]
    low = tf.cast(minval, kind)
    return tf.cast(drawn, kind) * (tf.cast(maxval, kind) - low) + low


def _keras_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
    part: float = 1.0,
) -> tf.Tensor:
    """Draws as `keras.random.normal`, a part of the numbers around the mean."""
    kind = _dtype(dtype)
    drawn = tf.cast(_draw(functools.partial(_normal, part), seed, shape), kind)
    return drawn * tf.cast(stddev, kind) + tf.cast(mean, kind)


def _keras_randint(
    shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None
) -> tf.Tensor:
    """Draws as `keras.random.randint`, from at most 2^32 integers."""
    words = tf.bitcast(_draw(_words, seed, shape), tf.uint32)
    low, high = (tf.cast(end, tf.int64) for end in (minval, maxval))
    return tf.cast(tf.cast(words, tf.int64) % (high - low) + low, dtype)


def _keras_dropout(
    inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
) -> tf.Tensor:
    """Drops as `keras.random.dropout`, at the nearest multiple of 2^-16 to the rate.

    16 random bits an entry take half the time of float32 numbers.
    """
    inputs = tf.convert_to_tensor(inputs)
    share = round((1 - rate) * 2**16)
    if share in (0, 2**16):
        return inputs if share else tf.zeros_like(inputs)
    sizes = keras.ops.shape(inputs)
    given = noise_shape or [None] * len(sizes)
    shape = [size if own is None else own for own, size in zip(given, sizes, strict=True)]
    # The int16 values from this one on have that share of all.
    kept = _draw(_words, seed, shape, per_word=2) >= tf.constant(2**15 - share, tf.int16)
    scale = tf.constant(2**16 / share, inputs.dtype)
    if inputs.dtype == tf.bfloat16:  # has no GPU kernel of multiply_no_nan
        return tf.where(kept, inputs * scale, tf.zeros([], inputs.dtype))
    return tf.math.multiply_no_nan(inputs, tf.cast(kept, inputs.dtype) * scale)


def _keras_categorical(
    logits: Any, num_samples: int, dtype: Any = "int64", seed: Any = None
) -> tf.Tensor:
    """Draws as `keras.random.categorical`, by Gumbel noise (Gumbel 1954)."""
    logits = tf.convert_to_tensor(logits)
    rows, classes = keras.ops.shape(logits)
    drawn = tf.maximum(_draw(_uniform, seed, [rows, num_samples, classes]), _SMALLEST)
    noise = tf.cast(-tf.math.log(-tf.math.log(drawn)), logits.dtype)
    return tf.cast(tf.argmax(logits[:, tf.newaxis] + noise, axis=-1), dtype)


def _keras_beta(
    shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None
) -> tf.Tensor:
    """Draws as `keras.random.beta`: two gamma numbers x and y give x / (x + y)."""
    first, second = (_log_gamma(shape, each, seed) for each in (alpha, beta))
    return tf.cast(tf.sigmoid(first - second), _dtype(dtype))


def _log_gamma(shape: Any, alpha: Any, seed: Any) -> tf.Tensor:
    """Draws logarithms of gamma numbers, float64: for a small alpha the numbers would be 0.

    Marsaglia and Tsang 2000, "A simple method for generating gamma variables": a rejection, of
    which the first accepted try counts. Below 1, Gamma(alpha) is Gamma(alpha + 1) · U^(1 / alpha).
    """
    sizes, alpha = _sizes(shape), tf.cast(alpha, tf.float64)[..., tf.newaxis]
    deviates = tf.cast(_draw(_normal, seed, [*sizes, _TRIES]), tf.float64)
    drawn = 1 - tf.cast(_draw(_uniform, seed, [*sizes, _TRIES + 1]), tf.float64)  # in (0, 1]
    zero = tf.zeros([], tf.float64)
    d = alpha + tf.where(alpha < 1, zero + 1, zero) - 1 / 3
    cube = (1 + deviates / tf.sqrt(9 * d)) ** 3
    log_cube = tf.math.log(tf.maximum(cube, 1e-30))
    limit = deviates**2 / 2 + d * (1 - cube + log_cube)
    accepted = (cube > 0) & (tf.math.log(drawn[..., 1:]) < limit)
    first = tf.one_hot(tf.argmax(tf.cast(accepted, tf.int64), axis=-1), _TRIES, dtype=tf.float64)
    found = tf.math.log(d) + tf.reduce_sum(first * log_cube, axis=-1, keepdims=True)
    return (found + tf.where(alpha < 1, tf.math.log(drawn[..., :1]) / alpha, zero))[..., 0]


def _refuse(name: str, remedy: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{_layer(_UNSEEDED)!r} calls keras.random.{name}, whose numbers cannot be drawn by "
        f"position. {remedy}, or draw in the data (dataset.map)."
    )


for _function in (
    *(_keras_uniform, _keras_normal, _keras_randint, _keras_dropout),
    *(_keras_categorical, _keras_beta),
):
    _replace(_function.__name__.removeprefix("_keras_"), _function)
_replace("truncated_normal", functools.partial(_keras_normal, part=_TWO_DEVIATIONS))
for _name, _remedy in {
    "binomial": "Add up keras.random.uniform(…) < probability",
    "gamma": "Use keras.random.beta",
    "shuffle": "Use ddl.layers.Mixup or ddl.layers.CutMix to mix examples",
}.items():
    _replace(_name, functools.partial(_refuse, _name, _remedy))


def _next(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    """Returns the next seed of a generator; refuses one in a pass."""
    if draws_by_position():
        raise ConfigError(
            f"{_layer(generator)!r} takes seeds from a keras.random.SeedGenerator, so its draws "
            "would depend on the number of replicas. Draw by keras.random functions with "
            "seed=generator, or use the layer in the data (dataset.map)."
        )
    return _next_of_keras(generator, ordered=ordered)


_next_of_keras = keras.random.SeedGenerator.next
keras.random.SeedGenerator.next = _next


def _dtype(dtype: Any) -> tf.DType:
    return tf.as_dtype(keras.backend.standardize_dtype(dtype))


def _words(**place: Any) -> tf.Tensor:
    """Draws words of Philox, int32 [rows, words]; see `_draw`."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=tf.int32, **place)


def _uniform(**place: Any) -> tf.Tensor:
    """Draws numbers uniform in [0, 1), float32 [rows, words]; the same bits where XLA compiles."""
    if not microbatch.is_compiled():
        return tf.raw_ops.StatelessRandomUniformV2(dtype=tf.float32, **place)
    mantissas = tf.bitwise.bitwise_and(_words(**place), _MANTISSA)
    return tf.bitcast(tf.bitwise.bitwise_or(mantissas, _ONE), tf.float32) - 1.0


def _normal(share: float = 1.0, **place: Any) -> tf.Tensor:
    """Draws standard normal numbers, float32 [rows, words], by the inverse error function.

    Args:
      share: Part of the numbers, around 0, that are drawn.
      **place: See `_draw`.
    """
    # In float64, whose rounded results have the same bits where XLA compiles.
    between = tf.cast(2 * _uniform(**place) - (1 - 2.0**-23), tf.float64)  # never -1 or 1
    return tf.cast(math.sqrt(2) * tf.math.erfinv(between * share), tf.float32)


def _draw(
    numbers_at: Callable[..., tf.Tensor], seed: Any, shape: Any, per_word: int = 1
) -> tf.Tensor:
    """Draws numbers of a shape, by row or shared.

    Args:
      numbers_at: Draws an array [rows, numbers] at a place: shape, key, counter and algorithm.
      seed: None, an integer, or the owner of a stream.
      shape: Shape of the result. The first dimension of a draw by row is a Python integer.
      per_word: 1, or 2 to split each 32-bit word into two int16.

    Raises:
      ConfigError: If the draw cannot be placed.
    """
    current = microbatch.current()
    assert current is not None
    owner = _UNSEEDED if seed is None else seed
    sizes, layer = _sizes(shape), _layer(owner)
    if current.in_loop:
        raise ConfigError(
            f"{layer!r} draws random numbers in a loop (tf.while_loop, tf.map_fn, "
            "tf.vectorized_map, the step of a recurrent layer), where each iteration would draw "
            "the same. Draw the numbers for all iterations before the loop."
        )
    place, call = current.call_number(owner, layer)
    drawn = Drawn(layer, tuple(size if isinstance(size, int) else None for size in sizes))
    of_example = _rows_of_example(current, (place, call), drawn)
    rows, sizes_of_row = (of_example * current.rows, sizes[1:]) if of_example else (1, sizes)
    features = math.prod(sizes_of_row)
    # Each row begins at a whole count of Philox, so that a draw can begin at any row.
    counts_of_row = -(-features // (_WORDS * per_word))
    if not isinstance(counts_of_row, int):
        counts_of_row = tf.cast(counts_of_row, tf.int64)
    if isinstance(owner, int):  # the same numbers in each update
        key, counter = hashed("integer seed", owner), tf.zeros([2], tf.uint64)
    else:
        own = getattr(owner, "_initial_seed", getattr(owner, "seed", None))
        of = int(own) if isinstance(own, numbers.Integral) else current.seed
        of_pass = (current.pass_number,) if current.pass_number else ()
        key = hashed(of, current.training, place, call, *of_pass)
        counter = current.counter
    first = current.first_row * of_example * counts_of_row if of_example else 0
    values = numbers_at(
        shape=[rows, counts_of_row * _WORDS],
        key=tf.bitcast(tf.constant([key], tf.int64), tf.uint64),
        counter=counter_at(counter, first),
        alg=PHILOX,
    )
    if per_word > 1:
        values = tf.reshape(tf.bitcast(values, tf.int16), [rows, -1])
    return tf.reshape(values[:, :features], sizes)


def _rows_of_example(current: Microbatch, key: tuple[int, int], drawn: Drawn) -> int:
    """Returns how many rows of a draw belong to each example; 0: all share it, as in a step."""
    if current.drawn is not None:
        current.drawn[key] = drawn
        return 0
    if not current.rows:
        return 0
    if current.placing is None or key not in current.placing:
        raise ConfigError(
            f"{drawn.layer!r} draws random numbers, but the loss could not be traced with 4 and 8 "
            "examples before training, so it is unknown whether each example has its own. The loss "
            "must take any number of examples: leave out a fixed batch size of the model."
        )
    of_example = current.placing[key]
    if of_example and drawn.shape[0] not in (None, of_example * current.rows):
        raise ConfigError(
            f"{drawn.layer!r} must draw {of_example} rows for each of the {current.rows} examples, "
            f"got {drawn.shape[0]} rows. Take the shape from x.shape or keras.ops.shape(x)."
        )
    return of_example


def _layer(owner: Any) -> str:
    """Returns the name of the layer that draws here, or else of the owner of the stream."""
    scope = tf.get_current_name_scope().rsplit("/", 1)[-1]
    return scope or str(getattr(owner, "name", owner))


def _sizes(shape: Any) -> list[Any]:
    """Returns a shape as a list, with Python integers for static sizes."""
    if tf.is_tensor(shape):
        static = tf.get_static_value(shape, partial=True)
        static = [None] * shape.shape[0] if static is None else static
        shape = [shape[i] if size is None else size for i, size in enumerate(static)]
    values = [(size, tf.get_static_value(size)) for size in shape]
    return [size if value is None else int(value) for size, value in values]


def hashed(*identity: int | str | None) -> int:
    """Returns a hash of an identity, in the range of int64."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def counter_at(counter: tf.Tensor, place: tf.Tensor | int) -> tf.Tensor:
    """Returns Philox's counter at a place after another counter, uint64 [2]."""
    if isinstance(place, int):
        return counter + tf.constant([place, 0], tf.uint64) if place else counter
    return counter + tf.cast(tf.stack([place, tf.zeros_like(place)]), tf.uint64)


def drawn_by_state(graph: tf.Graph) -> str | None:
    """Returns an operation that draws other numbers each time, as messages call it, if any.

    Draws of ddl are stateless operations, which repeat their numbers for the same seed. Those of
    Keras are too, but they assign the next seed to a variable.

    Args:
      graph: A graph; the functions that it calls are searched too.
    """
    drawing = (node for node in nodes_of(graph.as_graph_def()) if _has_state(node))
    return next((f"the operation {node.name!r} ({node.op})" for node in drawing), None)


def nodes_of(graph: Any) -> list[Any]:
    """Returns the operations of a `tf.compat.v1.GraphDef` and of the functions that it calls."""
    return [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]


def _has_state(node: Any) -> bool:
    """Returns whether a node draws numbers by a state, or changes one."""
    if node.op.startswith(("Rng", "StatefulRandom", "Assign")):  # tf.random.Generator, Keras
        return True
    # The recurrent kernels of GPUs have seeds for a dropout that Keras does not use.
    unused = "dropout" in node.attr and not node.attr["dropout"].f
    return "seed2" in node.attr and not unused
