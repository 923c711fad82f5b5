"""Checks on a model before training."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ddl.choices import BatchMoments
from ddl.distribution.devices import replica_devices
from ddl.errors import ConfigError
from ddl.precision import uses_tf32_unasked
from ddl.tasks.parts import seed_generators_of


def check_created_in_scope(
    variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy
) -> None:
    """Raises ConfigError if a variable was made outside the strategy's scope."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ConfigError(
                f"The model's variable {variable.path!r} was created outside the "
                "strategy's scope. Build the model under `with strategy.scope():`."
            )


def frozen_variables(layers: Sequence[keras.layers.Layer]) -> list[keras.Variable]:
    """Returns the trainable variables that are frozen in all of the given layers.

    A layer's sublayers must be in `layers` too: only its own variables are read.
    """
    own = [(layer, v) for layer in layers for v in layer._trainable_variables]
    trained = {id(v) for layer, v in own if layer.trainable and v.trainable}
    return [v for _, v in own if id(v) not in trained]


def computes_in_float16(models: Iterable[keras.layers.Layer]) -> bool:
    """Returns whether any layer computes in float16, so that gradients may underflow."""
    layers = (layer for model in models for layer in model._flatten_layers())
    return any(layer.compute_dtype == "float16" for layer in layers)


def warn_of_replica_dependence(
    layers: Sequence[keras.layers.Layer],
    strategy: tf.distribute.Strategy,
    microbatches: int = 1,
    task: Any = None,
) -> None:
    """Logs what makes a run depend on the number of replicas or microbatches.

    These are layers, and seed generators of the task.

    Logs nothing with one replica and one microbatch.

    Args:
      layers: The task's layers.
      strategy: The strategy, which has the number of replicas.
      microbatches: Microbatches per replica and update.
      task: The task, whose own seed generators are logged.
    """
    numbers = {"replica": strategy.num_replicas_in_sync, "microbatch": microbatches}
    parts = [part for part, number in numbers.items() if number > 1]
    drawing = [layer for layer in layers if _draws_by_replica(layer)]
    per = " and ".join(parts)
    of = " and ".join({"replica": "replicas", "microbatch": "microbatches"}[p] for p in parts)
    if drawing and parts:
        logging.warning(
            "The layers %s draw random numbers per %s, so the training result depends on the "
            "number of %s. Use the layers of ddl.layers, which do not depend on it.",
            _names(drawing),
            per,
            of,
        )
    if seed_generators_of(task) and parts:
        logging.warning(
            "The keras.random.SeedGenerator of %s draws random numbers per %s, so the training "
            "result depends on the number of %s. Draw with ddl.random, such as "
            "ddl.random.normal(self, shape), which does not depend on it.",
            type(task).__name__,
            per,
            of,
        )


def warn_of_batch_moments(
    layers: Sequence[keras.layers.Layer],
    strategy: tf.distribute.Strategy,
    microbatches: int,
    batch_moments: BatchMoments,
) -> None:
    """Logs if moments of BatchNormalization depend on the number of replicas or microbatches.

    Args:
      layers: The task's layers in training.
      strategy: The strategy.
      microbatches: Microbatches per replica and update.
      batch_moments: As `ddl.Trainer` takes it.
    """
    normalizing = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    if normalizing and batch_moments == "per_replica" and strategy.num_replicas_in_sync > 1:
        logging.warning(
            "The layers %s take moments of each replica's rows (Trainer.batch_moments = "
            "'per_replica'), so the number of replicas changes the training result.",
            _names(normalizing),
        )
    if normalizing and microbatches > 1:
        logging.warning(
            "The layers %s compute their moments on each microbatch separately, so the training "
            "result depends on the number of microbatches: ACCUMULATION_STEPS = %d.",
            _names(normalizing),
            microbatches,
        )


def warn_of_tf32(strategy: tf.distribute.Strategy) -> None:
    """Logs that a GPU rounds float32 to TF32 if nobody asked for it."""
    on_gpu = any("GPU" in device.upper() for device in replica_devices(strategy))
    if on_gpu and keras.config.dtype_policy().name == "float32" and uses_tf32_unasked():
        logging.warning(
            "TensorFlow rounds float32 inputs of matrix products and convolutions to TF32 (10 bits "
            "of mantissa) on recent GPUs. Call ddl.precision.set_tf32(False) for float32, or "
            "set_tf32(True) to keep this speed without the warning."
        )


def depends_on_microbatches(layers: Sequence[keras.layers.Layer]) -> bool:
    """Returns whether the result of training depends on the number of microbatches.

    The result depends on it if a layer takes statistics of a microbatch, or draws by replica.
    Variables that a user's layer writes in its forward pass are not examined.
    """
    return any(
        isinstance(layer, keras.layers.BatchNormalization) or _draws_by_replica(layer)
        for layer in layers
    )


def _draws_by_replica(layer: keras.layers.Layer) -> bool:
    return bool(layer._seed_generators) and not getattr(layer, "draws_by_position", False)


def _names(layers: list[keras.layers.Layer]) -> str:
    return ", ".join(layer.name for layer in layers)
