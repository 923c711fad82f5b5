"""The three passes: the rows, the gradients of the rows, the gradients of the weights."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from ddl.data.pipeline import Batch
from ddl.errors import ConfigError
from ddl.layers.replica_gather import gather_over_replicas, scatter_over_replicas
from ddl.microbatch import Draws, Microbatch
from ddl.step import gradients as gradient_path
from ddl.step.accumulation import over_microbatches
from ddl.step.across_examples.gathering import OwnRowsKept, RowsGiven
from ddl.step.moving_statistics import Statistics
from ddl.step.objective import Objective
from ddl.step.rows.summing import GradientSums, added
from ddl.step.state import TrainingState
from ddl.step.verbs.batches import StepBatch


class Computes(Protocol):
    """Methods of `ddl.step.global_gradient.GlobalGradient` that the passes use; see there."""

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a global batch."""

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied by the loss scale."""

    @property
    def statistics(self) -> Statistics:
        """Variables that a forward pass writes."""

    def batch_size(self, batch: StepBatch) -> int:
        """Returns the number of rows of a global batch."""

    def gradient_sums(
        self, objective: Objective, variables: Sequence[keras.Variable], batch: StepBatch
    ) -> GradientSums:
        """Returns the form of the sums of gradients over the microbatches."""

    def examples(
        self, batch: StepBatch, index: Any, state: TrainingState, draws: Draws
    ) -> tuple[dict[str, tf.Tensor], Microbatch]:
        """Returns the examples of a microbatch. Replica context."""

    def left_out(
        self, watched: Sequence[tf.Variable], variables: Sequence[keras.Variable]
    ) -> list[tf.Variable]:
        """Returns the watched variables that are neither updated nor frozen."""


@dataclasses.dataclass
class ThreePasses:
    """The gradient of a loss that gathers rows of the global batch. Cross-replica context.

    Attributes:
      of: Gives the microbatches.
      objective: The objective of the loss.
      variables: The variables of the gradient.
      batch: The global batch.
      state: The state before the update.
      draws: Identity of the random numbers, which are the same in each pass.
    """

    of: Computes
    objective: Objective
    variables: Sequence[keras.Variable]
    batch: StepBatch
    state: TrainingState
    draws: Draws

    def __post_init__(self) -> None:
        self._specs = [spec for call in self.objective.gathers for spec in call.specs]
        self._size = self.of.batch_size(self.batch)
        self._parts = self.of.microbatches
        self._replicas = self.of.strategy.num_replicas_in_sync
        self._used: set[int] = set()
        self._form = self.of.gradient_sums(self.objective, self.variables, self.batch)

    def gradients(self) -> tuple[Any, Any]:
        """Returns gradients and metric sums of each replica, before any reduce.

        Raises:
          ConfigError: If the loss does not depend on a variable, or depends on one that nothing
            updates, or gathers other tensors than in the trial; while tracing.
        """
        run, statistics = self.of.strategy.run, self.of.statistics.kept()
        own = self._over_microbatches(self._rows, (), self._no_rows)
        rows = run(self._of_all, args=(own,))
        statistics.restore()
        gradients, of_rows, sums = self._over_microbatches(self._loss, rows, self._no_gradients)
        if any(spec.dtype.is_floating for spec in self._specs):
            of_own = run(self._of_own, args=(of_rows,))
            statistics.restore()
            through_rows = self._over_microbatches(self._pulled, (rows, of_own), self._no_pulled)
            gradients = run(added, args=(gradients, through_rows))
        gradient_path.check_used(
            [v for place, v in enumerate(self.variables) if place not in self._used]
        )
        return self._form.as_gradients(gradients), sums

    def _over_microbatches(
        self, one: Callable[..., Any], given: Any, zeros: Callable[[], Any]
    ) -> Any:
        """Returns the sum of a function of the microbatches, of each replica.

        Args:
          one: Takes the batch on a replica, the number of the microbatch and what is given. Replica
            context.
          given: Values of each replica for all microbatches.
          zeros: Returns the empty sum. Replica context.
        """

        def on_replica(own: Batch, place: Any, given: Any, index: Any, so_far: Any) -> Any:
            values = one(StepBatch(self.batch.source, place, own), index, given)
            return values if so_far is None else added(so_far, values)

        def run(index: Any, so_far: Any) -> Any:
            arguments = (self.batch.batch, self.batch.place, given, index, so_far)
            return self.of.strategy.run(on_replica, args=arguments)

        own_graph = self.objective.needs_own_graph
        # One after the other, so that the activations of one are in memory.
        return over_microbatches(self.of.strategy, self._parts, run, zeros, own_graph)

    # ------------------------------------------------------------ pass 1, replica context

    def _rows(self, batch: StepBatch, index: Any, given: Any) -> list[tf.Tensor]:
        """Returns the rows that a microbatch gathers and their mask, among zeros for the others."""
        features, current = self.of.examples(batch, index, self.state, self.draws)
        current.gathering = kept = OwnRowsKept(self._size)
        with current.forward():
            self.objective.weighed(features, training=True)
        if [(x.shape[1:], x.dtype) for x in kept.kept] != [(s.shape, s.dtype) for s in self._specs]:
            raise ConfigError(
                "A loss must gather the same tensors in each trace; ddl.gather got "
                f"{[(tuple(s.shape), s.dtype.name) for s in self._specs]} for each row when the "
                f"Trainer was made, then {[(tuple(x.shape[1:]), x.dtype.name) for x in kept.kept]}."
            )
        is_own = tf.one_hot(index, self._parts, True, False, dtype=tf.bool)
        placed = []
        for rows in map(_summable, [*kept.kept, features["weight"] > 0]):
            each = tf.reshape(is_own, [self._parts] + [1] * rows.shape.rank)
            of_parts = tf.where(each, rows, tf.zeros([], rows.dtype))
            placed.append(tf.reshape(of_parts, [self._parts * current.rows, *rows.shape[1:]]))
        return placed

    def _no_rows(self) -> list[tf.Tensor]:
        mask = tf.TensorSpec([], tf.bool)
        rows = self._size // self._replicas
        return [
            _summable(tf.zeros([rows, *spec.shape], spec.dtype)) for spec in [*self._specs, mask]
        ]

    def _of_all(self, own: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the rows of all replicas, by position in the global batch, and their mask."""
        dtypes = [*(spec.dtype for spec in self._specs), tf.bool]
        own = [*own[:-1], tf.cast(own[-1], tf.bool)]  # which are fewer bytes
        return [
            tf.cast(self._swapped(rows, self._replicas), dtype)
            for rows, dtype in zip(gather_over_replicas(own), dtypes, strict=True)
        ]

    def _swapped(self, rows: tf.Tensor, first: int) -> tf.Tensor:
        """Reorders [first · second · rows, …] to [second · first · rows, …].

        One of the two is the number of replicas, the other that of microbatches.
        """
        parts = self._replicas * self._parts
        shape, rank = rows.shape, rows.shape.rank
        split = tf.reshape(rows, [first, parts // first, shape[0] // parts, *shape[1:]])
        return tf.reshape(tf.transpose(split, [1, 0, *range(2, rank + 2)]), shape)

    # ------------------------------------------------------------ pass 2, replica context

    def _loss(
        self, batch: StepBatch, index: Any, given: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """Returns gradients of the variables and of the gathered rows, and the metric sums."""
        features, current = self.of.examples(batch, index, self.state, self.draws)
        *rows, mask = given
        floats = [x for x in rows if x.dtype.is_floating]
        current.gathering = RowsGiven(rows, mask)
        with tf.GradientTape() as tape, current.forward():
            tape.watch(floats)
            loss, sums = self.objective(features, training=True)
            if self.of.scales:
                loss *= tf.cast(self.state.loss_scale, loss.dtype)
        gradients, of_rows = self._gradients(tape, current, loss, floats)
        # A row gets as many gradients as there are microbatches.
        return gradients, [tf.cast(x, _wide(x.dtype)) for x in of_rows], sums

    def _no_gradients(self) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        of_rows = [
            tf.zeros([self._size, *spec.shape], _wide(spec.dtype))
            for spec in self._specs
            if spec.dtype.is_floating
        ]
        return self._no_pulled(), of_rows, tf.zeros([self.objective.metrics.size], tf.float64)

    def _of_own(self, of_rows: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients of this replica's rows in all microbatches: sums over replicas."""
        return scatter_over_replicas([self._swapped(rows, self._parts) for rows in of_rows])

    # ------------------------------------------------------------ pass 3, replica context

    def _pulled(
        self, batch: StepBatch, index: Any, given: tuple[list[tf.Tensor], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns the gradients of the variables through the rows of a microbatch."""
        features, current = self.of.examples(batch, index, self.state, self.draws)
        (*rows, _), of_own = given
        current.gathering = kept = OwnRowsKept(self._size, rows)
        with tf.GradientTape() as tape, current.forward():
            self.objective.weighed(features, training=True)
        floats = [x for x in kept.kept if x.dtype.is_floating]
        upstream = []
        for own, gradient in zip(floats, of_own, strict=True):
            part = gradient[index * current.rows : (index + 1) * current.rows]
            upstream.append(tf.cast(tf.ensure_shape(part, own.shape), own.dtype))
        return self._gradients(tape, current, floats, [], upstream)[0]

    def _no_pulled(self) -> list[Any]:
        return self._form.zeros()

    def _gradients(
        self,
        tape: tf.GradientTape,
        current: Microbatch,
        targets: Any,
        tensors: list[tf.Tensor],
        upstream: list[tf.Tensor] | None = None,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients with respect to the variables and to tensors; zeros for None."""
        others = self.of.left_out(tape.watched_variables(), self.variables)
        updated = [v.value for v in self.variables]
        with current.backward():
            every = tape.gradient(targets, [*updated, *others, *tensors], upstream)
        of_variables, rest = every[: len(updated)], every[len(updated) :]
        gradient_path.check_none_left_out(others, rest[: len(others)])
        self._used |= {place for place, one in enumerate(of_variables) if one is not None}
        of_tensors = rest[len(others) :]
        return self._form.of(of_variables), _dense(of_tensors, tensors)


def _dense(gradients: Sequence[Any], like: Sequence[Any]) -> list[tf.Tensor]:
    return [
        tf.zeros_like(value) if one is None else tf.convert_to_tensor(one)
        for one, value in zip(gradients, like, strict=True)
    ]


def _summable(values: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose sum with zeros is exact on any device."""
    return values if values.dtype.is_floating else tf.cast(values, tf.int64)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size == 2 else dtype
