"""Cost of ddl's step compared with a plain step: python -m benchmarks.step_cost.

The digits CNN trains in global batches of 64, mirrored on 2 virtual CPU devices, with the other
settings as similar as possible. The plain loop is that of a tutorial: a tf.while of strategy.run,
Keras's optimizer.apply, and strategy.reduce of the loss, without clipping or loss scale. It runs
with TensorFlow's own all-reduce and with the one that ddl uses on CPUs. ddl runs the same model in
float32, and in mixed_float16 without and with its loss scale, finite check and skipping. A second
table compares ddl's layers for dropout and normalization with Keras's.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, repeats, report
from benchmarks.report import Report, Table
from ddl import distribution
from ddl.precision import set_precision

BATCH = 64
STEPS = 60
ROUNDS = 9
REPLICAS = 2

Loop = Callable[[], None]


def model(**layers: Any) -> keras.Model:
    """Builds the network of configs/digits_cnn.gin, with optional further layers."""
    return ddl.models.cnn(
        (8, 8, 1),
        10,
        blocks=((32,), (64,)),
        hidden_units=(64,),
        padding="same",
        input_scale=1 / 16,
        **layers,
    )


def optimizer() -> keras.optimizers.Optimizer:
    """Builds the optimizer of configs/digits_cnn.gin, with a constant learning rate."""
    return keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.02)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns a whole number of batches of digits, so that no batch needs padding."""
    images, labels = ddl.data.digits("train")
    whole = len(images) // BATCH * BATCH
    return images[:whole], labels[:whole]


def plain_loop(strategy: tf.distribute.Strategy, **layers: Any) -> Loop:
    """Builds the plain loop, with `STEPS` updates per call; ddl's layers act as Keras's in it."""
    set_precision("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network, update = model(**layers), optimizer()
        update.build(network.trainable_variables)
    images, labels = data()
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat()
    dataset = dataset.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(inputs: Any) -> tf.Tensor:
        image, label = inputs
        with tf.GradientTape() as tape:
            logits = network(image, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_sum(losses) / BATCH
        variables = network.trainable_variables
        update.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        def step(count: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            loss = strategy.run(replica_step, args=(next(iterator),))
            return count + 1, total + strategy.reduce("SUM", loss, axis=None)

        start = (tf.constant(0), tf.constant(0.0))
        return tf.while_loop(lambda count, _: count < STEPS, step, start)[1]

    return lambda: loop().numpy()


def ddl_loop(precision: str, layers: dict[str, Any] | None = None, **arguments: Any) -> Loop:
    """Builds ddl's loop, with `STEPS` updates per call."""
    set_precision(precision)
    keras.utils.set_random_seed(0)
    strategy = distribution.build_strategy("mirrored")
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.Classification(model(**(layers or {}))),
            optimizer(),
            data(),
            global_batch_size=BATCH,
            steps_per_loop=STEPS,
            **arguments,
        )
    return lambda: trainer.train(STEPS)


def times_and_ratios(title: str, loops: dict[str, Loop], bases: list[str], rounds: int) -> Table:
    """Measures the times of loops, and their ratios to those of the loops in `bases`."""
    for loop in repeats.rotated(loops).values():
        loop()  # traces
    timed = {
        name: lambda loop=loop: repeats.seconds(loop) / STEPS * 1e3 for name, loop in loops.items()
    }
    times = repeats.interleaved(timed, rounds)
    rows = [
        [
            (f"({bases.index(name)}) " if name in bases else "") + name,
            *(repeats.ratio(values / times[base]) for base in bases),
            repeats.spread(values),
        ]
        for name, values in times.items()
    ]
    return Table(
        title, ["loop", *(f"time / ({n})" for n in range(len(bases))), "ms per step"], rows
    )


def measure(quick: bool) -> Report:
    """Measures both tables."""
    rounds = 2 if quick else ROUNDS
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    mirrored = distribution.build_strategy("mirrored")
    plain, same_reduce = "plain, TensorFlow's all-reduce", "plain, the all-reduce of ddl"
    unscaled = "ddl, mixed_float16 without loss scale"
    average = ddl.ExponentialMovingAverage()
    plainly = times_and_ratios(
        "Compared with the plainest loop",
        {
            plain: plain_loop(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])),
            same_reduce: plain_loop(mirrored),
            "ddl, float32": ddl_loop("float32"),
            "ddl, float32, clip_norm": ddl_loop("float32", clip_norm=1.0),
            "ddl, float32, weight average": ddl_loop("float32", weight_average=average),
            unscaled: ddl_loop("mixed_float16", loss_scale=None),
            "ddl, mixed_float16": ddl_loop("mixed_float16"),
        },
        [plain, same_reduce, unscaled],
        rounds,
    )
    dropout = {"block_dropout": 0.25, "hidden_dropout": 0.5}
    normalization = {"batch_normalization": True}
    keras_dropout = "plain, Keras's Dropout"
    keras_normalization = "plain, Keras's synchronized norm"
    invariant = times_and_ratios(
        "Layers that do not depend on the replicas",
        {
            keras_dropout: plain_loop(mirrored, **dropout),
            "ddl, Dropout": ddl_loop("float32", dropout),
            keras_normalization: plain_loop(mirrored, **normalization),
            "ddl, the same layers": ddl_loop("float32", normalization),
        },
        [keras_dropout, keras_normalization],
        rounds,
    )
    tables = [plainly, invariant]
    return Report(tables, plots=[report.plot_of(t, ["ms per step"], "ms per step") for t in tables])


if __name__ == "__main__":
    command.main(measure, processes=3)
