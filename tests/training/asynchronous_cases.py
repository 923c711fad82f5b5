"""Parameter servers, workers and the chief in one process, which each test starts separately.

  python -m tests.training.asynchronous_cases WORKERS SERVERS NAME…

Prints the result of each named function as a line of JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.distribution.cluster import ClusterRole, ClusterTimeouts
from ddl.distribution.parameter_servers import build_parameter_server_strategy, start_server
from ddl.launcher.tasks import cluster_tasks, free_ports, tf_configs
from ddl.precision import set_precision
from tests.training import parity_cases

IMAGES = parity_cases.UNEVEN["image"][:20]


def build(workers: int, servers: int) -> tf.distribute.Strategy:
    """Builds a cluster of workers and parameter servers."""
    tasks = cluster_tasks(workers, num_ps=servers)
    configs = tf_configs(tasks, free_ports(len(tasks)))
    os.environ["TF_CONFIG"] = configs[0]
    cluster = json.loads(configs[0])["cluster"]
    build.servers = [  # type: ignore[attr-defined]
        start_server(ClusterRole(cluster, task.kind, task.index))
        for task in tasks
        if task.kind != "chief"
    ]
    return build_parameter_server_strategy(ClusterTimeouts(60, 60, 60))


def ranges(strategy: tf.distribute.Strategy) -> Any:
    """Returns how far a worker that waits for nobody ends from one device: weights and slots."""
    case = parity_cases.CASES["BatchNormalization, accumulation 2"]
    found = []
    for where in (strategy, tf.distribute.OneDeviceStrategy("CPU:0")):
        trained = parity_cases.make_trainer(case, where, "float64", steps_per_loop=19)
        if where is strategy:
            trained._runner.loop._slots = 1  # one range a loop, and so one worker at a time
        trained.train(20)
        variables = [*trained.model.variables, *trained.optimizer.variables]
        found.append([np.array(variable) for variable in variables])
    return [float(np.max(np.abs(ours - theirs))) for ours, theirs in zip(*found, strict=True)]


def trainer(
    strategy: tf.distribute.Strategy, precision: Any = "float32", data: Any = parity_cases.UNEVEN
) -> ddl.Trainer:
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return ddl.Trainer(
            parity_cases.cnn(),
            keras.optimizers.SGD(0.001, momentum=0.9),
            data,
            eval_data=parity_cases.UNEVEN,
            global_batch_size=16,
            steps_per_loop=50,
        )


def counts(strategy: tf.distribute.Strategy) -> Any:
    """Returns the counts of 400 updates; evaluations and predictions here and on one device."""
    trained = trainer(strategy)
    trained.trace()
    figures = trained.train(400)
    state = trained.state
    alone = trainer(tf.distribute.OneDeviceStrategy("CPU:0"))
    for variable, value in zip(alone.model.variables, trained.model.variables, strict=True):
        variable.assign(value.numpy())
    return {
        "step": trained.step,
        "iterations": int(trained.optimizer.iterations.numpy()),
        "batches": int(state.batches),
        "examples": float(trained.state.sums[0]),  # reading resets it
        "loss": figures["loss"],
        "traces": trained._runner.loop._make_updates.experimental_get_tracing_count(),
        "evaluations": [trained.evaluate(), alone.evaluate()],
        "predictions": [x.predict(IMAGES).tolist() for x in (trained, alone)],
    }


def refused(strategy: tf.distribute.Strategy) -> Any:
    """Returns the errors for data that cannot be sent to workers, and for a loss scale."""
    items = [{"image": image, "label": 1} for image in IMAGES]
    return [
        _error(lambda: trainer(strategy, data=items)),
        _error(lambda: trainer(strategy, "mixed_float16")),
    ]


def _error(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except ddl.errors.ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    cluster = build(int(sys.argv[1]), int(sys.argv[2]))
    for function in sys.argv[3:]:
        print(json.dumps({function: globals()[function](cluster)}), flush=True)
    # TensorFlow's servers cannot be stopped.
    sys.stdout.flush()
    os._exit(0)
