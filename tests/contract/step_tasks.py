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
of_classes = tf.nn.sparse_softmax_cross_entropy_with_logits


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
        return tape.gradient(mean, variables, unconnected_gradients="zero")

    def apply(self, gradients: Any, variables: Any, optimizer: str | None = None) -> None:
        self._optimizers[optimizer].apply(gradients, variables)

    def minimize(self, loss: Any, rows: Any, variables: Any, optimizer: str | None = None) -> None:
        self.apply(self.gradients(loss, rows, variables), variables, optimizer)

    def figures(self) -> dict[str, float]:
        """The mean of each loss over all examples so far."""
        means = {f"loss/{name}": total / weight for name, (total, weight) in self._sums.items()}
        return means if len(means) > 1 else {"loss": next(iter(means.values()))}


class OneModel:
    """A classifier of examples with weights, which one optimizer trains.

    Attributes:
      sizes: Rows of a batch, of each source.
      trainer: Arguments of `ddl.Trainer`.
    """

    sizes: Any = BATCH
    trainer: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        self.model = mlp(1)

    @staticmethod
    def optimizers() -> Any:
        return keras.optimizers.SGD(0.2, momentum=0.9)

    @staticmethod
    def data() -> Any:
        return {**examples(), "weight": weights(ROWS)}

    def per_example(self, features: Any, training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)[:, 0]
        return ddl.PerExample(cross_entropy(tf.cast(features["label"], logits.dtype), logits))


class WganGp(OneModel):
    """Gulrajani et al. 2017: two turns of the critic, each with a batch of its own.

    Every second step also applies the gradient of the penalty, as Karras et al. 2020, which does
    not reach the last bias. Two models and optimizers; the critic has a weight penalty and a limit
    of the norm.
    """

    trainer = MappingProxyType({"clip_norm": {"generator": None, "critic": 0.3}})
    data = staticmethod(examples)

    def __init__(self) -> None:
        self.generator = mlp(3)
        self.critic = mlp(1, kernel_regularizer=keras.regularizers.L2(0.125))

    @staticmethod
    def optimizers() -> Any:
        sgd = keras.optimizers.SGD
        return {"generator": sgd(0.1, momentum=0.9), "critic": sgd(0.05, momentum=0.5)}

    def criticizes(self, features: Any, training: bool) -> ddl.PerExample:
        drift = self.critic(features["x"], training=training)[:, 0]
        fake = self.critic(self.generator(features["noise"], training=training))[:, 0]
        return ddl.PerExample(fake - drift + 0.1 * tf.square(drift))

    def penalty(self, features: Any, training: bool) -> ddl.PerExample:
        real, fake = features["x"], self.generator(features["noise"], training=training)
        mixed = real + features["share"] * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed, training=training)
        slope = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, mixed)), 1) + 1e-12)
        return ddl.PerExample(10.0 * tf.square(slope - 1))

    def fools(self, features: Any, training: bool) -> ddl.PerExample:
        fake = self.generator(features["noise"], training=training)
        return ddl.PerExample(-self.critic(fake, training=training)[:, 0])

    def step(self, update: Any, batch: Any) -> None:
        def smooth() -> None:
            update.minimize(self.penalty, batch, self.critic, optimizer="critic")

        for _ in range(2):
            further = update.next(batch)
            update.minimize(self.criticizes, further, self.critic, optimizer="critic")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")
        update.when(update.step % 2 == 0, smooth)

    def plain(self, loop: Plain) -> None:
        def critic(loss: Any, rows: Any) -> None:
            variables = self.critic.trainable_variables
            gradients = loop.gradients(loss, rows, [v.value for v in variables])
            gradients[0] += 2 * 0.125 * variables[0]
            loop.apply(tf.clip_by_global_norm(gradients, 0.3)[0], variables, "critic")

        rows = loop.next()
        for _ in range(2):
            critic(self.criticizes, loop.next())
        loop.minimize(self.fools, rows, self.generator.trainable_variables, "generator")
        if loop.step % 2 == 0:
            critic(self.penalty, rows)


class Sam(OneModel):
    """Foret et al. 2021, with moving moments that move once an update."""

    def __init__(self) -> None:
        normalization = keras.layers.BatchNormalization()
        self.model = keras.Sequential([keras.Input((3,)), normalization, mlp(1)])

    def step(self, update: Any, batch: Any) -> None:
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (0.3 / up.norm())):
            again = {"same_draws_as": up, "moves_statistics": False}
            sharp = update.gradients(self.per_example, batch, **again)
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


