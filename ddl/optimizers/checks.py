"""Checks on an optimizer before training, for steps that ddl would skip or compute twice.

The trainer sums the gradients over the replicas, clips and unscales them, and passes the result to
the optimizer. An optimizer that repeats any of this, or relies on a method that only Keras's `fit`
calls, would silently train differently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError

# Arguments of Keras's optimizers that act per replica, before the all-reduce or per microbatch, and
# the alternative in ddl.
_OURS_INSTEAD = {
    "clipnorm": "Use the Trainer's clip_norm, which applies to the global gradient.",
    "global_clipnorm": "Use the Trainer's clip_norm.",
    "clipvalue": "Use the Trainer's clip_norm.",
    "gradient_accumulation_steps": "Use the Trainer's accumulation_steps.",
    "use_ema": "Use the Trainer's weight_average, which advances once per update.",
    "loss_scale_factor": "Use the Trainer's loss_scale.",
}

# Methods of Keras's optimizers that ddl replaces or never calls, and the alternative in ddl.
_NOT_CALLED = {
    "_all_reduce_sum_gradients": "The Trainer sums gradients itself.",
    "scale_loss": "Use the Trainer's loss_scale.",
    "finalize_variable_values": "Use the Trainer's weight_average for averaged weights.",
    "learning_rate": "Pass a LearningRateSchedule to the optimizer.",
    "_get_current_learning_rate": "Pass a LearningRateSchedule to the optimizer.",
}

_K = keras.optimizers
_REFUSED = {
    _K.LossScaleOptimizer: "it checks for overflow on replica 0 only. Pass its inner optimizer, "
    "and loss_scale to the Trainer.",
    _K.MultiOptimizer: "its inner optimizers would sum the gradients over the replicas again. Use "
    "ddl.optimizers.ParameterGroups.",
    _K.ScheduleFreeAdamW: "evaluations would use the weights of its gradients instead of their "
    "average. Use AdamW with a schedule.",
}


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Rejects an optimizer whose updates or reported rate would differ from its definition.

    Another optimizer within this one is rejected when the update is traced: `refusing_reductions`.

    Raises:
      ConfigError: If it wraps others, has an argument that Keras applies per replica, overrides a
        method that ddl does not call, or has a function as its learning rate that returns a
        constant.
    """
    kind, name = type(optimizer), f"{type(optimizer).__name__} {optimizer.name!r}"
    for refused, remedy in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise ConfigError(f"Trainer.optimizer cannot be the {name}: {remedy}")
    for argument, remedy in _OURS_INSTEAD.items():
        if getattr(optimizer, argument, None):
            raise ConfigError(
                f"The optimizer {name} was created with {argument}, which Keras applies on each "
                f"replica separately. Remove it. {remedy}"
            )
    for method, remedy in _NOT_CALLED.items():
        if getattr(kind, method) is not getattr(_K.Optimizer, method):
            raise ConfigError(
                f"The optimizer {name} overrides {method}, which ddl does not call. Remove the "
                f"override. {remedy}"
            )
    _check_learning_rate(optimizer)


def check_unused(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Raises ConfigError if the optimizer has made updates or was built for other variables."""
    known = {id(variable) for variable in optimizer._trainable_variables}
    found = ""
    if updates := int(optimizer.iterations.numpy()):
        found = f"has already made {updates:,} updates"
    elif optimizer.built and not known.issuperset(map(id, variables)):
        found = "was built for other variables"
    if found:
        raise ConfigError(
            f"The optimizer {optimizer.name!r} {found}, but a new Trainer counts from 0 and needs "
            "slots for its own. Create a new optimizer for each Trainer. To resume a run, restore "
            "a checkpoint afterwards."
        )


def check_counts(optimizer: keras.optimizers.Optimizer, step: int) -> None:
    """Raises ConfigError if the optimizer's number of updates differs from the trainer's `step`."""
    updates = int(optimizer.iterations.numpy())
    if updates != step:
        raise ConfigError(
            f"The optimizer's iterations must equal the Trainer's step, got {updates:,} and "
            f"{step:,}: its schedule and slots belong to another step. Other code used the "
            "optimizer, or only weights were restored. Restore a checkpoint with restore_latest, "
            "or create a new Trainer with a new optimizer. A custom optimizer must count each "
            "update once."
        )


def prepare_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Builds the optimizer's slots and removes the all-reduce from its `apply`.

    Keras's `apply` sums gradients over the replicas, without an option to skip it. This function
    replaces the instance's hook for the all-reduce by the identity. The hook is private to Keras
    and checked by tests/contract/test_parity.py.

    Raises:
      ConfigError: If `check_optimizer` or `check_unused` rejects the optimizer, or if it was made
        outside the strategy's scope.
    """
    check_optimizer(optimizer)
    if not strategy.extended.variable_created_in_scope(optimizer.iterations.value):
        raise ConfigError(
            f"The optimizer {optimizer.name!r} was created outside the strategy's scope. Create it "
            "under `with strategy.scope():`, like the model."
        )
    check_unused(optimizer, variables)
    with strategy.scope():
        optimizer.build(variables)
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


@contextmanager
def refusing_reductions(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Rejects sums over the replicas while an optimizer's update is traced. Cross-replica context.

    The gradients are already reduced and equal on all replicas. Another sum would multiply them by
    the number of replicas. Means of equal values are harmless.

    Raises:
      ConfigError: If the `with` block sums over the replicas, even on one device.
    """
    extended = strategy.extended
    # All reductions, also those in replica context and of variables, call one of these.
    names = ("reduce_to", "batch_reduce_to", "_replica_ctx_all_reduce")
    methods = {name: getattr(extended, name) for name in names if hasattr(extended, name)}
    # Without a strategy, the update of a replica is guarded within the one of all replicas.
    earlier = {name: vars(extended)[name] for name in methods if name in vars(extended)}
    for name, method in methods.items():
        setattr(extended, name, _guarded(method))
    try:
        yield
    finally:
        for name in methods:
            delattr(extended, name)  # uncovers the method of the class
        vars(extended).update(earlier)


def _guarded(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_sum(reduce_op: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM":
            raise ConfigError(
                "The optimizer must not sum over the replicas in its update, because the gradients "
                "are already summed: the update would grow with the number of replicas. Remove its "
                "all_reduce, its merge_call, its variables with SUM aggregation, or its inner "
                "optimizer (ddl.optimizers.ParameterGroups takes several)."
            )
        return reduce(reduce_op, *args, **kwargs)

    return refuse_sum


def _check_learning_rate(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError if the rate is a function that tracing would turn into a constant."""
    rate = optimizer._learning_rate
    if isinstance(rate, (LearningRateSchedule, keras.Variable)) or not callable(rate):
        return

    @tf.function(autograph=False)
    def value() -> tf.Tensor:
        return tf.identity(tf.convert_to_tensor(rate()))

    traced = value.get_concrete_function()
    # To read a variable is a stateful operation.
    if not any(op.op_def.is_stateful for op in traced.graph.get_operations()):
        raise ConfigError(
            f"The learning rate of the optimizer {optimizer.name!r} is a function that returns the "
            f"constant {float(traced()):g}: the training loop calls it only once, during tracing. "
            "Pass a float, a LearningRateSchedule, or a function of a tf.Variable or of the "
            "optimizer's iterations."
        )
