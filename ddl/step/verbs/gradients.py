"""The gradient of the global batch, as a value that a step can compute with."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_takes
from ddl.step import gradients as gradient_path
from ddl.step.gradients import Gradient, in_pairs
from ddl.step.sharding import InShares
from ddl.step.verbs.draws import same_on_replicas
from ddl.step.verbs.misuse import NO_LIST, Guarded, mapped, scalar

Scalar: TypeAlias = tf.Tensor | float


class Gradients(Guarded):
    """The gradient of the global batch with respect to some variables, equal on all replicas.

    It is reduced over replicas and microbatches, divided once by the sum of the weights, and
    unscaled. Sums, differences and multiples work variable by variable; `norm` and `dot` take all
    variables together. The projection of PCGrad (Yu et al. 2020, "Gradient surgery for multi-task
    learning"):

        one -= other * tf.math.divide_no_nan(tf.minimum(one.dot(other), 0.0), other.dot(other))

    Cross-replica context, in a graph.

    Attributes:
      variables: The variables, in the order of the values.
      values: One tensor per variable, of its shape and dtype; `tf.IndexedSlices` of looked-up rows.
      draws: Number of the pass whose random numbers were drawn to compute the values; None for a
        sum of gradients with different draws.
      checked: Whether the update has checked these values for overflow. Results of arithmetic are
        checked when they are applied, since a division may overflow.
      is_shared: Whether the step may use them elsewhere than in one `apply`.
    """

    _called = "gradients"
    _offered = ("norm", "dot", "of", "and_of", "map", "variables", "values")

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[keras.Variable],
        values: Sequence[Any] | InShares,
        factor: tf.Tensor | None = None,
        *,
        draws: int | None = None,
        checked: bool = False,
    ):
        """Keeps the arguments.

        Args:
          strategy: The strategy.
          variables: The variables.
          values: One reduced value per variable.
          factor: A factor that is missing in the values, []; None: 1.
          draws: As above.
          checked: As above.
        """
        self._strategy = strategy
        self.variables = tuple(variables)
        self._values: Any = values if isinstance(values, InShares) else list(values)
        self._factor = factor
        self.draws = draws
        self.checked = checked
        self.is_shared = True
        self._opaque = False
        self.graph = tf.compat.v1.get_default_graph()
        """Graph in which the values can be used."""

    @property
    def values(self) -> list[Gradient]:
        """One tensor per variable; see above."""
        return [self._strategy.experimental_local_results(v)[0] for v in self.of_replicas]

    @property
    def of_replicas(self) -> list[Any]:
        """The values; with several replicas distributed values, as `strategy.run` takes them."""
        if self._opaque:
            return self._values
        values, factor = list(self._values), self._factor
        if factor is not None:
            values = self._strategy.run(gradient_path.multiply, args=(values, factor))
        values = self._strategy.run(gradient_path.opaque, args=(values,))
        if tf.compat.v1.get_default_graph() is self.graph:  # else usable in the present one alone
            self._values, self._factor, self._opaque = values, None, True
        return values

    @property
    def to_apply(self) -> tuple[list[Any] | InShares, tf.Tensor | None]:
        """The values, and a factor that the update multiplies itself, or None."""
        if self.is_shared:
            return self.of_replicas, None
        return self._values, self._factor

    def __add__(self, other: "Gradients") -> "Gradients":
        return self._with(other, operator.add, "added")

    def __radd__(self, other: Any) -> "Gradients":
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        return self + other

    def __sub__(self, other: "Gradients") -> "Gradients":
        return self._with(other, operator.sub, "subtracted")

    def __rsub__(self, other: Any) -> "Gradients":
        raise ConfigError(
            "Gradients can be subtracted only from gradients of the same variables, got "
            f"{other!r:.80} - gradients. Use map(function) for a function of each gradient."
        )

    def __mul__(self, factor: Scalar) -> "Gradients":
        check_not_gradients(factor)
        number = scalar(factor)
        values = self._strategy.run(
            lambda own, by: gradient_path.multiply(own, by), args=(self.of_replicas, number)
        )
        return Gradients(self._strategy, self.variables, values, draws=self.draws)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Scalar) -> "Gradients":
        check_not_gradients(divisor)
        if isinstance(divisor, int | float) and divisor == 0:
            raise ConfigError(
                f"The divisor of gradients must not be 0, got gradients / {divisor!r}. Pass "
                "another number; for tensors that may be 0, multiply by tf.math.divide_no_nan."
            )
        return self * (1 / scalar(divisor))

    def __rtruediv__(self, other: Any) -> "Gradients":
        raise ConfigError(
            f"Gradients cannot be a divisor, got {other!r:.80} / gradients. Divide by "
            "gradients.norm(), or use map(function) for a function of each gradient."
        )

    def __iter__(self) -> Any:
        raise ConfigError(NO_LIST)

    def __getitem__(self, place: Any) -> Any:
        raise ConfigError(NO_LIST)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        raise ConfigError(
            "Gradients are not a tensor, so functions of TensorFlow do not take them. Use norm(), "
            "dot(other), or map(function), which calls a function of TensorFlow for each gradient."
        )

    def __neg__(self) -> "Gradients":
        return self * -1.0

    def norm(self) -> tf.Tensor:
        """Returns the global norm: a scalar in the widest dtype of the gradients."""
        return tf.sqrt(self._of_first_replica(gradient_path.squared_norm, self.of_replicas))

    def dot(self, other: "Gradients") -> tf.Tensor:
        """Returns the inner product with other gradients of the same variables: a scalar.

        Raises:
          ConfigError: If the variables differ.
        """
        self._check_same(other, "multiplied")

        def products(own: list[Gradient], others: list[Gradient]) -> tf.Tensor:
            widest = gradient_path.widest(own)
            of_entries = [in_pairs(operator.mul, *pair) for pair in zip(own, others, strict=True)]
            values = map(gradient_path.values_of, of_entries)
            return tf.add_n([tf.cast(tf.reduce_sum(one), widest) for one in values])

        return self._of_first_replica(products, self.of_replicas, other.of_replicas)

    def of(self, part: Any) -> "Gradients":
        """Returns the gradients of some of the variables, such as for clipping by group.

        Args:
          part: A Keras model or layer, whose trainable variables are meant, or a list of
            variables.

        Raises:
          ConfigError: If a variable of `part` is not among these gradients' variables.
        """
        places = {id(v): place for place, v in enumerate(self.variables)}
        wanted = trainable_variables(part, "The argument of Gradients.of")
        missing = [v.path for v in wanted if id(v) not in places]
        if missing:
            raise ConfigError(
                f"Gradients.of: these gradients hold no gradient of {', '.join(missing)}. Pass "
                "variables for which the gradients were computed."
            )
        values = [self.of_replicas[places[id(v)]] for v in wanted]
        return Gradients(self._strategy, wanted, values, draws=self.draws, checked=self.checked)

    def and_of(self, other: "Gradients") -> "Gradients":
        """Joins these gradients with those of other variables, for one `apply`.

        Raises:
          ConfigError: If the two share a variable.
        """
        check_gradients("Gradients.and_of", other)
        shared = {id(v) for v in self.variables} & {id(v) for v in other.variables}
        if shared:
            names = ", ".join(v.path for v in self.variables if id(v) in shared)
            raise ConfigError(
                f"Gradients.and_of: both hold gradients of {names}. Add them with +, or take parts "
                "with `of`."
            )
        variables = [*self.variables, *other.variables]
        draws = self.draws if self.draws == other.draws else None
        checked = self.checked and other.checked
        values = [*self.of_replicas, *other.of_replicas]
        return Gradients(self._strategy, variables, values, draws=draws, checked=checked)

    def map(self, function: Callable[[tf.Tensor, keras.Variable], tf.Tensor]) -> "Gradients":
        """Applies a function to each gradient, such as one that clips, and returns the results.

        Args:
          function: Takes a gradient and its variable, and returns a tensor of the same shape and
            dtype. It is called in replica context and must compute the same on all replicas, as
            draws of `ddl.random` do.

        Raises:
          ConfigError: If it takes other arguments, or returns another shape or dtype.
        """
        check_takes("The function of Gradients.map", function, ("gradient", "variable"))

        def run(own: list[Gradient]) -> list[tf.Tensor]:
            return [
                mapped(function(_dense(gradient), variable), variable)
                for gradient, variable in zip(own, self.variables, strict=True)
            ]

        values = same_on_replicas(self._strategy, run, (self.of_replicas,))
        return Gradients(self._strategy, self.variables, values, draws=self.draws)

    def _with(
        self, other: Any, function: Callable[[Any, Any], tf.Tensor], what: str
    ) -> "Gradients":
        self._check_same(other, what)

        def run(own: list[Gradient], others: list[Gradient]) -> list[Gradient]:
            return [in_pairs(function, a, b) for a, b in zip(own, others, strict=True)]

        values = self._strategy.run(run, args=(self.of_replicas, other.of_replicas))
        draws = self.draws if self.draws == other.draws else None
        return Gradients(self._strategy, self.variables, values, draws=draws)

    def _check_same(self, other: "Gradients", what: str) -> None:
        check_usable(self)
        if not isinstance(other, Gradients):
            raise ConfigError(f"Only gradients can be {what} here, got {other!r:.80}.")
        check_usable(other)
        if list(map(id, self.variables)) != list(map(id, other.variables)):
            raise ConfigError(
                f"Gradients can be {what} only if both are of the same variables, got those of "
                f"{_names(self.variables)} and of {_names(other.variables)}. Take the shared part "
                "with `of`, or join different parts with `and_of`."
            )

    def _of_first_replica(self, function: Callable[..., tf.Tensor], *values: Any) -> tf.Tensor:
        of_each = self._strategy.run(function, args=values)
        return self._strategy.experimental_local_results(of_each)[0]


def check_gradients(where: str, given: Any) -> None:
    """Raises ConfigError if the argument of a verb is not gradients that can be used here."""
    if not isinstance(given, Gradients):
        raise ConfigError(f"{where} takes the result of update.gradients, got {given!r:.80}.")
    check_usable(given)


def check_not_gradients(factor: Any) -> None:
    """Raises ConfigError if a factor or divisor are gradients."""
    if isinstance(factor, Gradients):
        raise ConfigError(
            "Gradients cannot be multiplied or divided by gradients. Use dot() for the inner "
            "product, or norm()."
        )


def check_usable(gradients: Gradients) -> None:
    """Raises ConfigError if the gradients were computed in control flow that has ended."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not gradients.graph:
        graph = getattr(graph, "outer_graph", None)
    if graph is None and not tf.executing_eagerly():
        raise ConfigError(
            "Gradients that were computed within update.when cannot be used outside of it. Apply "
            "them there."
        )


def draws_of(gradients: Any) -> int:
    """Returns the number of the pass that computed gradients.

    Raises:
      ConfigError: If they are no gradients of one call, or cannot be used in the present graph.
    """
    if not isinstance(gradients, Gradients) or gradients.draws is None:
        raise ConfigError(
            "same_draws_as must be gradients that update.gradients returned, or a multiple of "
            f"them, got {gradients!r:.80}. The sum of two has no draws of its own."
        )
    check_usable(gradients)
    return gradients.draws


def trainable_variables(part: Any, where: str = "The model of a task") -> list[keras.Variable]:
    """Returns the trainable variables of a model or layer, or the list of variables itself.

    Args:
      part: The model, layer or list.
      where: The argument, for the error.

    Raises:
      ConfigError: If `part` is none of these, or has no trainable variables.
    """
    if isinstance(part, keras.layers.Layer):
        variables = list(part.trainable_variables)
        if not variables:
            raise ConfigError(
                f"{part.name!r} has no trainable variables. Add trainable layers, or set "
                "trainable = True on its layers."
            )
        return list({id(v): v for v in variables}.values())
    items = list(part) if isinstance(part, list | tuple) else [part]
    if not items or not all(isinstance(item, keras.Variable) for item in items):
        raise ConfigError(
            f"{where} must be a Keras model, a layer or a list of keras.Variable, got "
            f"{part!r:.80}. Pass the model or layer itself, such as self.generator."
        )
    return list({id(item): item for item in items}.values())  # a shared layer counts once


def _dense(gradient: Gradient) -> tf.Tensor:
    return tf.convert_to_tensor(gradient)


def _names(variables: Sequence[keras.Variable]) -> str:
    paths = [variable.path for variable in variables]
    return ", ".join(paths) if len(paths) < 4 else f"{', '.join(paths[:3])}, …"
