"""Contenders of benchmarks.loop_overhead: Keras's fit, the tutorial's loop, Orbit and ddl.

Each contender trains the same network on the same arrays with Adam and dropout in float32. All but
the floor keep the mean of the loss and the accuracy. On one device the peers use no strategy, which
is their fastest option.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks.loop_overhead import Case
from benchmarks.report import PEERS
from benchmarks.rivals import WaitForTurn
from benchmarks.turns import Failed, Turns
from ddl import distribution

EXAMPLES = 57_600
Layer = Callable[[float], keras.layers.Layer]


def network(case: Case, dropout: Layer = keras.layers.Dropout) -> keras.Model:
    """Builds the tutorial's network of a case, up to the logits."""
    layers = keras.layers
    body = {
        "MLP": [layers.Flatten(), layers.Dense(128, activation="relu"), dropout(0.2)],
        "CNN": [
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            dropout(0.5),
        ],
    }
    return keras.Sequential([keras.Input((28, 28, 1)), *body[case.model], layers.Dense(10)])


@functools.cache
def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Returns random images, float32 [n, 28, 28, 1] in [0, 1), and labels, int64 [n]."""
    generator = np.random.default_rng(0)
    images = generator.random((EXAMPLES, 28, 28, 1), np.float32)
    return images, generator.integers(0, 10, EXAMPLES)


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns as many of `arrays` as fill whole windows."""
    whole = EXAMPLES // (case.batch * case.steps) * case.batch * case.steps
    images, labels = arrays()
    return images[:whole], labels[:whole]


def slices(case: Case) -> tf.data.Dataset:
    """Builds the tutorials' pipeline, repeated endlessly."""
    images, labels = data(case)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images))
    return _endless(dataset.batch(case.batch, drop_remainder=True))


def gathered(case: Case) -> tf.data.Dataset:
    """Builds an endless pipeline that gathers shuffled indices; copies less than `slices`."""
    images, labels = map(tf.constant, data(case))
    order = tf.data.Dataset.range(len(images)).shuffle(len(images))
    dataset = order.batch(case.batch, drop_remainder=True).map(
        lambda index: (tf.gather(images, index), tf.gather(labels, index)),
        num_parallel_calls=os.cpu_count(),
    )
    return _endless(dataset)


def _endless(batches: tf.data.Dataset) -> tf.data.Dataset:
    # Autotuning is off, since an iterator that ends may wait a minute for the tuner. The tuner
    # would only add a prefetch buffer, which is added here instead.
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.repeat().prefetch(tf.data.AUTOTUNE).with_options(options)


def strategy_of(case: Case) -> tf.distribute.Strategy:
    """Returns the default strategy on one device, a default MirroredStrategy on several."""
    distribution.configure_devices(case.replicas if case.replicas > 1 else None, gpus=())
    keras.utils.clear_session()
    if case.replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(case.replicas)])


# ------------------------------------------------------------ Keras's fit


