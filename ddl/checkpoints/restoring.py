"""Assignment of a saved checkpoint's values, if it fits."""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.checkpoints.comparison import compare, object_graph, parts_of, some, visits
from ddl.checkpoints.contents import BESIDE_ATTRIBUTES, saved_variables
from ddl.checkpoints.directory import Metadata, OfSources, SavedCheckpoint, first_line, readable
from ddl.distribution.devices import is_on_server, replica_devices
from ddl.errors import ModelDirectoryError
from ddl.step.state import TrainingState
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer

_NAMES = {
    "global_batch_size": "global batch size",
    "num_examples": "number of training examples",
    "batches_per_update": "number of batches per update",
}

_VALUES = "/.ATTRIBUTES/"
"""In a key of a checkpoint, between the path of an object and the name of one of its values."""


def position_in_data(trainer: Trainer) -> dict[str, OfSources]:
    """Returns the numbers on which the position in the data depends, by the field of `Metadata`."""
    pipelines = trainer.pipelines
    return {
        field: {name: getattr(one, field) for name, one in pipelines.items()}
        if len(pipelines) > 1
        else getattr(next(iter(pipelines.values())), field)
        for field in _NAMES
    }


def packing_of(trainer: Trainer) -> int | None:
    """Returns the digest of the packed rows of the training data; None if there are none."""
    items = [getattr(one.source, "items", None) for one in trainer.pipelines.values()]
    found = [getattr(each, "digest", None) for each in items]
    digests = [each for each in found if each is not None]
    return zlib.crc32(repr(digests).encode()) if digests else None


def metadata_of(
    trainer: Trainer, metrics: Mapping[str, float], scheduled: bool, ended_by: str | None
) -> Metadata:
    """Returns the metadata of a checkpoint of a trainer as it is; see `Metadata`."""
    return Metadata(
        metrics=metrics,
        replicas=trainer.strategy.num_replicas_in_sync,
        seconds=trainer.pace.total_seconds,
        scheduled=scheduled,
        ended_by=ended_by,
        strategy=type(trainer.strategy).__name__,
        device=tf.DeviceSpec.from_string(replica_devices(trainer.strategy)[0]).device_type,
        shard_optimizer_state=trainer.sharding is not None,
        jit_compile=trainer.jit_compile,
        tf32=tf.config.experimental.tensor_float_32_execution_enabled(),
        sha256=None,
        packing=packing_of(trainer),
        **position_in_data(trainer),
    )


def check_fits(saved: SavedCheckpoint, trainer: Trainer) -> None:
    """Raises ModelDirectoryError if steps or data positions mean something else here."""
    for field, now in position_in_data(trainer).items():
        was = getattr(saved.metadata, field)
        if was is not None and _ordered(was) != _ordered(now):
            raise ModelDirectoryError(
                f"The {_NAMES[field]} must be {_text(was)}, as in the run that saved {saved}, got "
                f"{_text(now)}: "
                "the step and the position in the data depend on it. Keep the number, or start "
                "a new run from these weights (WarmStart) in another --model_dir."
            )
    packing, was = packing_of(trainer), saved.metadata.packing
    if packing is not None and was is not None and packing != was:
        raise ModelDirectoryError(
            f"The packed rows must hold the documents that they held in the run that saved {saved}"
            ", but hold others, since the lengths of the documents, packed.seed or the version of "
            f"NumPy differ; it is {np.__version__} now. Give the data, the seed and NumPy of that "
            "run, or start a new run from these weights (WarmStart) in another --model_dir."
        )


def _ordered(number: OfSources) -> object:
    """Returns a number, or those of the sources in order: the first source counts the epochs."""
    return number if isinstance(number, int) else list(number.items())


def _text(number: OfSources) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return ", ".join(f"{of_source:,} ({name})" for name, of_source in number.items())


