"""Joining and leaving a multi-worker cluster, and reports of lost workers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import collective_all_reduce_strategy, multi_worker_util
from tensorflow.python.eager import context

from ddl.distribution.heartbeat import Peers, lost
from ddl.distribution.joining import wait_for_workers
from ddl.distribution.loopback import close_to_other_machines
from ddl.distribution.tf_config import cluster_role
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.distribution.workers import Workers
from ddl.errors import DdlError
from ddl.signals import keeping_handlers

_TYPES = ("chief", "worker")


# This process's peers. A process joins at most one cluster.
_PEERS: list[Peers] = []


# Seconds to wait for `Peers` to report a loss. TensorFlow may raise before that.
_NEWS_SECONDS = 2.0


# Seconds after the join timeout in which TensorFlow may raise its own error before SIGALRM.
_ALARM_SECONDS = 5.0


# Errors that TensorFlow raises for a collective that was aborted or that a peer never joins.
_BROKEN_OFF = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


# A worker's own computation can raise these too.
_MAY_BE_ITS_OWN = (tf.errors.FailedPreconditionError, tf.errors.InternalError)


def build_multi_worker_strategy(
    options: tf.distribute.experimental.CommunicationOptions,
    timeouts: ClusterTimeouts,
) -> tf.distribute.Strategy:
    """Joins the cluster in TF_CONFIG. Must run before any other operation of the process.

    Call it from the main thread.

    Args:
      options: Options for the communication of gradients.
      timeouts: Seconds to wait for others to join, and seconds of silence after which a worker is
        lost.

    Raises:
      WorkerLost: If other workers do not join in time. If they die after the rendezvous but before
        TensorFlow has joined, SIGALRM ends the process shortly after the join timeout, since no
        Python code runs then.
      AddressTaken: If another process uses this worker's port.
      ConfigError: If TF_CONFIG does not name this worker, or its port cannot be used.
    """
    spec = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
        for job in _TYPES
        if job in spec.jobs
    ]
    # Otherwise TensorFlow would configure the coordination service later, with its own timeouts.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        coordinated_jobs=jobs,
        # TensorFlow's heartbeat is the fallback. `Peers` detects a loss first and names the worker.
        cluster_register_timeout_in_ms=int(1000 * timeouts.join),
        heartbeat_timeout_in_ms=int(2000 * max(timeouts.peer, timeouts.stall)),
    )
    connections, names = wait_for_workers(timeouts.join)
    peers = Peers(connections, names, peer_timeout=timeouts.peer, stall_timeout=timeouts.stall)
    _PEERS.append(peers)
    alarm = _alarm(timeouts.join + _ALARM_SECONDS)
    with _all_local_devices(), alarm, worker_errors(), keeping_handlers():
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        role = cluster_role()
        # Not earlier: no Python code runs while TensorFlow joins.
        close_to_other_machines(role.cluster, role.workers[role.worker_index])
        Workers(strategy).any(False)  # a barrier: all workers have joined when it returns
        return strategy


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Sets a SIGALRM that ends the process if the `with` block takes longer.

    Main thread only.

    Args:
      seconds: Time limit of the block.
    """
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def worker_errors() -> Iterator[None]:
    """Converts errors of broken collectives into one line that names the lost process.

    Raises:
      WorkerLost: Instead of TensorFlow's error. InternalError and FailedPreconditionError pass
        through unless a loss is known.
    """
    try:
        yield
    except _BROKEN_OFF as error:
        losses = [peers.loss(wait=_NEWS_SECONDS) for peers in _PEERS]
        loss = next(filter(None, losses), None)
        if loss is None and isinstance(error, _MAY_BE_ITS_OWN):
            raise
        raise lost(loss, f"{type(error).__name__}: {_cause(error)}") from error


def _cause(error: tf.errors.OpError) -> str:
    """Returns the first line of the message after those about the location in the graph."""
    where = ("Graph execution error", "Detected at node", "<stack traces", " ")
    lines = [line for line in error.message.splitlines() if line and not line.startswith(where)]
    return lines[0].split(" [Op:")[0] if lines else "no further message"


@contextmanager
def leaving() -> Iterator[None]:
    """Reports the exit status to the other workers when the `with` block ends.

    The status is 0 if the block returns, and the error's `exit_status` if it raises a DdlError.

    Unexpected errors are not announced; peers notice when the process exits. The process that
    failed is therefore the first to end, and its output shows the cause.
    """
    status: int | None = None
    try:
        yield
        status = 0
    except DdlError as error:
        status = error.exit_status
        raise
    finally:
        for peers in _PEERS:
            if status is not None:
                peers.leave(status)


@contextmanager
def _all_local_devices() -> Iterator[None]:
    """Makes a worker without GPUs use all its virtual CPU devices; TensorFlow would use one.

    tests/distribution/test_workers.py checks this patch.
    """
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    initialize = extended._initialize_local_devices

    def devices(
        self: tf.distribute.StrategyExtended, resolver: object, worker: str
    ) -> tuple[tuple[str, ...], str]:
        found, kind = initialize(self, resolver, worker)
        if kind == "CPU":
            own = tf.DeviceSpec.from_string(worker)
            present = [
                tf.DeviceSpec.from_string(device.name)
                for device in tf.config.list_logical_devices("CPU")  # those of all workers
            ]
            count = sum((one.job, one.task) == (own.job, own.task) for one in present)
            found = tuple(f"{worker}/device:CPU:{number}" for number in range(count))
        return found, kind

    extended._initialize_local_devices = devices
    try:
        yield
    finally:
        extended._initialize_local_devices = initialize
