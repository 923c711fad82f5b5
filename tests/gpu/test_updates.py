"""An update on a GPU leaves nothing to the host, and copies as little as it can.

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
from ddl.distribution.path import taking
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
    """A trainer of the MLP 784-128-10.

    Attributes:
      crossing: Bytes that an update moves between host and devices, or between devices.
      arguments: Of the Trainer.
      precision: The number format.
      replicas: Number of replicas.
    """

    crossing: int = 0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "float32"
    replicas: int = 1


CASES = {
    "base": Case(),
    "float16": Case(1, precision="mixed_float16"),
    "mirrored, accumulation, stream": Case(
        32, {"accumulation_steps": 2, "data_on_device": False}, replicas=2
    ),
}


def of_case(
    case: Case,
    task: Callable[[keras.Model], Any] = ddl.Classification,
    optimizer: Callable[[], keras.optimizers.Optimizer] = keras.optimizers.Adam,
    look: Callable[[ddl.Trainer, int], Update] = update_of,
) -> Update:
    set_precision(case.precision)
    with taking(of_gpus()):
        if case.replicas > 1:
            strategy: tf.distribute.Strategy = LikeGpus(case.replicas, first=1)
        else:
            strategy = tf.distribute.OneDeviceStrategy(DEVICE)
        with strategy.scope():
            layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((784,)), *layers])
            trainer = ddl.Trainer(
                task(model),
                optimizer(),
                {"image": IMAGES, "label": LABELS},
                eval_data={"image": IMAGES, "label": LABELS},
                global_batch_size=BATCH,
                strategy=strategy,
                **case.arguments,
            )
        return look(trainer, MOST)


@pytest.mark.parametrize("name", CASES)
def test_an_update(name):
    update = of_case(CASES[name])
    assert not update.on_host
    assert update.asks == 0
    assert sum(update.crossing.values()) <= CASES[name].crossing, update.crossing


def test_a_batch_of_an_evaluation():
    batch = of_case(CASES["base"], look=evaluation_of)
    assert (batch.on_host, batch.crossing, batch.asks) == ([], {}, 0)


# ------------------------------------------------------------ what must be found


def test_an_optimizer_of_many_kernels_is_found():
    own = type("Own", (keras.optimizers.Adam,), {})  # by Keras's own operations
    fused, of_keras = (of_case(CASES["base"], optimizer=o) for o in (keras.optimizers.Adam, own))
    assert of_keras.operations > 1.5 * fused.operations


class CountsOnTheHost(ddl.Classification):
    """A task with a metric in int32, and losses, which are computed on the host."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        positive = tf.cast(features["image"] > 0, tf.int32)
        metrics = {"positive": tf.cast(tf.reduce_sum(positive, 1), "float32")}
        with tf.device(HOST):
            return output._replace(loss=output.loss * 2, metrics=metrics)


def test_operations_on_the_host_and_copies_are_found():
    update = of_case(CASES["base"], CountsOnTheHost)
    assert any("Sum: input, int32[64, 784], is in host memory" in line for line in update.on_host)
    assert sum(update.crossing.values()) >= 2 * BATCH * 4  # losses forward, gradients backward