def assign(
    checkpoint: tf.train.Checkpoint,
    saved: SavedCheckpoint,
    partial: Collection[str] = (),
    alone: Mapping[str, Any] | None = None,
) -> None:
    """Assigns all variables, or none if the checkpoint does not match.

    Args:
      checkpoint: The objects to restore.
      saved: The checkpoint on disk.
      partial: Names of parts that may hold variables that are not restored.
      alone: Parts of `checkpoint` that are assigned alone; None: all.

    Raises:
      ModelDirectoryError: If the checkpoint does not match or cannot be read.
    """
    remedy = "Pass another --model_dir, or the config of the run that saved the checkpoint."
    try:
        with readable(saved.prefix) as prefix:
            if differences := compare(checkpoint, prefix, (*partial, "save_counter")):
                if any(path.startswith(BESIDE_ATTRIBUTES) for path in differences.missing):
                    remedy += (
                        " If it is that config, an earlier version of ddl left the variables "
                        "in lists and dicts out of the checkpoint. Train again in another "
                        "--model_dir."
                    )
                if "callbacks" in parts_of(prefix) and not hasattr(checkpoint, "callbacks"):
                    remedy += " It holds variables of callbacks: pass those callbacks again."
                raise ValueError(str(differences))
            assigned = checkpoint if alone is None else tf.train.Checkpoint(**alone)
            if not _assigned_singly(assigned, prefix):
                status = assigned.restore(prefix).expect_partial()
                status.assert_existing_objects_matched()
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise ModelDirectoryError(
            f"{saved} cannot be restored into this model and optimizer: {first_line(error)}. "
            + remedy
        ) from error


def _assigned_singly(checkpoint: tf.train.Checkpoint, prefix: str) -> bool:
    """Assigns variables one after the other, if parameter servers hold some; returns whether.

    TensorFlow lets each server read all of its values at once: it must reach the files, and holds
    everything twice. Assigns nothing if the checkpoint lacks a value.

    Raises:
      ValueError: If the checkpoint lacks a value.
    """
    if not any(map(is_on_server, saved_variables(checkpoint))):
        return False
    reader = tf.train.load_checkpoint(prefix)
    nodes = object_graph(reader).nodes
    prefixes: dict[int, str] = {}  # id of an object here → start of its keys in the checkpoint
    for _, item, node in visits(checkpoint, nodes):
        if node is not None and nodes[node].attributes:
            start, _, _ = nodes[node].attributes[0].checkpoint_key.partition(_VALUES)
            prefixes.setdefault(id(item), start)
    found: list[tuple[Any, dict[str, str]]] = []
    missing = []
    # As in `ddl.checkpoints.snapshot`. The object graph belongs to no object.
    gathered, _, _, _ = checkpoint._saver._gather_serialized_tensors()
    for part, tensors in gathered.items():
        if part is None:
            continue
        start, keys = prefixes.get(id(getattr(part, "obj", part))), {}
        for name in tensors:
            value = name.partition(_VALUES)[2]
            keys[value] = f"{start}{_VALUES}{value}"
            if start is None or not reader.has_tensor(keys[value]):
                missing.append(name)
        found.append((part, keys))
    if missing:
        raise ValueError(f"it lacks values for {some(missing)}")
    for part, keys in found:
        variable = getattr(part, "obj", part)
        variable = variable.value if isinstance(variable, keras.Variable) else variable
        if isinstance(variable, tf.Variable):
            (key,) = keys.values()
            variable.assign(reader.get_tensor(key), read_value=False)
        else:  # such as a table of words
            with tf.device("CPU:0"):
                part._restore_from_tensors(
                    {value: tf.constant(reader.get_tensor(key)) for value, key in keys.items()}
                )
    return True


def take_over(state: TrainingState, trainer: Trainer) -> None:
    """Gives a restored state to a trainer.

    Args:
      state: The state, of variables.
      trainer: The trainer, whose other variables are restored.
    """
    for layer in layers_of(trainer.task):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            layer.finalize_state()  # this layer computes with constants made from its variables
    restored = TrainingState(*(tf.identity(value) for value in state))
    trainer.restore(restored)
