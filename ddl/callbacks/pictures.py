"""Callbacks that write pictures to TensorBoard: sample images, and a confusion matrix."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ddl import microbatch
from ddl.callbacks.moment import Moment
from ddl.callbacks.schedule import AfterEvaluation, Callback, Every
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DataError
from ddl.training.results.other_data import check_one_order
from ddl.training.trainer import Trainer

_PIXELS = 256
"""Smallest height of the picture of a confusion matrix."""

_ROWS = 2
"""Rows with which `predict` is traced before training; more than one, as a batch has."""

_IN_TEXT = 50
"""Largest number of classes whose counts are written as a table too."""


class SampleImages(Every):
    """Writes images to TensorBoard every so many steps: examples, or what a task makes of them.

        SampleImages(1000, "restored")  # calls task.restored(features) on 16 examples

    The examples are the first ones of the evaluation data, or else of the training data.
    """

    def __init__(
        self,
        steps: int,
        method: str | None = None,
        number: int = 16,
        feature: str = "image",
        low: float = 0.0,
        high: float = 1.0,
        name: str = "samples",
    ):
        """Checks the arguments.

        Args:
          steps: Number of updates between images.
          method: Name of a method of the task that takes features [n, …] and returns images
            [n, height, width, channels], with 1 or 3 channels, as `predict` is called; None
            writes the examples themselves.
          number: Number of images.
          feature: Feature of the examples that holds the images, without a `method`.
          low: Value of black; lower values are black too.
          high: Value of white; higher values are white too.
          name: Name of the images in TensorBoard.

        Raises:
          ConfigError: If `steps` or `number` is not an integer of at least 1, or `low` is not
            below `high`.
        """
        super().__init__(steps, self._show)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"SampleImages.number must be an integer ≥ 1, got {number!r:.60}.")
        if not low < high:
            raise ConfigError(
                f"SampleImages.low must be below SampleImages.high, got {low} and {high}."
            )
        self._method = method
        self._number = number
        self._feature = feature
        self._range = low, high
        self._name = name
        self._examples: dict[str, np.ndarray] | None = None

    def check(self, trainer: Trainer) -> None:
        """Checks task and data, without reading any.

        Raises:
          ConfigError: If the task lacks the method, or the data lack the feature; for a method with
            parameter servers.
        """
        task, names = type(trainer.task).__name__, _pipeline(trainer).source.element_spec
        if self._method is None and self._feature not in names:
            raise ConfigError(
                f"SampleImages.feature must be a feature of the data ({', '.join(sorted(names))}), "
                f"got {self._feature!r}. Or name a method of {task} in SampleImages.method."
            )
        if self._method is not None and not callable(getattr(trainer.task, self._method, None)):
            raise ConfigError(
                f"SampleImages.method is {self._method!r}, but {task} has no such method. Write "
                f"{task}.{self._method}(features), which returns images [n, height, width, 1 or 3]."
            )
        if self._method is not None:
            _check_predicts(self, trainer)

    def _show(self, moment: Moment) -> None:
        if self._examples is None:
            self._examples = _first(moment.trainer, self._number)
        if self._method is None:
            images = self._examples[self._feature]
        else:
            function = getattr(moment.trainer.task, self._method)
            images = moment.trainer.predict(self._examples, function=function)
        low, high = self._range
        scaled = (np.asarray(images, np.float32) - low) / (high - low)
        moment.write.images(self._name, np.clip(scaled, 0, 1))


class ConfusionMatrix(AfterEvaluation):
    """Writes a confusion matrix of the evaluation data to TensorBoard, after each evaluation.

    Row i of the picture shows the examples of class i: the brighter column j, the more of them are
    predicted as class j. A table has their numbers, for up to 50 classes. Each example counts once,
    whatever its weight; examples of weight 0 do not count. Each call computes the task's `predict`
    on the evaluation data once more.
    """

    def __init__(self, label: str = "label", name: str = "confusion"):
        """Keeps the arguments.

        Args:
          label: Feature with the class of each example, an integer.
          name: Name of picture and table in TensorBoard.
        """
        super().__init__(self._show)
        self._label = label
        self._name = name
        self._function: Callable[[dict[str, tf.Tensor]], Any] | None = None

    def check(self, trainer: Trainer) -> None:
        """Checks task and data, without reading any.

        Raises:
          ConfigError: If the task has no `predict`, or the data have no such label; with parameter
            servers.
          DataError: If the data have no order, such as a stream in shards.
        """
        super().check(trainer)
        _check_predicts(self, trainer)
        source = _pipeline(trainer).source
        task, spec = type(trainer.task).__name__, source.element_spec
        check_one_order(source, "ConfusionMatrix")
        if not callable(getattr(trainer.task, "predict", None)):
            raise ConfigError(
                f"ConfusionMatrix needs scores [n, classes] from {task}.predict(features), which "
                "does not exist. Write it."
            )
        label = spec.get(self._label)
        if label is None or label.shape.rank or not label.dtype.is_integer:
            got = "no such feature" if label is None else f"{label.dtype.name} {label.shape}"
            raise ConfigError(
                f"ConfusionMatrix.label must be a feature with one integer per example, but "
                f"{self._label!r} is {got}. The features are {', '.join(sorted(spec))}."
            )
        _check_scores(trainer, self._label, spec)

    def _show(self, moment: Moment) -> None:
        trainer = moment.trainer
        if self._function is None:
            self._function = _classes(trainer.task, self._label)
        found = trainer.predict(
            _pipeline(trainer).source, function=self._function, weightless=False
        )
        counts = confusion(found["label"], found["class"], int(found["classes"][0]))
        moment.write.images(self._name, _picture(counts))
        if len(counts) <= _IN_TEXT:
            moment.write.text(self._name, _table(counts))


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Counts the examples of each class by their predicted class, int64 [classes, classes].

    Args:
      labels: Class of each example, int [n].
      predicted: Predicted class of each example, int [n].
      classes: Number of classes.

    Raises:
      DataError: If a label is not from 0 to classes - 1.
    """
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise DataError(
            f"The labels must be from 0 to {classes - 1}, as the task predicts {classes} classes, "
            f"got labels from {labels.min()} to {labels.max()}. Correct the labels, or the number "
            "of classes of the model."
        )
    counts = np.bincount(labels.astype(np.int64) * classes + predicted, minlength=classes**2)
    return counts.reshape(classes, classes)


