"""Checks of a Trainer's arguments, data, model and state, and start-up notes on what they cost."""

import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.choices import check_positive
from ddl.data.pipeline import BatchPipeline
from ddl.data.stream import Stream
from ddl.distribution.devices import is_on_server, replica_devices
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError, TrainingDiverged
from ddl.layers.normalization import has_global_moments
from ddl.optimizers.fused import updates_rows
from ddl.precision import uses_tf32_unasked
from ddl.step.moving_statistics import statistics_of
from ddl.step.rows import read_as_a_whole
from ddl.step.state import TrainingState
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import copies_of, each_once, layers_of, own_items_of, own_variables_of
from ddl.tasks.task import Task

_LARGE_TABLE = 2**20  # entries, from which a dense update takes noticeable time

_MOST = 1000  # rows of an array, or files, whose sizes take time on a network drive
_FLOATS = "floats "
_REMEDY = "Lower the learning rate, clip the gradient, or check the data."


# ------------------------------------------------------------ the global batch size


def sizes_by_source(
    global_batch_size: int | Mapping[str, int], sources: Sequence[str]
) -> dict[str, int]:
    """Returns the batch size of each source; one number is that of every source.

    Raises:
      ConfigError: If a size is missing, or belongs to no source.
    """
    if not isinstance(global_batch_size, Mapping):
        return dict.fromkeys(sources, global_batch_size)
    if global_batch_size.keys() != set(sources):
        raise ConfigError(
            f"Trainer.global_batch_size must be one number, or that of each source, {sources}, got "
            f"{dict(global_batch_size)}."
        )
    return {name: global_batch_size[name] for name in sources}


