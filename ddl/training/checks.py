"""Checks of a Trainer's arguments, data and model, and start-up notes on what they cost."""

import inspect
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import keras
import numpy as np
import tensorflow as tf
import typeguard
from absl import logging

from ddl.choices import BatchMoments, check_positive
from ddl.data.pipeline import BatchPipeline
from ddl.data.stream import Stream
from ddl.distribution.devices import replica_devices
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.optimizers.fused import updates_rows
from ddl.precision import uses_tf32_unasked
from ddl.step.rows import table_of
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import layers_of, models_of
from ddl.tasks.task import Task

_CHECKED_ELSEWHERE = ("task", "optimizer", "global_batch_size", "corpus_metrics", "return")
_LARGE_TABLE = 2**20  # entries, from which a dense update takes noticeable time

_MOST_SIZES = 1000  # files whose sizes are compared: a network drive takes time for each
_MOST_ROWS, _MOST_BYTES = 1000, 1 << 24  # of an array
_FLOATS = "floats "

_OF_WHOLE_BATCHES = (
    keras.layers.Equalization,
    keras.layers.RandAugment,
    keras.layers.AugMix,
    keras.layers.RandomElasticTransform,
    keras.layers.MixUp,
    keras.layers.CutMix,
)
"""Layers that look at all rows of a replica, shuffle them, or do not draw through Keras."""


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises ConfigError if an option of the Trainer has another type than its annotation.

    Args:
      function: The constructor, for its annotations.
      given: Its arguments by name.
    """
    for name, kind in get_type_hints(function).items():
        value, wanted = given.get(name), inspect.formatannotation(kind)
        if name in _CHECKED_ELSEWHERE or kind is Any:
            continue
        try:
            typeguard.check_type(value, kind)
            fits = not isinstance(value, bool) or "bool" in wanted
        except typeguard.TypeCheckError:
            fits = False
        if not fits:
            raise ConfigError(f"Trainer.{name} must be {wanted}, got {value!r:.80}.")


class TrainedVariables:
    """The choice of trained variables, as it was when the trainer was created."""

    def __init__(self, task: Task):
        """Records the choice.

        Args:
          task: The trainer's task.
        """
        self._layers, self._models = layers_of(task), models_of(task)
        self._were = self._are()

    def check(self) -> None:
        """Raises ConfigError if a layer or model now trains other variables."""
        for (place, was), (_, now) in zip(self._were, self._are(), strict=True):
            if was != now:
                raise ConfigError(
                    f"Changing {place} has no effect: it was {was!r:.80} when the trainer was "
                    f"created, and is now {now!r:.80}. Create a new Trainer with a new optimizer."
                )

    def _are(self) -> list[tuple[str, Any]]:
        of_models = [
            (f"the list of trainable variables of task.{name}", [v.path for v in own])
            for name, own in ((n, one.trainable_variables) for n, one in self._models.items())
        ]
        of_layers = [(f"trainable of layer {x.name!r}", x.trainable) for x in self._layers]
        return [*of_layers, *of_models]


# ------------------------------------------------------------ the global batch size


def global_batch_size(total: int | None = None, per_replica: int | None = None) -> int:
    """Returns the global batch size, in examples. Call it in the strategy's scope.

    Args:
      total: Examples per update, for any number of replicas.
      per_replica: Examples per replica and update. The global batch, and with it the result of
        training, then depends on the number of replicas.

    Raises:
      ConfigError: If both are given, or neither, or if the size is not positive.
    """
    size = per_replica if total is None else total
    if size is None or (total is not None and per_replica is not None):
        raise ConfigError(
            "Exactly one of GLOBAL_BATCH_SIZE and PER_REPLICA_BATCH_SIZE must be given, got "
            f"{total} and {per_replica}. Set one of them to a number and the other to None."
        )
    check_positive("GLOBAL_BATCH_SIZE", total)
    check_positive("PER_REPLICA_BATCH_SIZE", per_replica)
    return size if per_replica is None else size * tf.distribute.get_strategy().num_replicas_in_sync


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


def check_batch_split(
    global_batch_size: int | Mapping[str, int], replicas: int, accumulation_steps: int
) -> None:
    """Checks that the global batches divide into equal microbatches over the replicas.

    Raises:
      ConfigError: If the batch does not divide evenly, with the nearest sizes that do; or if a
        number is not an integer of at least 1.
    """
    named = global_batch_size if isinstance(global_batch_size, Mapping) else {"": global_batch_size}
    unit = replicas * accumulation_steps
    for size in named.values():
        for name, value in (
            ("accumulation_steps", accumulation_steps),
            ("global_batch_size", size),
        ):
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"Trainer.{name} must be an integer of at least 1, got {value!r}."
                )
        if size % unit:
            nearest = " or ".join(
                str(n) for n in (size // unit * unit, -(-size // unit) * unit) if n
            )
            raise ConfigError(
                f"The global batch size must be a multiple of {unit} ({replicas} replicas × "
                f"{accumulation_steps} accumulation steps), got {size}. Use {nearest}, or change "
                "the number of devices."
            )


# ------------------------------------------------------------ the data


def check_same_data(
    strategy: tf.distribute.Strategy,
    train: Mapping[str, BatchPipeline],
    evaluation: BatchPipeline | None,
) -> None:
    """Compares the data of all workers: lengths, features, files, and rows of arrays in memory.

    The order of the examples follows from their number. A worker that misses a file would read
    other examples than its peers expect, so that some are repeated and others dropped. The check
    compares names of files within their folder, their sizes, and up to 1,000 rows of arrays. Rows
    of floats that differ are only warned of: machines may round a preprocessing differently. Eager,
    cross-replica context, on all workers.

    Args:
      strategy: The strategy.
      train: Pipeline of each source of training data, by its name.
      evaluation: Pipeline of the evaluation data, if any.

    Raises:
      DataError: On all workers, if a worker differs from worker 0; says in what.
    """
    workers = Workers(strategy)
    if workers.number == 1:
        return
    named = {f"training data {name!r}" if name else "training data": p for name, p in train.items()}
    facts = {
        f"{fact} of the {data}": value
        for data, pipeline in (named | {"evaluation data": evaluation}).items()
        if pipeline is not None
        for fact, value in _facts(pipeline).items()
    }
    expected, *others = [json.loads(t) for t in workers.gather_texts(json.dumps(facts))]
    for name, worker in itertools.product(expected, range(1, workers.number)):
        here, there = expected[name], others[worker - 1].get(name, "none")
        if here == there:
            continue
        message = (
            f"All workers must read the same data, but the {name} are {here} on worker 0 and "
            f"{there} on worker {worker}. Give all workers the same files and arrays."
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
        "steps per epoch": str(pipeline.steps_per_epoch),
        "features": ", ".join(f"{k} {spec[k].dtype.name} {spec[k].shape}" for k in sorted(spec)),
    }
    if source.files:  # whose folders may differ
        sizes = [tf.io.gfile.stat(path).length for path in source.files[:_MOST_SIZES]]
        digest = zlib.crc32(repr([*map(os.path.basename, source.files), sizes]).encode())
        found["files"] = f"{len(source.files):,} (digest of names and sizes {digest:08x})"
    for name, array in sorted((getattr(source, "arrays", None) or {}).items()):
        rows = min(_MOST_ROWS, len(array), max(1, _MOST_BYTES * len(array) // max(1, array.nbytes)))
        chosen = array[np.linspace(0, len(array) - 1, rows).astype(np.int64)]
        content = repr(chosen.tolist()).encode() if array.dtype == object else chosen.tobytes()
        is_float = array.dtype.kind not in "biuOSU"  # bfloat16 has a kind of its own
        found[f"{_FLOATS if is_float else ''}{name!r}"] = f"digest {zlib.crc32(content):08x}"
    return found


# ------------------------------------------------------------ the model


def check_created_in_scope(
    variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy
) -> None:
    """Raises ConfigError if a variable was made outside the strategy's scope."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ConfigError(
                f"The model's variable {variable.path!r} was created outside the "
                "strategy's scope. Build the model under `with strategy.scope():`."
            )


