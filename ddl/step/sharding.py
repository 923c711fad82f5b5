"""Sharded optimizer state: each replica keeps the slots of its share of every weight.

ZeRO stage 1 of Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion
parameter models". A tensor of n entries is cut into one share of ⌈n / replicas⌉ entries for each
replica; the last ones are padded with zeros, so that all have one shape.

    replica         gradients of its examples             whole
    cross-replica   reduce-scatter                        its share of the sum
    replica         unscale, penalties, clip, optimizer   its share of slots and weights
    cross-replica   all-gather                            whole weights

Several microbatches are added up whole, and reduced once.

An optimizer that computes entry by entry makes the same update on shares. Both exchanges together
send what an all-reduce sends. A task's step may compute with gradients, so those that
`update.gradients` returns are whole on all replicas, and `update.apply` takes shares of them.

Checkpoints hold whole slots (`ddl.checkpoints.contents`). Averages of the weights are whole.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, either
from ddl.layers.across_replicas import gather_over_replicas, scatter_over_replicas
from ddl.optimizers import MomentumSGD
from ddl.optimizers.checks import prepare_optimizer, refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.step import clipping
from ddl.step.overflow import all_finite
from ddl.step.replicas import AllReduce
from ddl.tasks.parts import copies_of

_FLAG = "shard_optimizer_state"

_BY_ENTRY: tuple[type[keras.optimizers.Optimizer], ...] = (
    *(keras.optimizers.Adadelta, keras.optimizers.Adagrad, keras.optimizers.Adam),
    *(keras.optimizers.AdamW, keras.optimizers.Adamax, keras.optimizers.Ftrl),
    *(keras.optimizers.Lion, keras.optimizers.Nadam, keras.optimizers.RMSprop),
    *(keras.optimizers.SGD, MomentumSGD),
)
"""Optimizers that compute each entry of a weight from the same entry of gradient and slots."""


class InShares(list[Any]):
    """Reduced gradients: for each variable, a vector [entries of a share] on each replica.

    Only an optimizer's update can use them.
    """


@dataclasses.dataclass(eq=False)
class Sharding:
    """The shares of the optimizers of a trainer.

    A Keras optimizer updates variables, and makes its slots in their shapes. A stand-in for each
    weight has the shape of a share, and takes over the replica's share of the weight in an update.

    Attributes:
      strategy: The strategy, with several replicas.
      all_reduce: Sums over the replicas.
      slots: The whole shape of each slot in shares, by the `id` of the variable [entries of a
        share], which is the `value` of the optimizer's.
      stand_ins: The stand-ins, by the ids of optimizer and weight.
    """

    strategy: tf.distribute.Strategy
    all_reduce: AllReduce
    slots: dict[int, tf.TensorShape] = dataclasses.field(default_factory=dict)
    stand_ins: dict[tuple[int, int], keras.Variable] = dataclasses.field(default_factory=dict)

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        """Builds the optimizer's slots as shares; else as `prepare_optimizer`.

        Args:
          optimizer: The optimizer; changed in place.
          variables: The variables that it updates.

        Raises:
          ConfigError: As `prepare_optimizer`; or if shares do not update as whole weights.
        """
        if type(optimizer) not in _BY_ENTRY or optimizer.built:
            name = f"{type(optimizer).__name__} {optimizer.name!r}"
            raise ConfigError(
                f"{_FLAG} supports elementwise optimizers that are not built yet, got {name}"
                f"{', which is built' if optimizer.built else ''}. Leave it out, or use "
                f"{either([of.__name__ for of in _BY_ENTRY])}, without a call of `build`."
            )
        excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
        stand_ins, shapes = [], dict[int, tf.TensorShape]()
        for variable in variables:
            shape = variable.value.shape
            size = _size_of_share(shape, self.strategy.num_replicas_in_sync)
            given = {"shape": [size], "dtype": variable.dtype, "name": variable.name}
            with self.strategy.scope():
                stand_in = keras.Variable("zeros", **given)
            stand_in._path = variable.path  # which names the slots
            stand_ins.append(stand_in)
            self.stand_ins[id(optimizer), id(variable)] = stand_in
            shapes[id(stand_in)] = shape
            if not optimizer._use_weight_decay(variable.value):
                excluded.add(optimizer._var_key(stand_in))
        add, attributes = optimizer.add_variable_from_reference, vars(optimizer)

        def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
            slot = add(reference_variable, *args, **kwargs)
            self.slots[id(slot.value)] = shapes[id(reference_variable)]
            return slot

        attributes["add_variable_from_reference"] = noted
        try:
            prepare_optimizer(optimizer, stand_ins, self.strategy)
        finally:
            del attributes["add_variable_from_reference"]

    @property
    def handles_of_stand_ins(self) -> frozenset[int]:
        """The ids of the handles of the stand-ins of this worker's replicas."""
        every = (copy for one in self.stand_ins.values() for copy in copies_of(one.value))
        return frozenset(id(copy.handle) for copy in every)

    def summed(self, gradients: Sequence[Any]) -> InShares:
        """Returns the sums over the replicas, in shares. Cross-replica context, in a graph.

        Args:
          gradients: The gradients of each replica; whole. Sparse ones become dense.
        """
        replicas = self.strategy.num_replicas_in_sync

        def own_sums(gradients: Sequence[Any]) -> list[tf.Tensor]:
            rows = []
            for gradient in map(tf.convert_to_tensor, gradients):
                size = _size_of_share(gradient.shape, replicas)
                flat = _padded(tf.reshape(gradient, [-1]), replicas * size)
                rows.append(tf.reshape(flat, [replicas, size]))
            # The backward pass computes the last layers' gradients first, so they are sent first.
            return [tf.reshape(row, [-1]) for row in scatter_over_replicas(rows[::-1])[::-1]]

        return InShares(self.strategy.run(own_sums, args=(gradients,)))

    def finite(self, shares: InShares) -> tf.Tensor:
        """Returns whether gradients in shares are finite on all replicas, bool []."""
        overflowed = lambda share: tf.cast([~all_finite(share)], tf.float64)  # noqa: E731
        each = self.strategy.run(overflowed, args=(list(shares),))
        return tf.equal(self.all_reduce.of_sums(each)[0], 0)


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
    traits = traits_of(strategy)
    if wanted and (traits.asynchronous or traits.shares_variables or traits.replicates_handles):
        raise ConfigError(
            f"{_FLAG} needs a copy of each variable on every replica, which mirrored and "
            f"multi_worker_mirrored have, got {type(strategy).__name__}. Leave it out, or use one "
            "of these strategies."
        )
    if wanted and strategy.num_replicas_in_sync == 1:
        logging.warning("%s has no effect on one replica, which keeps all slots.", _FLAG)
        wanted = False
    sharding = Sharding(strategy, all_reduce) if wanted else None
    for name, optimizer in optimizers.items():
        if sharding is not None:
            sharding.prepare(optimizer, variables[name])
        else:
            prepare_optimizer(optimizer, variables[name], strategy)
    return sharding


