"""Callback that writes the examples with the highest losses to TensorBoard."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.callbacks.moment import Moment
from ddl.callbacks.schedule import AfterEvaluation
from ddl.data import ArraySource, Source
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.training.results.other_data import check_one_order
from ddl.training.trainer import Trainer


class WorstExamples(AfterEvaluation):
    """Writes the evaluation examples with the highest losses to TensorBoard.

    After each evaluation, a table holds the positions of these examples in the evaluation data and
    their losses, the highest first. If the data lie in memory and have a feature of images, their
    pictures follow in the same order. A loss that is not a number counts as the highest. The loss
    of an example with several entries, such as tokens, is their weighted mean; an example whose
    weights from the task are all 0 is left out. Each call computes `per_example` of the task on the
    evaluation data once more, with the weights that evaluations use.
    """

    def __init__(self, number: int = 16, image: str = "image", name: str = "worst_examples"):
        """Checks the arguments.

        Args:
          number: Largest number of examples.
          image: Feature with the picture of an example, [height, width, 1, 3 or 4]; without such a
            feature, only the table is written.
          name: Name of table and pictures in TensorBoard.

        Raises:
          ConfigError: If `number` is not an integer of at least 1.
        """
        super().__init__(self._show)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"WorstExamples.number must be an integer ≥ 1, got {number!r:.60}.")
        self._number = number
        self._image = image
        self._name = name
        self._function: Callable[[dict[str, tf.Tensor]], Any] | None = None

    def check(self, trainer: Trainer) -> None:
        """Checks task and data, without reading any.

        Raises:
          ConfigError: If the task has no `per_example`, or the data have weights; with parameter
            servers.
          DataError: If the data have no order, such as a stream in shards.
        """
        super().check(trainer)
        if traits_of(trainer.strategy).asynchronous:
            raise ConfigError(
                "WorstExamples needs the loss of each example, which parameter servers do not "
                "compute. Leave it out, or run under another strategy."
            )
        source = _source(trainer)
        check_one_order(source, "WorstExamples")
        task = type(trainer.task).__name__
        if not callable(getattr(trainer.task, "per_example", None)):
            raise ConfigError(
                f"WorstExamples needs {task}.per_example(features, training), which does not "
                "exist. Write it, or leave WorstExamples out."
            )
        if "weight" in source.element_spec:
            raise ConfigError(
                "WorstExamples needs evaluation data whose examples all count alike, but they have "
                "a feature 'weight'. Evaluate on data without it, or leave WorstExamples out."
            )

    def _show(self, moment: Moment) -> None:
        trainer = moment.trainer
        if self._function is None:
            self._function = _losses(trainer.task)
        source = _source(trainer)
        found = trainer.predict(source, function=self._function)
        places = worst(found["loss"], found["weight"], self._number)
        rows = [f"| {place} | {found['loss'][place]:.6g} |" for place in places]
        table = "\n".join(["| example | loss |", "|---|---|", *rows])
        moment.write.text(self._name, table)
        images = source.features.get(self._image) if isinstance(source, ArraySource) else None
        if (
            images is not None
            and images.ndim == 4
            and images.shape[-1] in (1, 3, 4)
            and len(places)
        ):
            moment.write.images(self._name, _pictures(images[places]))


def worst(losses: np.ndarray, weights: np.ndarray, number: int) -> np.ndarray:
    """Returns the places of the highest losses, the highest first: int64 [at most number].

    Args:
      losses: Loss of each example, float [n]; NaN counts as the highest.
      weights: Weight of each example, float [n]; examples of weight 0 are left out.
      number: Largest number of places.
    """
    counted = np.flatnonzero(weights)
    ranked = np.where(np.isnan(losses), np.inf, losses)[counted]
    return counted[np.argsort(-ranked, kind="stable")[:number]]


def _source(trainer: Trainer) -> Source:
    """Returns the evaluation data, which `check` requires."""
    assert trainer.eval_pipeline is not None
    return trainer.eval_pipeline.source


def _losses(task: Any) -> Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]]:
    """Returns a function of features that returns loss and weight of each example, [batch]."""

    def losses(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        output = task.per_example(features, False)
        half = output.loss.dtype in (tf.float16, tf.bfloat16)
        loss = tf.cast(output.loss, tf.float32) if half else output.loss
        weight = tf.ones_like(loss)
        if output.weight is not None:
            given = tf.cast(output.weight, loss.dtype)
            missing = loss.shape.rank - given.shape.rank
            weight *= tf.reshape(given, [*given.shape, *[1] * missing])
        entries = list(range(1, loss.shape.rank))
        total = tf.reduce_sum(weight, axis=entries)
        summed = tf.reduce_sum(tf.math.multiply_no_nan(loss, weight), axis=entries)
        return {"loss": tf.math.divide_no_nan(summed, total), "weight": total}

    return losses


def _pictures(images: Any) -> np.ndarray:
    """Returns uint8 images as they are, and others scaled from 0 to 1 together."""
    array = np.asarray(images)
    if array.dtype == np.uint8:
        return array
    array = array.astype(np.float32)
    low, high = np.nanmin(array), np.nanmax(array)
    return np.clip(np.nan_to_num((array - low) / max(high - low, 1e-12)), 0, 1)
