"""Who trains in benchmarks.loop_overhead: Keras's fit, loops that people write, Orbit, ddl.

Each trains the same network on the same arrays with Adam, dropout on, in float32, and keeps the
mean of the loss and the accuracy, but for the floor. Each takes the devices that the case names:
on one device no strategy, which is the fastest that a peer can have.
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
from benchmarks.turns import Failed, Turns
from ddl import distribution
from ddl.optimizers import FusedAdam

EXAMPLES = 57_600
Layer = Callable[[float], keras.layers.Layer]


def network(case: Case, dropout: Layer = keras.layers.Dropout) -> keras.Model:
    """The tutorials' networks, up to the logits."""
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
    """Images, float32 [n, 28, 28, 1] between 0 and 1, and labels, int64 [n]: noise."""
    generator = np.random.default_rng(0)
    images = generator.random((EXAMPLES, 28, 28, 1), np.float32)
    return images, generator.integers(0, 10, EXAMPLES)


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """As many of them as whole windows need."""
    whole = EXAMPLES // (case.batch * case.steps) * case.batch * case.steps
    images, labels = arrays()
    return images[:whole], labels[:whole]


def slices(case: Case) -> tf.data.Dataset:
    """The pipeline of the tutorials, without end."""
    images, labels = data(case)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images))
    return _endless(dataset.batch(case.batch, drop_remainder=True))


def gathered(case: Case) -> tf.data.Dataset:
    """Shuffled indices, gathered a batch at a time: less to copy than `slices`. Without end."""
    images, labels = map(tf.constant, data(case))
    order = tf.data.Dataset.range(len(images)).shuffle(len(images))
    dataset = order.batch(case.batch, drop_remainder=True).map(
        lambda index: (tf.gather(images, index), tf.gather(labels, index)),
        num_parallel_calls=os.cpu_count(),
    )
    return _endless(dataset)


def _endless(batches: tf.data.Dataset) -> tf.data.Dataset:
    # Without a tuner, for which an iterator that ends may wait a minute. Nothing is left to it but
    # a buffer, which TensorFlow would add and is added here.
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.repeat().prefetch(tf.data.AUTOTUNE).with_options(options)


def strategy_of(case: Case) -> tf.distribute.Strategy:
    """TensorFlow's default on one device, MirroredStrategy as it comes on several."""
    distribution.configure_devices(case.replicas if case.replicas > 1 else None, gpus=())
    keras.utils.clear_session()
    if case.replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(case.replicas)])


# ------------------------------------------------------------ Keras's fit


class WaitForTurn(keras.callbacks.Callback):
    """Makes each epoch of a fit wait for its turn, and reports the time of a part of it."""

    def __init__(self, turns: Turns, parts: int) -> None:
        super().__init__()
        self._turns = turns
        self._parts = parts
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Waits."""
        if not self._turns.wait():
            raise StopIteration
        self._start = tf.timestamp().numpy()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports."""
        self._turns.report(float(tf.timestamp().numpy() - self._start) / self._parts)


def _fit(
    case: Case,
    turns: Turns,
    train_data: Callable[[], dict[str, Any]],
    parts: int = 1,
    **compile_arguments: Any,
) -> None:
    # An epoch of steps_per_epoch goes on where the last one ended, so that a window is a part of
    # one long epoch and pays for no beginning.
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
    """As the tutorials call it."""
    images, labels = data(case)
    _fit(case, turns, lambda: {"x": images, "y": labels, "batch_size": case.batch})


def fit_tuned_slices(case: Case, turns: Turns) -> None:
    """Many steps an execution, no XLA, which is slower on a CPU, and a pipeline that prefetches."""
    _fit_tuned(case, turns, slices)


def fit_tuned_gather(case: Case, turns: Turns) -> None:
    """The same with the other pipeline."""
    _fit_tuned(case, turns, gathered)


def _fit_tuned(case: Case, turns: Turns, make_dataset: Callable[[Case], tf.data.Dataset]) -> None:
    # Keras 3.15 fails with more than one step an execution on several devices.
    parts = case.longer if case.replicas == 1 else 1
    window = case.steps * parts
    steps = max(n for n in range(1, 101) if window % n == 0) if case.replicas == 1 else 1

    def train_data() -> dict[str, Any]:
        return {"x": make_dataset(case), "shuffle": False}

    _fit(case, turns, train_data, parts, steps_per_execution=steps, jit_compile=False)


# ------------------------------------------------------------ loops that people write


def tutorial_loop(case: Case, turns: Turns) -> None:
    """The loop of TensorFlow's tutorial on custom training with tf.distribute."""
    strategy = strategy_of(case)
    with strategy.scope():
        model, optimizer = network(case), keras.optimizers.Adam()
        per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        # The tutorial leaves it to the first step, which under a strategy fails with Keras 3.
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
    """Orbit's StandardTrainer, whose loop is a tf.while, with Keras 3's Adam."""
    _orbit(case, turns, keras.optimizers.Adam)


def orbit_fused(case: Case, turns: Turns) -> None:
    """The same with the Adam that ddl's configs take."""
    _orbit(case, turns, adam)


def _orbit(case: Case, turns: Turns, make_optimizer: Any) -> None:
    if not (PEERS / "orbit").exists():
        raise Failed("skipped: not installed; `make benchmarks/peers` installs it")
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


# ------------------------------------------------------------ ddl, and the floor


def adam() -> keras.optimizers.Optimizer:
    """The Adam of ddl's configs."""
    return FusedAdam()


def ddl_trainer(case: Case, turns: Turns) -> None:
    """What a user of ddl has: its step, dropout, pipeline, and its own number of steps a loop."""
    distribution.configure_devices(case.replicas if case.replicas > 1 else None, gpus=())
    keras.utils.clear_session()
    strategy = distribution.build_strategy("mirrored" if case.replicas > 1 else "one_device")
    with strategy.scope():
        task = ddl.Classification(network(case, ddl.layers.Dropout))
        trainer = ddl.Trainer(task, adam(), data(case), global_batch_size=case.batch)
    trainer.train(case.steps)  # finds out how many steps make a loop
    turns.take(lambda: trainer.train(case.steps * case.longer), case.longer)


class PlainDropout(keras.layers.Layer):
    """The cheapest dropout that TensorFlow has."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Drops in training."""
        return tf.nn.dropout(inputs, self.rate) if training else inputs


def floor(case: Case, turns: Turns) -> None:
    """The bare step: one batch that never changes, TensorFlow's Adam, no metrics, a tf.while."""
    strategy_of(case)
    model = network(case, PlainDropout)
    variables = [variable.value for variable in model.trainable_variables]
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]
    images, labels = (tf.constant(array[: case.batch]) for array in data(case))
    steps = case.steps * case.longer

    def step(count: tf.Tensor, power_1: tf.Tensor, power_2: tf.Tensor, _: tf.Tensor) -> Any:
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
