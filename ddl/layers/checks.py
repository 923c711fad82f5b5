"""Checks of the layers of a task: that they compute each row alone, and train what they did."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping

import keras
import numpy as np
from absl import logging

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


def check_are_means(
    where: str,
    of_eight: tuple[np.ndarray, np.ndarray],
    of_four: tuple[np.ndarray, np.ndarray],
    tolerance: float,
) -> None:
    """Raises ConfigError unless the losses of layers (`add_loss`) are means over rows.

    Each replica computes them from its rows of a microbatch. Only means add up to the loss of one
    device, up to their rounding.

    Args:
      where: Name of the loss in errors.
      of_eight: The losses of eight rows, and with others in place of the first four.
      of_four: The losses of these four rows, and of the others, which weigh twice as much.
      tolerance: Tolerated difference, relative to the largest value.
    """
    changes = 2 * (of_eight[0] - of_eight[1]), of_four[0] - of_four[1]
    largest = np.abs([of_eight, of_four]).max()
    if not np.allclose(*changes, rtol=0, atol=tolerance * largest):
        raise ConfigError(
            f"{where}: the losses that layers add (add_loss, or an activity regularizer) must be "
            "means over the rows of a batch, as replicas and microbatches compute them from their "
            "own rows. Divide sums by the number of rows, or return them from the task, where "
            "ddl.gather(x) gives a loss across rows those of all replicas."
        )


def warn_of_inference(
    task: object,
    layers: Iterable[keras.layers.Layer],
    used: Collection[keras.layers.Layer],
    draws: bool,
) -> None:
    """Logs if a loss in training runs all random and normalizing layers as an evaluation does.

    Args:
      task: The task.
      layers: Its layers, built.
      used: Layers of the loss, without BatchNormalization that takes no moments.
      draws: Whether the loss draws random numbers.
    """
    kind = keras.layers.BatchNormalization
    idle = [x.name for x in layers if x.trainable and (isinstance(x, kind) or _draws(x))]
    if idle and not draws and not any(isinstance(x, kind) for x in used):
        logging.warning(
            "%s.per_example runs %s as in an evaluation. Pass `training` on: model(x, "
            "training=training).",
            type(task).__name__,
            ", ".join(idle),
        )


def _draws(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer of Keras draws in training; recurrent cells have a seed anyway."""
    rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]
    return hasattr(layer, "seed_generator") and rates != [0.0, 0.0]


class FixedValues:
    """The choice of trained variables, and numbers in attributes, as the traced loop holds them."""

    def __init__(
        self, task: object, layers: list[keras.layers.Layer], optimizers: Mapping[str, object]
    ):
        """Records those of a task, its layers and the optimizers, when the trainer is created."""
        self._were = [(layer, _trained(layer)) for layer in layers]
        holders = (task, *layers, *optimizers.values())
        self._numbers = [(one, *given) for one in holders for given in _numbers_of(one)]

    def check(self) -> None:
        """Raises ConfigError if a layer now trains other variables, or a number has changed."""
        for holder, name, given in self._numbers:
            now = getattr(holder, name, None)
            if now is not given and repr(now) != repr(given):
                raise ConfigError(
                    f"Changing {name} of {type(holder).__name__} has no effect: the traced loop "
                    f"keeps {given!r:.80}, got {now!r:.80}. Make it a tf.Variable of the task and "
                    "assign to that, or create a new Trainer with a new optimizer."
                )
        for layer, was in reversed(self._were):  # a layer before the model that holds it
            if was != (now := _trained(layer)):
                raise ConfigError(
                    f"Changing trainable of the layer {layer.name!r} has no effect: it was "
                    f"{was!r:.80} when the trainer was created, and is now {now!r:.80}. Create a "
                    "new Trainer with a new optimizer."
                )


def _numbers_of(holder: object) -> Iterator[tuple[str, float]]:
    """Yields numbers in public attributes by name; of Keras's objects those given to `__init__`."""
    is_keras = isinstance(holder, keras.layers.Layer | keras.optimizers.Optimizer)
    arguments = inspect.signature(type(holder).__init__).parameters if is_keras else ()
    for name, value in getattr(holder, "__dict__", {}).items():
        is_given = name in arguments if is_keras else not name.startswith("_")
        is_rate = name == "_learning_rate" and is_keras
        if (is_given and isinstance(value, int | float)) or is_rate:
            yield name, value


def _trained(layer: keras.layers.Layer) -> tuple[bool, list[str]]:
    """Returns whether a layer is trainable, and the paths of its variables that are."""
    return layer.trainable, [variable.path for variable in layer.trainable_variables]