class Byol(OneModel):
    """Grill et al. 2020: predicts an average of the weights; a center as in DINO."""

    def __init__(self) -> None:
        self.online, self.predictor, self.target = mlp(3), mlp(3), mlp(3)
        self.center = tf.Variable(np.zeros(3), trainable=False)

    def agreement(self, features: Any, training: bool) -> ddl.PerExample:
        said = self.predictor(self.online(features["x"], training=training), training=training)
        wanted = self.targets(features, training) - self.center
        return ddl.PerExample(tf.reduce_mean(tf.square(said - wanted), axis=1))

    def targets(self, features: Any, training: bool) -> tf.Tensor:
        return self.target(features["noise"], training=training)

    def trained(self) -> list[Any]:
        return [*self.online.trainable_variables, *self.predictor.trainable_variables]

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.agreement, batch, [self.online, self.predictor])
        self.center.assign(0.9 * self.center + 0.1 * update.mean(self.targets, batch))
        update.average(self.target, of=self.online, decay=0.9)

    def plain(self, loop: Plain) -> None:
        rows = loop.next()
        loop.minimize(self.agreement, rows, self.trained())
        weight = rows["weight"][:, None]
        mean = tf.reduce_sum(weight * self.targets(rows, True), 0) / weight.sum()
        self.center.assign(0.9 * self.center + 0.1 * mean)
        for target, online in zip(self.target.variables, self.online.variables, strict=True):
            target.assign(0.9 * target.value + 0.1 * online.value)


class DpSgd(OneModel):
    """Abadi et al. 2016: limits the gradient of each example; its noise is a constant here."""

    limit, noise = 0.2, 0.5
    data = staticmethod(examples)

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
    """Yu et al. 2020: of two gradients, each without what points against the other.

    One loss is that of examples with weights, the other of examples of a second source.
    """

    sizes = MappingProxyType({"labelled": 4, "unlabelled": BATCH})

    @staticmethod
    def data() -> Any:
        labelled = {**examples(10, seed=2), "weight": weights(10)}
        return {"labelled": labelled, "unlabelled": examples()}

    def agrees(self, features: Any, training: bool) -> ddl.PerExample:
        noisy = self.model(features["x"] + features["noise"], training=training)
        error = noisy[:, 0] + self.model(features["x"], training=training)[:, 0]
        return ddl.PerExample(tf.square(error))

    def step(self, update: Any, batch: Any) -> None:
        def without(one: ddl.Gradients, other: ddl.Gradients) -> ddl.Gradients:
            return one - other * (tf.minimum(one.dot(other), 0.0) / other.dot(other))

        one = update.gradients(self.per_example, batch["labelled"])
        other = update.gradients(self.agrees, batch["unlabelled"])
        update.apply(without(one, other) + 0.5 * without(other, one))

    def plain(self, loop: Plain) -> None:
        def dot(one: Any, other: Any) -> Any:
            return sum(tf.reduce_sum(a * b) for a, b in zip(one, other, strict=True))

        def without(one: Any, other: Any) -> Any:
            against = tf.minimum(dot(one, other), 0.0) / dot(other, other)
            return [a - against * b for a, b in zip(one, other, strict=True)]

        variables = self.model.trainable_variables
        one = loop.gradients(self.per_example, loop.next("labelled"), variables)
        other = loop.gradients(self.agrees, loop.next("unlabelled"), variables)
        both = zip(without(one, other), without(other, one), strict=True)
        loop.apply([a + 0.5 * b for a, b in both], variables)


class Clip(OneModel):
    """Radford et al. 2021: two encoders, each with its own logits over the rows of the other.

    An own row is also told from the other rows of its encoder, as in SimCLR (Chen et al. 2020).
    """

    data = staticmethod(examples)

    def __init__(self) -> None:
        self.images, self.texts = mlp(2), mlp(2)

    def views(self, features: Any, training: bool) -> tuple[Any, Any]:
        images = self.images(features["x"], training=training)
        return images, self.texts(features["noise"], training=training)

    def trained(self) -> list[Any]:
        return [*self.images.trainable_variables, *self.texts.trainable_variables]

    @staticmethod
    def losses(view: Any, same: Any, other: Any, own: Any, mask: Any) -> Any:
        itself = tf.one_hot(own, same.shape[0], on_value=True, off_value=False)
        pairs = tf.where(mask, view @ tf.transpose(other), tf.float64.min)
        negatives = tf.where(mask & ~itself, view @ tf.transpose(same), tf.float64.min)
        return of_classes(own, tf.concat([pairs, negatives], 1))

    def per_example(self, features: Any, training: bool) -> ddl.PerExample:
        images, texts = views = self.views(features, training)
        rows = ddl.gather(views)
        loss = self.losses(images, *rows.rows, rows.own, rows.mask)
        return ddl.PerExample(loss + self.losses(texts, *rows.rows[::-1], rows.own, rows.mask))

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.per_example, batch, self.trained())

    def whole(self, features: Any, training: bool) -> ddl.PerExample:
        """The losses of all rows of a batch, without `ddl.gather`."""
        images, texts = self.views(features, training)
        own, mask = tf.range(images.shape[0]), True
        loss = self.losses(images, images, texts, own, mask)
        return ddl.PerExample(loss + self.losses(texts, texts, images, own, mask))

    def plain(self, loop: Plain) -> None:
        loop.minimize(self.whole, loop.next(), self.trained())
