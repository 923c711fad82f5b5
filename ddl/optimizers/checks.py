"""Checks on an optimizer before training, for steps that ddl would skip or compute twice.

The trainer sums the gradients over the replicas, clips and unscales them, and passes the result to
the optimizer. An optimizer that repeats any of this, or relies on a method that only Keras's `fit`
calls, would silently train differently.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError

# Arguments of Keras's optimizers that act per replica, before the all-reduce or per micro-step, and
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
    "_all_reduce_sum_gradients": "The Trainer sums gradients itself: see its communication.",
    "scale_loss": "Use the Trainer's loss_scale.",
    "finalize_variable_values": "Use the Trainer's weight_average for averaged weights.",
    "learning_rate": "Pass a LearningRateSchedule to the optimizer.",
    "_get_current_learning_rate": "Pass a LearningRateSchedule to the optimizer.",
}

_NO_HOLDERS = (
    *(str, bytes, int, float, complex, np.ndarray, type, types.ModuleType),
    *(tf.Tensor, tf.Variable, tf.distribute.Strategy),
    *(keras.Variable, keras.layers.Layer, LearningRateSchedule),
)


def check_optimizer(optimizer: Any) -> None:
    """Rejects an optimizer whose updates or reported rate would differ from its definition.

    Raises:
      ConfigError: If it is not a Keras optimizer, holds another optimizer, has an argument that
        Keras applies per replica, overrides a method that ddl does not call, or has a function as
        its learning rate that returns a constant.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"Trainer.optimizer must be a keras.optimizers.Optimizer, got {_described(optimizer)}. "
            "Pass an instance, such as keras.optimizers.SGD(0.1); in a config, write @SGD() with "
            "parentheses."
        )
    check_holds_none(optimizer)
    check_arguments(optimizer)
    for method, ours in _NOT_CALLED.items():
        if getattr(type(optimizer), method) is not getattr(keras.optimizers.Optimizer, method):
            raise ConfigError(
                f"The optimizer {type(optimizer).__name__} overrides {method}, which ddl does not "
                f"call. Remove the override. {ours}"
            )
    if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        raise ConfigError(
            "Trainer.optimizer cannot be keras.optimizers.ScheduleFreeAdamW: evaluations would use "
            "the weights of its gradients instead of their average. Use AdamW with a schedule."
        )
    _check_learning_rate(optimizer)


