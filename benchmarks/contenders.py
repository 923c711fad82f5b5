"""Contenders that train one network: ddl, Keras's fit, the tutorial's loop, Orbit, a bare loop.

They train with Adam (Adagrad for the embeddings) on random examples in memory. All but the bare
loop keep the mean of the loss and the accuracy. On one device the others use no strategy, which is
their fastest option, and on several the default MirroredStrategy. Each is a function of a `Case`
and returns a window that returns the seconds of an update. Those on JAX are in
`benchmarks.on_jax`.
"""

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks.by_keras import cnn, fit, mlp
from benchmarks.cases import Case
from benchmarks.harness import Window, find_peer, timed
from ddl import distribution
from ddl.precision import set_precision, set_tf32

LAYERS = keras.layers


# ------------------------------------------------------------ networks and data


def resnet(case: Case, dropout: Any) -> keras.Model:
    """Builds ResNet-50 for ImageNet."""
    return ddl.models.resnet((224, 224, 3), 1000)


def gpt(case: Case, dropout: Any) -> keras.Model:
    """Builds a GPT of two blocks; of eight on a GPU."""
    sizes = {"width": 128, "heads": 4, "blocks": 2}
    if case.gpu:
        return ddl.models.gpt(8192, 512, width=512, heads=8, blocks=8, dropout=0.0)
    return ddl.models.gpt(256, 64, **sizes, dropout=0.0)


def embeddings(case: Case, dropout: Any) -> keras.Model:
    """Builds a classifier of eight looked up vectors of width 32."""
    table, hidden = LAYERS.Embedding(case.rows, 32), LAYERS.Dense(32, "relu")
    layers = [keras.Input((8,), dtype="int64"), table, LAYERS.Flatten(), hidden, LAYERS.Dense(2)]
    return keras.Sequential(layers)


BUILDERS: dict[str, Callable[..., keras.Model]] = {
    "MLP": mlp,
    "CNN": cnn,
    "ResNet-50": resnet,
    "GPT": gpt,
    "embeddings": embeddings,
}


def network(case: Case, dropout: Any = LAYERS.Dropout) -> keras.Model:
    """Builds the model of a case, up to the logits."""
    return BUILDERS[case.network](case, dropout)


def arrays(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns random images, float32 or uint8, or numbers of tokens or rows; and labels, int64."""
    generator, model = np.random.default_rng(0), network(case)
    shape, output = model.input_shape[1:], model.output_shape[1:]
    labels = generator.integers(0, output[-1], (case.examples, *output[:-1]))
    if "int" in model.inputs[0].dtype:
        return generator.integers(0, case.rows or output[-1], (case.examples, *shape)), labels
    if case.network == "ResNet-50":
        return generator.integers(0, 256, (case.examples, *shape), np.uint8), labels
    return generator.random((case.examples, *shape), np.float32), labels


def optimizer(case: Case) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a case."""
    is_adagrad = case.network == "embeddings"
    return keras.optimizers.Adagrad(0.05) if is_adagrad else keras.optimizers.Adam()


def batches(case: Case, gathers: bool = False) -> tf.data.Dataset:
    """Returns an endless pipeline: the tutorials' slices, or one that gathers shuffled indices."""
    inputs, labels = arrays(case)
    if gathers:
        held = tf.constant(inputs), tf.constant(labels)
        order = tf.data.Dataset.range(case.examples).shuffle(case.examples)
        order = order.batch(case.batch, drop_remainder=True)
        dataset = order.map(
            lambda index: tuple(tf.gather(values, index) for values in held),
            num_parallel_calls=os.cpu_count(),
        )
    else:
        dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(case.examples)
        dataset = dataset.batch(case.batch, drop_remainder=True)
    # Autotuning is off, since an iterator that ends may wait a minute for the tuner. The tuner
    # would only add a prefetch buffer, which is added here instead.
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.repeat().prefetch(tf.data.AUTOTUNE).with_options(options)


def begin(case: Case) -> None:
    """Configures the devices and the number format."""
    gpus = [0] if case.gpu else ()
    distribution.configure_devices(case.replicas if case.replicas > 1 else None, gpus=gpus)
    set_precision("float32" if case.precision == "tf32" else case.precision)
    if case.gpu:
        set_tf32(case.precision == "tf32")
    keras.utils.set_random_seed(0)


def others_strategy(case: Case) -> tf.distribute.Strategy:
    """Begins, and returns the strategy of all but ddl."""
    begin(case)
    if case.workers > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if case.replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(case.replicas)])


