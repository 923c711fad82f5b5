"""oneDNN kernels that TensorFlow may drop inside a loop."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from ddl.distribution.path import path_of

_Function = TypeVar("_Function", bound=Callable)
_Result = TypeVar("_Result")

# Operations whose oneDNN gradient kernel reuses data of the oneDNN forward kernel.
_IN_PAIRS = {"MaxPool", "MaxPool3D"}


def needs_own_graph(graph: tf.Graph, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a loop may get slower kernels for the gradient of this forward pass.

    On a CPU, TensorFlow rewrites a graph to oneDNN kernels node by node, in topological order. It
    rewrites the gradient of max pooling only if the pooling itself is already rewritten. The graph
    of a `tf.while` is cyclic and has no such order: from build to build the same gradient gets the
    oneDNN kernel or the plain one. The plain one makes an update of a small CNN up to a fifth
    slower.

    Max pooling that runs only in training is not detected. Max pooling in a loop of the model
    itself remains in that loop's graph.

    Args:
      graph: Graph of the forward pass in evaluation mode.
      strategy: The strategy under which the graph runs.
    """
    if not path_of(strategy).rewrites_pooling:
        return False
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return any(node.op in _IN_PAIRS for node in nodes)


def in_own_graph_if(needed: bool, function: Callable[[], _Result]) -> _Result:
    """Calls a function, such as the body of a loop, in a graph of its own if it needs one."""
    return in_own_graph(function)() if needed else function()


def in_own_graph(function: _Function) -> _Function:
    """Returns the function as a `tf.function` that is never inlined into the calling loop.

    The call costs time, noticeable only in the smallest steps: docs/decisions.md.
    """
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
