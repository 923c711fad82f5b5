"""Checks of the variables that a step uses and changes."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.verbs.work import Call


def check_known(name: str, known: Sequence[tf.Variable], calls: Sequence[Call]) -> None:
    """Raises ConfigError if a verb uses a variable that is not found in the task."""
    ids = set(map(id, known))
    used = [v for call in calls for v in call.variables]
    bare = {id(v.value if isinstance(v, keras.Variable) else v): v for v in used}
    unknown = [getattr(v, "path", v.name) for key, v in bare.items() if key not in ids]
    if unknown:
        raise ConfigError(
            f"{name}.step uses the variables {', '.join(unknown)}, but no attribute of {name} "
            "leads to them, so no checkpoint would hold them. Keep their layers in attributes of "
            "the task, or in lists and dicts in attributes."
        )


def check_covered(
    name: str,
    layers: Sequence[keras.layers.Layer],
    applies: Sequence[Call],
    averaged: Sequence[tf.Variable],
) -> None:
    """Raises ConfigError if a trainable variable of the task is never changed."""
    changed = {id(v.value) for call in applies for v in call.variables} | set(map(id, averaged))
    trainable = {id(v.value): v for layer in layers for v in layer.trainable_variables}
    forgotten = [v.path for key, v in trainable.items() if key not in changed]
    if forgotten:
        raise ConfigError(
            f"{name}.step changes no variable of {', '.join(forgotten)}, although they are "
            "trainable. Pass their layers to update.minimize or update.average, or set trainable "
            "= False on them."
        )
