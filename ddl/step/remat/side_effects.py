"""Check that a second computation in the backward pass changes nothing and draws the same."""

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.effects.stateful import is_harmful, with_called


def check_changes_nothing(name: str, graph: tf.Graph, first: int, scope: str) -> None:
    """Raises ConfigError if operations of a scope change a state, or draw from one.

    Args:
      name: Name of the part of the model, for the error.
      graph: The graph.
      first: Number of operations before those of the scope.
      scope: Prefix of the names of the operations.
    """
    for operation in graph.get_operations()[first:]:
        if not operation.name.startswith(scope):
            continue
        for node in with_called(graph, operation.node_def, set()):
            if is_harmful(node.op):
                raise ConfigError(
                    f"The backward pass computes {name!r} a second time, so it must change nothing "
                    "but variables of its layers, and draw no numbers from a state, got the "
                    f"operation {node.op} at {operation.name}. Leave the layer out of "
                    "Remat.layers. Or keep its state in variables made by add_weight, draw with "
                    "ddl.random, and do not wrap its code in tf.function."
                )
