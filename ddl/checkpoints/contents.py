"""The ordered list of variables that a checkpoint holds, and its comparison with a saved list."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.groups import by_name
from ddl.optimizers.plateau import plateau_of
from ddl.tasks.parts import attributes_of, copies_of, layers_of, models_of
from ddl.training.trainer import Trainer

Entry: TypeAlias = tuple[str, Sequence[int], str]
"""Path, shape and dtype of a variable of a checkpoint."""

Entries: TypeAlias = Mapping[str, Entry]
"""The entries of a checkpoint by key, such as `model/0003`."""

PARTS = ("model", "task", "averages", "optimizer", "callbacks")
"""Parts of a checkpoint, with which keys begin. `task` is what the task holds beside its models."""

_WITH_VARIABLES = (keras.metrics.Metric, keras.optimizers.Optimizer)
_WITH_A_STATE = (keras.random.SeedGenerator, tf.random.Generator)


_NUMBER = re.compile(r"_\d+(?=[/_]|$)")
"""The number of a layer that Keras named."""


class Value(NamedTuple):
    """A variable of a checkpoint.

    Attributes:
      key: Its name in TensorFlow's file: the part and a number.
      path: Its path in the model, the optimizer or the callback, for messages and warm starts.
      variable: The variable; a tensor of the training state.
      whole: Shape of the whole slot of which each replica's variable holds a share, if it does.
    """

    key: str
    path: str
    variable: tf.Variable | tf.Tensor
    whole: tf.TensorShape | None

    @property
    def entry(self) -> Entry:
        """Path, shape as a whole, and dtype."""
        shape = self.variable.shape if self.whole is None else self.whole
        return self.path, list(shape), self.variable.dtype.name


def values_of(trainer: Trainer, callbacks: Sequence[object] = ()) -> list[Value]:
    """Returns the variables of a trainer and of callbacks, in the same order in every process.

    The order is that in which Keras tracks variables, and that of attributes, lists and dicts.
    """
    found: dict[str, list[tuple[str, tf.Variable]]] = {part: [] for part in PARTS}
    for name, optimizer in by_name(trainer.optimizer).items():
        found["optimizer"] += [(f"{name}/{v.path}", v.value) for v in optimizer.variables]
        if (plateau := plateau_of(optimizer)) is not None:
            found["optimizer"] += [(f"{name}/{key}", v) for key, v in plateau.state.items()]
    seen = {id(variable) for _, variable in found["optimizer"]}
    for name, model in models_of(trainer.task).items():
        before = "" if name == "model" else f"{name}/"
        found["model"] += [(f"{before}{p}", v) for p, v in _within(model.variables, "", seen)]
    if trainer.averages is not None:
        found["averages"] = [(_name(average), average) for average in trainer.averages.variables]
    seen |= {id(variable) for _, variable in found["averages"]}
    found["task"] += _within([layers_of(trainer.task), attributes_of(trainer.task)], "", seen)
    for callback in callbacks:
        found["callbacks"] += _within(attributes_of(callback), type(callback).__name__, seen)
    slots = {} if trainer.sharding is None else trainer.sharding.slots
    wholes = {id(slot.variable.value): slot.shape for slot in slots.values()}
    return [
        Value(f"{part}/{number:04}", path, variable, wholes.get(id(variable)))
        for part, every in found.items()
        for number, (path, variable) in enumerate(every)
    ]


def _within(item: object, path: str, seen: set[int]) -> Iterator[tuple[str, tf.Variable]]:
    """Yields the variables that an object leads to by attributes, lists and dicts, with paths.

    Adds the ids of variables and layers to `seen`, and skips those that it holds.
    """
    if isinstance(item, Mapping | list | tuple):
        for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
            yield from _within(value, f"{path}/{key}", seen)
    elif isinstance(item, keras.Variable):
        yield from _within(item.value, item.path, seen)
    elif id(item) in seen:
        return
    elif isinstance(item, tf.Variable):
        seen.add(id(item))
        yield path, item
    elif isinstance(item, keras.layers.Layer):
        layers = item._flatten_layers()
        seen.update(map(id, layers))
        yield from _within(item.variables, path, seen)
        for layer in layers:  # metrics, and variables of TensorFlow, which Keras does not track
            own = {k: v for k, v in attributes_of(layer).items() if not k.startswith("_self_")}
            yield from _within(own, layer.path or layer.name, seen)
    elif isinstance(item, _WITH_VARIABLES):
        yield from _within(item.variables, path, seen)
    elif isinstance(item, _WITH_A_STATE):
        yield from _within(item.state, path, seen)
    elif isinstance(item, tf.Module) or hasattr(item, "per_example"):
        seen.add(id(item))
        yield from _within(attributes_of(item), path, seen)


def check_covers(
    values: Iterable[Value], used: Iterable[tf.Variable], callbacks: Sequence[object]
) -> None:
    """Checks that a checkpoint holds every variable that training uses or callbacks have.

    Args:
      values: The variables of the checkpoint.
      used: Variables that the training loop reads or writes, including replica-local copies.
      callbacks: The callbacks, whose variables may have become more.

    Raises:
      ConfigError: If a variable is not in the checkpoint.
    """
    held = {id(copy.handle) for value in values for copy in copies_of(value.variable)}
    if lost := sorted({_name(v) for v in used if id(v.handle) not in held}):
        raise ConfigError(
            f"The training step uses the variables {some(lost)}, but neither the model nor the "
            "optimizer nor the task owns them, so no checkpoint would hold them. Keep each one in "
            "an attribute of the task or of a layer."
        )
    for callback in callbacks:
        found = _within(attributes_of(callback), type(callback).__name__, set())
        if lost := [path for path, v in found if id(copies_of(v)[0].handle) not in held]:
            raise ConfigError(
                f"The callback {type(callback).__name__} has the variables {some(lost)}, which no "
                "checkpoint holds: they were made after the run began. Make each tf.Variable in "
                "__init__ and keep it in an attribute, a list or a dict; build a model there, with "
                "model.build(shape); and call optimizer.build(variables)."
            )


def differences(there: Entries, here: Entries) -> str:
    """Returns how a checkpoint differs from what is to be restored; "" if it does not.

    Names and their order count, without the numbers by which Keras counts a process's layers.

    Args:
      there: The variables of the checkpoint.
      here: The variables to restore.
    """
    theirs, ours = ({key: _kind(key, *e) for key, e in one.items()} for one in (there, here))
    found = []
    for what, entries, own, others in (
        ("it lacks", here, ours, theirs),
        ("it has, but this run lacks,", there, theirs, ours),
    ):
        rest = Counter(own.values()) - Counter(others.values())
        differing = [entry for key, entry in entries.items() if own[key] in rest]
        if names := [f"{path} ({dtype} {list(shape)})" for path, shape, dtype in differing]:
            found.append(f"{what} {some(names)}")
    if not found:
        pairs = zip(there.values(), here.values(), theirs.values(), ours.values(), strict=True)
        moved = [(was[0], now[0]) for was, now, one, other in pairs if one != other]
        found = [f"it has {was} in the place of {now}" for was, now in moved[:1]]
    return "; ".join(found)


def _kind(key: str, path: str, shape: Sequence[int], dtype: str) -> tuple[str, ...]:
    """Returns the part, the path without numbers, the shape and the dtype of a variable."""
    return key.split("/")[0], _NUMBER.sub("", path), str(list(shape)), dtype


def _name(variable: Any) -> str:
    return str(variable.name).split(":")[0]


def some(names: Sequence[str], limit: int = 8) -> str:
    """Joins the first `limit` names, and adds how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
