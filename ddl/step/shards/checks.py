"""Refusals of what would not have the same bits on other devices, by name and with a remedy."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.devices.replicas import replica_devices
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.layers.shards.lockstep import WRITES
from ddl.step.effects.stateful import is_harmful, with_called
from ddl.step.moving_statistics import Statistics
from ddl.step.objective import Objective
from ddl.step.observing import RECORDS
from ddl.step.verbs.each_example import OfExample

# Further operations whose copies do what one does: they read tables, make their handles, or print.
_HARMLESS = re.compile(r"^(LookupTable(Find|Size)(V2)?|HashTable(V2)?|Print(V2)?)$")
# They write what another replica held back, or record values.
_OF_DDL = re.compile(rf"(^|/)({WRITES}|{RECORDS})(_\d+)?/")
_DRAWS = re.compile(
    "Random|Multinomial|TruncatedNormal|CandidateSampler|^Rng|^Stateful(Uniform|StandardNormal)|"
    "Distorted"
)
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_ANY_SHARDS = "Remove Trainer.batch_shards, or"


def check_number(shards: Any, strategy: tf.distribute.Strategy) -> None:
    """Raises ConfigError unless the shards can be computed in a fixed tree by these devices.

    Args:
      shards: `Trainer.batch_shards`.
      strategy: The strategy.
    """
    replicas = strategy.num_replicas_in_sync
    is_number = isinstance(shards, int) and not isinstance(shards, bool)
    if not is_number or shards < 1 or shards & (shards - 1):
        raise ConfigError(
            "Trainer.batch_shards must be None or a power of two, such as 8, since shards are "
            f"added in pairs; got {shards!r}."
        )
    if traits_of(strategy).asynchronous:
        raise ConfigError(
            "Trainer.batch_shards gives the same bits on any devices, but updates with parameter "
            f"servers depend on timing. {_ANY_SHARDS} choose another strategy."
        )
    kinds = {str(tf.DeviceSpec.from_string(name).device_type) for name in replica_devices(strategy)}
    if kinds != {"CPU"}:
        raise ConfigError(
            f"Trainer.batch_shards supports CPUs, got replicas on {', '.join(sorted(kinds))}. "
            f"Kernels of other devices have not been shown to keep the order of their additions. "
            f"{_ANY_SHARDS} train on CPUs (--num_virtual_devices)."
        )
    if shards % replicas:
        raise ConfigError(
            f"Trainer.batch_shards must be a multiple of the number of replicas, {replicas}, got "
            f"{shards}. Use 1, 2, 4, … replicas up to {shards}, or more shards; more shards "
            "compute other bits."
        )


def check_options(options: Any) -> None:
    """Raises ConfigError for another argument of the Trainer that `batch_shards` excludes.

    Args:
      options: `ddl.training.checks.arguments.Options`.
    """
    for name, reason in (
        ("gradient_dtype", "its rounding depends on the number of replicas"),
        ("gradient_noise_scale", "its estimate depends on the number of replicas"),
        ("remat", "layers that are computed again do not exchange values between shards yet"),
    ):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"Trainer.batch_shards excludes Trainer.{name}: {reason}. Remove one of the two."
            )
    if options.shard_optimizer_state:
        raise ConfigError(
            "Trainer.batch_shards excludes Trainer.shard_optimizer_state: norms of shares are "
            "added in an order that depends on the number of replicas. Remove one of the two."
        )
    if options.jit_compile == "on":
        raise ConfigError(
            "Trainer.batch_shards excludes --jit_compile=on: XLA chooses the order of additions. "
            "Use --jit_compile=off."
        )


def check_objectives(objectives: Iterable[Objective], strategy: tf.distribute.Strategy) -> None:
    """Raises ConfigError for layers and losses that would depend on the devices.

    Args:
      objectives: The objectives of the training.
      strategy: The strategy.
    """
    for objective in objectives:
        if objective.gathers:
            raise ConfigError(
                "Trainer.batch_shards excludes ddl.gather: a loss across examples would see the "
                f"rows of a shard. {_ANY_SHARDS} return a loss of each example alone."
            )
        for layer in objective.training_layers:
            _check_layer(layer, strategy)


def _check_layer(layer: keras.layers.Layer, strategy: tf.distribute.Strategy) -> None:
    name = f"{type(layer).__name__} {layer.name!r}"
    if isinstance(layer, keras.layers.BatchNormalization):
        of_keras = keras.layers.BatchNormalization
        if type(layer).call is not of_keras.call or type(layer)._moments is not of_keras._moments:
            raise ConfigError(
                f"Trainer.batch_shards excludes the layer {name}, which computes something else "
                "than Keras's BatchNormalization. Use that class, with synchronized=True."
            )
        if layer.trainable and not layer.synchronized:
            raise ConfigError(
                f"Trainer.batch_shards excludes the layer {name}: its moments are those of the "
                "rows of one replica. Build it with synchronized=True, or freeze it."
            )
        return
    if isinstance(layer, keras.layers.AugMix):
        raise ConfigError(
            f"Trainer.batch_shards excludes the layer {name}: it chooses operations by Python's "
            f"random module, once for each replica. {_ANY_SHARDS} use RandAugment."
        )
    if written := Statistics([layer], strategy).variables:
        raise ConfigError(
            f"Trainer.batch_shards excludes the layer {name}: it keeps the variables "
            f"{', '.join(v.name for v in written)}, which each shard would write. The only "
            "supported layer with such variables is synchronized BatchNormalization."
        )


def check_each(each: OfExample | None) -> None:
    """Raises ConfigError if a step changes the gradient of each example."""
    if each is not None:
        raise ConfigError(
            "Trainer.batch_shards excludes `each` of update.gradients, which is not shown to have "
            f"the same bits on any devices. {_ANY_SHARDS} leave `each` out."
        )


def check_operations(operations: Sequence[tf.Operation]) -> None:
    """Raises ConfigError for operations whose results may depend on the devices.

    Args:
      operations: Those of forward and backward pass of the shards.
    """
    seen: set[str] = set()
    for operation in operations:
        for node in with_called(operation.graph, operation.node_def, seen):
            if node.op.startswith("Xla") or _is_compiled(node):
                raise ConfigError(
                    f"Trainer.batch_shards excludes what XLA compiles ({node.op} {node.name}), "
                    "which chooses the order of additions. Leave jit_compile out of the "
                    "tf.function, or use a layer of TensorFlow operations."
                )
            _check_operation(node.op, node.name)


def _is_compiled(node: Any) -> bool:
    return "_XlaMustCompile" in node.attr and bool(node.attr["_XlaMustCompile"].b)


def _check_operation(kind: str, name: str) -> None:
    if not is_harmful(kind) or _HARMLESS.match(kind):
        return
    if _OF_DDL.search(name):
        return
    if _DRAWS.search(kind):
        raise ConfigError(
            f"Trainer.batch_shards excludes the operation {kind} ({name}): each of its copies "
            "draws numbers of its own. Draw with ddl.random and the layers of ddl.layers."
        )
    if kind in _PYTHON:
        raise ConfigError(
            f"Trainer.batch_shards excludes tf.py_function and tf.numpy_function ({name}): ddl "
            "cannot tell what Python code computes. Use TensorFlow operations, or compute it "
            "in the data."
        )
    if kind.startswith(("Assign", "Resource")):
        raise ConfigError(
            f"Trainer.batch_shards excludes the write of a variable in a loss ({kind} {name}): "
            "each shard would write it. Change variables in `step`, such as with "
            "update.average."
        )
    raise ConfigError(
        f"Trainer.batch_shards excludes the operation {kind} ({name}), which has a state: each "
        f"shard would read or change it on its own. {_ANY_SHARDS} compute it without a state, or "
        "in the data."
    )
