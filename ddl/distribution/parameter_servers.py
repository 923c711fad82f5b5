"""Clusters with parameter servers: start-up, and detection of lost tasks.

A chief leads such a cluster and is the only process that runs the program. Workers and parameter
servers are TensorFlow servers that execute what the chief sends (`ddl.training.asynchronous.loop`).
TensorFlow reassigns the updates of a lost worker to the others and readmits the worker when it is
back. But TensorFlow waits forever for a worker that neither answers nor dies, so the chief probes
every task.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

import tensorflow as tf

from ddl.distribution.grpc_probe import Answer, ask
from ddl.distribution.loopback import close_to_other_machines
from ddl.distribution.tf_config import cluster_role
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.errors import AddressTaken, ConfigError, WorkerLost
from ddl.output import say
from ddl.signals import keeping_handlers

_PAUSE = 1.0
_LOOK = 0.05  # seconds between looks for a signal in a pause
# A dead parameter server has lost its weights. These seconds let TensorFlow's pending call raise
# first.
_PATIENCE_WITH_THE_DEAD = 5.0
# A chief that has ended refuses every connection; a network problem refuses only some.
_REFUSALS = 3

# For messages.
_NAMES = {"chief": "Chief", "worker": "Worker", "ps": "Parameter server"}
_SILENCE: dict[Answer, str] = {
    "refuses": "has refused connections",
    "is silent": "has not answered",
    "is unreachable": "has been unreachable",
}


def serves_here() -> bool:
    """Returns whether TF_CONFIG makes this process a worker or a parameter server.

    Raises:
      ConfigError: If TF_CONFIG is malformed, or does not name a chief, workers and parameter
        servers and this process's task among them.
    """
    role = cluster_role()
    kinds = {"chief", "worker", "ps"}
    if role.kind not in kinds or not kinds <= role.cluster.keys():
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
    saves the weights on the parameter servers. A second signal ends the process at once.

    Args:
      timeouts: Seconds to wait for the chief at the start, and seconds of silence after which the
        chief is lost.

    Raises:
      WorkerLost: If the chief does not join in time, becomes unreachable or stalls.
      AddressTaken: If TensorFlow cannot use this process's address.
    """
    role = cluster_role()
    cluster, kind, index = role.cluster, role.kind, role.index
    signals = _hold_signals()
    try:
        server = start_server(cluster, kind, index)
    except tf.errors.OpError as error:
        raise AddressTaken(
            f"{_NAMES[kind]} {index} could not bind its address in TF_CONFIG, "
            f"{cluster[kind][index]}: {error.message}. Another process may use the port; choose a "
            "free one."
        ) from error
    chief = cluster["chief"][0]
    _wait_for("The chief", chief, time.monotonic(), timeouts.join)
    _wait_for_end_of_chief(chief, timeouts, signals)
    del server


def _wait_for_end_of_chief(chief: str, timeouts: ClusterTimeouts, signals: Sequence[int]) -> None:
    """Probes the chief until it refuses connections: once if a signal came, else several times.

    Raises:
      WorkerLost: If the chief becomes unreachable or stalls.
    """
    heard, refusals = time.monotonic(), 0
    while refusals < (1 if signals else _REFUSALS):
        answer = ask(chief, min(_PAUSE, timeouts.peer))
        refusals = refusals + 1 if answer == "refuses" else 0
        if answer in ("greets", "refuses"):
            heard = time.monotonic()
        elif (silent := time.monotonic() - heard) > (
            timeouts.peer if answer == "is unreachable" else timeouts.stall
        ):
            raise WorkerLost(
                f"The chief at {chief} {_SILENCE[answer]} for {silent:.0f} s. Check its log, then "
                "restart all tasks."
            )
        _pause(signals)


