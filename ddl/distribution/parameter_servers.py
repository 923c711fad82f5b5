"""Start-up of clusters with parameter servers, and their end.

A chief leads such a cluster and is the only process that runs the program. Workers and parameter
servers are TensorFlow servers that execute what the chief sends (`ddl.training.asynchronous`).
TensorFlow reassigns the updates of a lost worker to the others and readmits the worker when it is
back. It waits forever for a worker that neither answers nor dies, so the chief probes every task,
and the tasks probe the chief.
"""

import os
import threading
import time

import tensorflow as tf

from ddl.distribution.addresses import ask, close_to_other_machines, silence, taken
from ddl.distribution.cluster import ClusterRole, ClusterTimeouts, cluster_role
from ddl.errors import ConfigError, WorkerLost
from ddl.output import say
from ddl.signals import StopSignals, keeping_handlers

_PAUSE = 1.0
# A chief that has ended refuses every connection; a network problem refuses only some.
_REFUSALS = 3
# A dead parameter server has lost its weights. These seconds let TensorFlow's pending call raise
# first.
_PATIENCE_WITH_THE_DEAD = 5.0

NAMES = {"chief": "Chief", "worker": "Worker", "ps": "Parameter server"}
"""Names of the kinds of tasks, for messages."""


def serves_here() -> bool:
    """Returns whether TF_CONFIG makes this process a worker or a parameter server.

    Raises:
      ConfigError: If TF_CONFIG is malformed, or does not name a chief, workers and parameter
        servers and this process's task among them.
    """
    role = cluster_role()
    if role.kind not in NAMES or not NAMES.keys() <= role.cluster.keys():
        raise ConfigError(
            "parameter_server needs the environment variable TF_CONFIG with a chief, workers and "
            "parameter servers (ps), and the task of this process. `python -m ddl.launch "
            "--num_ps=1 --num_workers=2 -- …` sets it."
        )
    return role.kind != "chief"


# ---------------------------------------------------------------- a worker, a parameter server


def serve(timeouts: ClusterTimeouts) -> None:
    """Executes what the chief sends, and returns when the chief has ended. Main thread only.

    The first SIGTERM or SIGINT does not end the process: a chief that received a signal too still
    saves the weights on the parameter servers.

    Args:
      timeouts: Seconds to wait for the chief at the start, and seconds of silence after which the
        chief is lost.

    Raises:
      WorkerLost: If the chief does not join in time, becomes unreachable or stalls.
      AddressTaken: If TensorFlow cannot use this process's address.
    """
    role = cluster_role()
    chief, signalled = role.cluster["chief"][0], threading.Event()
    with StopSignals(signalled.set):
        try:
            _server = start_server(role)  # runs until the object is freed
        except tf.errors.OpError as error:
            raise taken(f"{NAMES[role.kind]} {role.index}", error.message) from error
        _wait_for("The chief", chief, time.monotonic(), timeouts.join)
        _wait_for_end(chief, timeouts, signalled)


def _wait_for_end(chief: str, timeouts: ClusterTimeouts, signalled: threading.Event) -> None:
    """Probes the chief until it refuses connections: once if a signal came, else several times.

    Raises:
      WorkerLost: If the chief becomes unreachable or stalls.
    """
    heard, refusals = time.monotonic(), 0
    while refusals < (1 if signalled.is_set() else _REFUSALS):
        answer = ask(chief, min(_PAUSE, timeouts.peer))
        refusals = refusals + 1 if answer == "refuses" else 0
        heard = time.monotonic() if answer in ("greets", "refuses") else heard
        if silent := silence(answer, heard, timeouts):
            raise WorkerLost(f"The chief at {chief} {silent}. Check its log; restart all tasks.")
        if signalled.wait(_PAUSE):  # the launcher sends one when the chief ended
            time.sleep(_PAUSE / 10)