# ------------------------------------------------------------ the update


def apply_to_shares(
    sharding: Sharding,
    gradients: list[Any],
    factor: tf.Tensor | None,
    variables: Sequence[keras.Variable],
    applied: Sequence[Any],
    clip: float | None,
) -> tf.Tensor:
    """Applies a gradient to each replica's share. Cross-replica context, in a graph.

    Args:
      sharding: The shares.
      gradients: The gradient, whole or in shares.
      factor: A factor that is missing in it, or None; see `ddl.step.engine.Engine.apply`, like all
        that follow.
      variables: The variables.
      applied: The optimizers with the variables that each updates.
      clip: The largest global norm, or None.

    Returns:
      The global norm before clipping, float64 [].
    """
    run = sharding.strategy.run

    def scaled(values: list[Any], factor: tf.Tensor | None) -> list[tf.Tensor]:
        if not isinstance(gradients, InShares):
            values = [own_share(tf.convert_to_tensor(value)) for value in values]
        if factor is not None:
            values = clipping.multiply(values, factor)
        # Penalties of the whole weights.
        pairs = zip(values, clipping.penalty_gradients(variables), strict=True)
        return [share if extra is None else share + own_share(extra) for share, extra in pairs]

    def squares(shares: list[tf.Tensor]) -> tf.Tensor:
        updated = [shares[index] for one in applied for index in one.indices(variables)]
        return tf.cast(clipping.squared_norm(updated), tf.float64)[tf.newaxis]

    shares, norm = run(scaled, args=(list(gradients), factor)), tf.zeros([], tf.float64)
    if clip is not None and applied:
        squared = sharding.all_reduce.of_sums(run(squares, args=(shares,)))[0]
        norm = tf.sqrt(squared)
        widest = clipping.widest([variable.value for variable in variables])
        clipped = lambda given, squared: clipping.clip_by_global_norm(given, clip, squared)[0]  # noqa: E731
        shares = run(clipped, args=(shares, tf.cast(squared, widest)))
    for one in applied:
        indices = one.indices(variables)
        given = [shares[index] for index in indices], [variables[index] for index in indices]
        _update(sharding, *given, one.optimizer)
    return norm


