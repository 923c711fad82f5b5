"""The resource by which TensorFlow orders the collective operations of a process."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

_Takers = dict[str, list[tuple[node_def_pb2.NodeDef, int, int]]]


class Tokens:
    """Finds the resources of a graph that only order collective operations.

    With several processes, TensorFlow gives each collective operation one and the same variable, so
    that all run in one order. The operations count as writing it, but its value never changes.
    """

    def __init__(self, graph: tf.Graph):
        """Keeps the graph; reads it and its functions when they are asked for."""
        self._graph = graph
        self._takers: dict[str, _Takers] = {}  # by name of the function, "" of the graph

    def include(self, resource: tf.Tensor) -> bool:
        """Returns whether collective operations take a resource, and no others.

        Args:
          resource: An input of the graph.
        """
        kinds = self._kinds("", resource.op.name)
        first = next(kinds, "")
        return first.startswith("Collective") and all(k.startswith("Collective") for k in kinds)

    def _kinds(self, function: str, resource: str) -> Iterator[str]:
        """Yields the kinds of the operations that take a resource, also within functions.

        Args:
          function: Name of a function of the graph; "" for the graph.
          resource: Name of the operation or the argument there that gives the resource.
        """
        for node, place, given in self._takers_in(function).get(resource, ()):
            called = _called_by(self._graph, node)
            if node.op == "Identity":  # a loop passes its resources on
                yield from self._kinds(function, node.name)
            elif not called:
                yield node.op
            for name in called:
                arguments = self._graph._get_function(name).cached_definition.signature.input_arg
                # The conditions of If and Case come first, and are no arguments of the functions.
                yield from self._kinds(name, arguments[place - (given - len(arguments))].name)

    def _takers_in(self, function: str) -> _Takers:
        """Returns the operations that take each value, with its place and the number of inputs."""
        if function not in self._takers:
            nodes: Iterable[Any] = (
                self._graph._get_function(function).cached_definition.node_def
                if function
                else [operation.node_def for operation in self._graph.get_operations()]
            )
            takers: _Takers = defaultdict(list)
            for node in nodes:
                given = [name.partition(":")[0] for name in node.input if not name.startswith("^")]
                for place, name in enumerate(given):
                    takers[name].append((node, place, len(given)))
            self._takers[function] = takers
        return self._takers[function]


def _called_by(graph: tf.Graph, node: node_def_pb2.NodeDef) -> list[str]:
    return [
        name
        for attribute in node.attr.values()
        for name in [attribute.func.name, *(each.name for each in attribute.list.func)]
        if name and graph._is_function(name)  # private; tests/step/effects guards it
    ]
