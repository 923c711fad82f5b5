"""Tasks with a step of their own, and what must be the same wherever they are trained."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import microbatch
from ddl.optimizers import Group, ParameterGroups
from ddl.precision import set_precision
from ddl.tasks.parts import layers_of

layers = keras.layers
cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits


def data(examples: int = 48) -> dict[str, np.ndarray]:
    """53 examples in batches of 16 leave one of five rows; 48 leave none."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 6))
    return {"x": x, "label": random.integers(0, 3, examples)}


def perceptron(inputs: int, outputs: int, **options: Any) -> keras.Model:
    hidden = [layers.Dense(8, "tanh", **options), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


class Gan:
    """Two losses, two models, two optimizers; latent noise by position."""

    def __init__(self) -> None:
        self.generator = perceptron(4, 6)
        self.discriminator = perceptron(6, 1, kernel_regularizer=keras.regularizers.L2(0.01))

    def score(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return self.discriminator(x, training=training)[:, 0]

    def fakes(self, features: dict[str, Any], training: bool) -> tf.Tensor:
        noise = ddl.random.normal(self, (features["x"].shape[0], 4))
        return self.generator(tf.cast(noise, self.generator.compute_dtype), training=training)

    def real_or_fake(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        real = self.score(features["x"], training)
        fake = self.score(self.fakes(features, training), training)
        loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        return ddl.PerExample(loss, {"found": tf.cast(real > 0, loss.dtype)})

    def fools(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        fake = self.score(self.fakes(features, training), training)
        return ddl.PerExample(cross_entropy(tf.ones_like(fake), fake))

    def step(self, update: Any, batch: Any) -> None:
        update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")


class Sam:
    """Foret et al. 2021: the gradient at the worst point nearby, at the same draws."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8),
                layers.BatchNormalization(),
                layers.ReLU(),
                keras.layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(loss)

    def step(self, update: Any, batch: Any) -> None:
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (0.05 / up.norm())):
            sharp = update.gradients(
                self.per_example, batch, same_draws_as=up, moves_statistics=False
            )
        update.apply(sharp)


class Byol:
    """Grill et al. 2020: predicts what an average of the weights says of another view."""

    def __init__(self) -> None:
        self.online = perceptron(6, 3)
        self.predictor = perceptron(3, 3)
        self.target = keras.models.clone_model(self.online)
        self.target.set_weights(self.online.get_weights())

    def agreement(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        x = features["x"]
        one, other = (x + tf.cast(ddl.random.normal(self, x.shape), x.dtype) for _ in range(2))
        said = self.predictor(self.online(one, training=training), training=training)
        wanted = self.target(other, training=training)
        return ddl.PerExample(tf.reduce_mean(tf.square(said - wanted), axis=1))

    def step(self, update: Any, batch: Any) -> None:
        trained = [*self.online.trainable_variables, *self.predictor.trainable_variables]
        update.minimize(self.agreement, batch, trained)
        update.average(self.target, of=self.online, decay=0.9)


class Critic(Gan):
    """Control flow, an average, and a variable of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = keras.models.clone_model(self.generator)
        self.seen = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def step(self, update: Any, batch: Any) -> None:
        def generate() -> None:
            update.minimize(self.fools, batch, self.generator, optimizer="generator")

        for _ in range(3):
            update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        update.when(update.step % 2 == 0, generate)
        update.average(self.shown, of=self.generator, decay=0.9)
        self.seen.assign_add(1.0)


class Grouped:
    """No step: parameter groups, one of which is frozen for a while."""

    def __init__(self) -> None:
        hidden = [layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))]
        backbone = keras.Sequential(
            [keras.Input((6,)), *hidden, keras.layers.Dropout(0.3)], name="backbone"
        )
        self.model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(3, name="head")])

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(features["x"], training=training)
        return ddl.PerExample(
            tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        )


def groups() -> ParameterGroups:
    return ParameterGroups(
        {
            "backbone": Group(momentum(0.05, 0.3), ["^backbone/"], frozen_until=3),
            "head": momentum(0.02, 0.1),
        }
    )


def momentum(rate: float, decay: float | None = None) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9, weight_decay=decay)


def two_optimizers() -> dict[str, keras.optimizers.Optimizer]:
    return {"generator": momentum(0.05), "discriminator": momentum(0.02)}


TASKS: dict[str, tuple[type, Callable[[], Any]]] = {
    "Gan": (Gan, two_optimizers),
    "Sam": (Sam, lambda: momentum(0.05)),
    "Byol": (Byol, lambda: momentum(0.1)),
    "Critic": (Critic, two_optimizers),
    "Grouped": (Grouped, groups),
}


def build(
    name: str,
    strategy: tf.distribute.Strategy,
    *,
    precision: str = "float64",
    examples: int = 53,
    change: Callable[[Any], None] = lambda task: None,
    optimizer: Callable[[], Any] | None = None,
    **arguments: Any,
) -> ddl.Trainer:
    """Makes the trainer of one of `TASKS`.

    Args:
      change: Changes the task before the trainer sees it.
      optimizer: Makes the optimizer, after `change`; None: as in `TASKS`.
    """
    set_precision(precision)
    keras.utils.set_random_seed(7)
    of_task, make_optimizer = TASKS[name]
    floats = "float64" if precision == "float64" else "float32"
    values = {k: v.astype(floats) if v.dtype.kind == "f" else v for k, v in data(examples).items()}
    with strategy.scope():
        task = of_task()
        change(task)
        return ddl.Trainer(
            task,
            (optimizer or make_optimizer)(),
            values,
            global_batch_size=16,
            strategy=strategy,
            seed=3,
            **arguments,
        )


def variables(trainer: ddl.Trainer) -> list[tf.Variable]:
    """The variables of layers, optimizers and averages, and the task's own."""
    update = trainer._update
    found = [v.value for layer in layers_of(trainer.task) for v in layer.variables]
    found += [v.value for one in update.optimizers.values() for v in one.variables]
    found += update.averages.variables if update.averages else []
    found += update.plan.changed
    return list({id(v): v for v in found}.values())


def copies(trainer: ddl.Trainer) -> list[list[np.ndarray]]:
    """The copies of each variable on all replicas."""
    results = trainer.strategy.experimental_local_results
    return [[copy.numpy() for copy in results(variable)] for variable in variables(trainer)]


def overflowing(loss: str, replica: int, batch: int) -> Callable[[Any], None]:
    """Makes one loss of a task infinite on one replica, in one batch."""

    def change(task: Any) -> None:
        of_task = getattr(task, loss)

        def overflows(features: dict[str, Any], training: bool) -> ddl.PerExample:
            output = of_task(features, training)
            current = microbatch.current()
            context = tf.distribute.get_replica_context()
            if current is None or current.seed is None or context is None:
                return output
            here = tf.equal(context.replica_id_in_sync_group, replica) & tf.equal(
                current.batch, batch
            )
            factor = tf.where(here, np.inf, 1.0)
            return output._replace(loss=output.loss * tf.cast(factor, output.loss.dtype))

        overflows.__name__ = loss
        setattr(task, loss, overflows)

    return change
