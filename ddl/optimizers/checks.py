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
from absl import logging
from keras.optimizers.schedules import LearningRateSchedule

from ddl.errors import ConfigError

# Arguments of Keras's optimizers that act per replica, before the all-reduce or per micro-step, and
# the alternative in ddl.
_OURS_INSTEAD = {
    "clipnorm": "use the trainer's clip_norm, of the global gradient",
    "global_clipnorm": "use the trainer's clip_norm",
    "clipvalue": "use the trainer's clip_value",
    "gradient_accumulation_steps": "use the trainer's accumulation_steps",
    "use_ema": "use the trainer's weight_average, which moves once an update",
    "loss_scale_factor": "use the trainer's loss_scale",
}

# Methods of Keras's optimizers that ddl replaces or never calls, and the alternative in ddl.
_NOT_CALLED = {
    "_all_reduce_sum_gradients": "the trainer sums gradients itself: see its communication and "
    "gradient_dtype",
    "scale_loss": "use the trainer's loss_scale",
    "finalize_variable_values": "use the trainer's weight_average for averaged weights",
    "learning_rate": "give the optimizer a LearningRateSchedule",
    "_get_current_learning_rate": "give the optimizer a LearningRateSchedule",
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
            f"the optimizer must be a keras.optimizers.Optimizer, got {_described(optimizer)}"
        )
    check_holds_none(optimizer)
    check_arguments(optimizer)
    for method, ours in _NOT_CALLED.items():
        if getattr(type(optimizer), method) is not getattr(keras.optimizers.Optimizer, method):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} has its own {method}, which ddl does "
                f"not use. Leave it out; {ours}."
            )
    _check_learning_rate(optimizer)
    if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        logging.warning(
            "Keras's ScheduleFreeAdamW has no switch to the averaged weights x of Defazio et al. "
            "2024: evaluations, checkpoints and exports have the weights y that gradients are "
            "taken at, as with Keras's fit."
        )


def check_arguments(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError if the optimizer has an argument that Keras applies per replica."""
    for argument, ours in _OURS_INSTEAD.items():
        if getattr(optimizer, argument, None):
            raise ConfigError(
                f"the optimizer {optimizer.name!r} was made with {argument}, which Keras carries "
                f"out on each replica by itself. Leave it out; {ours}."
            )


def check_holds_none(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ConfigError if the optimizer holds another optimizer.

    Call it again after `build`: some optimizers create their inner optimizer there.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "the optimizer is a keras LossScaleOptimizer, which asks for overflow on replica 0 "
            "alone. Give the optimizer inside it, and the loss scale to the trainer."
        )
    held = next(_held(optimizer), None)
    if held is None and isinstance(optimizer, keras.optimizers.MultiOptimizer):
        held = ("optimizer._optimizer_map", "what the function gives")
    if held is not None:
        place, inner = held
        raise ConfigError(
            f"the optimizer {optimizer.name!r} ({type(optimizer).__name__}) holds another one: "
            f"{inner} in {place}. An optimizer inside another one sums the gradients over the "
            "replicas once more, and ddl sees neither its learning rate nor its clipping. Give the "
            "trainer one plain optimizer, and clip_norm, clip_value and loss_scale to the trainer."
        )


def check_unused(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Raises ConfigError if the optimizer has made updates or was built for other variables."""
    remedy = "Make a new optimizer for each Trainer; to resume a run, restore a checkpoint after."
    if updates := int(optimizer.iterations.numpy()):
        raise ConfigError(
            f"the optimizer {optimizer.name!r} has made {updates:,} updates, and a new Trainer "
            f"counts from 0: its schedule and slots would be those of another step. {remedy}"
        )
    known = {id(variable) for variable in optimizer._trainable_variables}
    unknown = [variable.path for variable in variables if id(variable) not in known]
    if optimizer.built and unknown:
        raise ConfigError(
            f"the optimizer {optimizer.name!r} was built for other variables: it has no slots for "
            f"{unknown[0]!r}. {remedy}"
        )


def check_counts(optimizer: keras.optimizers.Optimizer, step: int) -> None:
    """Raises ConfigError if the optimizer's number of updates differs from the trainer's `step`."""
    updates = int(optimizer.iterations.numpy())
    if updates != step:
        raise ConfigError(
            f"the optimizer counts {updates:,} updates (iterations), and the trainer {step:,} "
            "(step): its schedule and slots do not belong to this step. Something else has used "
            "the optimizer, or weights alone were restored. Restore a checkpoint with "
            "restore_latest, or make a new Trainer with a new optimizer; an optimizer of your own "
            "must count each update once."
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
                    "the optimizer sums over the replicas in its update, where the gradients are "
                    "summed already: the update would grow with the number of replicas. Take out "
                    "its all_reduce, merge_call, variables with the aggregation SUM, or the "
                    "optimizer inside it; the trainer reduces the gradients."
                )
            return reduce(reduce_op, *args, **kwargs)

        return refuse_sum

    for name in names:
        setattr(extended, name, guarded(getattr(extended, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(extended, name)  # uncovers the method of the class


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
            f"the learning rate of the optimizer {optimizer.name!r} is a function that gives the "
            f"constant {float(traced()):g}: the training loop calls it once, when it is traced. "
            "Give a float, a LearningRateSchedule, or a function of a tf.Variable or of the "
            "optimizer's iterations."
        )


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    name = getattr(thing, "name", None)
    return f"{name!r} ({type(thing).__name__})" if isinstance(name, str) else f"{thing!r:.80}"
