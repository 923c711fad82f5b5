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
            found.update(np.ascontiguousarray(tensors[name].numpy()).tobytes())
    return found.hexdigest()
