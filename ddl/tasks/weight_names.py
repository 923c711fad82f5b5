"""Checks for features that are named like example weights but that no task reads.

Only the feature "weight" weighs its example. Keras's name is sample_weight; under that name, or a
similar one, the weights would have no effect.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from ddl.errors import DataError

_LIKE_WEIGHT = ("weight", "sampleweight", "exampleweight", "instanceweight", "lossweight")


def names_resembling_weight(names: Iterable[str]) -> list[str]:
    """Returns the names that look like "weight", such as sample_weight or exampleWeights."""
    letters = {name: re.sub("[^a-z]", "", name.lower()).removesuffix("s") for name in names}
    return [name for name, of_it in letters.items() if of_it in _LIKE_WEIGHT and name != "weight"]


def unread(features: Mapping[str, tf.Tensor], names: Iterable[str], output: Any) -> list[str]:
    """Returns the named features that a task does not read. Call it in the features' graph.

    Args:
      features: The features, as passed to the task.
      names: Names of some of them.
      output: The value that the task returned. It may hold a feature as it is, such as a weight.
    """
    returned = {id(tensor) for tensor in tf.nest.flatten(output)}
    return [
        name
        for name in names
        if not features[name].consumers() and id(features[name]) not in returned
    ]


def check_read(features: Mapping[str, tf.Tensor], task: str, output: Any) -> None:
    """Checks that the task reads every given feature. Call it in the features' graph.

    Args:
      features: The features that are named like weights, as passed to the task.
      task: Name of the task, for the error.
      output: As in `unread`.

    Raises:
      DataError: If the task neither computes with a feature nor returns it.
    """
    for name in unread(features, features, output):
        raise DataError(
            f"The data have a feature {name!r} that {task} does not read, so it would have no "
            "effect. To weight the examples, call the feature 'weight'; otherwise remove it."
        )