# ------------------------------------------------------------ the contenders


def by_ddl(case: Case, **arguments: Any) -> Window:
    """Trains by ddl with its own defaults."""
    begin(case)
    name = "mirrored" if case.replicas > 1 else "one_device"
    name = "multi_worker_mirrored" if case.workers > 1 else name
    with distribution.build_strategy(name).scope():
        model = network(case)
        is_gpt = case.network == "GPT"
        task = ddl.LanguageModel(model) if is_gpt else ddl.Classification(model)
        names = ("token", "next_token") if is_gpt else ("image", "label")
        data = dict(zip(names, arrays(case), strict=True))
        trainer = ddl.Trainer(
            task, optimizer(case), data, global_batch_size=case.batch, **arguments
        )
    trainer.train(case.steps)  # ddl chooses the number of steps per loop
    return timed(lambda: trainer.train(case.updates), case.updates)


def by_ddl_compiled(case: Case) -> Window:
    """Trains by ddl with XLA (`--jit_compile=on`)."""
    return by_ddl(case, jit_compile="on")


def by_ddl_accumulating(case: Case) -> Window:
    """Trains by ddl with two microbatches."""
    return by_ddl(case, accumulation_steps=2)


def _fit(case: Case, steps: int, data: dict[str, Any], **compiling: Any) -> Window:
    with others_strategy(case).scope():
        return fit(network(case), optimizer(case), steps, data, **compiling)


def by_fit(case: Case) -> Window:
    """Trains by `fit` as the tutorials call it."""
    begin(case)
    inputs, labels = arrays(case)
    return _fit(case, case.steps, {"x": inputs, "y": labels, "batch_size": case.batch})


def by_tuned_fit(case: Case, jit_compile: bool = False) -> Window:
    """Trains by `fit` with many steps per execution, on the pipeline that gathers."""
    begin(case)
    steps = max(n for n in range(1, 101) if case.updates % n == 0)
    data = {"x": batches(case, gathers=True), "shuffle": False}
    return _fit(case, case.updates, data, steps_per_execution=steps, jit_compile=jit_compile)


def by_compiled_fit(case: Case) -> Window:
    """Trains by the same `fit` with XLA."""
    return by_tuned_fit(case, jit_compile=True)


