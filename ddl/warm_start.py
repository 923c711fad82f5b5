"""Beginning a run with weights that another one learned."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from ddl.checkpoint_directory import CheckpointDirectory, first_line
from ddl.errors import ConfigError
from ddl.weight_average import AVERAGE_PREFIX, WeightAverages


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Which weights of a model are read from another model's checkpoint, and under which names.

    A weight's name is its path in the model, such as `conv_1/kernel`, without the model's own
    name; `--dry_run` prints what matches. What is read must have the shape that it has here.

    Attributes:
      checkpoint: A model directory, a folder of checkpoints (their newest is taken), or a
        checkpoint's path without its endings, written by ddl or by `tf.train.Checkpoint`.
      include: A regular expression that a weight's name must begin with to be read, so that a
        plain prefix such as `encoder/` will do. The empty one takes all that can be found.
      rename: For weights that have another name there: a regular expression, and what takes its
        place in the name here to give the one there, as `re.sub` reads them.
      averaged: Read the averages of the weights, which the other run must have kept.
    """

    checkpoint: str
    include: str = ""
    rename: tuple[str, str] | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        if self.rename is not None and len(self.rename) != 2:
            raise ConfigError(
                f"WarmStart.rename is {self.rename}; it is an expression and what takes its place"
            )
        for name, arguments in (
            ("include", (self.include, "")),
            ("rename", self.rename or ("", "")),
        ):
            try:
                re.sub(*arguments, "")
            except re.error as error:
                raise ConfigError(f"WarmStart.{name} is {arguments}: {error}") from error

    def apply(self, model: keras.Model, averages: WeightAverages | None = None) -> "Matches":
        """Sets the model's weights. Eager, cross-replica context.

        Args:
          model: A built one.
          averages: Of its weights, if a trainer keeps any; they begin at what was read.

        Returns:
          What was read and what was not.

        Raises:
          ConfigError: If there is no such checkpoint, nothing in it matches, or a weight that is
            to be read has another shape there; then the model is as it was.
        """
        prefix = _find(self.checkpoint)
        with _read_errors(prefix):
            reader = tf.train.load_checkpoint(prefix)
            there = _names(reader, self.averaged)
        here = _without_model({v.path: v for v in model.variables})
        sources = {
            name: re.sub(*self.rename, name) if self.rename else name
            for name in here
            if re.match(self.include, name)
        }
        read = {name: source for name, source in sources.items() if source in there}
        if not sources:
            raise ConfigError(
                f"WarmStart.include = {self.include!r} matches no weight; there are "
                + _some(list(here))
            )
        if not read:
            kind = "averages" if self.averaged else "weights"
            raise ConfigError(
                f"WarmStart: none of {_some(list(sources.values()))} is among the {kind} in "
                f"{prefix}: {_some(list(there)) or 'there are none'}. WarmStart.rename turns names "
                "here into those there."
            )
        shapes = reader.get_variable_to_shape_map()
        for name, source in read.items():
            shape_there, shape_here = tuple(shapes[there[source]]), tuple(here[name].shape)
            if shape_there != shape_here:
                raise ConfigError(
                    f"WarmStart: {source} in {prefix} has the shape {shape_there}, and {name} here "
                    f"{shape_here}. Leave it out with WarmStart.include, such as '(?!logits)'."
                )
        with _read_errors(prefix):
            values = {name: reader.get_tensor(there[source]) for name, source in read.items()}
        for name, value in values.items():
            here[name].assign(value)
        if averages is not None:
            averages.reset()
        return Matches(
            prefix=prefix,
            read=read,
            kept=[name for name in here if name not in read],
            unused=[name for name in there if name not in read.values()],
        )


@dataclasses.dataclass(frozen=True)
class Matches:
    """What a warm start did.

    Attributes:
      prefix: The checkpoint.
      read: Name there by name here, for each weight that was read.
      kept: Names of weights that keep their initial values.
      unused: Names in the checkpoint that nothing was read from.
    """

    prefix: str
    read: Mapping[str, str]
    kept: Sequence[str]
    unused: Sequence[str]

    def __str__(self) -> str:
        """Three lines for a person, a name each where few."""
        renamed = [here if here == name else f"{here} ← {name}" for here, name in self.read.items()]
        lines = [f"warm start from {self.prefix}: {len(renamed)} weights read: {_some(renamed)}"]
        if self.kept:
            lines.append(f"  not there, and as initialized: {_some(self.kept)}")
        if self.unused:
            lines.append(f"  there, and not read: {_some(self.unused)}")
        return "\n".join(lines)


@contextmanager
def _read_errors(prefix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TensorFlow raises errors of many kinds here
        raise ConfigError(f"WarmStart: {prefix} cannot be read: {first_line(error)}") from error


def _find(checkpoint: str) -> str:
    """The prefix that a path means."""
    for path in (Path(checkpoint), Path(checkpoint) / "checkpoints"):
        if os.path.exists(f"{path}.index"):
            return str(path)
        if saved := CheckpointDirectory(path).saved():
            return saved[-1].prefix
        if path.is_dir() and (latest := tf.train.latest_checkpoint(str(path))):
            return latest
    raise ConfigError(f"WarmStart.checkpoint = {checkpoint!r}: there is no checkpoint")


def _names(reader: Any, averaged: bool) -> dict[str, str]:
    """Keys in the checkpoint by the names of weights, or of averages, without slots and state."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    )
    names = {}
    for number in _within(graph, {"model", "averages"}):
        for attribute in graph.nodes[number].attributes:
            name = attribute.full_name
            if name and name.startswith(AVERAGE_PREFIX) == averaged:
                names[name.removeprefix(AVERAGE_PREFIX)] = attribute.checkpoint_key
    return _without_model(names)


def _without_model(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same by shorter names, where all begin with that of the model: model/layer/weight."""
    first = {name.split("/")[0] for name in named}
    if len(first) == 1 and all(name.count("/") > 1 for name in named):
        return {name.partition("/")[2]: value for name, value in named.items()}
    return dict(named)


def _within(graph: trackable_object_graph_pb2.TrackableObjectGraph, parts: set[str]) -> list[int]:
    """The nodes below some of the root's children; below all, if it has none of these."""
    children = {child.local_name: child.node_id for child in graph.nodes[0].children}
    seen: dict[int, None] = {}
    waiting = [node for name, node in children.items() if name in parts] or [0]
    while waiting:
        node = waiting.pop(0)
        if node not in seen:
            seen[node] = None
            waiting += [child.node_id for child in graph.nodes[node].children]
    return list(seen)


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
