"""A GAN by ddl and by the tutorial's loop: python -m benchmarks.gan.

The same two perceptrons train on the digits in global batches of 64, mirrored on 2 virtual CPU
devices, with an update of the discriminator and one of the generator per step. The tutorial's loop
calls a `tf.function` of `strategy.run` for each batch, as in TensorFlow's guides to custom
training. It draws its noise per replica, and divides its losses by the global batch size itself.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import harness
from benchmarks.harness import Contender, Options, Report, Table, Target, Window, spread
from ddl import distribution

BATCH, LATENT, REPLICAS, STEPS = 64, 16, 2, 200

cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits


def generator() -> keras.Model:
    """Builds the generator."""
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((LATENT,)), dense(128, "relu"), dense(64, "sigmoid")])


def discriminator() -> keras.Model:
    """Builds the discriminator."""
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((64,)), dense(128, "relu"), dense(1)])


def adam() -> keras.optimizers.Optimizer:
    """Builds an optimizer."""
    return keras.optimizers.Adam(5e-4, beta_1=0.5)


def images() -> np.ndarray:
    """Returns a whole number of batches of digits: float32 [n, 64]."""
    pixels, _ = ddl.data.digits("train")
    whole = len(pixels) // BATCH * BATCH
    return pixels[:whole].reshape(-1, 64).astype(np.float32) / 16


def batches() -> tf.data.Dataset:
    """Returns an endless pipeline of batches."""
    rows = images()
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows)).repeat()
    return dataset.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


# ------------------------------------------------------------ ddl


class Gan:
    """The task of ddl."""

    def __init__(self) -> None:
        self.generator, self.discriminator = generator(), discriminator()

    def fakes(self, features: dict[str, Any], training: bool) -> tf.Tensor:
        """Generates images."""
        noise = ddl.random.normal(self, (features["image"].shape[0], LATENT))
        return self.generator(noise, training=training)

    def real_or_fake(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The discriminator's loss."""
        real = self.discriminator(features["image"])[:, 0]
        fake = self.discriminator(self.fakes(features, training))[:, 0]
        loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        return ddl.PerExample(loss)

    def fools(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The generator's loss."""
        fake = self.discriminator(self.fakes(features, training))[:, 0]
        return ddl.PerExample(cross_entropy(tf.ones_like(fake), fake))

    def step(self, update: ddl.Update, batch: object) -> None:
        """One update of each."""
        update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        update.minimize(self.fools, batch, self.generator, optimizer="generator")


def by_ddl(case: None) -> Window:
    """Returns the window of ddl."""
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    strategy = distribution.build_strategy("mirrored")
    with strategy.scope():
        trainer = ddl.Trainer(
            Gan(),
            {"generator": adam(), "discriminator": adam()},
            {"image": images()},
            global_batch_size=BATCH,
            steps_per_loop=STEPS,
        )
    return harness.timed(lambda: trainer.train(STEPS), STEPS)


# ------------------------------------------------------------ the tutorial's loop


def by_tutorial(case: None) -> Window:
    """Returns the window of the tutorial's loop."""
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(REPLICAS)])
    with strategy.scope():
        generates, discriminates = generator(), discriminator()
        of_generator, of_discriminator = adam(), adam()
        of_generator.build(generates.trainable_variables)
        of_discriminator.build(discriminates.trainable_variables)
    data = iter(strategy.experimental_distribute_dataset(batches()))

    def replica_step(real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noise = tf.random.normal([tf.shape(real)[0], LATENT])
        with tf.GradientTape() as tape:
            of_real, of_fake = discriminates(real), discriminates(generates(noise))
            first = tf.reduce_sum(cross_entropy(tf.ones_like(of_real), of_real)) / BATCH
            first += tf.reduce_sum(cross_entropy(tf.zeros_like(of_fake), of_fake)) / BATCH
        weights = discriminates.trainable_variables
        of_discriminator.apply(tape.gradient(first, weights), weights)
        noise = tf.random.normal([tf.shape(real)[0], LATENT])
        with tf.GradientTape() as tape:
            of_fake = discriminates(generates(noise))
            second = tf.reduce_sum(cross_entropy(tf.ones_like(of_fake), of_fake)) / BATCH
        weights = generates.trainable_variables
        of_generator.apply(tape.gradient(second, weights), weights)
        return first, second

    @tf.function
    def train_step(batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        first, second = strategy.run(replica_step, args=(batch,))
        reduce = tf.distribute.ReduceOp.SUM
        return strategy.reduce(reduce, first, None), strategy.reduce(reduce, second, None)

    def window() -> float:
        total = 0.0
        for _ in range(STEPS):
            first, second = train_step(next(data))
            total += first + second
        return float(total)

    return harness.timed(window, STEPS)


# ------------------------------------------------------------ measurement

PROGRAMS = {"ddl": "by_ddl", "the tutorial's loop": "by_tutorial"}


def measure(options: Options) -> Report:
    """Measures both programs."""
    contenders = {
        name: Contender(f"benchmarks.gan:{function}", None) for name, function in PROGRAMS.items()
    }
    times, notes = harness.compare(contenders, *((1, 1) if options.quick else (5, 5)))
    ratios = {name: spread(values / times["ddl"]) for name, values in times.items()}
    rows = [[name, ratios[name], spread(values, 1e3)] for name, values in times.items()]
    targets = [
        Target(f"ddl's speed / that of {name}", value, 1.5)
        for name, value in ratios.items()
        if name != "ddl"
    ]
    return Report([Table("", ["program", "time / ddl's", "ms per step"], rows)], targets, notes)


if __name__ == "__main__":
    harness.main(measure)
