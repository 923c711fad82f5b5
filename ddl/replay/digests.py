"""Digests of what a checkpoint holds, so that two states can be compared without their values."""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ddl.checkpoints.comparison import OBJECT_GRAPH, object_graph
from ddl.checkpoints.directory import readable
from ddl.step.shards.digest import bytes_of

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"

# Figures since the last log, and counts of the saves: they change nothing that is trained.
_FIGURES = frozenset(
    ["save_counter", "state/sums", "state/gradient_norms", "state/gradient_noise"],
)


class State(NamedTuple):
    """Contents of a checkpoint.

    Attributes:
      digests: A digest for each variable, by its path in the checkpoint; without figures.
      names: The name of each variable of a model or an optimizer, by the same path.
      rewinds: Number of rewinds that the run had made.
    """

    digests: dict[str, str]
    names: dict[str, str]
    rewinds: int


def state_of(prefix: str) -> State:
    """Reads a checkpoint.

    Args:
      prefix: Path of the checkpoint on disk, without the file endings.

    Raises:
      tf.errors.OpError: If it cannot be read.
    """
    with readable(prefix) as path:
        reader = tf.train.load_checkpoint(path)
        keys = {
            key.removesuffix(_SUFFIX): key
            for key in reader.get_variable_to_shape_map()
            if key != OBJECT_GRAPH
        }
        rewinds = keys.get("state/rewinds")
        return State(
            {
                path: _digest(reader.get_tensor(key))
                for path, key in sorted(keys.items())
                if path not in _FIGURES
            },
            _names(reader),
            0 if rewinds is None else int(reader.get_tensor(rewinds)),
        )


def _digest(value: Any) -> str:
    value = np.asarray(value)
    # A zero has two signs, which are equal.
    own = value + value.dtype.type(0) if value.dtype.kind == "f" else value
    content = f"{value.dtype} {value.shape} ".encode() + bytes_of(own)
    return hashlib.sha256(content).hexdigest()[:32]


def _names(reader: Any) -> dict[str, str]:
    """Returns the full names that TensorFlow stores beside the paths."""
    return {
        attribute.checkpoint_key.removesuffix(_SUFFIX): attribute.full_name
        for node in object_graph(reader).nodes
        for attribute in node.attributes
        if attribute.full_name
    }
