"""Parameter servers, workers and the chief in one process, which each test starts separately.

  python -m tests.training.asynchronous_cases WORKERS SERVERS NAME…

Prints the result of each named function as a line of JSON.
"""

import dataclasses
import json
import os
import sys
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


def trained(strategy: tf.distribute.Strategy) -> Any:
    """Returns how far a worker that waits for nobody ends from one device: weights and slots.

    Then the counts of 200 updates, and evaluations and predictions here and on one device.
    """
    case = dataclasses.replace(
        parity_cases.CASES["BatchNormalization, accumulation 2"],
        optimizer=lambda: keras.optimizers.SGD(0.004, momentum=0.9),
        arguments={"accumulation_steps": 2, "eval_data": parity_cases.UNEVEN},
    )
    alone = tf.distribute.OneDeviceStrategy("CPU:0")
    both = [
        parity_cases.make_trainer(case, where, "float64", steps_per_loop=19)
        for where in (strategy, alone)
    ]
    loop = both[0]._runner.loop
    slots, loop._slots = loop._slots, 1  # one range a loop, and so one worker at a time
    ends = []
    for each in both:
        each.train(20)
        variables = [*each.model.variables, *each.optimizer.variables]
        ends.append([np.array(variable) for variable in variables])
    loop._slots = slots
    figures = both[0].train(180)
    ours, theirs = ([*each.model.variables, *each.averages.variables] for each in both)
    for variable, value in zip(theirs, ours, strict=True):
        variable.assign(value.numpy())
    state = both[0].state
    return {
        "distances": [float(np.max(np.abs(x - y))) for x, y in zip(*ends, strict=True)],
        "step": both[0].step,
        "iterations": int(both[0].optimizer.iterations.numpy()),
        "batches": int(state.batches),
        "examples": float(state.sums[0]),  # reading resets it
        "loss": figures["loss"],
        "traces": loop._make_updates.experimental_get_tracing_count(),
        "evaluations": [each.evaluate() for each in both],
        "predictions": [each.predict(IMAGES).tolist() for each in both],
    }


def streamed(strategy: tf.distribute.Strategy) -> Any:
    """Returns the updates that a stream of TensorFlow's operations made, and losses."""
    rows = tf.data.Dataset.from_tensor_slices(parity_cases.UNEVEN).shuffle(131, seed=1).batch(5)
    with strategy.scope():
        trainer = ddl.Trainer(parity_cases.cnn(), "sgd", rows, global_batch_size=16)
    losses = [trainer.train(updates)["loss"] for updates in (10, 60)]
    return [trainer.step, *losses]


def refused(strategy: tf.distribute.Strategy) -> Any:
    """Returns the errors for data that cannot be sent to workers, and for a loss scale."""
    items = [{"image": image, "label": 1} for image in IMAGES]
    wrong: list[tuple[str, Any]] = [("float32", items), ("float32", lambda: iter(items))]
    wrong.append(("mixed_float16", parity_cases.UNEVEN))
    return [_error(strategy, *each) for each in wrong]


def _error(strategy: tf.distribute.Strategy, precision: str, data: Any) -> str | None:
    set_precision(precision)
    try:
        with strategy.scope():
            ddl.Trainer(parity_cases.cnn(), "sgd", data, global_batch_size=16)
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
