"""Parameter servers, workers and the chief in one process, which a test runs for itself.

  python -m tests.asynchronous_cases WORKERS NAME…

Prints what each of the functions named below found, as a line of JSON.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.cluster_tasks import cluster_tasks, free_ports, tf_configs
from ddl.cluster_timeouts import ClusterTimeouts
from ddl.parameter_servers import build_parameter_server_strategy, start_server
from ddl.precision import LossScale, set_precision
from tests import parity_cases


def build(workers: int) -> tf.distribute.Strategy:
    """A cluster of so many workers and two parameter servers."""
    tasks = cluster_tasks(workers, num_ps=2)
    configs = tf_configs(tasks, free_ports(len(tasks)))
    os.environ["TF_CONFIG"] = configs[0]
    cluster = json.loads(configs[0])["cluster"]
    build.servers = [  # type: ignore[attr-defined]
        start_server(cluster, task.kind, task.index) for task in tasks if task.kind != "chief"
    ]
    return build_parameter_server_strategy(ClusterTimeouts(10, 10, 10))


PARITY = (
    "plain",
    "clipping by global norm, biting at every step",
    "L2",
    "weights of tokens, sparse gradients",
    "131 examples in batches of 32",
    "synchronized BatchNormalization, accumulation 2",
    "ddl.layers.Dropout",
    "augmentation, batches made on the host",
    "AdamW",
)


def parity(strategy: tf.distribute.Strategy) -> Any:
    """Largest differences from one device: with one worker there is nothing asynchronous."""
    return {name: parity_cases.differences(name, strategy, "float64") for name in PARITY}


def ranges(strategy: tf.distribute.Strategy) -> Any:
    """Largest differences of weights and slots after one loop, of ranges of several updates."""
    case = parity_cases.CASES["synchronized BatchNormalization, accumulation 2"]
    found = []
    for where in (strategy, tf.distribute.OneDeviceStrategy("CPU:0")):
        trained = parity_cases.make_trainer(case, where, "float64", steps_per_loop=60)
        trained.train(60)
        variables = [*trained.model.variables, *trained.optimizer.variables]
        found.append([np.array(variable) for variable in variables])
    return [float(np.max(np.abs(ours - theirs))) for ours, theirs in zip(*found, strict=True)]


def noise(strategy: tf.distribute.Strategy) -> Any:
    """The gradient noise scale after one loop, here and on one device."""
    found = []
    for where in (strategy, tf.distribute.OneDeviceStrategy("CPU:0")):
        trained = trainer(
            where,
            "float32",
            accumulation_steps=2,
            gradient_noise_scale=ddl.GradientNoiseScale(0.9),
        )
        found.append(trained.train(50)["gradient_noise_scale"])
    return found


def rmsprop(strategy: tf.distribute.Strategy) -> Any:
    """The loss of an optimizer that makes a temporary variable in each update."""
    trained = trainer(strategy, "float32", lambda: ddl.optimizers.FusedRMSprop(0.001))
    return trained.train(400)["loss"]


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.001, momentum=0.9)


def trainer(
    strategy: tf.distribute.Strategy, precision: Any, optimizer: Any = momentum, **arguments: Any
) -> ddl.Trainer:
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return ddl.Trainer(
            parity_cases.cnn(),
            optimizer(),
            parity_cases.UNEVEN,
            eval_data=parity_cases.UNEVEN,
            global_batch_size=16,
            steps_per_loop=50,
            **arguments,
        )


def counts(strategy: tf.distribute.Strategy) -> Any:
    """What is counted of 400 updates, and what an evaluation gives beside one device."""
    trained = trainer(strategy, "float32")
    trained.trace()
    figures = trained.train(400)
    state = trained.state
    alone = trainer(tf.distribute.OneDeviceStrategy("CPU:0"), "float32")
    for variable, value in zip(alone.model.variables, trained.model.variables, strict=True):
        variable.assign(value.numpy())
    return {
        "step": trained.step,
        "iterations": int(trained.optimizer.iterations.numpy()),
        "batches": int(state.batches),
        "examples": float(trained.state.sums[0]),  # read and set back
        "loss": figures["loss"],
        "traces": trained.trace_count,
        "evaluation": [trained.evaluate(), alone.evaluate()],
    }


def overflows(strategy: tf.distribute.Strategy) -> Any:
    """float16 from a loss scale that is much too large."""
    trained = trainer(strategy, "mixed_float16", loss_scale=LossScale(2.0**24))
    figures = trained.train(200)
    return {
        "step": trained.step,
        "iterations": int(trained.optimizer.iterations.numpy()),
        "skipped": trained.skipped_updates,
        "scale": trained.loss_scale,
        "finite": bool(np.all([np.isfinite(v.numpy()).all() for v in trained.model.variables])),
        "loss": figures["loss"],
    }


def bfloat16(strategy: tf.distribute.Strategy) -> Any:
    """mixed_bfloat16 needs no loss scale."""
    trained = trainer(strategy, "mixed_bfloat16")
    return {"loss": trained.train(200)["loss"], "scale": trained.loss_scale, "step": trained.step}


def refused(strategy: tf.distribute.Strategy) -> Any:
    """Data that cannot be sent to workers."""
    source = ddl.data.RandomAccessSource(lambda indices: {"image": indices}, 10)
    try:
        ddl.data.BatchPipeline(source, 5).packed_arrays()
    except ddl.errors.ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    cluster = build(int(sys.argv[1]))
    for function in sys.argv[2:]:
        print(json.dumps({function: globals()[function](cluster)}), flush=True)
    # TensorFlow's servers cannot be ended.
    sys.stdout.flush()
    os._exit(0)
