"""Operations of an update on a GPU: python -m benchmarks.gpu_counts.

This benchmark needs no GPU. It traces the training loop with ddl's choices for GPUs and without
XLA, and counts in the graph what one update does: operations that start a kernel, call a library or
copy; bytes that cross between host and device, or between devices, without those of collectives;
and operations that a GPU leaves to the host, for want of a kernel or because TensorFlow keeps their
data in host memory. TensorFlow's graph optimizer joins some of these operations before they run.
Kernels and library calls of six trainers were counted with TensorFlow 2.21, and the operations
differ from them by less than 15% (`tests/gpu/test_updates.py`). The host counts the updates, so
that nothing crosses for the condition of the loop.

Each row changes one thing of the first row of its network. The MLP is 784-128-10 with a batch of
64, float32 and FusedAdam; the CNN has two convolutions with batch normalization; the GPT has two
blocks of width 64.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command
from benchmarks.report import Report, Table

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """A trainer.

    Attributes:
      network: "MLP", "CNN" or "GPT".
      change: What differs from the first row of the network; "" for that row.
      arguments: Of the Trainer, besides task, data and batch size; functions are called.
      optimizer: Name of an optimizer of `ddl.optimizers`.
      precision: The number format.
      replicas: Number of replicas.
      task: Arguments of the task; functions are called.
    """

    network: str
    change: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str = "FusedAdam"
    precision: str = "float32"
    replicas: int = 1
    task: dict[str, Any] = dataclasses.field(default_factory=dict)


def _average() -> Any:
    import ddl

    return ddl.ExponentialMovingAverage(0.99)


def _noise_scale() -> Any:
    import ddl

    return ddl.GradientNoiseScale()


def _flip_and_shift() -> list[Any]:
    import ddl

    return [ddl.layers.RandomFlip("horizontal"), ddl.layers.RandomShift(2, 2)]


_OPTIMIZERS = (
    "FusedSGD",
    "MomentumSGD",
    "FusedAdamW",
    "FusedRMSprop",
    "FusedAdagrad",
    "LARS",
    "LAMB",
)
ROWS = (
    Row("MLP"),
    *(Row("MLP", name, optimizer=name) for name in _OPTIMIZERS),
    Row("MLP", "mixed_float16", precision="mixed_float16"),
    Row("MLP", "mixed_bfloat16", precision="mixed_bfloat16"),
    Row("MLP", "accumulation over 2", {"accumulation_steps": 2}),
    Row("MLP", "accumulation over 4", {"accumulation_steps": 4}),
    Row("MLP", "clip_norm", {"clip_norm": 1.0}),
    Row("MLP", "clip_value", {"clip_value": 1.0}),
    Row("MLP", "weight average", {"weight_average": _average}),
    Row(
        "MLP",
        "accumulation over 2, noise scale",
        {"accumulation_steps": 2, "gradient_noise_scale": _noise_scale},
    ),
    Row("MLP", "data made on the host", {"data_on_device": False}),
    Row("MLP", "mirrored on 2", replicas=2),
    Row("MLP", "mirrored on 2, accumulation over 2", {"accumulation_steps": 2}, replicas=2),
    Row("CNN"),
    Row("CNN", "augmentation: flip and shift", task={"augmentations": _flip_and_shift}),
    Row("CNN", "mirrored on 2, normalization synchronized", replicas=2),
    Row("GPT"),
    Row("GPT", "mixed_bfloat16", precision="mixed_bfloat16"),
)
_QUICK = (ROWS[0], ROWS[8])


def measure(quick: bool) -> Iterator[Report]:
    """Traces one row after the other; yields what is counted so far."""
    from ddl.distribution import configure_devices

    configure_devices(4, gpus=())
    counted: dict[str, list[Any]] = {}
    firsts: dict[str, int] = {}
    for row in _QUICK if quick else ROWS:
        update = update_of(row)
        first = firsts.setdefault(row.network, update.operations)
        name = f"{row.network}: {row.change}" if row.change else row.network
        crossing, on_host = sum(update.crossing.values()), len(update.on_host)
        counted[name] = [name, update.operations, update.operations - first, crossing, on_host]
        columns = ["", "operations", "added", "bytes across", "left to the host"]
        yield Report([Table("An update", columns, [*counted.values()])])


def update_of(row: Row) -> Any:
    """Traces a trainer on the second CPU device and those after it; see `tests.gpu.updates`."""
    import keras
    import tensorflow as tf

    import ddl
    from ddl.devices.path import taking
    from ddl.precision import set_precision
    from tests.gpu.places import of_gpus
    from tests.gpu.updates import DEVICE, update_of

    keras.utils.clear_session()  # also of its precision
    set_precision(row.precision)
    with taking(of_gpus()):
        strategy: tf.distribute.Strategy = tf.distribute.OneDeviceStrategy(DEVICE)
        if row.replicas > 1:
            strategy = tf.distribute.MirroredStrategy([f"CPU:{1 + i}" for i in range(row.replicas)])
        with strategy.scope():
            task, data = _task(row)
            trainer = ddl.Trainer(
                task,
                getattr(ddl.optimizers, row.optimizer)(1e-3),
                data,
                global_batch_size=BATCH,
                strategy=strategy,
                **_called(row.arguments),
            )
        return update_of(trainer, BATCH // 4 - 1)


def _called(arguments: dict[str, Any]) -> dict[str, Any]:
    called: Callable[[Any], Any] = lambda value: value() if callable(value) else value  # noqa: E731
    return {name: called(value) for name, value in arguments.items()}


def _task(row: Row) -> tuple[Any, dict[str, Any]]:
    """Returns the task and its data: 256 examples of zeros."""
    import numpy as np

    import ddl
    from benchmarks.gpt import NextToken, gpt

    labels = np.zeros(256, "i4")
    if row.network == "GPT":
        tokens = np.zeros([256, 32], "i8")
        model = gpt(32, 256, width=64, heads=4, blocks=2)
        return NextToken(model), {"image": tokens, "label": tokens}
    if row.network == "MLP":
        model = ddl.models.mlp((28, 28, 1), 10)
        images = np.zeros([256, 28, 28, 1], "u1")
    else:
        model = ddl.models.cnn(
            (28, 28, 1), 10, blocks=((16, 16),), hidden_units=(), batch_normalization=True
        )
        images = np.zeros([256, 28, 28, 1], "u1")
    return ddl.Classification(model, **_called(row.task)), {"image": images, "label": labels}


if __name__ == "__main__":
    command.main(measure)