def _update(
    sharding: Sharding,
    shares: list[Any],
    variables: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
) -> None:
    """Lets an optimizer update its share of its weights, and gathers the weights."""
    stand_ins = [sharding.stand_ins[id(optimizer), id(variable)] for variable in variables]

    def on_replica(gradients: list[tf.Tensor]) -> None:
        for variable, stand_in, gradient in zip(variables, stand_ins, gradients, strict=True):
            # Not before the whole gradient is freed, so that the two are not in memory together.
            with tf.control_dependencies([gradient]):
                _set(stand_in.value, own_share(tf.convert_to_tensor(variable.value)))
        optimizer.apply_gradients(zip(gradients, stand_ins, strict=True))
        shares = [tf.convert_to_tensor(one.value)[tf.newaxis] for one in stand_ins]
        for variable, rows in zip(variables, gather_over_replicas(shares), strict=True):
            constraint, shape = variable.constraint, variable.value.shape
            value = tf.reshape(tf.reshape(rows, [-1])[: shape.num_elements()], shape)
            _set(variable.value, value if constraint is None else constraint(value))

    with refusing_reductions(sharding.strategy), by_kernels([optimizer]):
        sharding.strategy.run(on_replica, args=(shares,))


def _set(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value to this replica's copy."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


# ------------------------------------------------------------ shares of a tensor


def _size_of_share(shape: tf.TensorShape, replicas: int) -> int:
    return -(-int(shape.num_elements()) // replicas)


def _padded(flat: tf.Tensor, size: int) -> tf.Tensor:
    missing = size - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat


def copied_share(value: tf.Tensor, replica: int, replicas: int) -> tf.Tensor:
    """Returns a replica's share, [entries of a share], in memory of its own. In any context.

    TensorFlow does not copy a slice of rows, nor a value that is assigned to a variable: a variable
    to which such a slice is assigned keeps the whole tensor in memory. It copies slices of columns.
    """
    size = _size_of_share(value.shape, replicas)
    row = tf.reshape(value, [1, -1])[:, replica * size : (replica + 1) * size]
    return _padded(tf.reshape(row, [-1]), size)


def own_share(value: tf.Tensor) -> tf.Tensor:
    """Returns this replica's share of a tensor that all replicas hold. Replica context."""
    context = tf.distribute.get_replica_context()
    replica = int(tf.get_static_value(context.replica_id_in_sync_group))
    return copied_share(value, replica, context.num_replicas_in_sync)
