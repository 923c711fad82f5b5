"""Averages of the weights of which each replica keeps its share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.step.compiled.compiler import Compiler
from ddl.step.moving_statistics import restoring
from ddl.step.sharding.optimizers import Sharding
from ddl.step.sharding.shares import copied_share, gathered, own_share, size_of_share
from ddl.step.weight_average import ExponentialMovingAverage, WeightAverages


class AveragesInShares(WeightAverages):
    """The averages of a model's weights in shares, and those of its statistics whole.

    Statistics may differ between replicas, and so do their averages. An update moves a replica's
    share by its share of the weights, without communication. `applied` gathers the averages: an
    evaluation holds weights and averages whole.
    """

    def __init__(
        self,
        rule: ExponentialMovingAverage,
        trained: Sequence[tf.Variable],
        statistics: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
    ):
        """Starts at the present values.

        Args:
          rule: The averaging rule.
          trained: The weights, equal on all replicas.
          statistics: The statistics.
          strategy: The strategy, with several replicas.
        """
        self._in_shares = frozenset(map(id, trained))
        self._workers = Workers(strategy)
        self._traced: Any = None
        super().__init__(rule, [*trained, *statistics], strategy)
        pairs = list(zip(self.variables, self._weights, strict=True))
        self.shares = {id(v): w.shape for v, w in pairs if id(w) in self._in_shares}
        self.reset()

    def update(self, update: tf.Tensor, compiler: Compiler) -> None:
        """Moves the averages; see the base class."""
        if self._in_buffers(compiler):
            step = self._step_of_buffers(update)
            run = lambda step: compiler(lambda: self._move_buffers(step))  # noqa: E731
        else:
            step = 1 - self.rule.decay_at(update)
            run = self._move
        self._strategy.run(run, args=(step,))

    def _move(self, step: tf.Tensor) -> None:
        """Moves one replica's averages. Replica context."""
        for variable, weight in zip(self.variables, self._weights, strict=True):
            average, own = tf.convert_to_tensor(variable), self._own(weight)
            distance = own - average
            if not weight.trainable:  # may be infinite; inf - inf is NaN
                distance = tf.where(tf.equal(own, average), tf.zeros_like(own), distance)
            tf.raw_ops.AssignAddVariableOp(
                resource=variable.handle, value=tf.cast(step, average.dtype) * distance
            )

    def _initial(self, weight: tf.Variable) -> Any:
        if id(weight) not in self._in_shares:
            return weight
        size = size_of_share(weight.shape, self._strategy.num_replicas_in_sync)
        return tf.zeros([size], weight.dtype)  # `reset` assigns the shares

    def _own(self, weight: tf.Variable) -> tf.Tensor:
        value = tf.convert_to_tensor(weight)
        return own_share(value) if id(weight) in self._in_shares else value

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Assigns the averages to the model; see the base class. Call on all workers."""
        with restoring(copy for weight in self._weights for copy in self._copies(weight)):
            everywhere = self._whole_of_all_workers() if self._workers.number > 1 else {}
            for average, weight in zip(self.variables, self._weights, strict=True):
                values: Sequence[Any] = self._copies(average)
                if id(average) in self.shares:
                    whole = everywhere.get(id(average))
                    values = [self._whole(average) if whole is None else whole] * len(values)
                for copy, value in zip(self._copies(weight), values, strict=True):
                    with tf.device(copy.device):
                        copy.assign(value)
            yield

    def reset(self) -> None:
        """Sets the averages to the present values. Eager, cross-replica context."""
        replicas = self._strategy.num_replicas_in_sync
        first = self._workers.index * self._workers.replicas_of_each
        for average, weight in zip(self.variables, self._weights, strict=True):
            pairs = zip(self._copies(average), self._copies(weight), strict=True)
            for number, (copy, value) in enumerate(pairs):
                with tf.device(copy.device):
                    own = value.read_value()
                    if id(average) in self.shares:
                        own = copied_share(own, first + number, replicas)
                    copy.assign(own)

    def _whole(self, average: tf.Variable) -> tf.Tensor:
        """Returns the whole average, of the replicas of one worker. Eager."""
        shape, copies = self.shares[id(average)], self._copies(average)
        with tf.device(copies[0].device):
            flat = tf.concat([copy.read_value() for copy in copies], axis=0)
            return tf.reshape(flat[: shape.num_elements()], shape)

    def _whole_of_all_workers(self) -> dict[int, tf.Tensor]:
        """Returns the whole averages by the ids of their variables. Eager, on all workers."""
        # Not traced by a call: TensorFlow counts those of all trainers together, and warns.
        self._traced = self._traced or self._gathered.get_concrete_function()
        return dict(zip(self.shares, self._traced(), strict=True))

    @tf.function(autograph=False)
    def _gathered(self) -> list[tf.Tensor]:
        shares = [variable for variable in self.variables if id(variable) in self.shares]
        shapes = list(self.shares.values())
        values = self._strategy.run(
            lambda: gathered([tf.convert_to_tensor(share) for share in shares], shapes)
        )
        return [self._strategy.experimental_local_results(value)[0] for value in values]


def averages_of(
    rule: ExponentialMovingAverage | None,
    trained: Sequence[tf.Variable],
    statistics: Sequence[tf.Variable],
    sharding: Sharding | None,
    strategy: tf.distribute.Strategy,
) -> WeightAverages | None:
    """Returns the averages of a trainer, in shares like the slots; None without a rule.

    Args:
      rule: `Trainer.weight_average`.
      trained: The weights.
      statistics: The statistics.
      sharding: The shares of the optimizers' slots; None: whole averages.
      strategy: The strategy.
    """
    if rule is None:
        return None
    if sharding is None:
        return WeightAverages(rule, [*trained, *statistics], strategy)
    return AveragesInShares(rule, trained, statistics, strategy)
