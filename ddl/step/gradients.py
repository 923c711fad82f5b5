"""Gradients as a task's step combines them: sums, products, norms, parts."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.errors import ConfigError, check_takes
from ddl.step import clipping
from ddl.step.clipping import Gradient, Variables, multiply, squared_norm, values_of, widest
from ddl.tasks.parts import each_once


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
      pass_number: Number of the pass that computed the values in the update; None if they were
        computed of gradients.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Variables, values: Any, pass_number: Any
    ):
        """Keeps the arguments; `values` has one distributed value for each variable."""
        self._strategy = strategy
        self.variables = tuple(variables)
        self.of_replicas = list(strategy.run(_opaque, args=(list(values),)))
        self.pass_number: int | None = pass_number

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
        return self._new(self.variables, values)

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
        known = {id(v): value for v, value in zip(self.variables, self.of_replicas, strict=True)}
        wanted = trainable_variables(part, "The argument of Gradients.of")
        if missing := [v.path for v in wanted if id(v) not in known]:
            raise ConfigError(f"Gradients.of: these hold no gradient of {', '.join(missing)}.")
        return self._new(wanted, [known[id(v)] for v in wanted])

    def and_of(self, other: "Gradients") -> "Gradients":
        """Joins these gradients with those of other variables, for one `apply`.

        Raises:
          ConfigError: If the two share a variable.
        """
        known = set(map(id, self.variables))
        if shared := [v.path for v in other.variables if id(v) in known]:
            raise ConfigError(f"Gradients.and_of: both hold gradients of {', '.join(shared)}.")
        variables = *self.variables, *other.variables
        return self._new(variables, [*self.of_replicas, *other.of_replicas])

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

        def on_replica(gradients: list[Gradient]) -> list[tf.Tensor]:
            copies.append(current.copied())  # draws what the step would draw here
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            with copies[-1].forward():
                mapped = [function(*pair) for pair in zip(dense, self.variables, strict=True)]
            check_same_shapes("The function of Gradients.map", mapped, dense)
            return mapped

        values = self._strategy.run(on_replica, args=(self.of_replicas,))
        current.advance_to(copies[0])
        return self._new(self.variables, values)

    def _with(self, other: Any, function: Callable[[Any, Any], tf.Tensor]) -> "Gradients":
        self._check_same(other)
        both = function, self.of_replicas, other.of_replicas
        return self._new(self.variables, self._strategy.run(_in_pairs, args=both))

    def _new(self, variables: Variables, values: Sequence[Any]) -> "Gradients":
        return Gradients(self._strategy, variables, values, None)

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
    """Returns the trainable variables of a model or layer, or of a list of these or of variables.

    Args:
      part: The model, layer or list.
      where: The argument, for the error.

    Raises:
      ConfigError: If `part` is none of these, or has no trainable variables.
    """
    parts = part if isinstance(part, list | tuple) else [part]
    items = [v for x in parts for v in getattr(x, "trainable_variables", [x])]
    if not items or not all(isinstance(item, keras.Variable) for item in items):
        raise ConfigError(
            f"{where} must be a Keras model, a layer or keras.Variables, or a list of these, with "
            f"trainable variables, got {part!r:.80}. Pass the model itself, such as self.generator."
        )
    return each_once(items)  # a shared layer counts once


def _opaque(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the same gradients as values that TensorFlow's graph optimizer does not look into.

    It merges a product into the product that reads it, if nothing else does. Norms and inner
    products of a step read the gradients of the first replica alone, so the merged products of the
    other replicas would be rounded differently, and their weights would drift apart.
    """
    barrier, values = tf.raw_ops.PlaceholderWithDefault, [values_of(one) for one in gradients]
    opaque = [barrier(input=value, shape=value.shape) for value in values]
    return [clipping.with_values(one, value) for one, value in zip(gradients, opaque, strict=True)]


def _in_pairs(function: Callable[..., tf.Tensor], *both: Sequence[Gradient]) -> list[tf.Tensor]:
    """Returns a function of the gradients of each variable; sparse gradients become dense."""
    dense = [map(tf.convert_to_tensor, gradients) for gradients in both]
    return [function(*pair) for pair in zip(*dense, strict=True)]


def _inner_product(one: Sequence[Gradient], other: Sequence[Gradient]) -> tf.Tensor:
    products = [tf.reduce_sum(product) for product in _in_pairs(operator.mul, one, other)]
    return tf.add_n([tf.cast(product, widest(one)) for product in products])
