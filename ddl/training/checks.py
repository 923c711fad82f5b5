"""Checks of a Trainer's arguments, data and model, and start-up notes on what they cost."""

import inspect
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import keras
import numpy as np
import tensorflow as tf
import typeguard
from absl import logging

from ddl.choices import BatchMoments, check_at_least_1
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.devices import replica_devices
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.optimizers.fused import updates_rows
from ddl.precision import uses_tf32_unasked
from ddl.step.rows.summing import table_of
from ddl.step.train_step import TrainStep
from ddl.tasks.parts import layers_of, models_of
from ddl.tasks.task import Task

_LARGE_TABLE = 2**20  # entries, from which a dense update takes noticeable time

_MOST_SIZES = 1000  # files whose sizes are compared: a network drive takes time for each
_MOST_ROWS, _MOST_BYTES = 1000, 1 << 24  # of an array
_FLOATS = "floats of the "

_OF_WHOLE_BATCHES = (
    keras.layers.Equalization,
    keras.layers.RandAugment,
    keras.layers.AugMix,
    keras.layers.RandomElasticTransform,
    keras.layers.MixUp,
    keras.layers.CutMix,
)
"""Layers that look at all rows of a replica, shuffle them, or do not draw through Keras."""


def check_types(function: Callable[..., Any], given: Mapping[str, Any], names: str) -> None:
    """Raises ConfigError if an argument of the Trainer has another type than its annotation.

    Args:
      function: The function, for its annotations.
      given: Its arguments by name.
      names: Names of the arguments to check, separated by spaces.
    """
    kinds = get_type_hints(function)
    for name in names.split():
        value, wanted = given[name], inspect.formatannotation(kinds[name])
        try:
            typeguard.check_type(value, kinds[name])
            fits = not isinstance(value, bool) or "bool" in wanted
        except typeguard.TypeCheckError:
            fits = False
        if not fits:
            raise ConfigError(f"Trainer.{name} must be {wanted}, got {value!r:.80}.")


def check_one_data_set(method: str, data: Any, others: Sequence[Any]) -> None:
    """Raises ConfigError unless a method of the Trainer got one data set or none.

    Args:
      method: Name of the method.
      data: The first argument.
      others: The other positional arguments.
    """
    if others:
        raise ConfigError(
            f"{method} takes one data set, got {1 + len(others)} positional arguments. Pass a pair "
            f"(inputs, labels) as one argument, {method}((x, y)), and averaged by name."
        )
    if isinstance(data, bool):
        raise ConfigError(f"{method} takes a data set, got {data!r}. Pass averaged by name.")


