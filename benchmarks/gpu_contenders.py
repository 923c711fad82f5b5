"""Contenders of benchmarks.gpu: ddl, Keras's fit, Orbit and the bare compiled step, in one process.

They share the GPU's memory, which a process of its own for each would hold all at once. Each
is a function from a case to another that makes the updates of a window and waits for them.
"""

import functools
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import device_trace, networks
from benchmarks.gpt import NextToken, gpt
from benchmarks.gpu_cases import Case
from benchmarks.repeats import interleaved, rotated, seconds
from benchmarks.report import PEERS
from benchmarks.turns import Failed, Turns
from ddl import distribution
from ddl.precision import set_numerics, set_tf32

Window = Callable[[], object]


def network(case: Case) -> keras.Model:
    """Builds the model of a case, up to the logits."""
    if case.network == "MLP":
        return networks.mlp()
    if case.network == "wide MLP":
        return ddl.models.mlp((32, 32, 3), 10, hidden_units=(512, 512))
    if case.network == "CNN":
        return networks.cnn()
    if case.network == "ResNet-50":
        return ddl.models.resnet((224, 224, 3), 1000)
    if case.network == "GPT":
        return gpt(512, 8_192, width=512, heads=8, blocks=8)
    if case.network == "tiny MLP":
        return ddl.models.mlp((4, 4, 1), 3, hidden_units=(5,), dropout=0.2)
    if case.network == "tiny GPT":
        return gpt(6, 11, width=8, heads=2, blocks=1)
    raise ValueError(case.network)


def _is_gpt(case: Case) -> bool:
    return case.network.endswith("GPT")


def _plain_network(case: Case) -> keras.Model:
    """Builds the model as others would: normalization need not reduce over replicas."""
    model = network(case)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = False
    return model