def start_server(role: ClusterRole) -> tf.distribute.Server:
    """Starts TensorFlow's server for a task of a cluster; it runs as long as the process."""
    # An operation that waits for another process holds a thread. One thread per core would
    # deadlock on small machines, where all threads could wait.
    threads = max(os.cpu_count() or 1, 4 + sum(map(len, role.cluster.values())))
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
    server = tf.distribute.Server(role.cluster, role.kind, role.index, config=config)
    close_to_other_machines(role.cluster, role.cluster[role.kind][role.index])
    return server


def _wait_for(who: str, address: str, since: float, timeout: float) -> None:
    while ask(address, _PAUSE) != "greets":
        if time.monotonic() > since + timeout:
            raise WorkerLost(
                f"{who} at {address} did not join within {timeout:g} s. Check its log, then "
                "restart all tasks."
            )
        time.sleep(0.1)


# ---------------------------------------------------------------- the chief


def build_parameter_server_strategy(timeouts: ClusterTimeouts) -> tf.distribute.Strategy:
    """Connects the chief to all other tasks. Must run before any other operation of the process.

    Call it from the main thread.

    Args:
      timeouts: Seconds to wait for others to join, and seconds of silence after which a task is
        lost.

    Raises:
      WorkerLost: If a task does not join in time.
      ConfigError: If TF_CONFIG does not make this process the chief, or workers have more than one
        GPU each.
    """
    if serves_here():
        raise ConfigError(
            "parameter_server must be built on the chief, but TF_CONFIG makes this process "
            "another task. Call ddl.distribution.parameter_servers.serve here."
        )
    cluster = cluster_role().cluster
    since = time.monotonic()
    for kind in ("ps", "worker"):
        for index, address in enumerate(cluster[kind]):
            _wait_for(f"{NAMES[kind]} {index}", address, since, timeouts.join)
    with keeping_handlers():
        strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        )
    close_to_other_machines(cluster, cluster["chief"][0])
    if strategy.num_replicas_in_sync > 1:
        raise ConfigError(
            "With parameter servers each worker must use at most one GPU, got "
            f"{strategy.num_replicas_in_sync}. Start one worker per GPU (ddl.launch --pin_gpus)."
        )
    return strategy


def watch_tasks(timeouts: ClusterTimeouts) -> None:
    """Probes every worker and parameter server in TF_CONFIG from now on, each in its own thread.

    TensorFlow reassigns the updates of a lost worker to the others and readmits the worker when it
    is back, but waits forever for a task that neither answers nor dies. A lost parameter server, a
    stopped or unreachable worker, and the loss of all workers end this process with the status of
    WorkerLost, even if its main thread is blocked. A worker that died is reported, and training
    continues on the others.

    Args:
      timeouts: Seconds of silence after which a task is lost.
    """
    cluster, gone = cluster_role().cluster, set[str]()
    for kind in ("ps", "worker"):
        for index, address in enumerate(cluster[kind]):
            given = (kind, index, address, gone, len(cluster["worker"]), timeouts)
            threading.Thread(target=_watch, args=given, daemon=True).start()


def _watch(
    kind: str, index: int, address: str, gone: set[str], workers: int, timeouts: ClusterTimeouts
) -> None:
    """Probes a task; all threads share the addresses of workers that are gone."""
    who, heard = f"{NAMES[kind]} {index} at {address}", time.monotonic()
    dead = timeouts._replace(peer=min(_PATIENCE_WITH_THE_DEAD, timeouts.peer))
    while True:
        answer = ask(address, min(timeouts.peer, timeouts.stall, 10 * _PAUSE))
        refuses = answer == "refuses"
        if answer == "greets" and address in gone:
            gone.discard(address)
            say(f"{who} is back.")
        elif refuses and kind == "worker" and address not in gone:
            gone.add(address)
            say(f"{who} is lost. The other workers compute its updates until it is back.")
        if answer == "greets" or (refuses and kind == "worker" and len(gone) < workers):
            heard = time.monotonic()
        if silent := silence(answer, heard, dead if refuses and kind == "ps" else timeouts):
            # At once: the main thread may be blocked forever.
            say(f"{who} {silent}. Restart all tasks; they resume from the last checkpoint.")
            os._exit(WorkerLost.exit_status)
        time.sleep(_PAUSE)
