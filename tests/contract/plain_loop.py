"""A plain training loop: TensorFlow and NumPy on one device, without ddl.

It computes what ddl promises on any devices: the gradient of Σ weight·loss / Σ weight over the
global batch, penalties added once, clipped by the global norm, applied, and averaged. Padding does
not exist here: the last batch of an epoch is shorter.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Arrays = Mapping[str, np.ndarray]
# Takes the model, features and `training`; returns losses [batch, …], metrics of the same shape by
# name, and weights of that shape or None.
PerExample = Callable[[keras.Model, Mapping[str, tf.Tensor], bool], tuple[Any, dict, Any]]
# Takes variables, gradients and the number of the update, from 1.
Rule = Callable[[Sequence[keras.Variable], Sequence[tf.Tensor], int], None]


def batches_in_order(examples: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yields the examples of each batch, epoch after epoch in the stored order."""
    while True:
        yield from np.split(np.arange(examples), range(batch_size, examples, batch_size))


@dataclasses.dataclass
class Loop:
    """One training run.

    Attributes:
      model: The model; changed in place.
      per_example: Losses, metrics and weights of each example.
      data: Arrays by feature name; "weight" weighs examples.
      batch_size: Rows of a full batch.
      rule: Applies gradients.
      microbatches: Parts of a batch; batch normalization sees one at a time.
      clip_norm: Largest global norm of a gradient.
      average: Decay of the averages of all of the model's variables, and whether it starts small;
        None keeps none.
      skipped: Numbers of batches, from 0, that are left out.
      averages: The averages.
      norms: The norms of the gradients before clipping.
    """

    model: keras.Model
    per_example: PerExample
    data: Arrays
    batch_size: int
    rule: Rule
    microbatches: int = 1
    clip_norm: float | None = None
    average: tuple[float, bool] | None = None
    skipped: Sequence[int] = ()
    averages: list[np.ndarray] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)

    def train(self, updates: int) -> list[dict[str, float]]:
        """Returns the weighted means of loss and metrics of each update."""
        self.averages = [v.numpy() for v in self.model.weights]
        figures: list[dict[str, float]] = []
        order = batches_in_order(len(next(iter(self.data.values()))), self.batch_size)
        for number, rows in enumerate(order):
            if len(figures) == updates:
                break
            if number not in self.skipped:
                figures.append(self._update(rows, len(figures) + 1))
        return figures

    def _update(self, rows: np.ndarray, number: int) -> dict[str, float]:
        variables = self.model.trainable_variables
        values = [v.value for v in variables]
        total = [tf.zeros_like(v) for v in values]
        sums: dict[str, Any] = defaultdict(float)
        size = self.batch_size // self.microbatches
        for part in (rows[start : start + size] for start in range(0, self.batch_size, size)):
            features, weight = rows_of(self.data, part)
            if not len(weight):
                continue  # nothing but padding
            with tf.GradientTape() as tape:
                own = sums_of(self.per_example(self.model, features, True), weight)
            gradients = tape.gradient(own["loss"], values)
            total = [t + tf.convert_to_tensor(g) for t, g in zip(total, gradients, strict=True)]
            for name, value in own.items():
                sums[name] += value
        means = [gradient / sums["weight"] for gradient in total]
        with tf.GradientTape() as tape:
            own = (v.regularizer(v) for v in variables if v.regularizer)
            penalty = sum(own, tf.zeros([], "float64"))
        penalties = tape.gradient(penalty, values, unconnected_gradients="zero")
        gradients = [mean + of_penalty for mean, of_penalty in zip(means, penalties, strict=True)]
        self.norms.append(float(tf.linalg.global_norm(gradients)))
        if self.clip_norm is not None:
            gradients = [g * min(1.0, self.clip_norm / self.norms[-1]) for g in gradients]
        self.rule(variables, gradients, number)
        if self.average is not None:
            decay, warm_up = self.average
            rate = 1 - (min(decay, (1 + number) / (10 + number)) if warm_up else decay)
            for average, weight in zip(self.averages, self.model.weights, strict=True):
                average += rate * (weight.numpy() - average)
        return {name: float(sums[name] / sums["weight"]) for name in sums if name != "weight"}


def evaluate(model: keras.Model, per_example: PerExample, data: Arrays) -> dict[str, float]:
    """Returns the weighted means over all examples at once."""
    features, weight = rows_of(data, np.arange(len(next(iter(data.values())))))
    sums = sums_of(per_example(model, features, False), weight)
    return {name: float(sums[name] / sums["weight"]) for name in sums if name != "weight"}


def rows_of(data: Arrays, rows: np.ndarray) -> tuple[dict[str, tf.Tensor], np.ndarray]:
    """Returns features and weights of those of some examples that weigh more than 0."""
    weight = data["weight"][rows] if "weight" in data else np.ones(len(rows))
    kept = rows[weight > 0]
    features = {name: tf.constant(each[kept]) for name, each in data.items() if name != "weight"}
    return features, weight[weight > 0].astype("f8")


def sums_of(outputs: tuple[Any, dict, Any], weight: np.ndarray) -> dict[str, tf.Tensor]:
    """Returns Σ weight, Σ weight·loss and Σ weight·value of each metric."""
    loss, metrics, own_weight = outputs
    total = tf.reshape(tf.constant(weight), [-1] + [1] * (len(loss.shape) - 1))
    total *= tf.ones_like(loss) if own_weight is None else tf.cast(own_weight, tf.float64)
    values = {"weight": tf.ones_like(loss), "loss": loss, **metrics}
    return {name: tf.reduce_sum(total * tf.cast(v, "float64")) for name, v in values.items()}


@dataclasses.dataclass
class Lars:
    """SGD with momentum and layer-wise rates (You et al. 2017). Biases have none.

    Attributes:
      rate: Learning rate.
      momentum: Share of the velocity that an update keeps.
      decay: Weight decay, which enters the layer-wise rate.
      trust: The trust coefficient.
    """

    rate: float
    momentum: float
    decay: float
    trust: float
    velocities: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)

    def __call__(self, variables, gradients, number):
        for v, gradient in zip(variables, gradients, strict=True):
            if not v.path.endswith("bias"):
                size, of_gradient = tf.norm(v), tf.norm(gradient)
                local = self.trust * size / (of_gradient + self.decay * size)
                gradient = local * (gradient + self.decay * v)
            velocity = self.momentum * self.velocities.get(id(v), 0.0) - self.rate * gradient
            self.velocities[id(v)] = velocity
            v.assign(v + velocity)


@dataclasses.dataclass
class Lamb:
    """Adam with layer-wise rates: algorithm 2 of You et al. 2019. Biases follow Adam.

    Attributes:
      rate: Learning rate.
      decay: Weight decay, which enters the layer-wise rate.
    """

    rate: float
    decay: float
    moments: dict[int, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, variables, gradients, number):
        for v, gradient in zip(variables, gradients, strict=True):
            first, second = self.moments.get(id(v), (0.0, 0.0))
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            self.moments[id(v)] = first, second
            step = first / (1 - 0.9**number)
            step /= tf.sqrt(second / (1 - 0.999**number)) + 1e-6
            if not v.path.endswith("bias"):
                step += self.decay * v
                step *= tf.norm(v) / tf.norm(step)
            v.assign(v - self.rate * step)


def of_keras(optimizer: keras.optimizers.Optimizer) -> Rule:
    """Returns the rule of an optimizer that Keras applies outside of any strategy."""
    return lambda variables, gradients, _: optimizer.apply(gradients, variables)