def _fit(
    case: Case,
    turns: Turns,
    train_data: Callable[[], dict[str, Any]],
    parts: int = 1,
    **compile_arguments: Any,
) -> None:
    # With steps_per_epoch an epoch continues the iterator of the last one, so that a window does
    # not include the start of an epoch.
    with strategy_of(case).scope():
        model = network(case)
        model.compile(
            keras.optimizers.Adam(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **compile_arguments,
        )
    forever = {"epochs": 10**6, "steps_per_epoch": case.steps * parts, "verbose": 0}
    try:
        model.fit(**train_data(), **forever, callbacks=[WaitForTurn(turns, parts)])
    except StopIteration:
        return


def fit(case: Case, turns: Turns) -> None:
    """Runs `fit` as the tutorials call it."""
    images, labels = data(case)
    _fit(case, turns, lambda: {"x": images, "y": labels, "batch_size": case.batch})


def fit_tuned_slices(case: Case, turns: Turns) -> None:
    """Runs `fit` on `slices` with many steps per execution, without XLA (slower on a CPU)."""
    _fit_tuned(case, turns, slices)


def fit_tuned_gather(case: Case, turns: Turns) -> None:
    """Runs the same `fit` on `gathered`."""
    _fit_tuned(case, turns, gathered)


def _fit_tuned(case: Case, turns: Turns, make_dataset: Callable[[Case], tf.data.Dataset]) -> None:
    # Keras 3.15 fails with more than one step per execution on several devices.
    parts = case.longer if case.replicas == 1 else 1
    window = case.steps * parts
    steps = max(n for n in range(1, 101) if window % n == 0) if case.replicas == 1 else 1

    def train_data() -> dict[str, Any]:
        return {"x": make_dataset(case), "shuffle": False}

    _fit(case, turns, train_data, parts, steps_per_execution=steps, jit_compile=False)


# ------------------------------------------------------------ the tutorial's loop and Orbit


def tutorial_loop(case: Case, turns: Turns) -> None:
    """Runs the loop of TensorFlow's tutorial on custom training with tf.distribute."""
    strategy = strategy_of(case)
    with strategy.scope():
        model, optimizer = network(case), keras.optimizers.Adam()
        per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        # The tutorial builds in the first step, which fails under a strategy with Keras 3.
        optimizer.build(model.trainable_variables)
    batches = iter(strategy.experimental_distribute_dataset(slices(case)))

    def replica_step(inputs: Any) -> tf.Tensor:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(per_example(labels, predictions))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def step(inputs: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def window() -> None:
        total = 0.0
        for _ in range(case.steps):
            total += step(next(batches))
        float(total), float(accuracy.result())
        accuracy.reset_state()

    turns.take(window)


def orbit(case: Case, turns: Turns) -> None:
    """Runs Orbit's StandardTrainer, whose loop is a tf.while, with Keras 3's Adam."""
    _orbit(case, turns, keras.optimizers.Adam)


def orbit_fused(case: Case, turns: Turns) -> None:
    """Runs Orbit with the Adam of ddl's configs."""
    _orbit(case, turns, adam)


def _orbit(case: Case, turns: Turns, make_optimizer: Any) -> None:
    if not (PEERS / "orbit").exists():
        raise Failed(
            "skipped, because it is not installed. Install it with `make benchmarks/peers`."
        )
    sys.path.append(str(PEERS))
    import orbit

    class Trainer(orbit.StandardTrainer):
        def __init__(self) -> None:
            self.strategy = strategy_of(case)
            with self.strategy.scope():
                self.model, self.optimizer = network(case), make_optimizer()
                self.optimizer.build(self.model.trainable_variables)
                self.loss = keras.metrics.Mean()
                self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            super().__init__(self.strategy.experimental_distribute_dataset(slices(case)))

        def train_loop_begin(self) -> None:
            self.loss.reset_state()
            self.accuracy.reset_state()

        def train_step(self, iterator: Any) -> None:
            self.strategy.run(self.replica_step, args=(next(iterator),))

        def replica_step(self, inputs: Any) -> None:
            images, labels = inputs
            with tf.GradientTape() as tape:
                logits = self.model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_sum(losses) / case.batch
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            self.optimizer.apply(gradients, variables)
            self.loss.update_state(losses)
            self.accuracy.update_state(labels, logits)

        def train_loop_end(self) -> dict[str, float]:
            return {"loss": float(self.loss.result()), "accuracy": float(self.accuracy.result())}

    trainer, steps = Trainer(), tf.constant(case.steps * case.longer)
    turns.take(lambda: trainer.train(steps), case.longer)


# ------------------------------------------------------------ ddl and the floor


def adam() -> keras.optimizers.Optimizer:
    """Returns the Adam of ddl's configs."""
    return keras.optimizers.Adam()


def build_trainer(case: Case) -> ddl.Trainer:
    """Builds a trainer of ddl with its own step, dropout and pipeline."""
    distribution.configure_devices(case.replicas if case.replicas > 1 else None, gpus=())
    keras.utils.clear_session()
    strategy = distribution.build_strategy("mirrored" if case.replicas > 1 else "one_device")
    with strategy.scope():
        task = ddl.Classification(network(case, keras.layers.Dropout))
        return ddl.Trainer(task, adam(), data(case), global_batch_size=case.batch)


def ddl_trainer(case: Case, turns: Turns) -> None:
    """Runs ddl with its own number of steps per loop."""
    trainer = build_trainer(case)
    trainer.train(case.steps)  # ddl chooses the number of steps per loop
    turns.take(lambda: trainer.train(case.steps * case.longer), case.longer)


class PlainDropout(keras.layers.Layer):
    """TensorFlow's cheapest dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Applies dropout in training."""
        return tf.nn.dropout(inputs, self.rate) if training else inputs


def reading_floor(case: Case, turns: Turns) -> None:
    """Runs the step of `floor`, on rows that it gathers from the arrays in a random order."""
    floor(case, turns, reads=True)


def floor(case: Case, turns: Turns, reads: bool = False) -> None:
    """Runs the bare step in a tf.while: one constant batch, TensorFlow's Adam, no metrics."""
    strategy_of(case)
    model = network(case, PlainDropout)
    variables = [variable.value for variable in model.trainable_variables]
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]
    arrays = [tf.constant(array) for array in data(case)]
    batches = arrays[0].shape[0] // case.batch
    order = tf.random.shuffle(tf.range(batches * case.batch), seed=0)
    order = tf.reshape(order, (batches, case.batch))
    constant = [array[: case.batch] for array in arrays]
    steps = case.steps * case.longer

    def step(count: tf.Tensor, power_1: tf.Tensor, power_2: tf.Tensor, _: tf.Tensor) -> Any:
        rows = order[count % batches]
        images, labels = [tf.gather(a, rows) for a in arrays] if reads else constant
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        for variable, (m, v), gradient in zip(
            variables, slots, tape.gradient(loss, variables), strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=power_1,
                beta2_power=power_2,
                lr=0.001,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=gradient,
            )
        return count + 1, power_1 * 0.9, power_2 * 0.999, loss

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        start = (tf.constant(0), tf.constant(0.9), tf.constant(0.999), tf.constant(0.0))
        return tf.while_loop(lambda count, *_: count < steps, step, start)[3]

    turns.take(lambda: loop().numpy(), case.longer)
