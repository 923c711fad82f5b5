"""Digest of a checkpoint's values, to compare two runs by a look."""

import hashlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

_OTHERS = (
    *("_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", "state", "callbacks"),
    "statistics_of_replicas",
)
"""Parts of a checkpoint that say where a run stands, or belong to one number of replicas."""


def digest_of(tensors: Mapping[str, tf.Tensor]) -> str:
    """Returns the SHA-256 over names and bytes of weights, slots, statistics and averages.

    Args:
      tensors: All tensors of a checkpoint by name, on the host.
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        if name.split("/")[0] not in _OTHERS:
            found.update(f"{name}\0".encode())
            found.update(_bytes_of(np.asarray(tensors[name].numpy())))
    return found.hexdigest()


def _bytes_of(value: np.ndarray) -> bytes:
    """Returns the bytes of an array: equal values have equal ones in every process."""
    if value.dtype.kind == "O":  # texts, of which an array holds addresses
        return repr(value.tolist()).encode()
    return np.ascontiguousarray(value).tobytes()
