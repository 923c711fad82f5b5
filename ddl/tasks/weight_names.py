"""Checks for features that are named like example weights but that no task reads.

Only the feature "weight" weighs its example. Keras's name is sample_weight; under that name, or a
similar one, the weights would have no effect.
"""

import re
from collections.abc import Iterable, Mapping

import tensorflow as tf

from ddl.errors import DataError

_LIKE_WEIGHT = ("weight", "sampleweight", "exampleweight", "instanceweight", "lossweight")


def names_resembling_weight(names: Iterable[str]) -> list[str]:
    """Returns the names that look like "weight", such as sample_weight or exampleWeights."""
    letters = {name: re.sub("[^a-z]", "", name.lower()).removesuffix("s") for name in names}
    return [name for name, of_it in letters.items() if of_it in _LIKE_WEIGHT and name != "weight"]


def unread(features: Mapping[str, tf.Tensor], names: Iterable[str]) -> list[str]:
    """Returns the named features that no operation consumes. Call it in the features' graph."""
    return [name for name in names if not features[name].consumers()]


def check_read(features: Mapping[str, tf.Tensor], task: str) -> None:
    """Checks that the task reads every given feature. Call it in the features' graph.

    Args:
      features: The features that are named like weights, as passed to the task.
      task: Name of the task, for the error.

    Raises:
      DataError: If no operation consumes a feature.
    """
    for name in unread(features, features):
        raise DataError(
            f"The data have a feature {name!r} that {task} does not read, so it would have no "
            "effect. To weight the examples, call the feature 'weight'; otherwise remove it."
        )