def _classes(task: Any, label: str) -> Callable[[dict[str, tf.Tensor]], Any]:
    """Returns a function of features that returns label and predicted class of each."""

    def classes(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        scores = task.predict(features)
        if not tf.is_tensor(scores) or scores.shape.rank != 2 or scores.shape[1] < 2:
            got = f"shape {scores.shape}" if tf.is_tensor(scores) else type(scores).__name__
            is_known = not tf.is_tensor(scores) or scores.shape.rank is not None
            error = _NoScoresError if is_known else ConfigError
            raise error(
                f"ConfusionMatrix needs scores [n, classes] from {type(task).__name__}.predict, "
                f"with at least two classes, got {got}. Return one tensor of scores from it, or "
                "leave ConfusionMatrix out."
            )
        return {
            "label": tf.cast(features[label], tf.int64),
            "class": tf.argmax(scores, axis=-1),
            "classes": tf.fill([scores.shape[0]], scores.shape[1]),
        }

    return classes


class _NoScoresError(ConfigError):
    """The outputs of a task are no scores of classes."""


def _check_scores(trainer: Trainer, label: str, spec: Mapping[str, tf.TensorSpec]) -> None:
    """Traces the task's `predict` for one replica, without reading data.

    Other errors of the task are left to the evaluation, whose batches may have another form.

    Raises:
      ConfigError: If it returns no scores [n, classes].
    """
    classes = _classes(trainer.task, label)
    rows = {
        name: tf.TensorSpec([_ROWS, *one.shape], one.dtype)
        for name, one in spec.items()
        if name != "weight"
    }
    is_traced = False

    def of_replica(features: dict[str, tf.Tensor]) -> None:
        nonlocal is_traced
        if not is_traced:  # one replica stands for all
            is_traced = True
            classes(features)

    probe = tf.function(
        lambda features: trainer.strategy.run(of_replica, args=(features,)), autograph=False
    )
    with microbatch.without_traces_of_the_user():
        try:
            probe.get_concrete_function(rows)
        except _NoScoresError:
            raise
        except Exception:
            return


def _check_predicts(callback: Callback, trainer: Trainer) -> None:
    """Raises ConfigError if the strategy computes no outputs."""
    if traits_of(trainer.strategy).asynchronous:
        raise ConfigError(
            f"{type(callback).__name__} needs outputs of the task, which parameter servers do not "
            "compute. Leave it out, or run under another strategy."
        )


def _pipeline(trainer: Trainer) -> Any:
    """Returns the pipeline of the evaluation data, or else of the first training data."""
    return trainer.eval_pipeline or next(iter(trainer.pipelines.values()))


def _first(trainer: Trainer, number: int) -> dict[str, np.ndarray]:
    """Returns the first examples of the data, fewer if there are fewer; the same on all workers."""
    pipeline = _pipeline(trainer)
    number = min(number, pipeline.num_examples)
    contents = getattr(pipeline.source, "contents", None)
    if contents is not None:
        return {name: rows[:number] for name, rows in contents().items()}
    size = pipeline.global_batch_size
    rows: list[dict[str, np.ndarray]] = []
    dataset = pipeline.source.batches(size, 0, seed=0, shuffle=False)
    for batch in dataset.take(-(-number // size)).as_numpy_iterator():
        batch.pop("weight")
        rows.append(batch)
    return {name: np.concatenate([row[name] for row in rows])[:number] for name in rows[0]}


def _picture(counts: np.ndarray) -> np.ndarray:
    """Returns the share of each row's examples as a picture [height, width, 1], from 0 to 1."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = -(-_PIXELS // len(counts))
    return np.kron(shares, np.ones([cell, cell]))[..., np.newaxis]


def _table(counts: np.ndarray) -> str:
    """Returns the counts as Markdown."""
    head = ["class", *map(str, range(len(counts)))]
    rows = [head, ["---"] * len(head)]
    rows += [[f"**{number}**", *map(str, row)] for number, row in enumerate(counts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
