"""Warm start: initial weights from another model's checkpoint."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from ddl.checkpoints.comparison import object_graph, some
from ddl.checkpoints.contents import IN_CONTAINERS
from ddl.checkpoints.directory import CheckpointDirectory, first_line, readable
from ddl.errors import ConfigError
from ddl.step.weight_average import AVERAGE_PREFIX, WeightAverages


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The choice of weights to read from another model's checkpoint, and of their names there.

    A weight's name is its path in the model, such as `conv_1/kernel`, without the model's own
    name. `--dry_run` prints the matches. A weight and its source must have the same shape.

    Attributes:
      checkpoint: A model directory or a folder of checkpoints, whose newest checkpoint is read, or
        a checkpoint's path without the file endings. ddl or `tf.train.Checkpoint` wrote it.
      include: Regular expression matched at the start of each weight's name in this model; only
        matching weights are read. A plain prefix such as `encoder/` works. The empty string
        matches all weights.
      rename: Pattern and replacement for `re.sub`, which turn a weight's name in this model into
        its name in the checkpoint; None keeps the names.
      averaged: Whether to read the weight averages; the other run must have kept them.

    Raises:
      ConfigError: If `rename` is not a pair, or an expression is invalid.
    """

    checkpoint: str
    include: str = ""
    rename: tuple[str, str] | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        if self.rename is not None and len(self.rename) != 2:
            raise ConfigError(
                f"WarmStart.rename must be a pair (expression, replacement), got {self.rename}."
            )
        for name, arguments in (
            ("include", (self.include, "")),
            ("rename", self.rename or ("", "")),
        ):
            try:
                re.sub(*arguments, "")
            except re.error as error:
                raise ConfigError(
                    f"WarmStart.{name} must be a valid regular expression, got "
                    f"{getattr(self, name)!r}: {error}."
                ) from error

    def apply(self, model: keras.Model, averages: WeightAverages | None = None) -> "Matches":
        """Assigns the matching weights to the model. Eager, cross-replica context.

        Args:
          model: A built model.
          averages: The trainer's weight averages, if it keeps any; reset to the new weights.

        Returns:
          The names of the weights that were read, kept and unused.

        Raises:
          ConfigError: If there is no readable checkpoint, no weight matches, a matching name is
            ambiguous, or a shape differs. The model is then unchanged.
        """
        prefix = _find(self.checkpoint)
        with _reading(prefix) as reader:
            there = _names(reader, self.averaged)
            shapes = reader.get_variable_to_shape_map()
        here = _without_model(_by_name((v.path, v) for v in model.variables))
        sources = {
            name: re.sub(*self.rename, name) if self.rename else name
            for name in here
            if re.match(self.include, name)
        }
        read = {name: source for name, source in sources.items() if source in there}
        if not sources:
            raise ConfigError(
                f"WarmStart.include must match a weight of the model, got {self.include!r}. "
                f"The weights are {some(list(here))}."
            )
        if not read:
            kind = "averages" if self.averaged else "weights"
            raise ConfigError(
                f"WarmStart: {prefix} has none of the {kind} {some(list(sources.values()))}. Its "
                f"{kind}: {some(list(there)) or 'none'}. Set WarmStart.rename to map the names of "
                "this model to those in the checkpoint."
            )
        for name, source in read.items():
            for names in (here[name], there[source]):
                if len(names) > 1:
                    raise ConfigError(
                        f"WarmStart: the name {name} is ambiguous: {len(names)} weights have it. "
                        "Give their layers different names, or exclude them by WarmStart.include."
                    )
        sizes = {
            name: (tuple(here[name][0].shape), tuple(shapes[there[source][0]]))
            for name, source in read.items()
        }
        other = [name for name, (ours, theirs) in sizes.items() if ours != theirs]
        if other:
            name = other[0]
            matching = [each for each in read if each not in other]
            raise ConfigError(
                f"WarmStart: {read[name]} in {prefix} must have the shape of {name} in this model, "
                f"{sizes[name][0]}, got {sizes[name][1]}. This model has "
                f"{len(here)} weights: {len(matching)} match ({some(matching) or 'none'}), "
                f"{len(other)} have another shape ({some(other)}), and "
                f"{len(here) - len(read)} are not read. Exclude "
                "those that differ by WarmStart.include, such as '(?!logits)'."
            )
        with _reading(prefix) as reader:
            values = {name: reader.get_tensor(there[source][0]) for name, source in read.items()}
        for name, value in values.items():
            here[name][0].assign(value)
        if averages is not None:
            averages.reset()
        return Matches(
            prefix=prefix,
            read=read,
            kept=[name for name in here if name not in read],
            excluded=[name for name in here if name not in sources],
            unused=[name for name in there if name not in read.values()],
        )


