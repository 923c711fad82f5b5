"""Several processes that train together: how they join, and what they agree on.

Each worker runs the whole program and holds a copy of all weights. What decides how long a loop is,
where a run stops and what it goes on with is asked of all of them here, since the updates of one
wait for those of the others.
"""

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import collective_all_reduce_strategy, multi_worker_util
from tensorflow.python.eager import context

from ddl.cluster_timeouts import ClusterTimeouts
from ddl.errors import DdlError, ModelDirectoryError
from ddl.peers import Peers, lost
from ddl.rendezvous import wait_for_workers
from ddl.signals import keeping_answers

_Strategy = tf.distribute.MultiWorkerMirroredStrategy

_TYPES = ("chief", "worker")

# Of this process, which belongs to one cluster at most.
_PEERS: list[Peers] = []

# What a worker that dies leaves behind reaches TensorFlow first.
_NEWS_SECONDS = 2.0

# After an end of the time to join that TensorFlow notices by itself.
_ALARM_SECONDS = 5.0

# What TensorFlow raises where a collective was broken off, or is one that a peer never joins.
_BROKEN_OFF = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)

# These also come of what a worker computes by itself.
_MAY_BE_ITS_OWN = (tf.errors.FailedPreconditionError, tf.errors.InternalError)


def build_multi_worker_strategy(
    options: tf.distribute.experimental.CommunicationOptions,
    timeouts: ClusterTimeouts,
) -> tf.distribute.Strategy:
    """Joins the cluster that TF_CONFIG names. Before any other operation of the process.

    Args:
      options: How gradients travel.
      timeouts: After which time it is an error that others have not joined, and after which silence
        one is lost.

    Raises:
      WorkerLost: If others do not join in time. If they die after that but before TensorFlow has
        joined, the process ends by SIGALRM soon after that time: no Python code runs then.
    """
    spec = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
        for job in _TYPES
        if job in spec.jobs
    ]
    # TensorFlow would configure it with timeouts of its own, if it were not by now.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        coordinated_jobs=jobs,
        # Its own watch is the second line: ddl's, which says who was lost, comes first.
        cluster_register_timeout_in_ms=int(1000 * timeouts.join),
        heartbeat_timeout_in_ms=int(2000 * max(timeouts.peer, timeouts.stall)),
    )
    connections, names = wait_for_workers(timeouts.join)
    peers = Peers(connections, names, peer_timeout=timeouts.peer, stall_timeout=timeouts.stall)
    _PEERS.append(peers)
    alarm = _alarm(timeouts.join + _ALARM_SECONDS)
    with _all_local_devices(), alarm, worker_errors(), keeping_answers():
        strategy = _Strategy(communication_options=options)
        Workers(strategy).any(False)  # all are there when this returns
        return strategy


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Has the kernel end the process, if the `with` block takes longer. Main thread only."""
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def worker_errors() -> Iterator[None]:
    """Says in a line which other process of the cluster was lost.

    Raises:
      WorkerLost: In place of what TensorFlow raises for it. An internal error or a failed
        precondition stays what it is where no loss is known.
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
    """The first line that says something, after those about where in a graph it was."""
    where = ("Graph execution error", "Detected at node", "<stack traces", " ")
    lines = [line for line in error.message.splitlines() if line and not line.startswith(where)]
    return lines[0].split(" [Op:")[0] if lines else "it says no more"


@contextmanager
def leaving() -> Iterator[None]:
    """Tells the other workers when the `with` block ends by itself, and how.

    Of an error that nobody foresaw the end of the process tells them, so that the first of all to
    end is the one that says what happened.
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
    """Lets a worker without GPUs use each of its virtual CPU devices, where TensorFlow takes one.

    Held by tests/test_workers.py.
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
                for device in tf.config.list_logical_devices("CPU")  # of all workers
            ]
            count = sum((one.job, one.task) == (own.job, own.task) for one in present)
            found = tuple(f"{worker}/device:CPU:{number}" for number in range(count))
        return found, kind

    extended._initialize_local_devices = devices
    try:
        yield
    finally:
        extended._initialize_local_devices = initialize


class Workers:
    """The processes of a strategy: one, or those of a cluster. Eager, cross-replica context.

    Every method but the properties is to be called by all of them, in the same order.

    Attributes:
      number: How many there are.
      index: Which one this is, from 0.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Asks the strategy."""
        self._strategy = strategy
        self.number = 1
        self.index = 0
        if isinstance(strategy, _Strategy):
            self.number = strategy.extended._num_workers
            self.index = strategy.extended._id_in_cluster

    @property
    def replicas_of_each(self) -> int:
        """How many replicas a process has."""
        return self._strategy.num_replicas_in_sync // self.number

    @property
    def is_chief(self) -> bool:
        """Whether this one writes what all have in common."""
        return self.index == 0

    def any(self, value: bool) -> bool:
        """Whether it holds on any of them."""
        return bool(self._total([float(value)])[0])

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Ends in an error on all of them if the `with` block, which asks nobody, does on one.

        Raises:
          DdlError: What the block raised here, or a ModelDirectoryError for that of another.
        """
        failure: DdlError | None = None
        try:
            yield
        except DdlError as error:
            failure = error
        if self.any(failure is not None):
            raise failure or ModelDirectoryError("another worker failed; its output says how")

    def of_chief(self, value: int) -> int:
        """The chief's value, up to 2^53."""
        return int(self.figure_of_chief(float(value)))

    def figure_of_chief(self, value: float) -> float:
        """The chief's value, the same to the bit on all of them."""
        return float(self._total([value if self.is_chief else 0.0])[0])

    def texts(self, text: str) -> list[str]:
        """The text that each one gave, in their order."""
        own = np.frombuffer(text.encode(), np.uint8)
        lengths = self.rows(np.array([len(own)]))[:, 0].astype(int)
        rows = self.rows(np.pad(own, [0, lengths.max() - len(own)])).astype(np.uint8)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def rows(self, values: np.ndarray) -> np.ndarray:
        """What each one gave: float64 [number, n] of [n], as many on each."""
        matrix = np.zeros([self.number, len(values)])
        matrix[self.index] = values
        return self._total(matrix.ravel()).reshape(matrix.shape)

    def _total(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums over the processes: float64 [n]."""
        if self.number == 1:
            return np.asarray(values, np.float64)
        total = _summing(self._strategy)(tf.constant(values, tf.float64)).numpy()
        return total / self.replicas_of_each


@functools.cache
def _summing(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Sums over all replicas; traced once a shape, which collectives must know."""

    @tf.function(autograph=False)
    def total(values: tf.Tensor) -> tf.Tensor:
        per_replica = strategy.run(lambda: tf.identity(values))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    return total
