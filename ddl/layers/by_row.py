"""Layers of Keras that cannot compute each row of a batch alone, which a Trainer refuses."""

from collections.abc import Iterable

import keras

from ddl.errors import ConfigError

# Layers that look at all rows of a replica, shuffle them, or do not draw through Keras.
_OF_WHOLE_BATCHES = (
    keras.layers.Equalization,
    keras.layers.RandAugment,
    keras.layers.AugMix,
    keras.layers.RandomElasticTransform,
    keras.layers.MixUp,
    keras.layers.CutMix,
)


def check_computes_by_row(layers: Iterable[keras.layers.Layer]) -> None:
    """Raises ConfigError for layers of Keras that cannot compute each row of a batch alone."""
    for layer in layers:
        if getattr(layer, "stateful", False):
            what = "carries its states from batch to batch (stateful=True), so the order, padding,"
            remedy = "Set stateful=False, and give each example its whole sequence."
        elif isinstance(layer, _OF_WHOLE_BATCHES):
            what = f"({type(layer).__name__}) computes a row from all rows of a replica, so padding"
            remedy = "Call it in dataset.map, or use ddl.layers.Mixup or ddl.layers.CutMix."
        else:
            continue
        raise ConfigError(
            f"The layer {layer.name!r} {what} and the number of replicas would change the result. "
            f"{remedy}"
        )
