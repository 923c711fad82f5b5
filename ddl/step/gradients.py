"""Gradients of the global batch: clipped and applied, or combined by a step.

The path of a gradient after the all-reduce: finite check (`ddl.step.overflow`), factor, penalties,
clip, apply. Every replica holds the same values there. Keras 3 clips and checks before the
all-reduce, on each replica's own share.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError, check_takes
from ddl.microbatch import CannotCompileError, is_compiled

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

Variables: TypeAlias = Sequence[keras.Variable]

Limit: TypeAlias = float | Mapping[str, float | None] | None
"""A limit of all gradients, or that of each optimizer by its name; None: no limit."""


class Gradients:
    """The gradient of the global batch with respect to some variables, equal on all replicas.

    It is reduced over replicas and microbatches, divided once by the sum of the weights, and
    unscaled. Sums, differences and multiples work variable by variable; `norm` and `dot` take all
    variables together. The projection of PCGrad (Yu et al. 2020, "Gradient surgery for multi-task
    learning"):

        one -= other * tf.math.divide_no_nan(tf.minimum(one.dot(other), 0.0), other.dot(other))

    Cross-replica context, in a graph.

    Attributes:
      variables: The variables, in the order of the values.
      of_replicas: The values as distributed values, which `strategy.run` takes.
      draws: Number of the pass that computed the values; None if they were computed of gradients.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Variables, values: Any, draws: Any = None
    ):
        """Keeps the arguments; the values are one for each variable, without a missing factor."""
        self._strategy = strategy
        self.variables = tuple(variables)
        self.of_replicas = list(strategy.run(_opaque, args=(list(values),)))
        self.draws: int | None = draws

    @property
    def values(self) -> list[Gradient]:
        """One tensor per variable, of its shape and dtype; looked-up rows as `tf.IndexedSlices`."""
        return [self._strategy.experimental_local_results(v)[0] for v in self.of_replicas]

    def __add__(self, other: "Gradients") -> "Gradients":
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> "Gradients":
        return self if isinstance(other, int) and other == 0 else self + other  # Python's sum()

    def __sub__(self, other: "Gradients") -> "Gradients":
        return self._with(other, operator.sub)

    def __mul__(self, factor: tf.Tensor | float) -> "Gradients":
        exact = tf.constant(factor, tf.float64) if isinstance(factor, int | float) else factor
        if isinstance(exact, Gradients) or exact.shape.rank != 0:
            raise ConfigError(f"Gradients can be multiplied by a scalar alone, got {factor!r:.80}.")
        values = self._strategy.run(multiply, args=(self.of_replicas, exact))
        return self._made(self.variables, values)

    __rmul__ = __mul__

    def norm(self) -> tf.Tensor:
        """Returns the global norm: a scalar in the widest dtype of the gradients."""
        return tf.sqrt(self._of_first_replica(squared_norm, self.of_replicas))

    def dot(self, other: "Gradients") -> tf.Tensor:
        """Returns the inner product with other gradients of the same variables: a scalar.

        Raises:
          ConfigError: If the variables differ.
        """
        self._check_same(other)

        return self._of_first_replica(_inner_product, self.of_replicas, other.of_replicas)

    def of(self, part: Any) -> "Gradients":
        """Returns the gradients of some of the variables, such as for clipping by group.

        Args:
          part: A Keras model or layer, whose trainable variables are meant, or a list of
            variables.

        Raises:
          ConfigError: If a variable of `part` is not among these gradients' variables.
        """
        own = {id(v): value for v, value in zip(self.variables, self.of_replicas, strict=True)}
        wanted = trainable_variables(part, "The argument of Gradients.of")
        if missing := [v.path for v in wanted if id(v) not in own]:
            raise ConfigError(f"Gradients.of: these hold no gradient of {', '.join(missing)}.")
        return self._made(wanted, [own[id(v)] for v in wanted])

    def and_of(self, other: "Gradients") -> "Gradients":
        """Joins these gradients with those of other variables, for one `apply`.

        Raises:
          ConfigError: If the two share a variable.
        """
        own = {id(v) for v in self.variables}
        if shared := [v.path for v in other.variables if id(v) in own]:
            raise ConfigError(f"Gradients.and_of: both hold gradients of {', '.join(shared)}.")
        variables = *self.variables, *other.variables
        return self._made(variables, [*self.of_replicas, *other.of_replicas])

    def map(self, function: Callable[[tf.Tensor, keras.Variable], tf.Tensor]) -> "Gradients":
        """Applies a function to each gradient, such as one that clips, and returns the results.

        Args:
          function: Takes a gradient and its variable, and returns a tensor of the same shape and
            dtype. It is called in replica context and must compute the same on all replicas, as
            draws of `ddl.random` do.

        Raises:
          ConfigError: If it takes other arguments, or returns another shape.
        """
        check_takes("The function of Gradients.map", function, ("gradient", "variable"))
        current = microbatch.current()
        assert current is not None  # a step draws by it
        copies = []

        def on_replica(own: list[Gradient]) -> list[tf.Tensor]:
            copies.append(current.copied())  # draws what the step would draw here
            dense = [tf.convert_to_tensor(gradient) for gradient in own]
            with copies[-1].forward():
                mapped = [function(*pair) for pair in zip(dense, self.variables, strict=True)]
            check_same_shapes("The function of Gradients.map", mapped, dense)
            return mapped

        values = self._strategy.run(on_replica, args=(self.of_replicas,))
        current.advance_to(copies[0])
        return self._made(self.variables, values)

    def _with(self, other: Any, function: Callable[[Any, Any], tf.Tensor]) -> "Gradients":
        self._check_same(other)
        both = function, self.of_replicas, other.of_replicas
        return self._made(self.variables, self._strategy.run(_in_pairs, args=both))

    def _made(self, variables: Variables, values: Sequence[Any]) -> "Gradients":
        return Gradients(self._strategy, variables, values)

    def _check_same(self, other: Any) -> None:
        others = other.variables if isinstance(other, Gradients) else ()
        if [id(v) for v in self.variables] != [id(v) for v in others]:
            got = [v.path for v in others] or other
            raise ConfigError(
                f"Gradients can be combined with gradients of the same variables alone, those of "
                f"{[v.path for v in self.variables]!s:.80}, got {got!r:.80}. Take the shared part "
                "with `of`, or join different parts with `and_of`."
            )

    def _of_first_replica(self, function: Callable[..., tf.Tensor], *values: Any) -> tf.Tensor:
        of_each = self._strategy.run(function, args=values)
        return self._strategy.experimental_local_results(of_each)[0]