def check_arguments(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError for an argument that Keras applies per replica, or that has no effect."""
    of_user = type(optimizer).__module__.partition(".")[0] not in ("keras", "ddl")
    if "lr" in vars(optimizer) and not of_user:  # a class of one's own may have such an attribute
        raise ConfigError(
            f"Setting lr of the optimizer {optimizer.name!r} has no effect. Assign to its "
            "learning_rate instead, and remove lr with `del optimizer.lr`."
        )
    for argument, ours in _OURS_INSTEAD.items():
        if getattr(optimizer, argument, None):
            raise ConfigError(
                f"The optimizer {optimizer.name!r} was created with {argument}, which Keras "
                f"applies on each replica separately. Remove it. {ours}"
            )


def check_holds_none(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError if the optimizer holds another optimizer.

    Call it again after `build`: some optimizers create their inner optimizer there.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "The optimizer is a Keras LossScaleOptimizer, which checks for overflow on replica 0 "
            "only. Pass its inner optimizer instead, and pass loss_scale to the Trainer."
        )
    held = next(_held(optimizer), None)
    if held is None and isinstance(optimizer, keras.optimizers.MultiOptimizer):
        held = ("optimizer._optimizer_map", "what the function returns")
    if held is not None:
        place, inner = held
        raise ConfigError(
            f"The optimizer {optimizer.name!r} ({type(optimizer).__name__}) must not contain "
            f"another optimizer, but it contains {inner} in {place}. The inner optimizer would sum "
            "the gradients over the replicas again, and ddl sees neither its learning rate nor "
            "its clipping. Pass one plain optimizer, or ddl.optimizers.ParameterGroups with an "
            "optimizer for each group of variables; and pass clip_norm and loss_scale to "
            "the Trainer."
        )


def check_unused(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Raises ConfigError if the optimizer has made updates or was built for other variables."""
    remedy = (
        "Create a new optimizer for each Trainer. To resume a run, restore a checkpoint afterwards."
    )
    if updates := int(optimizer.iterations.numpy()):
        raise ConfigError(
            f"The optimizer {optimizer.name!r} has already made {updates:,} updates, but a new "
            "Trainer counts from 0, so its schedule and slots would belong to another step. "
            f"{remedy}"
        )
    known = {id(variable) for variable in optimizer._trainable_variables}
    unknown = [variable.path for variable in variables if id(variable) not in known]
    if optimizer.built and unknown:
        raise ConfigError(
            f"The optimizer {optimizer.name!r} was built for other variables: it has no slots for "
            f"{unknown[0]!r}. {remedy}"
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
    names = [
        name
        for name in ("reduce_to", "batch_reduce_to", "_replica_ctx_all_reduce")
        if hasattr(extended, name)
    ]

    def guarded(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def refuse_sum(reduce_op: Any, *args: Any, **kwargs: Any) -> Any:
            if str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM":
                raise ConfigError(
                    "The optimizer must not sum over the replicas in its update, because the "
                    "gradients are already summed: the update would grow with the number of "
                    "replicas. Remove its all_reduce, its merge_call, its variables with SUM "
                    "aggregation, or its inner optimizer; the Trainer reduces the gradients."
                )
            return reduce(reduce_op, *args, **kwargs)

        return refuse_sum

    # Without a strategy, the update of a replica is guarded within the one of all replicas.
    earlier = {name: vars(extended)[name] for name in names if name in vars(extended)}
    for name in names:
        setattr(extended, name, guarded(getattr(extended, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(extended, name)  # uncovers the method of the class
        for name, function in earlier.items():
            setattr(extended, name, function)


def _held(optimizer: Any) -> Iterator[tuple[str, str]]:
    """Yields the place and description of each optimizer that an object holds, at any depth."""
    seen = {id(optimizer)}
    waiting = [("optimizer", optimizer)]
    while waiting:
        for place, part in _parts(*waiting.pop()):
            if id(part) in seen or isinstance(part, _NO_HOLDERS) or inspect.isroutine(part):
                continue
            seen.add(id(part))
            # Asked of the class: an object may compute any attribute that it is asked for.
            if callable(getattr(type(part), "apply_gradients", None)):
                yield place, _described(part)
            else:
                waiting.append((place, part))


def _parts(place: str, holder: Any) -> list[tuple[str, Any]]:
    """Returns the items and attributes of an object, with the places where it keeps them."""
    parts: list[tuple[str, Any]] = []
    if isinstance(holder, Mapping):
        parts += [(f"{place}[{key!r}]", value) for key, value in holder.items()]
    elif isinstance(holder, (list, tuple, set, frozenset)):
        parts += [(f"{place}[{number}]", value) for number, value in enumerate(holder)]
    # Mappings such as Keras's OptimizerMap also have attributes. TensorFlow's `_self_` attributes
    # refer to the same objects again. A function for the rate may read another optimizer.
    parts += [
        (f"{place}.{name}", value)
        for name, value in getattr(holder, "__dict__", {}).items()
        if not name.startswith("_self_") and name != "_learning_rate"
    ]
    for slots in (getattr(cls, "__slots__", ()) for cls in type(holder).__mro__):
        for name in (slots,) if isinstance(slots, str) else slots:
            parts.append((f"{place}.{name}", getattr(holder, name, None)))
    return parts


def _check_learning_rate(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError if the rate is a function that tracing would turn into a constant."""
    rate = optimizer._learning_rate
    if isinstance(rate, (LearningRateSchedule, keras.Variable)) or not callable(rate):
        return

    @tf.function(autograph=False)
    def value() -> tf.Tensor:
        return tf.identity(tf.convert_to_tensor(rate()))

    traced = value.get_concrete_function()
    reads = any(tensor.dtype == tf.resource for tensor in traced.inputs)
    if not reads and not any(op.op_def.is_stateful for op in traced.graph.get_operations()):
        raise ConfigError(
            f"The learning rate of the optimizer {optimizer.name!r} is a function that returns the "
            f"constant {float(traced()):g}: the training loop calls it only once, during tracing. "
            "Pass a float, a LearningRateSchedule, or a function of a tf.Variable or of the "
            "optimizer's iterations."
        )


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    name = getattr(thing, "name", None)
    return f"{name!r} ({type(thing).__name__})" if isinstance(name, str) else f"{thing!r:.80}"