def check_computes_by_row(layers: Iterable[keras.layers.Layer]) -> None:
    """Raises ConfigError for layers of Keras that cannot compute each row of a batch alone."""
    for layer in layers:
        if getattr(layer, "stateful", False):
            raise ConfigError(
                f"The layer {layer.name!r} carries its states from batch to batch (stateful=True), "
                "so the order, padding, evaluations and the number of replicas would change the "
                "result. Set stateful=False, and give each example its whole sequence."
            )
        if isinstance(layer, _OF_WHOLE_BATCHES):
            raise ConfigError(
                f"The layer {layer.name!r} ({type(layer).__name__}) computes a row from all rows "
                "of a replica, so the number of replicas would change the result. Call it in "
                "dataset.map, or use ddl.layers.Mixup or ddl.layers.CutMix."
            )


def computes_in_float16(models: Iterable[keras.layers.Layer]) -> bool:
    """Returns whether any layer computes in float16, so that gradients may underflow."""
    layers = (layer for model in models for layer in model._flatten_layers())
    return any(layer.compute_dtype == "float16" for layer in layers)


def depends_on_microbatches(layers: Sequence[keras.layers.Layer]) -> bool:
    """Returns whether a layer takes statistics of a microbatch.

    Variables that a user's layer writes in its forward pass are not examined.
    """
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)


def warn_of_batch_moments(
    layers: Sequence[keras.layers.Layer],
    strategy: tf.distribute.Strategy,
    microbatches: int,
    batch_moments: BatchMoments,
) -> None:
    """Logs if moments of BatchNormalization depend on the number of replicas or microbatches.

    Args:
      layers: The task's layers in training.
      strategy: The strategy.
      microbatches: Microbatches per replica and update.
      batch_moments: As `ddl.Trainer` takes it.
    """
    names = ", ".join(x.name for x in layers if isinstance(x, keras.layers.BatchNormalization))
    reasons = {
        "replica (Trainer.batch_moments = 'per_replica'), so the number of replicas": batch_moments
        == "per_replica"
        and strategy.num_replicas_in_sync > 1,
        f"microbatch, so ACCUMULATION_STEPS = {microbatches}": microbatches > 1,
    }
    for reason, holds in reasons.items():
        if names and holds:
            logging.warning(
                "The layers %s take moments of each %s changes the training result.", names, reason
            )


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
    losses = (*update.plan.losses.values(), *update.plan.means.values())
    for name, applied in update.plan.applied.items():
        optimizer = update.optimizers[name]
        for variable in applied.variables:
            found = [table_of(variable, x.training.tables, update.strategy) for x in losses]
            reads = [read for read in found if read is not None]
            if not reads or variable.value.shape.num_elements() < _LARGE_TABLE:
                continue
            as_a_whole = any(read.as_a_whole for read in reads)
            if as_a_whole or update.averages or update.sharding or not updates_rows(optimizer):
                logging.warning(
                    "Each update takes time for all %s rows of the table %s. Adagrad, and SGD "
                    "without momentum, update the rows of the batch alone, without weight_average "
                    "and shard_optimizer_state: see docs/large-embeddings.md.",
                    f"{variable.shape[0]:,}",
                    variable.path,
                )