@dataclasses.dataclass(frozen=True)
class Matches:
    """The result of a warm start.

    Attributes:
      prefix: The checkpoint's path without the file endings.
      read: For each weight read, its name in this model mapped to its name in the checkpoint.
      kept: Names of this model's weights that keep their initial values.
      excluded: Those of `kept` that `WarmStart.include` does not match.
      unused: Names of the checkpoint's weights, or averages, that were not read.
    """

    prefix: str
    read: Mapping[str, str]
    kept: Sequence[str]
    excluded: Sequence[str]
    unused: Sequence[str]

    def __str__(self) -> str:
        """Returns a report of one to four lines, with the first few names of each kind.

        A name stands in one line: weights that `include` leaves out may be in the checkpoint too.
        """
        renamed = [here if here == name else f"{here} ← {name}" for here, name in self.read.items()]
        lines = [f"Warm start from {self.prefix}. Read {len(renamed)} weights: {some(renamed)}."]
        kinds = (
            ("Kept at their initial values, since WarmStart.include excludes them", self.excluded),
            ("Kept at their initial values, since the checkpoint lacks them", self.kept),
            ("In the checkpoint, but not in this model", self.unused),
        )
        told: set[str] = set()
        for what, names in kinds:
            if further := [name for name in names if name not in told]:
                lines.append(f"  {what}: {some(further)}.")
            told.update(names)
        return "\n".join(lines)


@contextmanager
def _reading(prefix: str) -> Iterator[Any]:
    """Yields a reader of the checkpoint.

    Raises:
      ConfigError: Instead of any error raised in the `with` block.
    """
    try:
        with readable(prefix) as path:
            yield tf.train.load_checkpoint(path)
    except Exception as error:  # TensorFlow raises errors of many kinds here
        raise ConfigError(
            f"WarmStart.checkpoint: {prefix} cannot be read: {first_line(error)}. Correct the path."
        ) from error


def _find(checkpoint: str) -> str:
    """Returns the checkpoint prefix for a path; raises ConfigError if there is no checkpoint."""
    for path in (Path(checkpoint), Path(checkpoint) / "checkpoints"):
        if os.path.exists(f"{path}.index"):
            return str(path)
        if saved := CheckpointDirectory(path).saved():
            return saved[-1].prefix
        # tf.train.latest_checkpoint would read the path as a glob pattern.
        state = tf.train.get_checkpoint_state(str(path)) if path.is_dir() else None
        if state and os.path.exists(f"{state.model_checkpoint_path}.index"):
            return state.model_checkpoint_path
    raise ConfigError(
        f"WarmStart.checkpoint must be a checkpoint or a folder with one, got {checkpoint!r}."
    )


def _names(reader: Any, averaged: bool) -> dict[str, list[str]]:
    """Maps names of weights, or of averages, to checkpoint keys, without slots and state."""
    graph = object_graph(reader)
    names = []
    root = {child.local_name: child.node_id for child in graph.nodes[0].children}
    # Of a task without `model`: the name of each of its models stands before those of its weights.
    models = graph.nodes[root["models"]].children if "models" in root else ()
    places = [(f"{child.local_name}/", [child.node_id]) for child in models]
    known = [root[name] for name in ("model", IN_CONTAINERS, "averages") if name in root]
    places.append(("", known or ([] if models else [0])))
    for prefix, starts in places:
        for number in _within(graph, starts):
            for attribute in graph.nodes[number].attributes:
                name = attribute.full_name
                if name and name.startswith(AVERAGE_PREFIX) == averaged:
                    name = prefix + name.removeprefix(AVERAGE_PREFIX)
                    names.append((name, attribute.checkpoint_key))
    return _without_model(_by_name(names))


def _by_name(named: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Groups the items by name."""
    found: dict[str, list[Any]] = {}
    for name, item in named:
        found.setdefault(name, []).append(item)
    return found


def _without_model(named: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the first part of the names if all share it, as in `model/layer/weight`."""
    first = {name.split("/")[0] for name in named}
    if len(first) == 1 and all(name.count("/") > 1 for name in named):
        return {name.partition("/")[2]: value for name, value in named.items()}
    return dict(named)


def _within(
    graph: trackable_object_graph_pb2.TrackableObjectGraph, starts: Sequence[int]
) -> list[int]:
    """Returns the given nodes and all nodes below them, each once."""
    seen: dict[int, None] = {}
    waiting = list(starts)
    while waiting:
        node = waiting.pop(0)
        if node not in seen:
            seen[node] = None
            waiting += [child.node_id for child in graph.nodes[node].children]
    return list(seen)
