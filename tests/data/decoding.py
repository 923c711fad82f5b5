"""The examples of a source as a pipeline makes them: rows of a block, each decoded."""

import numpy as np
import tensorflow as tf


def examples(source, indices=None, seed=(0, 0)):
    """Returns the decoded examples at indices, or all of them, as dicts of arrays."""
    indices = np.arange(len(source)) if indices is None else np.array(indices)
    rows = source.rows(indices)
    found = []
    for place in range(len(indices)):
        item = {name: tf.constant(values[place]) for name, values in rows.items()}
        if source.decode is not None:
            item = source.decode(item, tf.constant(seed, tf.int64))
        found.append({name: value.numpy() for name, value in item.items()})
    return found
