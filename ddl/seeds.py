"""Hashes and places of Philox for random numbers, and operations that draw from a state."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

PHILOX = tf.random.Algorithm.PHILOX.value


def hashed(*identity: int | str | None) -> int:
    """Returns a hash of an identity, in the range of int64."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def counter_at(counter: tf.Tensor, place: tf.Tensor | int) -> tf.Tensor:
    """Returns Philox's counter at a place after another counter, uint64 [2]."""
    if isinstance(place, int):
        return counter + tf.constant([place, 0], tf.uint64) if place else counter
    return counter + tf.cast(tf.stack([place, tf.zeros_like(place)]), tf.uint64)


def drawn_by_state(operations: Iterable[tf.Operation]) -> str | None:
    """Returns an operation that draws other numbers each time, as messages call it, if any.

    Draws of ddl and Keras are stateless operations, which repeat their numbers for the same seed.

    Args:
      operations: Operations of a graph; the functions that they call are searched too.
    """
    for operation in operations:
        node = operation.node_def
        if _has_state(node):
            return f"the operation {node.name!r} ({node.op})"
        for inner in _nodes_of_functions(node, operation.graph, set()):
            if _has_state(inner):
                return f"the operation {inner.name!r} ({inner.op}) in {node.name!r}"
    return None


def _has_state(node: Any) -> bool:
    """Returns whether a node draws numbers by a state that is no layer's variable."""
    if node.op.startswith(("Rng", "StatefulRandom")):  # tf.random.Generator
        return True
    # The recurrent kernels of GPUs have seeds for a dropout that Keras does not use.
    unused = "dropout" in node.attr and not node.attr["dropout"].f
    return "seed2" in node.attr and not unused


def _nodes_of_functions(node: Any, graph: tf.Graph, seen: set[str]) -> Iterator[Any]:
    """Returns the nodes of all functions that a node calls, such as a loop's body."""
    for value in node.attr.values():
        for name in [value.func.name, *(one.name for one in value.list.func)]:
            if not name or name in seen:
                continue
            seen.add(name)
            function = graph._get_function(name)
            for inner in function.cached_definition.node_def if function else ():
                yield inner
                yield from _nodes_of_functions(inner, graph, seen)