def start_server(
    cluster: Mapping[str, Sequence[str]], kind: str, index: int
) -> tf.distribute.Server:
    """Starts TensorFlow's server for a task of a cluster; it runs as long as the process.

    Args:
      cluster: Addresses, host:port, by kind of task.
      kind: Kind of this task: "chief", "worker" or "ps".
      index: Number of this task among those of its kind.
    """
    # An operation that waits for another process holds a thread. One thread per core would
    # deadlock on small machines, where all threads could wait.
    threads = max(os.cpu_count() or 1, 4 + sum(map(len, cluster.values())))
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
    server = tf.distribute.Server(
        cluster, job_name=kind, task_index=index, protocol="grpc", config=config
    )
    close_to_other_machines(cluster, cluster[kind][index])
    return server


def _pause(signals: Sequence[int]) -> None:
    """Waits, and no longer than to the next signal: the launcher sends one when the chief ended."""
    received, end = len(signals), time.monotonic() + _PAUSE
    while len(signals) == received and time.monotonic() < end:
        time.sleep(_LOOK)  # Python resumes a sleep after a signal


def _hold_signals() -> list[int]:
    """Returns a list that collects SIGTERM and SIGINT; a second one ends the process."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return received


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
            "The parameter server strategy must be built on the chief, but TF_CONFIG makes this "
            "process another task. Call ddl.distribution.parameter_servers.serve here."
        )
    cluster = cluster_role().cluster
    peers = [
        (kind, index, at) for kind in ("ps", "worker") for index, at in enumerate(cluster[kind])
    ]
    since = time.monotonic()
    for kind, index, address in peers:
        _wait_for(f"{_NAMES[kind]} {index}", address, since, timeouts.join)
    with keeping_handlers():
        strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        )
    close_to_other_machines(cluster, cluster["chief"][0])
    if strategy.num_replicas_in_sync > 1:
        raise ConfigError(
            "With parameter servers each worker must use at most one GPU, got "
            f"{strategy.num_replicas_in_sync}. Start one worker per GPU (ddl.launch --pin=gpus)."
        )
    watch = _Watch(len(cluster["worker"]), timeouts)
    for kind, index, address in peers:
        watch.begin(kind, index, address)
    return strategy


class _Watch:
    """Probes of every worker and parameter server, each from its own thread.

    A lost parameter server, a stopped or unreachable worker, and the loss of all workers end this
    process, even if its main thread is blocked. A worker that died is reported, and training
    continues on the others.
    """

    def __init__(self, num_workers: int, timeouts: ClusterTimeouts):
        self._num_workers = num_workers
        self._timeouts = timeouts
        self._gone: set[int] = set()  # workers

    def begin(self, kind: str, index: int, address: str) -> None:
        threading.Thread(
            target=self._watch, args=(kind, index, address), name=f"watch {address}", daemon=True
        ).start()

    def _watch(self, kind: str, index: int, address: str) -> None:
        who = f"{_NAMES[kind]} {index} at {address}"
        heard = time.monotonic()
        while True:
            answer = ask(address, min(self._timeouts.peer, self._timeouts.stall, 10 * _PAUSE))
            if answer == "greets":
                heard = time.monotonic()
            silent = time.monotonic() - heard
            if kind == "worker":
                self._note(index, who, answer)
                if answer == "refuses" and len(self._gone) < self._num_workers:
                    heard = time.monotonic()
            patience = self._timeouts.stall if answer == "is silent" else self._timeouts.peer
            if kind == "ps" and answer == "refuses":
                patience = min(_PATIENCE_WITH_THE_DEAD, patience)
            if silent > patience:
                _end(f"{who} {_SILENCE[answer]} for {silent:.0f} s")
            time.sleep(_PAUSE)

    def _note(self, index: int, who: str, answer: Answer) -> None:
        if answer == "refuses" and index not in self._gone:
            self._gone.add(index)
            say(f"{who} is lost. The other workers compute its updates until it is back.")
        elif answer == "greets" and index in self._gone:
            self._gone.discard(index)
            say(f"{who} is back.")


def _end(why: str) -> NoReturn:
    """Reports the reason and exits at once: the main thread may be blocked forever."""
    say(f"{why}. Restart all tasks; they resume from the last checkpoint.")
    os._exit(WorkerLost.exit_status)
