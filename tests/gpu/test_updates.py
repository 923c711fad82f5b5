"""An update on a GPU leaves nothing to the host, copies as little and starts as few kernels.

Not run on a GPU: `tests.gpu.updates` looks at the graph.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline
from ddl.devices.path import taking
from ddl.optimizers import LAMB, FusedAdam
from ddl.precision import set_precision
from tests.conftest import LikeGpus
from tests.gpu.places import of_gpus
from tests.gpu.updates import DEVICE, HOST, Update, evaluation_of, update_of

BATCH = 64
MOST = BATCH // 4 - 1  # elements of a tensor in host memory; a microbatch has more

_RANDOM = np.random.default_rng(0)
IMAGES = _RANDOM.random((640, 784), np.float32)
LABELS = _RANDOM.integers(0, 10, 640)


@dataclasses.dataclass(frozen=True)
class Case:
    """A trainer of the MLP 784-128-10, and what its update does.

    Attributes:
      operations: Operations of an update that start a kernel, call a library, or copy.
      crossing: Bytes that an update moves between host and devices, or between devices.
      counted: Kernels and library calls on a GPU, as counted once with TensorFlow 2.21; None: not.
      arguments: Of the Trainer.
      precision: The number format.
      optimizer: Makes the optimizer.
      replicas: Number of replicas.
    """

    operations: int
    crossing: int
    counted: int | None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "float32"
    optimizer: Callable[[], keras.optimizers.Optimizer] = FusedAdam
    replicas: int = 1


CASES = {
    "base": Case(37, 0, 41),
    "accumulation": Case(126, 0, 142, {"accumulation_steps": 4}),
    "clip_norm": Case(45, 0, 49, {"clip_norm": 1.0}),
    "float16": Case(63, 1, 64, precision="mixed_float16"),
    "average": Case(51, 0, 54, {"weight_average": ddl.ExponentialMovingAverage(0.99)}),
    "LAMB": Case(51, 0, 60, optimizer=lambda: LAMB(1e-3)),
    "stream": Case(36, 0, None, {"data_on_device": False}),
    "mirrored": Case(75, 32, None, replicas=2),
    "mirrored, accumulation": Case(138, 32, None, {"accumulation_steps": 2}, replicas=2),
    "mirrored, accumulation, stream": Case(
        131, 32, None, {"accumulation_steps": 2, "data_on_device": False}, replicas=2
    ),
}


def of_case(
    case: Case,
    task: Callable[[keras.Model], Any] = ddl.Classification,
    labels: np.ndarray = LABELS,
    look: Callable[[ddl.Trainer, int], Update] = update_of,
    **path: bool,
) -> Update:
    set_precision(case.precision)
    with taking(dataclasses.replace(of_gpus(), **path)):
        if case.replicas > 1:
            strategy: tf.distribute.Strategy = LikeGpus(case.replicas, first=1)
        else:
            strategy = tf.distribute.OneDeviceStrategy(DEVICE)
        with strategy.scope():
            layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((784,)), *layers])
            trainer = ddl.Trainer(
                task(model),
                case.optimizer(),
                {"image": IMAGES, "label": labels},
                eval_data={"image": IMAGES, "label": labels},
                global_batch_size=BATCH,
                strategy=strategy,
                **case.arguments,
            )
        return look(trainer, MOST)


@pytest.mark.parametrize("name", CASES)
def test_an_update(name):
    case = CASES[name]
    update = of_case(case)
    assert not update.on_host
    assert update.asks == 0
    assert sum(update.crossing.values()) <= case.crossing, update.crossing
    # If an update takes fewer now, take its number as the case's.
    assert 0.9 * case.operations <= update.operations <= 1.1 * case.operations


def test_the_replicas_of_a_worker_copy_their_own_rows_alone(monkeypatch):
    """Several workers take plain iterators, which give the rows of all replicas of a worker."""
    monkeypatch.setattr(BatchPipeline, "distributes", lambda *_: False)
    case = dataclasses.replace(CASES["mirrored"], arguments={"data_on_device": False})
    update = of_case(case, labels=LABELS.astype("i4"))
    batch = BATCH * (4 * 784 + 8)  # int32 is sent as int64
    assert sum(update.crossing.values()) == batch + case.crossing


def test_a_residual_network():
    """Batch normalization is one library call forward and one backward; see ResNet-50 in
    `benchmarks.gpu_counts`."""
    images = np.zeros([64, 16, 16, 3], np.uint8)
    with taking(of_gpus()):
        strategy = tf.distribute.OneDeviceStrategy(DEVICE)
        with strategy.scope():
            trainer = ddl.Trainer(
                ddl.Classification(ddl.models.resnet((16, 16, 3), 10, blocks=(1, 1))),
                FusedAdam(),
                {"image": images, "label": LABELS[:64]},
                global_batch_size=32,
                strategy=strategy,
            )
        update = update_of(trainer, MOST)
    assert (update.on_host, update.crossing, update.asks) == ([], {}, 0)
    convolutions = normalizations = 9
    # A matrix product and a pooling; the images have no gradient.
    assert update.library_calls == 3 * convolutions - 1 + 2 * normalizations + 3 + 2
    assert update.operations == pytest.approx(196, rel=0.1)


def test_a_batch_of_an_evaluation():
    batch = of_case(CASES["base"], look=evaluation_of)
    assert (batch.on_host, batch.crossing, batch.asks) == ([], {}, 0)
    assert batch.operations == pytest.approx(18, rel=0.1)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.counted])
def test_operations_follow_what_was_counted(name):
    case = CASES[name]
    assert case.operations == pytest.approx(case.counted, rel=0.15)


def test_the_host_counts_updates_that_xla_compiles():
    compiled = of_case(dataclasses.replace(CASES["base"], arguments={"jit_compile": "on"}))
    assert (compiled.on_host, compiled.crossing, compiled.asks) == ([], {}, 0)


def test_the_stop_flag_stays_on_the_host():
    # With a loss scale, XLA computes on the device whether the loop goes on, and the host asks.
    scaled = dataclasses.replace(CASES["float16"], arguments={"jit_compile": "on"})
    assert of_case(scaled, look=readers_of_the_stop_flag) == {HOST}


def readers_of_the_stop_flag(trainer: ddl.Trainer, most: int) -> set[str]:
    """Returns the devices of the operations that read the flag, in the loop's conditions."""
    del most
    loop = trainer._runner.loop
    loop.trace(trainer.state)
    arguments = loop._iterator_from(trainer.state), tf.constant(0, tf.int64), trainer.state
    definition = loop._loop.get_concrete_function(*arguments).graph.as_graph_def()
    found = set()
    for function in definition.library.function:
        flags = {n.name for n in function.node_def if n.op == "ReadVariableOp"}
        flags &= {n.name for n in function.node_def if n.attr["dtype"].type == tf.bool}
        for node in function.node_def:
            if flags & {name.split(":")[0] for name in node.input}:
                found.add(tf.DeviceSpec.from_string(node.device).to_string()[-5:])
    return found


