"""Tasks across examples, and what a loop over a whole batch without padding would compute."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.precision import set_precision

layers = keras.layers
cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
BATCH = 16


def data(examples: int = 21) -> dict[str, np.ndarray]:
    """21 examples in batches of 16 leave one of five rows; 32 leave none."""
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(examples, 6)), "label": random.integers(0, 3, examples)}


class Task:
    """A model, and a loss of its output."""

    def __init__(self, *, dropout: bool = True, normalized: bool = False) -> None:
        middle = [layers.BatchNormalization()] if normalized else []
        middle += [keras.layers.Dropout(0.3)] if dropout else []
        hidden = layers.Dense(8, "tanh")
        self.model = keras.Sequential([keras.Input((6,)), hidden, *middle, layers.Dense(4)])

    def embedded(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return tf.math.l2_normalize(self.model(x, training=training), axis=-1)

    def gather(self, x: Any) -> ddl.tasks.gather.Gathered:
        return ddl.gather(x)


class InfoNce(Task):
    """Each example against its second view, among those of all others."""

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        x = features["x"]
        queries, keys = self.embedded(x, training), self.embedded(x[:, ::-1], training)
        others = self.gather(keys)
        logits = queries @ tf.transpose(others.rows) / 0.5
        logits = tf.where(others.mask, logits, logits.dtype.min)
        found = tf.cast(tf.argmax(logits, 1) == others.own, logits.dtype)
        return ddl.PerExample(cross_entropy(others.own, logits), {"found": found})


class Triplets(Task):
    """The farthest example of the own label, and the nearest of the others."""

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        own = self.embedded(features["x"], training)
        others = self.gather({"z": own, "label": features["label"]})
        distances = 2 - 2 * own @ tf.transpose(others.rows["z"])
        same = features["label"][:, tf.newaxis] == others.rows["label"]
        positive = tf.reduce_max(tf.where(same & others.mask, distances, 0.0), axis=1)
        negative = tf.reduce_min(tf.where(others.mask & ~same, distances, 9.0), axis=1)
        return ddl.PerExample(tf.nn.softplus(positive - negative))


class Covariances(Task):
    """A loss of the gathered rows alone: their covariances, as in VICReg."""

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        z = self.model(features["x"], training=training)
        others = self.gather(z)
        counts = tf.cast(others.mask, z.dtype)[:, tf.newaxis]
        number = tf.reduce_sum(counts)
        centred = counts * (others.rows - tf.reduce_sum(counts * others.rows, 0) / number)
        covariance = tf.transpose(centred) @ centred / number
        off_diagonal = covariance - tf.linalg.diag(tf.linalg.diag_part(covariance))
        spread = tf.nn.relu(1 - tf.sqrt(tf.linalg.diag_part(covariance) + 1e-4))
        loss = tf.reduce_sum(off_diagonal**2) + tf.reduce_mean(spread)
        return ddl.PerExample(tf.fill([z.shape[0]], loss))


class BarlowTwins(Task):
    """Correlations between two views over the global batch, as in Barlow Twins."""

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        x = features["x"]
        views = [self.model(view, training=training) for view in (x, x[:, ::-1])]
        others = self.gather(tuple(views))
        counts = tf.cast(others.mask, views[0].dtype)[:, tf.newaxis]
        number = tf.reduce_sum(counts)
        one, other = (counts * (z - tf.reduce_sum(counts * z, 0) / number) for z in others.rows)
        scales = [tf.sqrt(tf.reduce_sum(z**2, 0) / number + 1e-4) for z in (one, other)]
        correlations = tf.transpose(one / scales[0]) @ (other / scales[1]) / number
        identity = tf.eye(correlations.shape[0], dtype=correlations.dtype)
        loss = tf.reduce_sum((0.1 + 0.9 * identity) * (correlations - identity) ** 2)
        return ddl.PerExample(tf.fill([x.shape[0]], loss))


class Weighted(InfoNce):
    """Weights by the task, and a term that nothing gathers."""

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        loss, metrics, _ = super().per_example(features, training)
        weight = 0.5 + tf.cast(features["label"], loss.dtype)
        own = tf.reduce_sum(self.model(features["x"], training=training) ** 2, axis=1)
        return ddl.PerExample(loss + own, metrics, weight)


class OwnStep(InfoNce):
    """The loss of another name, in a step of its own."""

    def contrasts(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        return super().per_example(features, training)

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.contrasts, batch)


TASKS = {
    task.__name__: task for task in (InfoNce, Triplets, Covariances, BarlowTwins, Weighted, OwnStep)
}


def build(
    name: str,
    strategy: tf.distribute.Strategy,
    *,
    examples: int = 21,
    precision: Any = "float64",
    change: Callable[[Any], None] | None = None,
    made: dict[str, bool] | None = None,
    **options: Any,
) -> ddl.Trainer:
    """Builds a trainer of a task.

    Args:
      name: Name of the task.
      strategy: The strategy.
      examples: Number of examples.
      precision: The precision.
      change: Changes the task.
      made: Arguments of the task.
      options: Further arguments of the Trainer.
    """
    set_precision(precision)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        task = TASKS[name](**(made or {}))
        if change is not None:
            change(task)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return ddl.Trainer(
        task,
        optimizer,
        data(examples),
        global_batch_size=BATCH,
        eval_data=data(examples),
        strategy=strategy,
        **options,
    )


def copies(trainer: ddl.Trainer) -> list[list[np.ndarray]]:
    """Returns the copy of each replica of weights, statistics and slots."""
    local = trainer.strategy.experimental_local_results
    variables = [*trainer.task.model.variables, *trainer.optimizer.variables]
    return [[copy.numpy() for copy in local(v.value)] for v in variables]
