"""Checks of the layers of a task: that they compute each row alone, and train what they did."""

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


class TrainedVariables:
    """The choice of trained variables, as it was when the trainer was created."""

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        """Records the choice of the layers of the trainer's task."""
        self._were = [(layer, _trained(layer)) for layer in layers]

    def check(self) -> None:
        """Raises ConfigError if a layer or model now trains other variables."""
        for layer, was in reversed(self._were):  # a layer before the model that holds it
            if was != (now := _trained(layer)):
                raise ConfigError(
                    f"Changing trainable of the layer {layer.name!r} has no effect: it was "
                    f"{was!r:.80} when the trainer was created, and is now {now!r:.80}. Create a "
                    "new Trainer with a new optimizer."
                )


def _trained(layer: keras.layers.Layer) -> tuple[bool, list[str]]:
    """Returns whether a layer is trainable, and the paths of its variables that are."""
    return layer.trainable, [variable.path for variable in layer.trainable_variables]
