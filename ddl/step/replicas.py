"""Where an update meets tf.distribute: the distributed data set, `strategy.run`, `strategy.reduce`.

    one distributed data set        each replica's rows of every update; of arrays on the devices
                                    the loop has tables of rows (`ddl.training.loop.RowTables`)
    one strategy.run a microbatch   its sum is added to those before, on each replica
    one all-reduce a gradient       of all its variables, in few buffers
    one strategy.reduce a gradient  of a float64 vector of metric sums

In training, all losses of a task run below `over_microbatches`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ddl.data.iterators import iterator_of
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.communication import reduce_options
from ddl.distribution.devices import local_devices
from ddl.distribution.path import CPU, path_of
from ddl.distribution.workers import Workers
from ddl.step.clipping import Variables

_SUM = tf.distribute.ReduceOp.SUM

# ResourceHandle::ANONYMOUS_NAME of TensorFlow: each execution creates a new variable. A name drawn
# at trace time would be shared by all workers of parameter servers, which share a trace.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


def distributed_iterator(
    pipeline: BatchPipeline,
    strategy: tf.distribute.Strategy,
    first_update: int = 0,
    *,
    repeats: bool = False,
) -> Any:
    """Returns an endless iterator that gives each replica its own rows, on its device.

    Cross-replica context, eager.

    Args:
      pipeline: The batches.
      strategy: The strategy.
      first_update: As in `BatchPipeline.rows`.
      repeats: As in `BatchPipeline.rows`.
    """
    dataset, reader = pipeline.rows(strategy, first_update, repeats=repeats)
    distributed: Any = dataset
    if Workers(strategy).number > 1:
        # `experimental_distribute_dataset` would batch anew over the replicas of all workers.
        distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
    elif path_of(strategy) != CPU or strategy.num_replicas_in_sync > 1:
        distributed = strategy.experimental_distribute_dataset(dataset)
    # A single CPU needs no copies to devices, which take as long as to read small batches.
    iterator = iterator_of(distributed)
    iterator._ddl_reader = reader
    return iterator


def over_microbatches(
    strategy: tf.distribute.Strategy,
    microbatches: int,
    one: Callable[[Any, Any, Any], Any],
    batch: Any,
    zeros: Callable[[], Any],
) -> Any:
    """Returns the sum of a function of the microbatches, of each replica. Cross-replica context.

    The loop is outside of strategy.run, so that layers can communicate across replicas in each
    microbatch, as batch normalization does. One microbatch at a time is in memory; TensorFlow's
    default would let up to 10 run forward before the first one runs backward.

    A loop carries its tensors on one device, to which all other GPUs would send their sums in each
    turn. Several GPUs therefore add in variables of their own, which live for one update.

    Args:
      strategy: The strategy.
      microbatches: Number of microbatches.
      one: Takes the batch, the number of the microbatch and the sum so far; returns the sum with
        that microbatch, or the microbatch's own if the sum so far is None. Replica context.
      batch: The batch, with the rows of each replica.
      zeros: Returns the empty sum. Replica context.
    """

    def run(index: tf.Tensor | int, so_far: Any) -> Any:
        return strategy.run(one, args=(batch, index, so_far))

    if microbatches == 1:
        return run(0, None)
    start = strategy.run(zeros)
    if not sums_in_variables(strategy):
        return tf.while_loop(
            lambda index, so_far: index < microbatches,
            lambda index, so_far: (index + 1, run(index, so_far)),
            (tf.constant(0), start),
            parallel_iterations=1,
        )[1]
    handles = strategy.run(_zero_variables, args=(start,))

    def turn(index: tf.Tensor) -> tuple[tf.Tensor]:
        strategy.run(_add_to, args=(handles, run(index, None)))
        return (index + 1,)

    first = (tf.constant(0),)
    tf.while_loop(lambda index: index < microbatches, turn, first, parallel_iterations=1)
    return strategy.run(_read_once, args=(handles, start))


class AllReduce:
    """Sums over all replicas. Cross-replica context, in a graph.

    Several workers pack gradients into buffers of a given size, last layers first. The backward
    pass computes these first, so that their all-reduce overlaps with the rest of the pass.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Keeps the strategy under which the gradients are computed."""
        self._strategy = strategy
        self._options = reduce_options()

    def __call__(self, gradients: Sequence[Any], variables: Variables) -> list[Any]:
        """Returns the sums, one per variable, present on every replica.

        TensorFlow's reduce packs in reverse order, one dtype at a time.

        Args:
          gradients: One value per variable; a per-replica value with several replicas.
          variables: The variables, in the order of the gradients.
        """
        sums: list[Any] = list(gradients)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        # The reduce concatenates the gradients of a buffer, so they must share a dtype.
        for dtype in dict.fromkeys(variable.value.dtype for variable in variables):
            places = [i for i, v in enumerate(variables) if v.value.dtype == dtype]
            pairs = [(gradients[i], variables[i].value) for i in places]
            reduced = self._strategy.extended.batch_reduce_to(_SUM, pairs, self._options)
            for place, gradient in zip(places, reduced, strict=True):
                sums[place] = gradient
        return sums

    def of_sums(self, sums: Any) -> tf.Tensor:
        """Returns the sum of a float64 vector over all replicas, on the first one's device.

        `tf.distribute.Strategy.reduce` adds on the host, for which GPUs would have to wait.

        Args:
          sums: The vector of each replica.
        """
        if not path_of(self._strategy).sums_on_devices:
            return self._strategy.reduce(_SUM, sums, axis=None)
        if self._strategy.num_replicas_in_sync == 1:
            return sums
        reduced = self._strategy.extended.reduce_to(_SUM, sums, sums, self._options)
        return self._strategy.experimental_local_results(reduced)[0]


# ------------------------------------------------------------ sums of several GPUs


def sums_in_variables(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas add up their microbatches in variables of their own."""
    return len(local_devices(strategy)) > 1 and path_of(strategy).sums_on_devices


def _zero_variables(like: Any) -> list[tf.Tensor]:
    """Returns handles of new variables of zeros on the current device, one for each tensor."""
    handles = []
    for one in tf.nest.flatten(like):
        # Not tf.zeros: TensorFlow would keep it as a constant, and copy it in each update.
        zeros = tf.raw_ops.Empty(shape=one.shape.as_list(), dtype=one.dtype, init=True)
        handle = tf.raw_ops.VarHandleOp(dtype=one.dtype, shape=one.shape, shared_name=_ANONYMOUS)
        tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
        handles.append(handle)
    return handles


def _add_to(handles: list[tf.Tensor], values: Any) -> None:
    for handle, value in zip(handles, tf.nest.flatten(values), strict=True):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.convert_to_tensor(value))


def _read_once(handles: list[tf.Tensor], like: Any) -> Any:
    """Returns the values of variables, and ends the variables."""
    values = []
    for handle, one in zip(handles, tf.nest.flatten(like), strict=True):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=one.dtype)
        with tf.control_dependencies([value]):
            tf.raw_ops.DestroyResourceOp(resource=handle)
        values.append(tf.ensure_shape(value, one.shape))
    return tf.nest.pack_sequence_as(like, values)