def check_batch_split(size: int, replicas: int, accumulation_steps: int) -> None:
    """Checks that a global batch divides into equal microbatches over the replicas.

    Raises:
      ConfigError: If the batch does not divide evenly, with the nearest sizes that do; or if a
        number is not at least 1.
    """
    check_positive("Trainer.accumulation_steps", accumulation_steps)
    check_positive("Trainer.global_batch_size", size)
    unit = replicas * accumulation_steps
    if size % unit:
        near = " or ".join(str(n) for n in (size // unit * unit, -(-size // unit) * unit) if n)
        raise ConfigError(
            f"The global batch size must be a multiple of {unit} ({replicas} replicas × "
            f"{accumulation_steps} accumulation steps), got {size}. Use {near}, or change the "
            "number of devices."
        )


# ------------------------------------------------------------ the data


def check_same_data(workers: Workers, pipelines: Mapping[str, BatchPipeline]) -> None:
    """Compares the data of all workers: lengths, features, files, and rows of arrays in memory.

    The order of the examples follows from their number. A worker that misses a file would read
    other examples than its peers expect, so that some are repeated and others dropped. The check
    compares names of files within their folder, their sizes, and up to 1,000 rows of arrays. Rows
    of floats that differ are only warned of: machines may round a preprocessing differently. Eager,
    cross-replica context, on all workers.

    Args:
      workers: The workers.
      pipelines: The data by their name in errors.

    Raises:
      DataError: On all workers, if a worker differs from worker 0; says in what.
    """
    if workers.number == 1:
        return
    facts = {f"{fact} of the {n}": v for n, p in pipelines.items() for fact, v in _facts(p).items()}
    expected, *others = [json.loads(text) for text in workers.gather_texts(json.dumps(facts))]
    for (name, here), (number, there) in itertools.product(expected.items(), enumerate(others, 1)):
        if here == there.get(name):
            continue
        message = (
            f"All workers must read the same data, but the {name} are {here} on worker 0 and "
            f"{there.get(name)} on worker {number}. Give all workers the same files and arrays."
        )
        if not name.startswith(_FLOATS):
            workers.barrier()
            raise DataError(message)
        logging.warning("%s Ignore this if they differ by rounding alone.", message)


def _facts(pipeline: BatchPipeline) -> dict[str, str]:
    """Returns what must be the same on all workers, as texts by name."""
    source, spec = pipeline.source, pipeline.source.element_spec
    if isinstance(source, Stream) and not source.is_repeatable:
        raise DataError(
            f"{source.name}: two reads of the first examples differ, but all workers must read "
            "the same. Seed them: ddl.data.stream(lambda epoch: ….shuffle(n, seed=epoch))."
        )
    found = {
        "examples": str(pipeline.num_examples),
        "features": ", ".join(f"{k} {spec[k].dtype.name} {spec[k].shape}" for k in sorted(spec)),
    }
    if source.files:  # whose folders may differ
        sizes = [tf.io.gfile.stat(path).length for path in source.files[:_MOST]]
        digest = zlib.crc32(repr([*map(os.path.basename, source.files), sizes]).encode())
        found["files"] = f"{len(source.files):,} (digest of names and sizes {digest:08x})"
    for name, array in sorted((getattr(source, "arrays", None) or {}).items()):
        chosen = array[np.linspace(0, len(array) - 1, min(_MOST, len(array))).astype(int)]
        content = repr(chosen.tolist()).encode() if array.dtype == object else chosen.tobytes()
        is_float = array.dtype.kind not in "biuOSU"  # bfloat16 has a kind of its own
        found[f"{_FLOATS if is_float else ''}{name!r}"] = f"digest {zlib.crc32(content):08x}"
    return found


# ------------------------------------------------------------ the model


@contextmanager
def naming_features(where: str, features: Iterable[str]) -> Iterator[None]:
    """Raises DataError if a task reads a feature that the data lack within the `with` block.

    Args:
      where: Name of the task's method.
      features: Names of the features of the data.
    """
    try:
        yield
    except KeyError as error:
        if error.args and error.args[0] not in features:
            raise DataError(
                f"{where} reads the feature {error.args[0]!r}, but the data have only "
                f"{', '.join(sorted(features))}. Correct the name, or add it to the data."
            ) from error
        raise


def warn_of_tf32(strategy: tf.distribute.Strategy) -> None:
    """Logs that a GPU rounds float32 to TF32 if nobody asked for it."""
    on_gpu = any("GPU" in device.upper() for device in replica_devices(strategy))
    if on_gpu and keras.config.dtype_policy().name == "float32" and uses_tf32_unasked():
        logging.warning(
            "TensorFlow rounds float32 inputs of products to TF32 (10 bits of mantissa) on recent "
            "GPUs. Call ddl.precision.set_tf32(False) for float32, or set_tf32(True) for this."
        )


def warn_of_dense_updates(update: TrainStep) -> None:
    """Logs which large tables are read by rows, but updated as a whole, which takes time.

    Args:
      update: The update, with its optimizers built.
    """
    plan, gradient = update.plan, update.gradient
    losses = (*plan.losses.values(), *plan.means.values())
    for name, applied in plan.applied.items():
        whole = update.averages or gradient.sharding or not updates_rows(update.optimizers[name])
        for variable in applied.variables:
            found = {read_as_a_whole(variable, x.form.tables, gradient.strategy) for x in losses}
            is_large = variable.value.shape.num_elements() >= _LARGE_TABLE
            if is_large and (True in found or (whole and False in found)):
                logging.warning(
                    "Each update takes time for all %s rows of the table %s. Looked up by an "
                    "Embedding, Adagrad and SGD without momentum update the batch's rows alone, "
                    "without weight_average and shard_optimizer_state: docs/large-embeddings.md.",
                    f"{variable.shape[0]:,}",
                    variable.path,
                )


# ------------------------------------------------------------ a trained state


def check_state_finite(state: TrainingState, update: TrainStep, max_skipped_updates: int) -> None:
    """Checks the state after a training loop. Eager, cross-replica context, on all workers.

    Raises:
      TrainingDiverged: If the loss or a metric is not finite, or if at least
        `max_skipped_updates` updates in a row were skipped.
    """
    step, skipped, count = map(int, (state.step, state.skipped_in_a_row, state.diverged_for))
    if skipped >= max_skipped_updates:
        raise TrainingDiverged(
            f"Training diverged after step {step}: the gradients of {skipped} "
            "consecutive batches were not finite, at a final loss scale of "
            f"{float(state.loss_scale):g}. {_remedy(update.task)}"
        )
    if not count:
        return
    means = update.metrics.means(state.sums)
    others = [name for name, value in means.items() if not math.isfinite(value)]
    what, remedy = "the loss", _remedy(update.task)
    if others and not any(name.split("/")[0] == "loss" for name in others):
        what = f"the metric {others[0]!r}"
        remedy = (
            "The loss is finite. Return a finite number of this metric for each example, or leave "
            "the metric out."
        )
    # With a loss scale, later updates may have been skipped.
    when = f"by step {step}" if update.loss_scale else f"at step {step - count + 1}"
    raise TrainingDiverged(
        f"Training diverged {when}: {what} is not finite from batch {int(state.batches) - count} "
        f"on. {remedy}"
    )


def _remedy(task: Task) -> str:
    """Returns the remedy for a loss that is not finite, which in float16 may have overflowed."""
    halves = [layer.name for layer in layers_of(task) if layer.compute_dtype == "float16"]
    if not halves:
        return _REMEDY
    return (
        f"float16 holds numbers up to 65,504: give the last layer, {halves[-1]!r}, dtype='float32' "
        f"and compute the loss in float32, or use 'mixed_bfloat16' (macro PRECISION). {_REMEDY}"
    )


def finite_variables(update: TrainStep) -> list[tf.Variable]:
    """Returns the weights, slots, statistics and averages that are finite now.

    Others, such as an untrained mask, are so by design.
    """
    weights = [v.value for layer in layers_of(update.task) for v in layer.variables]
    slots = [v.value for x in update.optimizers.values() for v in x.variables]
    if update.gradient.sharding is not None:
        slots = [copy for slot in slots for copy in copies_of(slot)]
    averages = update.averages.variables if update.averages else ()
    every = each_once(v for v in (*weights, *slots, *averages) if v.dtype.is_floating)
    return [variable for variable in every if _is_finite(variable)]


def check_finite(variables: Sequence[tf.Variable], workers: Workers, step: int) -> None:
    """Raises TrainingDiverged with the name of the first variable that is not finite.

    If a variable is not finite on one worker, all workers raise: statistics may differ between
    workers. Eager, cross-replica context, on all workers.
    """
    finite = workers.gather(np.array([_is_finite(variable) for variable in variables])).min(axis=0)
    for variable, is_finite in zip(variables, finite, strict=True):
        if not is_finite:
            raise TrainingDiverged(
                f"Training diverged at step {step}: {variable.name.split(':')[0]} is not finite. "
                f"{_REMEDY}"
            )


def _is_finite(variable: tf.Variable) -> bool:
    # Variables are read one after the other: a parameter server copies a table for each read, and
    # must not hold copies of all at once. Its device sends the result.
    with tf.device(variable.device if is_on_server(variable) else None):
        return bool(tf.reduce_all(tf.math.is_finite(variable.read_value())))


def check_same_on_replicas(task: Task, strategy: tf.distribute.Strategy) -> None:
    """Compares the copies of the variables that losses and layers write: a checkpoint holds one.

    Variables that are read together (`tf.VariableSynchronization.ON_READ`) and states of
    `tf.random.Generator` may differ. Eager, cross-replica context, on all workers.

    Raises:
      ConfigError: If the copies of a variable differ; on all workers.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    workers, layers = Workers(strategy), layers_of(task)
    generators = [x for x in own_items_of(task) if isinstance(x, tf.random.Generator)]
    # Moments over all replicas may differ by their rounding on processors of several kinds.
    others = [layer for layer in layers if not has_global_moments(layer)]
    compared = [
        v
        for v in (*own_variables_of(task, layers), *statistics_of(others, strategy))
        if v.dtype != tf.string
        and v.synchronization != tf.VariableSynchronization.ON_READ
        and strategy.extended.variable_created_in_scope(v)
        and all(v is not generator.state for generator in generators)
    ]
    if not compared:
        return
    values = [[copy.numpy() for copy in copies_of(variable)] for variable in compared]
    digests = workers.gather(np.array([_digest(own) for own in values]))
    for place in np.flatnonzero((digests != digests[0]).any(axis=0)):
        texts = ", ".join(f"{value.ravel()[:3].tolist()}" for value in values[place][:4])
        raise ConfigError(
            f"The variable {compared[place].name.split(':')[0]!r} of {type(task).__name__} has "
            f"other values on other replicas, here {texts}: a layer or a loss, which sees the rows "
            "of its replica alone, has assigned to it. In a layer, assign the result of "
            "ddl.layers.sum_over_replicas; for a loss, assign that of update.mean in a method "
            "step(update, batch); or make it with aggregation=tf.VariableAggregation.MEAN."
        )


def _digest(copies: Sequence[np.ndarray]) -> float:
    """Returns a number that tells values apart; NaN, which equals nothing, for unequal copies."""
    same = all(np.array_equal(one, copies[0], equal_nan=True) for one in copies)
    return float(zlib.crc32(copies[0].tobytes())) if same else math.nan