class TrainedVariables:
    """The choice of trained variables, as it was when the trainer was created."""

    def __init__(self, task: Task):
        """Records the choice.

        Args:
          task: The trainer's task.
        """
        self._layers, self._models = layers_of(task), models_of(task)
        self._were = list(self._are())

    def check(self) -> None:
        """Raises ConfigError if a layer or model now trains other variables."""
        for (place, was), (_, now) in zip(self._were, self._are(), strict=True):
            if was != now:
                raise ConfigError(
                    f"Changing {place} has no effect: it was {was!r:.80} when the trainer was "
                    f"created, and is now {now!r:.80}. Create a new Trainer with a new optimizer."
                )

    def _are(self) -> Iterator[tuple[str, Any]]:
        for layer in self._layers:
            yield f"trainable of layer {layer.name!r}", layer.trainable
        for name, model in self._models.items():
            paths = [variable.path for variable in model.trainable_variables]
            yield f"the list of trainable variables of task.{name}", paths


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
    check_at_least_1("GLOBAL_BATCH_SIZE", total)
    check_at_least_1("PER_REPLICA_BATCH_SIZE", per_replica)
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
        named = ", ".join(sources) if sources != [""] else "one source without a name"
        raise ConfigError(
            f"Trainer.global_batch_size gives the sizes of {', '.join(global_batch_size)}, but "
            f"Trainer.train_data has {named}. Give each source one size, or all the same number."
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
    sizes = {"accumulation_steps": accumulation_steps, "global_batch_size": global_batch_size}
    if isinstance(global_batch_size, Mapping):
        del sizes["global_batch_size"]
        sizes |= {f"global_batch_size[{name!r}]": n for name, n in global_batch_size.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"Trainer.{name} must be an integer of at least 1, got {size!r}.")
        unit = replicas * accumulation_steps
        if name != "accumulation_steps" and size % unit:
            lower = size // unit * unit
            nearest = " or ".join(str(size) for size in (lower, lower + unit) if size > 0)
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
    pipelines = {
        f"training data {name!r}" if name else "training data": p for name, p in train.items()
    }
    if evaluation is not None:
        pipelines["evaluation data"] = evaluation
    facts: dict[str, str] = {}
    for data, pipeline in pipelines.items():
        source = pipeline.source
        if isinstance(source, Stream) and not source.is_repeatable:
            raise DataError(
                f"Two reads of the first examples of {source.name} differ, so that workers, each "
                "of which keeps its rows, would train on some twice and on others never. Seed what "
                "is random: ddl.data.stream(lambda epoch: ….shuffle(n, seed=epoch))."
            )
        facts |= {f"{fact} of the {data}": text for fact, text in _facts(pipeline).items()}
    text = json.dumps(facts)
    # A number of a worker has the shape of other sums, so that no function is traced for it.
    digests = workers.gather(np.array([float(zlib.crc32(text.encode()))]))
    if (digests == digests[0]).all():
        return
    expected, *others = [json.loads(text) for text in workers.gather_texts(text)]
    for index, given in enumerate(others, start=1):
        names = [name for name in expected | given if expected.get(name) != given.get(name)]
        if names and all(name.startswith(_FLOATS) for name in names):
            logging.warning(
                "The %s differ between worker 0 and worker %s. If this is more than rounding, each "
                "worker trains on rows that another one does not expect. Give all workers the same "
                "data.",
                " and the ".join(names),
                index,
            )
        elif names:
            workers.barrier()
            listing = "\n".join(
                f"  {name}: {expected.get(name, 'none')} on worker 0, {given.get(name, 'none')} on "
                f"worker {index}"
                for name in names
            )
            raise DataError(
                f"Worker {index} must read the data of worker 0, but they differ in\n{listing}\n"
                "Give all workers the same files, and start all of them again."
            )


def _facts(pipeline: BatchPipeline) -> dict[str, str]:
    """Returns what must be the same on all workers, as texts by name."""
    source, spec = pipeline.source, pipeline.source.element_spec
    found = {
        "examples": str(pipeline.num_examples),
        "steps per epoch": str(pipeline.steps_per_epoch),
        "features": ", ".join(f"{k} {spec[k].dtype.name} {spec[k].shape}" for k in sorted(spec)),
    }
    if source.files:
        files = _files(source)
        digest = zlib.crc32("\n".join(files).encode())
        found["files"] = f"{len(files):,} (digest of names and sizes {digest:08x})"
    for name, array in sorted((getattr(source, "arrays", None) or {}).items()):
        is_float = array.dtype.kind not in "biuOSU"  # bfloat16 has a kind of its own
        rows = min(_MOST_ROWS, len(array), max(1, _MOST_BYTES * len(array) // max(1, array.nbytes)))
        chosen = array[np.linspace(0, len(array) - 1, rows).astype(np.int64)]
        content = repr(chosen.tolist()).encode() if array.dtype == object else chosen.tobytes()
        fact = f"floats of the {name!r}" if is_float else f"array {name!r}"
        found[fact] = f"digest of rows {zlib.crc32(content):08x}"
    return found


def _files(source: Source | Stream) -> list[str]:
    """Returns the names of the files of a source, whose folders may differ, and their sizes."""
    names = [os.path.basename(path) for path in source.files]
    if len(names) > _MOST_SIZES:
        return names
    return [f"{name} ({_size(path)})" for name, path in zip(names, source.files, strict=True)]


def _size(path: str) -> str:
    try:
        return f"{tf.io.gfile.stat(path).length:,} bytes"
    except (OSError, tf.errors.OpError):
        return "not found"


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
    """Raises ConfigError for layers of Keras that cannot compute each row alone."""
    for layer in layers:
        if isinstance(layer, _OF_WHOLE_BATCHES):
            raise ConfigError(
                f"The layer {layer.name!r} ({type(layer).__name__}) computes a row from all rows "
                "of a replica, or draws for all of them, so the result would depend on the number "
                "of replicas. Call it in the data (dataset.map), or use ddl.layers.Mixup or "
                "ddl.layers.CutMix to mix examples."
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
    if names and batch_moments == "per_replica" and strategy.num_replicas_in_sync > 1:
        logging.warning(
            "The layers %s take moments of each replica's rows (Trainer.batch_moments = "
            "'per_replica'), so the number of replicas changes the training result.",
            names,
        )
    if names and microbatches > 1:
        logging.warning(
            "The layers %s compute their moments on each microbatch separately, so the training "
            "result depends on the number of microbatches: ACCUMULATION_STEPS = %d.",
            names,
            microbatches,
        )


def warn_of_tf32(strategy: tf.distribute.Strategy) -> None:
    """Logs that a GPU rounds float32 to TF32 if nobody asked for it."""
    on_gpu = any("GPU" in device.upper() for device in replica_devices(strategy))
    if on_gpu and keras.config.dtype_policy().name == "float32" and uses_tf32_unasked():
        logging.warning(
            "TensorFlow rounds float32 inputs of matrix products and convolutions to TF32 (10 bits "
            "of mantissa) on recent GPUs. Call ddl.precision.set_tf32(False) for float32, or "
            "set_tf32(True) to keep this speed without the warning."
        )


def warn_of_dense_updates(update: TrainStep) -> None:
    """Logs for each large table that is read by rows why updates take time for all of its rows.

    Args:
      update: The update, with its optimizers built.
    """
    losses = (*update.plan.losses.values(), *update.plan.means.values())
    for name, applied in update.plan.applied.items():
        for variable in applied.variables:
            found = [table_of(variable, x.training.tables, update.strategy) for x in losses]
            reads = [read for read in found if read is not None]
            if not reads or variable.value.shape.num_elements() < _LARGE_TABLE:
                continue
            whole = any(read.as_a_whole for read in reads)
            if reasons := _reasons_for_dense_updates(update, name, variable, whole):
                logging.warning(
                    "Each update takes time for all %s rows of the table %s, not for those of the "
                    "batch alone: %s. The result is right. docs/large-embeddings.md says which "
                    "updates are sparse.",
                    f"{variable.shape[0]:,}",
                    variable.path,
                    "; ".join(reasons),
                )


def _reasons_for_dense_updates(
    update: TrainStep, name: str, variable: keras.Variable, is_read_as_a_whole: bool
) -> list[str]:
    optimizer = update.optimizers[name]
    decays = optimizer.weight_decay and optimizer._use_weight_decay(variable)
    reasons = {
        f"{type(optimizer).__name__} computes on all rows (Adagrad and SGD without momentum do "
        "not; ParameterGroups gives the table an optimizer of its own)": not updates_rows(
            optimizer
        ),
        "weight_decay decays all rows (exclude the table with exclude_from_weight_decay)": decays,
        "its regularizer has a gradient for all rows (remove it)": variable.regularizer,
        "its constraint changes all rows (remove it)": variable.constraint,
        "weight_average moves the averages of all rows (remove it)": update.averages,
        "--shard_optimizer_state sends dense gradients (leave it out)": update.sharding,
        "a layer reads the whole table to look up rows (in a layer of your own, call "
        "ddl.layers.look_up instead of tf.gather)": is_read_as_a_whole,
    }
    return [text for text, holds in reasons.items() if holds]