# ------------------------------------------------------------ what must be found


def test_an_optimizer_of_many_kernels_is_found():
    case = CASES["base"]
    update = of_case(dataclasses.replace(case, optimizer=keras.optimizers.Adam))
    assert update.operations > 1.5 * case.operations


class CountsOnTheHost(ddl.Classification):
    """A task with a metric in int32, which TensorFlow computes on the host."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        positive = tf.cast(features["image"] > 0, tf.int32)
        return output._replace(metrics={"positive": tf.cast(tf.reduce_sum(positive, 1), "float32")})


def test_an_operation_on_the_host_is_found():
    update = of_case(CASES["base"], CountsOnTheHost)
    assert any("Sum: input, int32[64, 784], is in host memory" in line for line in update.on_host)


class LosesOnTheHost(ddl.Classification):
    """A task whose losses are computed on the host."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        with tf.device(HOST):
            return output._replace(loss=output.loss * 2)


def test_a_condition_on_the_device_is_found():
    # With a loop that counts on the device, the host asks in each update.
    update = of_case(CASES["base"], places_order=False)
    assert update.asks > 0


def test_a_copy_is_found():
    update = of_case(CASES["base"], LosesOnTheHost)
    assert sum(update.crossing.values()) >= 2 * BATCH * 4  # losses forward, gradients backward


def test_arrays_in_host_memory_are_found():
    update = of_case(CASES["base"], labels=LABELS.astype("i4"), packs_int32=False)
    assert any("While: input, int32[640], is in host memory" in line for line in update.on_host)
