"""Checks on a model before training."""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf
from absl import logging

from ddl.choices import BatchMoments
from ddl.distribution.devices import replica_devices
from ddl.errors import ConfigError
from ddl.precision import uses_tf32_unasked


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


_OF_WHOLE_BATCHES = (
    keras.layers.Equalization,
    keras.layers.RandAugment,
    keras.layers.AugMix,
    keras.layers.RandomElasticTransform,
    keras.layers.MixUp,
    keras.layers.CutMix,
)
"""Layers that look at all rows of a replica, shuffle them, or do not draw through Keras."""


def check_computes_by_row(layers: Iterable[keras.layers.Layer]) -> None:
    """Raises ConfigError for layers of Keras that cannot compute each row alone."""
    for layer in layers:
        if isinstance(layer, _OF_WHOLE_BATCHES):
            raise ConfigError(
                f"The layer {layer.name!r} ({type(layer).__name__}) computes a row from all rows "
                "of a replica, or draws for all of them, so the result would depend on the number "
                "of replicas. Call it in the data (dataset.map), or use ddl.layers.Mixup or "
                "ddl.layers.CutMix to mix examples."
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
    """Returns whether a layer takes statistics of a microbatch.

    Variables that a user's layer writes in its forward pass are not examined.
    """
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)


def _names(layers: list[keras.layers.Layer]) -> str:
    return ", ".join(layer.name for layer in layers)
