"""Tasks with a step of their own, each beside the same algorithm in plain TensorFlow.

A task's `step` uses ddl's verbs. Its `plain` makes the same update on whole batches with a
`tf.GradientTape` and Keras's optimizers. Both share the models and the losses of the examples.
"""

import collections
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl

ROWS, BATCH = 20, 8  # the last batch of an epoch has 4 rows
cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits


def examples(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return {
        "x": x,
        "label": random.integers(0, 2, rows),
        "noise": random.normal(size=(rows, 3)),
        "share": random.uniform(size=(rows, 1)),
    }


def weights(rows: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.5, 2, rows).astype("float32")


def mlp(outputs: int, **options: Any) -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((3,)), dense(4, "tanh", **options), dense(outputs)])


def batches(data: dict[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of endless epochs, in the order of the data, all floats as float64."""
    rows = len(data["x"])
    data = {k: v.astype("float64") if v.dtype.kind == "f" else v for k, v in data.items()}
    while True:
        for first in range(0, rows, size):
            yield {name: values[first : first + size] for name, values in data.items()}


class Plain:
    """What a loop without ddl needs: batches, gradients of mean losses, optimizers.

    Attributes:
      step: Updates before this one.
    """

    def __init__(self, data: Any, sizes: Any, optimizers: Any):
        self._sources = (
            {"": batches(data, sizes)}
            if "x" in data
            else {name: batches(values, sizes[name]) for name, values in data.items()}
        )
        self._optimizers = optimizers if isinstance(optimizers, dict) else {None: optimizers}
        self._sums: dict[str, Any] = collections.defaultdict(lambda: np.zeros(2))
        self.step = 0

    def next(self, source: str = "") -> dict[str, np.ndarray]:
        return next(self._sources[source])

    def gradients(self, loss: Any, rows: Any, variables: Any, counts: bool = True) -> Any:
        weight = rows["weight"] if "weight" in rows else np.ones(len(rows["x"]))
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(weight * loss(rows, True).loss)
            mean = total / weight.sum()
        if counts:
            self._sums[loss.__name__] += [total.numpy(), weight.sum()]
        return tape.gradient(mean, variables)

    def apply(self, gradients: Any, variables: Any, optimizer: str | None = None) -> None:
        self._optimizers[optimizer].apply(gradients, variables)

    def figures(self) -> dict[str, float]:
        """The mean of each loss over all examples so far."""
        means = {f"loss/{name}": total / weight for name, (total, weight) in self._sums.items()}
        return means if len(means) > 1 else {"loss": next(iter(means.values()))}


class Gan:
    """Two losses, two models, two optimizers; a weight penalty and a limit of one norm."""

    trainer = MappingProxyType({"clip_norm": {"generator": None, "discriminator": 0.3}})

    def __init__(self) -> None:
        self.generator = mlp(3)
        self.discriminator = mlp(1, kernel_regularizer=keras.regularizers.L2(0.125))

    @property
    def layers(self) -> list[keras.Model]:
        return [self.generator, self.discriminator]

    @staticmethod
    def optimizers() -> Any:
        sgd = keras.optimizers.SGD
        return {"generator": sgd(0.3, momentum=0.9), "discriminator": sgd(0.2, momentum=0.5)}

    def real_or_fake(self, features: Any, training: bool) -> ddl.PerExample:
        real = self.discriminator(features["x"], training=training)[:, 0]
        fake = self.discriminator(self.generator(features["noise"], training=training))[:, 0]
        ones, zeros = tf.ones_like(real), tf.zeros_like(fake)
        return ddl.PerExample(cross_entropy(ones, real) + cross_entropy(zeros, fake))

    def fools(self, features: Any, training: bool) -> ddl.PerExample:
        fake = self.discriminator(self.generator(features["noise"], training=training))[:, 0]
        return ddl.PerExample(cross_entropy(tf.ones_like(fake), fake))

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")

    def plain(self, loop: Plain) -> None:
        rows, variables = loop.next(), self.discriminator.trainable_variables
        gradients = loop.gradients(self.real_or_fake, rows, variables)
        gradients[0] += 2 * 0.125 * variables[0]
        gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
        loop.apply(gradients, variables, "discriminator")
        variables = self.generator.trainable_variables
        loop.apply(loop.gradients(self.fools, rows, variables), variables, "generator")


class WganGp:
    """Gulrajani et al. 2017: two turns of the critic, each with a batch of its own."""

    trainer: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        self.generator, self.critic = mlp(3), mlp(1)

    @property
    def layers(self) -> list[keras.Model]:
        return [self.generator, self.critic]

    @staticmethod
    def optimizers() -> Any:
        return {"generator": keras.optimizers.SGD(0.1), "critic": keras.optimizers.SGD(0.05)}

    def criticizes(self, features: Any, training: bool) -> ddl.PerExample:
        real, fake = features["x"], self.generator(features["noise"], training=training)
        mixed = real + features["share"] * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed, training=training)
        slope = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, mixed)), 1) + 1e-12)
        drift = self.critic(real, training=training)[:, 0]
        distance = drift - self.critic(fake, training=training)[:, 0]
        return ddl.PerExample(10.0 * tf.square(slope - 1) - distance + 0.1 * tf.square(drift))

    def fools(self, features: Any, training: bool) -> ddl.PerExample:
        fake = self.generator(features["noise"], training=training)
        return ddl.PerExample(-self.critic(fake, training=training)[:, 0])

    def step(self, update: Any, batch: Any) -> None:
        for _ in range(2):
            further = update.next(batch)
            update.minimize(self.criticizes, further, self.critic, optimizer="critic")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")

    def plain(self, loop: Plain) -> None:
        rows, variables = loop.next(), self.critic.trainable_variables
        for _ in range(2):
            loop.apply(loop.gradients(self.criticizes, loop.next(), variables), variables, "critic")
        variables = self.generator.trainable_variables
        loop.apply(loop.gradients(self.fools, rows, variables), variables, "generator")


class OneOptimizer:
    """A task with one optimizer, and examples with weights."""

    trainer: Mapping[str, Any] = MappingProxyType({})

    @staticmethod
    def optimizers() -> Any:
        return keras.optimizers.SGD(0.2, momentum=0.9)

    @staticmethod
    def data() -> Any:
        return {**examples(), "weight": weights(ROWS)}


class OneModel(OneOptimizer):
    """A classifier."""

    def __init__(self) -> None:
        self.model = mlp(1)

    @property
    def layers(self) -> list[keras.Model]:
        return [self.model]

    def per_example(self, features: Any, training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)[:, 0]
        return ddl.PerExample(cross_entropy(tf.cast(features["label"], logits.dtype), logits))


class Sam(OneModel):
    """Foret et al. 2021, with moving moments that move once an update."""

    def __init__(self) -> None:
        normalization = keras.layers.BatchNormalization()
        self.model = keras.Sequential([keras.Input((3,)), normalization, mlp(1)])

    def step(self, update: Any, batch: Any) -> None:
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (0.3 / up.norm())):
            sharp = update.gradients(
                self.per_example, batch, same_draws_as=up, moves_statistics=False
            )
        update.apply(sharp)

    def plain(self, loop: Plain) -> None:
        rows, variables = loop.next(), self.model.trainable_variables
        up = loop.gradients(self.per_example, rows, variables)
        kept = self.model.get_weights()
        for variable, gradient in zip(variables, up, strict=True):
            variable.assign_add(gradient * (0.3 / tf.linalg.global_norm(up)))
        sharp = loop.gradients(self.per_example, rows, variables, counts=False)
        self.model.set_weights(kept)
        loop.apply(sharp, variables)


class Byol(OneOptimizer):
    """Grill et al. 2020: predicts an average of the weights; a center as in DINO."""

    def __init__(self) -> None:
        self.online, self.predictor, self.target = mlp(3), mlp(3), mlp(3)
        self.center = tf.Variable(np.zeros(3), trainable=False)

    @property
    def layers(self) -> list[keras.Model]:
        return [self.online, self.predictor, self.target]

    def agreement(self, features: Any, training: bool) -> ddl.PerExample:
        said = self.predictor(self.online(features["x"], training=training), training=training)
        wanted = self.targets(features, training) - self.center
        return ddl.PerExample(tf.reduce_mean(tf.square(said - wanted), axis=1))

    def targets(self, features: Any, training: bool) -> tf.Tensor:
        return self.target(features["noise"], training=training)

    def trained(self) -> list[Any]:
        return [*self.online.trainable_variables, *self.predictor.trainable_variables]

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.agreement, batch, self.trained())
        self.center.assign(0.9 * self.center + 0.1 * update.mean(self.targets, batch))
        update.average(self.target, of=self.online, decay=0.9)

    def plain(self, loop: Plain) -> None:
        rows = loop.next()
        loop.apply(loop.gradients(self.agreement, rows, self.trained()), self.trained())
        weight = rows["weight"][:, None]
        mean = tf.reduce_sum(weight * self.targets(rows, True), 0) / weight.sum()
        self.center.assign(0.9 * self.center + 0.1 * mean)
        for target, online in zip(self.target.variables, self.online.variables, strict=True):
            target.assign(0.9 * target.value + 0.1 * online.value)


class DpSgd(OneModel):
    """Abadi et al. 2016: limits the gradient of each example; its noise is a constant here."""

    limit, noise = 0.2, 0.5

    @staticmethod
    def data() -> Any:
        return examples()

    def clipped(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        norm = tf.linalg.global_norm(gradients)
        return [gradient * tf.minimum(self.limit / norm, 1.0) for gradient in gradients]

    def ones(self, features: Any, training: bool) -> tf.Tensor:
        return tf.ones(features["x"].shape[0], tf.float64)

    def step(self, update: Any, batch: Any) -> None:
        gradients = update.gradients(self.per_example, batch, each=self.clipped)
        deviation = self.noise / update.sum(self.ones, batch)
        update.apply(gradients.map(lambda gradient, variable: gradient + deviation))

    def plain(self, loop: Plain) -> None:
        rows, variables = loop.next(), self.model.trainable_variables
        count, total = len(rows["x"]), [tf.zeros_like(v) for v in variables]
        for row in range(count):
            one = {name: values[row : row + 1] for name, values in rows.items()}
            clipped = self.clipped(loop.gradients(self.per_example, one, variables))
            total = [a + b for a, b in zip(total, clipped, strict=True)]
        loop.apply([(gradient + self.noise) / count for gradient in total], variables)


class PcGrad(OneModel):
    """Yu et al. 2020: of two gradients, each without what points against the other."""

    def reconstructs(self, features: Any, training: bool) -> ddl.PerExample:
        error = self.model(features["x"], training=training)[:, 0] + features["x"][:, 0]
        return ddl.PerExample(tf.square(error))

    def step(self, update: Any, batch: Any) -> None:
        def without(one: ddl.Gradients, other: ddl.Gradients) -> ddl.Gradients:
            return one - other * (tf.minimum(one.dot(other), 0.0) / other.dot(other))

        one = update.gradients(self.per_example, batch)
        other = update.gradients(self.reconstructs, batch)
        update.apply(without(one, other) + without(other, one))

    def plain(self, loop: Plain) -> None:
        def dot(one: Any, other: Any) -> Any:
            return sum(tf.reduce_sum(a * b) for a, b in zip(one, other, strict=True))

        def without(one: Any, other: Any) -> Any:
            against = tf.minimum(dot(one, other), 0.0) / dot(other, other)
            return [a - against * b for a, b in zip(one, other, strict=True)]

        rows, variables = loop.next(), self.model.trainable_variables
        one = loop.gradients(self.per_example, rows, variables)
        other = loop.gradients(self.reconstructs, rows, variables)
        both = zip(without(one, other), without(other, one), strict=True)
        loop.apply([a + b for a, b in both], variables)


class TwoSources(OneModel):
    """A loss on examples with weights, and one on examples of a second source."""

    sizes = MappingProxyType({"labelled": 4, "unlabelled": BATCH})

    @staticmethod
    def data() -> Any:
        labelled = {**examples(10, seed=2), "weight": weights(10)}
        return {"labelled": labelled, "unlabelled": examples()}

    def agrees(self, features: Any, training: bool) -> ddl.PerExample:
        noisy = self.model(features["x"] + features["noise"], training=training)
        error = noisy - self.model(features["x"], training=training)
        return ddl.PerExample(tf.square(error[:, 0]))

    def step(self, update: Any, batch: Any) -> None:
        labelled = update.gradients(self.per_example, batch["labelled"])
        unlabelled = update.gradients(self.agrees, batch["unlabelled"])
        update.apply(labelled + 0.5 * unlabelled)

    def plain(self, loop: Plain) -> None:
        variables = self.model.trainable_variables
        labelled = loop.gradients(self.per_example, loop.next("labelled"), variables)
        unlabelled = loop.gradients(self.agrees, loop.next("unlabelled"), variables)
        both = zip(labelled, unlabelled, strict=True)
        loop.apply([a + 0.5 * b for a, b in both], variables)


class LazyPenalty(OneModel):
    """Karras et al. 2020: every second step also applies the gradient of a penalty."""

    def penalty(self, features: Any, training: bool) -> ddl.PerExample:
        x = tf.convert_to_tensor(features["x"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            logits = self.model(x, training=training)
        slope = tf.reduce_sum(tf.square(tape.gradient(logits, x)), 1)
        return ddl.PerExample(slope + 0.1 * tf.square(logits[:, 0]))

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.per_example, batch)
        update.when(update.step % 2 == 0, lambda: update.minimize(self.penalty, batch))

    def plain(self, loop: Plain) -> None:
        rows, variables = loop.next(), self.model.trainable_variables
        loop.apply(loop.gradients(self.per_example, rows, variables), variables)
        if loop.step % 2 == 0:
            loop.apply(loop.gradients(self.penalty, rows, variables), variables)
