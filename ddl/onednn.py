"""Kernels of oneDNN, which TensorFlow's graph must not lose in a loop."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from ddl.data.resident import on_cpu

_Function = TypeVar("_Function", bound=Callable)

# The gradients of these have a kernel of oneDNN that takes what the forward one left behind.
_IN_PAIRS = {"MaxPool", "MaxPool3D"}


def loses_kernels_in_loops(graph: tf.Graph, strategy: tf.distribute.Strategy) -> bool:
    """Whether TensorFlow may take slower kernels for the gradient of a forward pass in a loop.

    On a CPU, TensorFlow puts oneDNN's kernels in a graph node by node, from the inputs on, and in
    the gradient of max pooling only if the pooling itself has one by then. In the graph of a
    `tf.while` there is no such order, since its end leads back to its beginning: each time that it
    is built, the same gradient takes oneDNN's kernel or the plain one, with which an update of a
    small CNN takes up to a fifth longer (`python -m benchmarks.max_pooling`).

    Pooling in training alone is not seen, and in a loop of the model's own it stays in that graph.

    Args:
      graph: Of the forward pass, as in an evaluation.
      strategy: Where it runs.
    """
    if not on_cpu(strategy):
        return False
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return any(node.op in _IN_PAIRS for node in nodes)


def in_graph_of_its_own(function: _Function) -> _Function:
    """Keeps a function out of the graph of the loop that calls it: there it is one operation.

    The call itself takes time (`python -m benchmarks.max_pooling`), which tells in the smallest
    steps alone.
    """
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
