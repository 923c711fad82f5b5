"""The memory that each replica needs, for `--dry_run`."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.optimizers.named import by_name
from ddl.step.remat.activations import Activations
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer


def memory_of_replica(trainer: Trainer, activations: Activations) -> dict[str, str]:
    """Returns what a replica holds, as texts by name.

    Args:
      trainer: A trainer that has traced its updates.
      activations: The observer of that trace.
    """
    trained = [v.value for v in trainer._parts.update.plan.trained]
    weights = {id(v): v.value for layer in layers_of(trainer.task) for v in layer.variables}
    slots = [v.value for one in by_name(trainer.optimizer).values() for v in one.variables]
    gradients = _bytes(trained)
    accumulates = trainer.accumulation_steps > 1
    # The sum over the microbatches, and the gradients of the present one.
    rows = {
        "weights": _bytes(weights.values()),
        "gradients": gradients * (2 if accumulates else 1),
        "optimizer": _bytes(slots),
        "averages": _bytes(trainer.averages.variables) if trainer.averages else 0,
        "kept for overflows": trainer.kept_bytes,
    }
    texts = {f"memory, {name}": _text(size) for name, size in rows.items() if size}
    if trainer.sharding is not None and rows["optimizer"]:
        replicas = trainer.strategy.num_replicas_in_sync
        texts["memory, optimizer"] += f", a replica's share of the slots of {replicas} replicas"
    if accumulates:
        texts["memory, gradients"] += ", of the sum over microbatches and of one microbatch"
    if activations.bytes is not None:
        texts["memory, activations"] = _of_activations(trainer, activations)
        rows["activations"] = activations.bytes
    where = " with those on parameter servers or the host" if _is_apart(trainer.strategy) else ""
    texts["memory of a replica"] = (
        f"about {_text(sum(rows.values()))}{where}, without the data, TensorFlow, and buffers of "
        "operations and collectives"
    )
    return texts


def _of_activations(trainer: Trainer, activations: Activations) -> str:
    text = f"{_text(activations.bytes or 0)} of a microbatch"
    if trainer.remat_parts is None:
        return f"{text}; Trainer.remat would keep fewer"
    return (
        f"{text}: {_text(activations.kept or 0)} kept, and {_text(activations.repeated)} of the "
        f"largest of {len(trainer.remat_parts.names)} parts that are computed again"
    )


def _is_apart(strategy: tf.distribute.Strategy) -> bool:
    traits = traits_of(strategy)
    return traits.asynchronous or traits.shares_variables


def _bytes(variables: Iterable[Any]) -> int:
    """Returns the bytes of one replica's copies."""
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    return sum(int(v.shape.num_elements()) * v.dtype.size for v in plain)


def _text(size: int) -> str:
    """Returns a number of bytes as a text."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}"
    return f"{size} bytes"