def by_tutorial(case: Case) -> Window:
    """Trains by the loop of TensorFlow's tutorial: a tf.function for each step."""
    strategy = others_strategy(case)
    with strategy.scope():
        model, update = network(case), optimizer(case)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        # The tutorial builds in the first step, which fails under a strategy with Keras 3.
        update.build(model.trainable_variables)
    iterator = iter(strategy.experimental_distribute_dataset(batches(case)))

    def replica_step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return _keras_step(case, model, update, accuracy, inputs, labels)

    @tf.function
    def step(batch: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def window() -> None:
        total = 0.0
        for _ in range(case.steps):
            total += step(next(iterator))
        float(total), float(accuracy.result())
        accuracy.reset_state()

    return timed(window, case.steps)


def _keras_step(
    case: Case, model: Any, update: Any, accuracy: Any, inputs: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
    """Makes an update by Keras's optimizer, and returns this replica's share of the loss."""
    is_scaled = isinstance(update, keras.optimizers.LossScaleOptimizer)
    with tf.GradientTape() as tape:
        each, logits = losses(model, inputs, labels)
        loss = tf.reduce_sum(each) / (case.batch * each.shape[1:].num_elements())
        scaled = update.scale_loss(loss) if is_scaled else loss
    variables = model.trainable_variables
    update.apply(tape.gradient(scaled, [v.value for v in variables]), variables)
    accuracy.update_state(labels, logits)
    return loss


def by_orbit(case: Case) -> Window:
    """Trains by Orbit's StandardTrainer, whose loop is a tf.while."""
    find_peer("orbit")
    import orbit

    class Trainer(orbit.StandardTrainer):
        def __init__(self) -> None:
            self.strategy = others_strategy(case)
            with self.strategy.scope():
                self.model, self.optimizer = network(case), optimizer(case)
                if case.precision == "mixed_float16":
                    self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
                self.optimizer.build(self.model.trainable_variables)
                self.loss = keras.metrics.Mean()
                self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            super().__init__(self.strategy.experimental_distribute_dataset(batches(case)))

        def train_loop_begin(self) -> None:
            self.loss.reset_state()
            self.accuracy.reset_state()

        def train_step(self, iterator: Any) -> None:
            self.strategy.run(self.replica_step, args=next(iterator))

        def replica_step(self, inputs: tf.Tensor, labels: tf.Tensor) -> None:
            parts = (self.model, self.optimizer, self.accuracy)
            self.loss.update_state(_keras_step(case, *parts, inputs, labels))

        def train_loop_end(self) -> dict[str, float]:
            return {"loss": float(self.loss.result()), "accuracy": float(self.accuracy.result())}

    trainer, steps = Trainer(), tf.constant(case.updates)
    return timed(lambda: trainer.train(steps), case.updates)


# ------------------------------------------------------------ the bare loop


class PlainDropout(LAYERS.Layer):
    """TensorFlow's cheapest dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Applies dropout in training."""
        return tf.nn.dropout(inputs, self.rate) if training else inputs


def losses(model: keras.Model, inputs: tf.Tensor, labels: tf.Tensor) -> tuple[Any, Any]:
    """Returns the cross-entropies, float32, and the logits of a model in training."""
    logits = tf.cast(model(inputs, training=True), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), logits


def adam_update(variables: Any, slots: Any, gradients: Any, number: tf.Tensor) -> None:
    """Applies TensorFlow's kernel of Adam; `number` is that of the update, from 1."""
    powers = [tf.pow(beta, tf.cast(number, tf.float32)) for beta in (0.9, 0.999)]
    for variable, (m, v), gradient in zip(variables, slots, gradients, strict=True):
        tf.raw_ops.ResourceApplyAdam(
            **{"var": variable.handle, "m": m.handle, "v": v.handle},
            **{"beta1_power": powers[0], "beta2_power": powers[1], "lr": 0.001},
            **{"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7},
            grad=tf.convert_to_tensor(gradient),
        )


def slots_of(variables: Any) -> list[list[tf.Variable]]:
    """Returns Adam's slots."""
    return [[tf.Variable(tf.zeros_like(v), trainable=False) for _ in range(2)] for v in variables]


def bare_adam(model: keras.Model) -> Callable[..., tf.Tensor]:
    """Returns a step: a function of the update's number, inputs and labels to the mean loss."""
    variables = [variable.value for variable in model.trainable_variables]
    slots = slots_of(variables)

    def step(number: tf.Tensor, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model, inputs, labels)[0])
        adam_update(variables, slots, tape.gradient(loss, variables), number)
        return loss

    return step


def bare_loop(case: Case, step: Callable[..., tf.Tensor], reads: bool = True) -> Window:
    """Returns a tf.while of a step on rows gathered in a random order, or on one constant batch."""
    held = [tf.constant(values) for values in arrays(case)]
    count = case.examples // case.batch
    order = tf.random.shuffle(tf.range(count * case.batch, dtype=tf.int64), seed=0)
    order = tf.reshape(order, [count, case.batch])
    constant = [values[: case.batch] for values in held]

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        def turn(number: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rows = order[number % count]
            batch = [tf.gather(values, rows) for values in held] if reads else constant
            return number + 1, step(number + 1, *batch)

        start = (tf.constant(0, tf.int64), tf.constant(0.0))
        return tf.while_loop(lambda number, _: number < case.updates, turn, start)[1]

    return timed(lambda: loop().numpy(), case.updates)


def reading_floor(case: Case) -> Window:
    """Trains by the bare step on rows that it gathers, as ddl does; without metrics."""
    begin(case)
    return bare_loop(case, bare_adam(network(case, PlainDropout)))


def floor(case: Case) -> Window:
    """Trains by the bare step on one constant batch."""
    begin(case)
    return bare_loop(case, bare_adam(network(case, PlainDropout)), reads=False)


def compiled_floor(case: Case) -> Window:
    """Trains by the bare step, compiled by XLA, on one constant batch."""
    begin(case)
    step = tf.function(bare_adam(network(case)), autograph=False, jit_compile=True)
    return bare_loop(case, step, reads=False)
