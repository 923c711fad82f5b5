"""Comparison of a checkpoint with the objects to restore, before anything is assigned."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from ddl.checkpoints.slots import WholeSlot

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of the object graph in a TensorFlow checkpoint."""

_HOLD_VALUES = (keras.Variable, tf.Variable, WholeSlot)


def object_graph(reader: Any) -> trackable_object_graph_pb2.TrackableObjectGraph:
    """Reads the object graph of a checkpoint.

    Args:
      reader: From `tf.train.load_checkpoint`.

    Raises:
      ValueError: If `tf.train.Checkpoint` did not write the checkpoint.
    """
    if not reader.has_tensor(OBJECT_GRAPH):
        raise ValueError("tf.train.Checkpoint did not write it")
    message = trackable_object_graph_pb2.TrackableObjectGraph
    return message.FromString(reader.get_tensor(OBJECT_GRAPH))


def parts_of(prefix: str) -> set[str]:
    """Returns the names of the parts of a checkpoint, such as `model`.

    Args:
      prefix: Path of the checkpoint on disk, without the file endings.
    """
    root = object_graph(tf.train.load_checkpoint(prefix)).nodes[0]
    return {child.local_name for child in root.children}


@dataclasses.dataclass(frozen=True)
class Differences:
    """Differences between a checkpoint and the objects to restore; false if there are none.

    Attributes:
      missing: Paths of variables that the checkpoint does not hold.
      unread: Names of variables in the checkpoint that no object here restores.
      shapes: For each variable whose shape or dtype differs, a text with both.
    """

    missing: Sequence[str]
    unread: Sequence[str]
    shapes: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unread or self.shapes)

    def __str__(self) -> str:
        """Returns one clause for each kind of difference."""
        kinds = (
            ("it lacks", self.missing),
            ("it has, but this run lacks,", self.unread),
            ("it has other shapes or dtypes for", self.shapes),
        )
        return "; ".join(f"{what} {some(names)}" for what, names in kinds if names)


def compare(
    checkpoint: tf.train.Checkpoint, prefix: str, partial: Collection[str] = ()
) -> Differences:
    """Compares variables by their paths in the object graph, as TensorFlow's restore does.

    Args:
      checkpoint: The objects to restore.
      prefix: Path of the checkpoint on disk, without the file endings.
      partial: Names of parts that may hold variables that are not restored.

    Raises:
      ValueError: If `tf.train.Checkpoint` did not write the checkpoint.
      tf.errors.OpError: If the checkpoint cannot be read.
    """
    reader = tf.train.load_checkpoint(prefix)
    nodes = object_graph(reader).nodes
    visited = visits(checkpoint, nodes)
    found: dict[int, int] = {}  # id of a variable here → node in the checkpoint
    ambiguous: dict[int, None] = {}  # variables whose paths lead to several nodes
    here: dict[int, tuple[str, Any]] = {}
    for path, item, node in visited:
        if isinstance(item, _HOLD_VALUES):
            here.setdefault(id(item), (path, item))
            holds = node is not None and nodes[node].attributes
            if node is not None and holds and found.setdefault(id(item), node) != node:
                ambiguous[id(item)] = None
    taken = {node for _, _, node in visited}
    whole = [child.node_id for child in nodes[0].children if child.local_name not in partial]
    pairs = [(*here[number], node) for number, node in found.items()]
    return Differences(
        missing=[path for number, (path, _) in here.items() if number not in found],
        unread=[
            attribute.full_name or attribute.checkpoint_key
            for node in _below(nodes, whole)
            if node not in taken
            for attribute in nodes[node].attributes
        ],
        shapes=[
            *_other_forms(reader, nodes, pairs),
            *(
                f"{here[number][0]} (two variables in the checkpoint match it)"
                for number in ambiguous
            ),
        ],
    )


def visits(
    checkpoint: tf.train.Checkpoint, nodes: Sequence[Any]
) -> list[tuple[str, Any, int | None]]:
    """Walks the objects to restore and the object graph of a checkpoint side by side.

    The objects are matched by the attributes that lead to them, as TensorFlow's restore does. The
    key of a variable in the file need not be its path here: the file names each variable by the
    shortest of its paths when it was saved, which may lead through a part that is absent here.

    Args:
      checkpoint: The objects to restore.
      nodes: Nodes of the object graph.

    Returns:
      For each object and node that a path leads to, once and shortest paths first: the path, the
      object, and the number of the node; None if the checkpoint lacks the path.
    """
    view = tf.train.TrackableView(checkpoint)
    visited: list[tuple[str, Any, int | None]] = []
    waiting: list[tuple[str, Any, int | None]] = [("", checkpoint, 0)]
    seen = set()
    for path, item, node in waiting:  # breadth first, for the shortest paths
        if (id(item), node) in seen:
            continue
        seen.add((id(item), node))
        visited.append((path, item, node))
        if isinstance(item, _HOLD_VALUES):
            continue
        there = {} if node is None else {c.local_name: c.node_id for c in nodes[node].children}
        for name, child in view.children(item).items():
            waiting.append((f"{path}/{name}".lstrip("/"), child, there.get(name)))
    return visited


def _other_forms(
    reader: Any, nodes: Sequence[Any], pairs: Sequence[tuple[str, Any, int]]
) -> list[str]:
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    different = []
    for path, variable, node in pairs:
        key = nodes[node].attributes[0].checkpoint_key
        there = (dtypes[key].name, tuple(shapes[key]))
        bare = variable.value if isinstance(variable, keras.Variable) else variable
        here = (bare.dtype.name, tuple(bare.shape))
        if here != there:
            different.append(
                f"{path} ({there[0]} {there[1]} in the checkpoint, {here[0]} {here[1]} here)"
            )
    return different


def _below(nodes: Sequence[Any], roots: Sequence[int]) -> dict[int, None]:
    """Returns these nodes and all their descendants, breadth first."""
    seen: dict[int, None] = {}
    waiting = list(roots)
    for node in waiting:
        if node not in seen:
            seen[node] = None
            waiting += [child.node_id for child in nodes[node].children]
    return seen


def some(names: Sequence[str], limit: int = 8) -> str:
    """Joins the first `limit` names, and adds how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
