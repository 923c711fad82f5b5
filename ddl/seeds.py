"""Hashes and places of Philox for random numbers, and operations that draw from a state."""

import hashlib
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


def drawn_by_state(graph: tf.Graph) -> str | None:
    """Returns an operation that draws other numbers each time, as messages call it, if any.

    Draws of ddl and Keras are stateless operations, which repeat their numbers for the same seed.

    Args:
      graph: A graph; the functions that it calls are searched too.
    """
    definition = graph.as_graph_def()
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    drawing = (node for body in bodies for node in body if _has_state(node))
    return next((f"the operation {node.name!r} ({node.op})" for node in drawing), None)


def _has_state(node: Any) -> bool:
    """Returns whether a node draws numbers by a state that is no layer's variable."""
    if node.op.startswith(("Rng", "StatefulRandom")):  # tf.random.Generator
        return True
    # The recurrent kernels of GPUs have seeds for a dropout that Keras does not use.
    unused = "dropout" in node.attr and not node.attr["dropout"].f
    return "seed2" in node.attr and not unused
