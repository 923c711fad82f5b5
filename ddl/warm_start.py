"""Beginning a run with weights that another one learned."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from ddl.errors import ConfigError
from ddl.weight_average import AVERAGE_PREFIX


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Which weights of a model are read from another model's checkpoint, and under which names.

    A weight's name is its path in the model, such as `conv_1/kernel`; `--dry_run` prints what
    matches. What is read must have the shape that it has here.

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
        for pattern in (self.include, *(self.rename or ())[:1]):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"WarmStart: {pattern!r} is not a regular expression: {error}"
                ) from error

    def apply(self, model: keras.Model) -> "Matches":
        """Sets the model's weights. Eager, cross-replica context.

        Returns:
          What was read and what was not.

        Raises:
          ConfigError: If there is no such checkpoint, nothing in it matches, or a weight that is
            to be read has another shape there; then the model is as it was.
        """
        prefix = _find(self.checkpoint)
        try:
            reader = tf.train.load_checkpoint(prefix)
            there = _names(reader)
        except Exception as error:  # TensorFlow raises errors of many kinds here
            raise ConfigError(f"WarmStart: {prefix} cannot be read: {error}") from error
        wanted = [v for v in model.variables if re.match(self.include, v.path)]
        sources = {v.path: self._name_there(v.path) for v in wanted}
        read = [v for v in wanted if sources[v.path] in there]
        if not read:
            raise ConfigError(self._nothing_matches(model, sources, prefix, there))
        shapes = reader.get_variable_to_shape_map()
        for variable in read:
            shape = tuple(shapes[there[sources[variable.path]]])
            if shape != tuple(variable.shape):
                raise ConfigError(
                    f"WarmStart: {sources[variable.path]} in {prefix} has the shape {shape}, and "
                    f"{variable.path} here {tuple(variable.shape)}. Leave it out with "
                    "WarmStart.include, such as '(?!logits)'."
                )
        for variable in read:
            variable.assign(reader.get_tensor(there[sources[variable.path]]))
        taken = {sources[v.path] for v in read}
        return Matches(
            prefix=prefix,
            read={v.path: sources[v.path] for v in read},
            kept=[v.path for v in model.variables if v not in read],
            unused=[name for name in there if name not in taken and self._is_weight(name)],
        )

    def _name_there(self, name: str) -> str:
        if self.rename is not None:
            name = re.sub(*self.rename, name)
        return AVERAGE_PREFIX + name if self.averaged else name

    def _is_weight(self, name: str) -> bool:
        return name.startswith(AVERAGE_PREFIX) == self.averaged

    def _nothing_matches(
        self,
        model: keras.Model,
        sources: Mapping[str, str],
        prefix: str,
        there: Mapping[str, str],
    ) -> str:
        if not sources:
            names = _some([v.path for v in model.variables])
            return f"WarmStart.include = {self.include!r} matches no weight; there are {names}"
        names = _some([name for name in there if self._is_weight(name)])
        return (
            f"WarmStart: none of {_some(list(sources.values()))} is in {prefix}, which has "
            f"{names}. Set WarmStart.rename to the names there."
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


def _find(checkpoint: str) -> str:
    """The prefix that a path means."""
    for path in (Path(checkpoint), Path(checkpoint) / "checkpoints"):
        if os.path.exists(f"{path}.index"):
            return str(path)
        if path.is_dir() and (latest := tf.train.latest_checkpoint(str(path))):
            return latest
    raise ConfigError(f"WarmStart.checkpoint = {checkpoint!r}: there is no checkpoint")


def _names(reader: Any) -> dict[str, str]:
    """Keys in the checkpoint by the names of the variables, without slots and training state."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    )
    names = {}
    for number in _within(graph, {"model", "averages"}):
        for attribute in graph.nodes[number].attributes:
            if attribute.full_name:
                names[attribute.full_name] = attribute.checkpoint_key
    return names


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
