"""Parameter servers, workers and the chief in one process, which the test starts.

  python -m tests.training.asynchronous_cases

Prints what the test reads as JSON.
"""

import json
import os
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


def build() -> tf.distribute.Strategy:
    """Builds a cluster of two workers and two parameter servers."""
    tasks = cluster_tasks(2, num_ps=2)
    configs = tf_configs(tasks, free_ports(len(tasks)))
    os.environ["TF_CONFIG"] = configs[0]
    cluster = json.loads(configs[0])["cluster"]
    build.servers = [  # type: ignore[attr-defined]
        start_server(ClusterRole(cluster, task.kind, task.index))
        for task in tasks
        if task.kind != "chief"
    ]
    return build_parameter_server_strategy(ClusterTimeouts(60, 60, 60))


def trainer(
    strategy: tf.distribute.Strategy, precision: Any = "float64", data: Any = parity_cases.UNEVEN
) -> ddl.Trainer:
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return ddl.Trainer(
            parity_cases.cnn(),
            keras.optimizers.SGD(0.003, momentum=0.9),
            data,
            eval_data=parity_cases.UNEVEN,
            global_batch_size=16,
            accumulation_steps=2,
            steps_per_loop=50,
        )


def found(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Returns what 400 updates found, with evaluations and predictions here and on one device."""
    trained, alone = trainer(strategy), trainer(tf.distribute.OneDeviceStrategy("CPU:0"))
    loop: Any = trained._runner.loop
    several, loop._slots = loop._slots, 1  # one range a loop: a worker that waits for nobody
    for each in (trained, alone):
        each.train(20)
    pairs = list(zip(_variables(trained), _variables(alone), strict=True))
    differences = [float(np.max(np.abs(one.numpy() - other.numpy()))) for one, other in pairs]
    loop._slots = several
    figures, state = trained.train(380), trained.state
    for one, other in pairs:
        other.assign(one.numpy())
    return {
        "differences": differences,
        "step": trained.step,
        "iterations": int(trained.optimizer.iterations.numpy()),
        "batches": int(state.batches),
        "examples": float(state.sums[0]),  # reading resets it
        "loss": figures["loss"],
        "traces": loop._make_updates.experimental_get_tracing_count(),
        "evaluations": [trained.evaluate(), alone.evaluate()],
        "predictions": [x.predict(IMAGES).tolist() for x in (trained, alone)],
        "refused": [
            _error(lambda: trainer(strategy, data=[{"image": x, "label": 1} for x in IMAGES])),
            _error(lambda: trainer(strategy, "mixed_float16")),
        ],
    }


def _variables(trained: ddl.Trainer) -> list[Any]:
    """Returns weights, moments and slots."""
    return [v.value for v in [*trained.model.variables, *trained.optimizer.variables]]


def _error(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except ddl.errors.ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps(found(build())), flush=True)
    # TensorFlow's servers cannot be stopped.
    os._exit(0)
