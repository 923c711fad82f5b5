"""The variables that a part of the model reads, found in the graph of its computation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.effects.stateful import is_harmful, with_called


def read_in(graph: tf.Graph, first: int, scope: str) -> dict[int, tuple[str, tf.Tensor | None]]:
    """Returns the variables that operations of a scope read, by the ids of their handles.

    Args:
      graph: The graph.
      first: Number of operations before those of the scope.
      scope: Prefix of the names of the operations.

    Returns:
      For each variable the name of its handle in the graph, and the value that the scope read
      first; None if it did not read the value alone.
    """
    handles = {inside.name: id(outside) for outside, inside in graph.captures}
    found: dict[int, tuple[str, tf.Tensor | None]] = {}
    for operation, name in _uses(graph, first, handles):
        if operation.name.startswith(scope) and handles[name] not in found:
            reads = operation.type == "ReadVariableOp"
            found[handles[name]] = name, operation.outputs[0] if reads else None
    return found


def values_of(
    variables: Sequence[keras.Variable], read: Mapping[int, tuple[str, tf.Tensor | None]]
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns those of some variables that were read, with the values that were read first.

    Args:
      variables: Variables of Keras.
      read: From `read_in`.
    """
    found = []
    for variable in variables:
        if variable._value is not None and id(variable._value.handle) in read:
            _, value = read[id(variable._value.handle)]
            found.append(
                (variable, tf.convert_to_tensor(variable._value if value is None else value))
            )
    return found


def check_not_assigned(
    name: str,
    graph: tf.Graph,
    first: int,
    read: Mapping[int, tuple[str, tf.Tensor | None]],
    restored: Sequence[keras.Variable],
) -> None:
    """Raises ConfigError if a variable that a part read, and that is not restored, was assigned.

    Args:
      name: Name of the part of the model, for the error.
      graph: The graph of the first computation, with all operations of the forward pass.
      first: Number of operations up to the end of the part.
      read: From `read_in`.
      restored: Variables that the second computation reads as the first one did.
    """
    own = {id(variable._value.handle) for variable in restored}
    others = {handle: id_of for id_of, (handle, _) in read.items() if id_of not in own}
    if not others:
        return
    for operation, _ in _uses(graph, first, others):
        for node in with_called(graph, operation.node_def, set()):
            if is_harmful(node.op):
                raise ConfigError(
                    f"{name!r} reads a variable that is assigned later in the forward pass, by the "
                    f"operation {node.op} at {operation.name}, so the backward pass cannot compute "
                    "it again. Keep the variable in a layer of the task (add_weight), or leave "
                    "the layer out of Remat.layers."
                )


def _uses(graph: tf.Graph, first: int, handles: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yields operations that take handles of variables, with the names of the handles."""
    for operation in graph.get_operations()[first:]:
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and tensor.name in handles:
                yield operation, tensor.name
