"""Optimizers whose slots are shares, and the exchanges of their gradients and weights."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from ddl.step.all_reduce import AllReduce
from ddl.step.gradients import prepare_optimizer
from ddl.step.overflow import all_finite
from ddl.step.sharding.checks import check_optimizers, has_shares
from ddl.step.sharding.shares import own_share, size_of_share, summed_to_shares


@dataclasses.dataclass(frozen=True)
class ShardOfSlot:
    """A slot of which each replica holds its share.

    Attributes:
      variable: The optimizer's variable: [entries of a share].
      shape: Shape of the whole slot, which is that of its weight.
    """

    variable: keras.Variable
    shape: tf.TensorShape


class Sharding:
    """The shares of the optimizers of a trainer.

    A Keras optimizer updates variables, and makes its slots in their shapes. A stand-in for each
    weight has the shape of a share. During an update it holds the replica's share of the weight,
    and at other times no memory.

    Attributes:
      strategy: The strategy.
      slots: The slots in shares, by the id of the optimizer's variable.
    """

    def __init__(self, strategy: tf.distribute.Strategy, all_reduce: AllReduce):
        """Keeps the arguments.

        Args:
          strategy: The strategy, with several replicas.
          all_reduce: Sums over the replicas.
        """
        self.strategy = strategy
        self.slots: dict[int, ShardOfSlot] = {}
        self._all_reduce = all_reduce
        self._stand_ins: dict[tuple[int, int], keras.Variable] = {}
        self._weights: dict[int, keras.Variable] = {}

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        """Builds the optimizer's slots as shares; else as `prepare_optimizer`.

        Args:
          optimizer: The optimizer; changed in place.
          variables: The variables that it updates.

        Raises:
          ConfigError: As `prepare_optimizer`.
        """
        stand_ins = [self._stand_in(variable) for variable in variables]
        for variable, stand_in in zip(variables, stand_ins, strict=True):
            self._stand_ins[id(optimizer), id(variable)] = stand_in
            self._weights[id(stand_in)] = variable
        _decay_like_weights(optimizer, variables, stand_ins)
        add = optimizer.add_variable_from_reference

        def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
            slot = add(reference_variable, *args, **kwargs)
            whole = self._weights[id(reference_variable)].value.shape
            self.slots[id(slot)] = ShardOfSlot(slot, whole)
            return slot

        vars(optimizer)["add_variable_from_reference"] = noted
        try:
            prepare_optimizer(optimizer, stand_ins, self.strategy)
        finally:
            del vars(optimizer)["add_variable_from_reference"]
        for copy in self._copies(stand_ins):
            with tf.device(copy.device):
                free(copy.handle, copy.dtype)

    def stand_ins(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> list[keras.Variable]:
        """Returns the variables that an optimizer updates in place of some of its variables."""
        return [self._stand_ins[id(optimizer), id(variable)] for variable in variables]

    def allocate(self, stand_ins: Sequence[keras.Variable]) -> None:
        """Gives stand-ins their shapes while a graph is traced that XLA is to compile."""
        with tf.init_scope():
            for copy in self._copies(stand_ins):
                with tf.device(copy.device):
                    zeros = tf.zeros(copy.shape, copy.dtype)  # `copy.assign` checks the shape
                    tf.raw_ops.AssignVariableOp(resource=copy.handle, value=zeros)

    def weight_of(self, variable: Any) -> Any:
        """Returns the weight that a stand-in stands for; any other variable itself."""
        return self._weights.get(id(variable), variable)

    @property
    def handles_of_stand_ins(self) -> frozenset[int]:
        """The ids of the handles of the stand-ins of this worker's replicas."""
        return frozenset(id(copy.handle) for copy in self._copies(self._stand_ins.values()))

    def _copies(self, variables: Iterable[keras.Variable]) -> list[tf.Variable]:
        results = self.strategy.experimental_local_results
        return [copy for variable in variables for copy in results(variable.value)]

    def summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the sums over the replicas, in shares. Cross-replica context, in a graph.

        Args:
          gradients: The gradients of each replica; whole.
        """
        return list(self.strategy.run(summed_to_shares, args=(gradients,)))

    def cut(self, values: Sequence[Any]) -> list[Any]:
        """Returns shares of values that all replicas hold whole. Cross-replica, in a graph."""

        def own(values: list[Any]) -> list[tf.Tensor]:
            return [own_share(tf.convert_to_tensor(value)) for value in values]

        return list(self.strategy.run(own, args=(list(values),)))

    def total(self, values: Any) -> tf.Tensor:
        """Returns the sum over the replicas of a vector of each, float64 [n]."""
        return self._all_reduce.of_sums(values)

    def finite(self, shares: list[Any]) -> tf.Tensor:
        """Returns whether gradients in shares are finite on all replicas, bool []."""

        def overflowed(own: list[tf.Tensor]) -> tf.Tensor:
            return tf.cast(~all_finite(own), tf.float64)[tf.newaxis]

        return tf.equal(self.total(self.strategy.run(overflowed, args=(shares,)))[0], 0)

    def _stand_in(self, variable: keras.Variable) -> keras.Variable:
        # Weight decay is excluded by names and paths.
        scope, _, _ = variable.value.name.split(":")[0].rpartition("/")
        size = size_of_share(variable.value.shape, self.strategy.num_replicas_in_sync)
        named = tf.name_scope(f"{scope}/") if scope else nullcontext()
        with self.strategy.scope(), named:
            stand_in = keras.Variable(
                "zeros", shape=[size], dtype=variable.dtype, name=variable.name
            )
        stand_in._path = variable.path
        return stand_in


def _decay_like_weights(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    stand_ins: Sequence[keras.Variable],
) -> None:
    """Excludes a weight from weight decay if it or its stand-in is excluded, now or later.

    Keras keeps the ids of excluded variables. A user excludes weights, `exclude_from_weight_decay`
    of ddl the variables that the optimizer was built with.
    """
    key, decays = optimizer._var_key, optimizer._use_weight_decay
    partners: dict[Any, keras.Variable] = {}
    for variable, stand_in in zip(variables, stand_ins, strict=True):
        partners |= {key(variable): stand_in, key(stand_in): variable}

    def decays_both(variable: Any) -> bool:
        return decays(variable) and decays(partners.get(key(variable), variable))

    vars(optimizer)["_use_weight_decay"] = decays_both


def free(handle: tf.Tensor, dtype: tf.DType) -> None:
    """Frees the memory of a variable: it holds no entries until it is assigned anew."""
    empty = tf.zeros([0], dtype)
    if not tf.executing_eagerly():  # else the static shapes would not match
        empty = tf.raw_ops.PlaceholderWithDefault(input=empty, shape=tf.TensorShape(None))
    tf.raw_ops.AssignVariableOp(resource=handle, value=empty)


def sharding_of(
    optimizers: Mapping[str, keras.optimizers.Optimizer],
    variables: Mapping[str, Sequence[keras.Variable]],
    all_reduce: AllReduce,
    strategy: tf.distribute.Strategy,
    wanted: bool,
) -> Sharding | None:
    """Builds the slots of optimizers, in shares if that is wanted and there are several replicas.

    Args:
      optimizers: The optimizers by name; changed in place.
      variables: The variables that each updates, by its name.
      all_reduce: Sums over the replicas.
      strategy: The strategy in whose scope the optimizers were made.
      wanted: `Trainer.shard_optimizer_state`.

    Returns:
      The shares; None if each replica holds whole slots.

    Raises:
      ConfigError: If an optimizer cannot be used, or if strategy or optimizer cannot be sharded.
    """
    sharding = None
    if wanted and has_shares(strategy):
        sharding = Sharding(strategy, all_reduce)
        check_optimizers(optimizers)
    for name, optimizer in optimizers.items():
        if sharding is not None:
            sharding.prepare(optimizer, variables[name])
        else:
            prepare_optimizer(optimizer, variables[name], strategy)
    return sharding


def variables_of(
    optimizer: keras.optimizers.Optimizer, sharding: Sharding | None
) -> list[tf.Variable]:
    """Returns an optimizer's variables; of a slot in shares, each share of this worker."""
    found: list[tf.Variable] = []
    for variable in optimizer.variables:
        if sharding is None or id(variable) not in sharding.slots:
            found.append(variable.value)
        else:
            found += sharding.strategy.experimental_local_results(variable.value)
    return found