def check_same_shapes(what: str, results: Any, gradients: Sequence[tf.Tensor]) -> None:
    """Raises ConfigError unless a user's function returned a tensor like each gradient."""
    shapes = [gradient.shape for gradient in gradients]
    if [getattr(result, "shape", None) for result in results] != shapes:
        raise ConfigError(
            f"{what} must return a tensor of the same shape for each gradient, "
            f"{[tuple(shape) for shape in shapes]!s:.80}, got {results!r:.80}."
        )


def trainable_variables(part: Any, where: str = "The model of a task") -> list[keras.Variable]:
    """Returns the trainable variables of a model or layer, or the list of variables itself.

    Args:
      part: The model, layer or list.
      where: The argument, for the error.

    Raises:
      ConfigError: If `part` is none of these, or has no trainable variables.
    """
    variables = part.trainable_variables if isinstance(part, keras.layers.Layer) else part
    items = list(variables) if isinstance(variables, list | tuple) else [variables]
    if not items or not all(isinstance(item, keras.Variable) for item in items):
        raise ConfigError(
            f"{where} must be a Keras model, a layer or a list of keras.Variable, with trainable "
            f"variables, got {part!r:.80}. Pass the model itself, such as self.generator."
        )
    return list({id(item): item for item in items}.values())  # a shared layer counts once


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns the values of a gradient; of a sparse one, those of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def widest(values: Sequence[Gradient]) -> tf.DType:
    """Returns the widest dtype of the values."""
    return max((value.dtype for value in values), key=lambda dtype: dtype.size)


