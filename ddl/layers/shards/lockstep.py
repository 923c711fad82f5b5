"""The shards of a replica, traced side by side in one graph.

Each shard is traced in a thread of its own, as tf.distribute traces each replica. One thread runs
at a time. Where a layer exchanges values with the other shards, each thread waits until all have
come there; the replica's own thread then computes the exchange.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.framework import ops

from ddl.devices.replicas import local_devices
from ddl.errors import ConfigError
from ddl.layers.replica_gather import gather_over_replicas
from ddl.layers.shards.tree import exchanged, sum_in_tree, sum_rows_in_tree

_Result = TypeVar("_Result")
_Exchange = Callable[[list[tf.Tensor]], tf.Tensor]

WRITES = "writes_of_shards"
"""Scope of the operations that write what the shards held back."""

_OF_THREAD = threading.local()


class _StoppedError(Exception):
    """Ends a thread after an error in another one."""


class Shard:
    """A shard of a replica's rows.

    Attributes:
      number: Its number among those of the replica, from 0.
      count: Number of shards of a replica.
      given: The values that `over_shards` was given for all shards.
    """

    def __init__(self, number: int, given: Any, of: "_Lockstep"):
        """Belongs to the shards `of` a replica."""
        self.number = number
        self.count = of.count
        self.given = given
        self._of = of
        self._written: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def sum_of_all(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the values of all shards of all replicas, in one fixed tree.

        Args:
          values: Tensor of one static shape on all shards.
        """

        def total(parts: list[tf.Tensor]) -> tf.Tensor:
            (rows,) = gather_over_replicas([sum_in_tree(parts)[tf.newaxis]])
            return exchanged(sum_rows_in_tree(rows))

        return self._of.exchange(self, values, total)

    def from_all(self, values: tf.Tensor, combined: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns what a function makes of the values of all shards, computed once for them.

        Args:
          values: Tensor of one static shape on all shards.
          combined: Takes the values of each shard of all replicas, in the order of the shards,
            [shards, …].
        """

        def of_rows(parts: list[tf.Tensor]) -> tf.Tensor:
            return combined(exchanged(gather_over_replicas([tf.stack(parts)])[0]))

        return self._of.exchange(self, values, of_rows)

    @contextlib.contextmanager
    def keeping_writes(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Holds assignments to variables back, which are the same in all shards, until the end.

        The replica then assigns the values of its first shard, once.

        Args:
          variables: The variables that the `with` block may assign.
        """
        known = [self._written[id(v)] for v in variables if id(v) in self._written]
        with keras.StatelessScope(state_mapping=known) as scope:
            yield
        written = scope.state_mapping.keys() - {id(variable) for variable in variables}
        assert not written, "a layer writes a variable that is not kept"
        for variable in variables:
            value = scope.get_current_value(variable)
            if value is not None:
                self._written[id(variable)] = variable, value

    def write(self) -> None:
        """Assigns what was held back. In the replica's thread."""
        with tf.name_scope(WRITES):
            for variable, value in self._written.values():
                variable.assign(value)


def current() -> Shard | None:
    """Returns the shard that this thread traces; None outside of shards."""
    return getattr(_OF_THREAD, "shard", None)


def over_shards(
    count: int,
    function: Callable[[], _Result],
    given: Any = None,
    check: Callable[[Sequence[tf.Operation]], None] | None = None,
) -> list[_Result]:
    """Returns a function's result of each shard of this replica. Replica context, in a graph.

    Variables that a layer writes under `Shard.keeping_writes` are written once, at the end.

    Args:
      count: Number of shards of each replica.
      function: Computes a shard, which `current` returns.
      given: The attribute `given` of the shards.
      check: Called with the operations of the shards before those writes.

    Raises:
      ConfigError: If the shards exchange values in different places.
    """
    return _Lockstep(count).run(function, given, check)


class _Lockstep:
    """The shards of one replica, whose threads take turns."""

    def __init__(self, count: int):
        self.count = count
        self._graph = tf.compat.v1.get_default_graph()
        self._stops = False
        self._threads: list[_ShardThread] = []

    def run(
        self,
        function: Callable[[], Any],
        given: Any,
        check: Callable[[Sequence[tf.Operation]], None] | None,
    ) -> list[Any]:
        before = len(self._graph.get_operations())
        with _inherited() as enter:
            self._threads = [
                _ShardThread(Shard(number, given, self), function, enter)
                for number in range(self.count)
            ]
            try:
                while not self._all_ended():
                    self._exchange()
            finally:
                self._stop()
        if check is not None:
            check(self._graph.get_operations()[before:])
        self._threads[0].shard.write()
        return [thread.result for thread in self._threads]

    def exchange(self, shard: Shard, values: tf.Tensor, exchange: _Exchange) -> tf.Tensor:
        """Waits for all shards; returns what `exchange` makes of their values."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ConfigError(
                "A layer exchanges values between the shards of a batch (Trainer.batch_shards) "
                "within a loop, a conditional or a tf.function of the model. Call it outside."
            )
        thread = self._threads[shard.number]
        thread.pending = values, exchange
        thread.pause()
        if self._stops:
            raise _StoppedError
        return thread.received

    def _all_ended(self) -> bool:
        """Runs each thread to its next exchange or its end; returns whether all have ended."""
        for thread in self._threads:
            thread.resume()
            if thread.error is not None:
                raise thread.error
        ended = [thread.has_ended for thread in self._threads]
        if any(ended) and not all(ended):
            raise ConfigError(
                "The shards of a batch (Trainer.batch_shards) exchange values at different "
                "places. All shards must call the same layers in the same order."
            )
        return all(ended)

    def _exchange(self) -> None:
        pending = [thread.pending for thread in self._threads]
        made = pending[0][1]([values for values, _ in pending])
        for thread in self._threads:
            thread.received = made

    def _stop(self) -> None:
        self._stops = True
        for thread in self._threads:
            while not thread.has_ended:
                thread.resume()
            thread.join()


class _ShardThread(threading.Thread):
    """The thread that traces a shard."""

    def __init__(self, shard: Shard, function: Callable[[], Any], enter: Callable[[], Any]):
        super().__init__(daemon=True)
        self.shard = shard
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.pending: Any = None
        self.received: Any = None
        self._function = function
        self._enter = enter
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        self._may_run.acquire()
        try:
            _OF_THREAD.shard = self.shard
            with self._enter():
                self.result = self._function()
        except _StoppedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.has_ended = True
            self._has_paused.release()

    def resume(self) -> None:
        """Runs the thread until it pauses or ends. From the replica's thread."""
        self._may_run.release()
        self._has_paused.acquire()

    def pause(self) -> None:
        """Waits until the replica's thread resumes this one."""
        self._has_paused.release()
        self._may_run.acquire()


@contextlib.contextmanager
def _inherited() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Yields a function that enters this thread's graph, replica and device in another thread.

    The functions are private to TensorFlow, which makes the threads of replicas with them;
    tests/layers/shards/test_lockstep.py guards them.
    """
    graph = tf.compat.v1.get_default_graph()
    context = tf.distribute.get_replica_context()
    device = None
    if devices := local_devices(context.strategy):
        device = devices[context._replica_id]  # the number among those of this process
    creators = graph._variable_creator_stack[:]
    scope = graph.get_name_scope()
    with tf.init_scope():
        outer, outer_is_eager = tf.compat.v1.get_default_graph(), tf.executing_eagerly()
    graph.switch_to_thread_local()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mirrored_run._enter_graph(outer, outer_is_eager))
            stack.enter_context(mirrored_run._enter_graph(graph, False, creators))
            stack.enter_context(context)
            stack.enter_context(ops.device(device))
            stack.enter_context(ops.name_scope(f"{scope}/" if scope else ""))
            yield

    yield enter