@functools.lru_cache(1)
def arrays(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns random images, uint8, and labels, int32; or tokens and those after them, int64."""
    generator, model = np.random.default_rng(0), network(case)
    shape, classes = model.input_shape[1:], model.output_shape[-1]
    if _is_gpt(case):
        tokens = generator.integers(0, classes, (case.examples, shape[0] + 1))
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    images = generator.integers(0, 256, (case.examples, *shape), "u1")
    return images, generator.integers(0, classes, case.examples).astype("i4")


# ------------------------------------------------------------ the contenders


def ddl_trainer(case: Case) -> Window:
    """The Trainer as `ddl.main` sets it up, with all choices left to ddl."""
    strategy = distribution.build_strategy("one_device")
    with strategy.scope():
        model = network(case)
        task = NextToken(model) if _is_gpt(case) else ddl.Classification(model)
        data = dict(zip(("image", "label"), arrays(case), strict=True))
        trainer = ddl.Trainer(
            task,
            keras.optimizers.Adam(),
            data,
            global_batch_size=case.batch,
            strategy=strategy,
            **_jit(),
        )
    return lambda: trainer.train(case.steps)


def _jit() -> dict[str, str]:
    """Returns the Trainer's choice of compiling, where it has one."""
    arguments = inspect.signature(ddl.Trainer.__init__).parameters
    return {"jit_compile": "auto"} if "jit_compile" in arguments else {}


class _Fit(keras.callbacks.Callback):
    """A `fit` in a thread, which makes an epoch for each call."""

    def __init__(self, model: keras.Model, case: Case) -> None:
        super().__init__()
        self._asked: queue.Queue[bool] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        images, labels = arrays(case)
        arguments = {"batch_size": case.batch, "steps_per_epoch": case.steps, "epochs": 10**6}
        self._arguments = {"x": images, "y": labels, "verbose": 0, **arguments}
        self._fitted = model
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._fitted.fit(**self._arguments, callbacks=[self])
        except BaseException as error:
            self._done.put(error)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Waits for a call."""
        self._asked.get()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the call; Keras has fetched the figures of the epoch."""
        self._done.put(None)

    def __call__(self) -> None:
        """Makes an epoch.

        Raises:
          Failed: If `fit` failed.
        """
        self._asked.put(True)
        error = self._done.get()
        if error is not None:
            raise Failed(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")


def keras_fit(case: Case) -> Window:
    """Keras's fit with its own choices; it compiles with XLA."""
    model = _plain_network(case)
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return _Fit(model, case)


def orbit_trainer(case: Case) -> Window:
    """Orbit's StandardTrainer with Keras's Adam; its loop is a tf.while."""
    if not (PEERS / "orbit").exists():
        raise Failed(
            "skipped, because it is not installed. Install it with `make benchmarks/peers`."
        )
    sys.path.append(str(PEERS))
    import orbit

    examples = tf.data.Dataset.from_tensor_slices(arrays(case)).shuffle(case.examples).repeat()
    batches = examples.batch(case.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    class Trainer(orbit.StandardTrainer):
        def __init__(self) -> None:
            self.model, self.optimizer = _plain_network(case), keras.optimizers.Adam()
            if case.precision == "mixed_float16":
                self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
            self.optimizer.build(self.model.trainable_variables)
            self.loss = keras.metrics.Mean()
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            super().__init__(batches)

        def train_loop_begin(self) -> None:
            self.loss.reset_state()
            self.accuracy.reset_state()

        def train_step(self, iterator: Any) -> None:
            images, labels = next(iterator)
            with tf.GradientTape() as tape:
                losses, logits = _losses(self.model, images, labels)
                loss = tf.reduce_mean(losses)
                if case.precision == "mixed_float16":
                    loss = self.optimizer.scale_loss(loss)
            variables = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
            self.loss.update_state(losses)
            self.accuracy.update_state(labels, logits)

        def train_loop_end(self) -> dict[str, float]:
            return {"loss": float(self.loss.result()), "accuracy": float(self.accuracy.result())}

    trainer, steps = Trainer(), tf.constant(case.steps)
    return lambda: trainer.train(steps)


def _losses(
    model: keras.Model, images: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    logits = tf.cast(model(images, training=True), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), logits


def bare_step(case: Case) -> Window:
    """The compiled step in a tf.while: one constant batch, TensorFlow's Adam, no metrics."""
    update = _bare(case)
    batch = [tf.constant(array[: case.batch]) for array in arrays(case)]
    compiled = tf.function(update, autograph=False, jit_compile=True)

    @tf.function(autograph=False)
    def loop(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        def body(count: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return count + 1, compiled(images, labels)

        return tf.while_loop(
            lambda count, _: count < case.steps, body, (tf.constant(0), tf.constant(0.0))
        )[1]

    return lambda: loop(*batch).numpy()


def _bare(case: Case) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    model = _plain_network(case)
    variables = [variable.value for variable in model.trainable_variables]
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]

    def update(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_losses(model, images, labels)[0])
        for variable, (m, v), gradient in zip(
            variables, slots, tape.gradient(loss, variables), strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=0.9,
                beta2_power=0.999,
                lr=0.001,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=tf.convert_to_tensor(gradient),
            )
        return loss

    return update


CONTENDERS: dict[str, Callable[[Case], Window]] = {
    "ddl": ddl_trainer,
    "Keras fit": keras_fit,
    "Orbit": orbit_trainer,
    "bare step": bare_step,
}


# ------------------------------------------------------------ a process


def measure(case: Case, turns: Turns) -> None:
    """Builds a case on the first GPU in one turn, and measures it in the next."""
    turns.wait()
    distribution.configure_devices(gpus=[0])
    contenders = Contenders(case)
    turns.report({})
    turns.wait()
    turns.report(contenders.measured())


class Contenders:
    """All contenders of a case, built and compiled in this process."""

    def __init__(self, case: Case) -> None:
        """Builds each contender, and makes two windows with it."""
        keras.utils.clear_session()
        set_numerics("float32" if case.precision == "tf32" else case.precision, seed=0)
        set_tf32(case.precision == "tf32")
        arrays.cache_clear()
        self._case = case
        self._windows: dict[str, Window] = {}
        self._first: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        for name, build in rotated(CONTENDERS).items():
            before = _memory()
            try:
                self._first[name] = seconds(lambda name=name, build=build: self._start(name, build))
                self._windows[name]()
                self._held[name] = _memory() - before
            except Exception as error:
                self._windows.pop(name, None)
                self._failed[name] = str(error).partition("\n")[0][:200] or type(error).__name__

    def _start(self, name: str, build: Callable[[Case], Window]) -> None:
        self._windows[name] = build(self._case)
        self._windows[name]()

    def measured(self) -> dict[str, Any]:
        """Measures all contenders by turns.

        Returns:
          The device's name, and for each contender its milliseconds an update and the other figures
          of `_figures`, or a text that says why it failed.
        """
        case = self._case
        found: dict[str, Any] = {"device": _device_name()}
        found |= self._failed
        times = interleaved(
            {name: lambda window=window: seconds(window) for name, window in self._windows.items()},
            case.rounds,
        )
        for name, window in self._windows.items():
            own = _figures(window, self._held[name], case)
            milliseconds = float(np.median(times[name])) / case.steps * 1e3
            found[name] = {"ms": milliseconds, "first": self._first[name], **own}
        return found


def _figures(window: Window, held: int, case: Case) -> dict[str, float | None]:
    """Returns the peak of memory in MB, and from a profile of a window what an update takes."""
    others = _memory() - held
    if _has_gpu():
        tf.config.experimental.reset_memory_stats("GPU:0")
    window()
    peak = _memory("peak") - others
    trace = device_trace.traced(window)
    return {
        "memory": peak / 2**20 if _has_gpu() else None,
        "idle": trace.idle / case.steps * 1e3 if trace else None,
        "kernels": trace.kernels / case.steps if trace else None,
    }


def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _memory(kind: str = "current") -> int:
    """Returns bytes on the GPU; 0 without one."""
    return tf.config.experimental.get_memory_info("GPU:0")[kind] if _has_gpu() else 0


def _device_name() -> str:
    gpus: Iterator[Any] = iter(tf.config.get_visible_devices("GPU"))
    gpu = next(gpus, None)
    return tf.config.experimental.get_device_details(gpu).get("device_name", "") if gpu else "CPU"