def multiply(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Multiplies each gradient by a scalar, in the gradient's dtype; sparse ones stay sparse."""
    return [_with_values(one, values_of(one) * tf.cast(factor, one.dtype)) for one in gradients]


def _opaque(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the same gradients as values that TensorFlow's graph optimizer does not look into.

    It merges a product into the product that reads it, if nothing else does. Norms and inner
    products of a step read the gradients of the first replica alone, so the merged products of the
    other replicas would be rounded differently, and their weights would drift apart.
    """
    barrier, values = tf.raw_ops.PlaceholderWithDefault, [values_of(one) for one in gradients]
    opaque = [barrier(input=own, shape=own.shape) for own in values]
    return [_with_values(one, own) for one, own in zip(gradients, opaque, strict=True)]


def _with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _in_pairs(function: Callable[..., tf.Tensor], *both: Sequence[Gradient]) -> list[tf.Tensor]:
    """Returns a function of the gradients of each variable; sparse gradients become dense."""
    dense = [map(tf.convert_to_tensor, gradients) for gradients in both]
    return [function(*pair) for pair in zip(*dense, strict=True)]


def _inner_product(one: Sequence[Gradient], other: Sequence[Gradient]) -> tf.Tensor:
    products = [tf.reduce_sum(product) for product in _in_pairs(operator.mul, one, other)]
    return tf.add_n([tf.cast(product, widest(one)) for product in products])


def merge_duplicates(gradient: Gradient) -> Gradient:
    """Returns a sparse gradient with duplicate rows added up, and a dense gradient unchanged.

    Several replicas, or several examples, may give rows for the same index. These rows must be
    added before the norm or an optimizer such as Adam squares them; else the result would depend on
    the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def with_each_row_once(gradients: list[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Merges the duplicate rows of sparse gradients, before they are checked or applied.

    Cross-replica context.

    Raises:
      CannotCompileError: If there are sparse gradients within what XLA compiles.
    """
    first = (strategy.experimental_local_results(gradient)[0] for gradient in gradients)
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in first):
        return gradients
    if is_compiled():
        raise CannotCompileError("the number of rows of a sparse gradient depends on the examples")
    return strategy.run(lambda own: [merge_duplicates(one) for one in own], args=(gradients,))


def squared_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the squared global norm: a scalar in the widest dtype of the gradients.

    Args:
      gradients: The gradients; sparse ones hold each row once (`merge_duplicates`).
    """
    dtype = widest(gradients)
    halves = [tf.cast(tf.nn.l2_loss(values_of(gradient)), dtype) for gradient in gradients]
    return 2 * tf.reduce_sum(tf.stack(halves))


def clip_by_global_norm(
    gradients: Sequence[Gradient], clip_norm: float, squared: tf.Tensor
) -> tuple[list[Gradient], tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `clip_norm`.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Args:
      gradients: The gradients of the global batch, as in `squared_norm`.
      clip_norm: The largest norm allowed.
      squared: The squared global norm.

    Returns:
      The clipped gradients, and the norm before clipping: a scalar in the widest dtype of
      the gradients.
    """
    norm = tf.sqrt(squared)
    # Below the limit the factor is exactly one, so clipping rounds nothing.
    limit = tf.constant(clip_norm, norm.dtype)  # tf.cast rounds to float32 first
    return multiply(gradients, limit / tf.maximum(norm, limit)), norm


def clips_by_name(limit: Limit, optimizers: Sequence[str]) -> dict[str, float | None]:
    """Returns the largest global norm of each optimizer's gradients; None: no limit.

    Args:
      limit: `Trainer.clip_norm`.
      optimizers: Names of the optimizers.

    Raises:
      ConfigError: If a limit is not positive, or names no optimizer, or leaves one out.
    """
    limits = limit if isinstance(limit, Mapping) else dict.fromkeys(optimizers, limit)
    if limits.keys() != set(optimizers):
        raise ConfigError(
            f"Trainer.clip_norm gives limits for {', '.join(limits)}, but Trainer.optimizer has "
            f"{', '.join(optimizers)}. Give one number, or one for each; None means no limit."
        )
    if wrong := [one for one in limits.values() if one is not None and not one > 0]:
        raise ConfigError(
            f"Trainer.clip_norm must be greater than 0, or None for no limit, got {wrong[0]}."
        )
    return dict(limits)


def add_regularization(gradients: Sequence[Gradient], variables: Variables) -> list[Gradient]:
    """Adds the gradients of the variables' own regularizers, such as L2. Replica context.

    These gradients depend only on the weights, so every replica computes them without an
    all-reduce. They are added once after the all-reduce, so their scale does not depend on the
    number of replicas or microbatches.
    """
    pairs = zip(gradients, of_penalties(variables), strict=True)
    return [g if extra is None else tf.convert_to_tensor(g) + extra for g, extra in pairs]


def of_penalties(variables: Variables) -> list[tf.Tensor | None]:
    """Returns the gradient of each variable's regularizer; None without one. Replica context."""
    with tf.GradientTape() as tape:
        penalties = [v.regularizer(v) for v in variables if v.regularizer is not None]
    if not penalties:
        return [None] * len(variables)
    return list(tape.gradient(penalties, [v.value for v in variables]))  # of their sum
