"""Checks of the variables that a step uses and changes."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.schedule_free import AdamWScheduleFree
from ddl.step.verbs.work import Call


def check_schedule_free(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    applies: Sequence[Call],
    used: str,
    variables: Sequence[keras.Variable],
    by_hand: Sequence[tf.Variable],
) -> None:
    """Raises ConfigError for a schedule-free optimizer whose average would not be defined.

    The average of a variable counts the updates of the optimizer, so it must update all of its
    variables at once, and nothing else may change them.
    """
    ids = set(map(id, variables))
    parts = [ids & set(map(id, call.variables)) for call in applies if call.name == used]
    if not isinstance(optimizer, AdamWScheduleFree):
        return
    if assigned := [v.path for v in variables if any(v.value is own for own in by_hand)]:
        raise ConfigError(
            f"{name}.step assigns to {', '.join(assigned)}, which AdamWScheduleFree updates, so "
            "that its average is not defined. Leave the assignment out, or use another optimizer."
        )
    if any(part and part != ids for part in parts):
        raise ConfigError(
            f"{name}.step applies gradients of some of the variables of AdamWScheduleFree, which "
            "must update all of them at once. Join the gradients with `and_of`, or give each part "
            "an optimizer of its own."
        )


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
