"""Cost of ddl's step compared with a plain step: python -m benchmarks.step_cost.

The digits CNN trains in global batches of 64, mirrored on 2 virtual CPU devices, with the other
settings as similar as possible. The plain loop is that of a tutorial: a tf.while of strategy.run,
Keras's optimizer.apply, and strategy.reduce of the loss, without clipping or loss scale. It runs
with TensorFlow's own all-reduce and with the one that ddl uses on CPUs. ddl runs the same model in
float32, and in mixed_float16 without and with its loss scale, finite check and skipping. The last
rows train with dropout, and with normalization that is synchronized in both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import ddl
from benchmarks import harness
from benchmarks.harness import Contender, Options, Report, Table, spread
from ddl import distribution
from ddl.precision import set_precision

BATCH, STEPS, REPLICAS = 64, 200, 2
DROPOUT = {"block_dropout": 0.25, "hidden_dropout": 0.5}
NORMALIZATION = {"batch_normalization": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A loop.

    Attributes:
      beside: Name of the loop with which it is compared.
      layers: Further arguments of the network.
      precision: Number format.
      arguments: Of the Trainer.
    """

    beside: str
    layers: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "float32"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


PLAIN, SAME = "plain, TensorFlow's all-reduce", "plain, the all-reduce of ddl"
PLAIN_DROPOUT, PLAIN_NORM = "plain, Keras's Dropout", "plain, Keras's synchronized norm"
UNSCALED = "ddl, mixed_float16 without loss scale"
CASES = {
    PLAIN: Case(PLAIN),
    SAME: Case(PLAIN),
    "ddl, float32": Case(SAME),
    "ddl, float32, clip_norm": Case(SAME, arguments={"clip_norm": 1.0}),
    "ddl, float32, weight average": Case(SAME, arguments={"weight_average": 0.99}),
    UNSCALED: Case(SAME, {}, "mixed_float16", {"loss_scale": None}),
    "ddl, mixed_float16": Case(UNSCALED, {}, "mixed_float16"),
    PLAIN_DROPOUT: Case(SAME, DROPOUT),
    "ddl, Dropout": Case(PLAIN_DROPOUT, DROPOUT),
    PLAIN_NORM: Case(SAME, NORMALIZATION),
    "ddl, BatchNormalization": Case(PLAIN_NORM, NORMALIZATION),
}


def model(**layers: Any) -> keras.Model:
    """Builds the network of configs/digits_cnn.gin, with optional further layers."""
    sizes = {"blocks": ((32,), (64,)), "hidden_units": (64,), "padding": "same"}
    return ddl.models.cnn((8, 8, 1), 10, **sizes, input_scale=1 / 16, **layers)


def optimizer() -> keras.optimizers.Optimizer:
    """Builds the optimizer of configs/digits_cnn.gin, with a constant learning rate."""
    return keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.02)


def data() -> tuple[Any, Any]:
    """Returns a whole number of batches of digits, so that no batch needs padding."""
    images, labels = ddl.data.digits("train")
    whole = len(images) // BATCH * BATCH
    return images[:whole], labels[:whole]


def plain_loop(name: str) -> Callable[[], float]:
    """Builds a plain loop."""
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    if name == PLAIN:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = distribution.build_strategy("mirrored")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        network, update = model(**CASES[name].layers), optimizer()
        update.build(network.trainable_variables)
    images, labels = data()
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat()
    dataset = dataset.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
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
            loss = strategy.run(replica_step, args=next(iterator))
            return count + 1, total + strategy.reduce("SUM", loss, axis=None)

        start = (tf.constant(0), tf.constant(0.0))
        return tf.while_loop(lambda count, _: count < STEPS, step, start)[1]

    return harness.timed(lambda: loop().numpy(), STEPS)


def ddl_loop(name: str) -> Callable[[], float]:
    """Builds a loop of ddl."""
    case = CASES[name]
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    set_precision(case.precision)
    keras.utils.set_random_seed(0)
    strategy = distribution.build_strategy("mirrored")
    arguments = dict(case.arguments)
    if "weight_average" in arguments:
        arguments["weight_average"] = ddl.ExponentialMovingAverage(arguments["weight_average"])
    with strategy.scope():
        task = ddl.Classification(model(**case.layers))
        trainer = ddl.Trainer(task, optimizer(), data(), global_batch_size=BATCH, **arguments)
    steps = STEPS if case.precision == "float32" else STEPS // 10  # slow on CPUs
    return harness.timed(lambda: trainer.train(steps), steps)


def measure(options: Options) -> Report:
    """Measures all loops by turns."""
    contenders = {
        name: Contender(f"benchmarks.step_cost:{name.partition(',')[0]}_loop", name)
        for name in options.chosen(CASES)
    }
    times, notes = harness.compare(contenders, *((1, 1) if options.quick else (3, 3)))
    rows: list[list[Any]] = []
    for name, values in times.items():
        base = CASES[name].beside
        ratio = spread(values / times[base]) if base in times and base != name else "–"
        rows.append([name, base, ratio, spread(values, 1e3)])
    columns = ["loop", "beside", "time / its", "ms per step"]
    return Report([Table("", columns, rows)], (), notes)


if __name__ == "__main__":
    harness.main(measure)
