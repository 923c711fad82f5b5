"""Floating-point operations of a graph, counted in its matrix products and convolutions.

A multiplication with its addition counts 2, as NVIDIA counts in its peak rates. Operations of other
kinds count 0: they are limited by memory, not by arithmetic. Shapes must be static.
"""

import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_CONVOLUTIONS = {
    # The place of the filters' shape and of the shape that the filters are moved over.
    "Conv2D": ("input 1", "result"),
    "Conv2DBackpropInput": ("input 1", "input 2"),
    "Conv2DBackpropFilter": ("result", "input 2"),
}


def flops_of(graph: tf.Graph) -> int:
    """Returns the operations of a graph, with those of the functions that it calls.

    The body of a loop counts once.
    """
    return sum(map(_of, graph.get_operations())) + sum(map(flops_of, _called(graph)))


def _called(graph: tf.Graph) -> Iterator[tf.Graph]:
    for operation in graph.get_operations():
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            name = operation.get_attr("f").name
            yield graph._get_function(name).graph


def _of(operation: Any) -> int:
    kind = operation.type
    if kind in ("MatMul", "BatchMatMulV2"):
        attribute = "transpose_a" if kind == "MatMul" else "adj_x"
        inner = operation.inputs[0].shape[-2 if operation.get_attr(attribute) else -1]
        return 2 * math.prod(operation.outputs[0].shape) * inner
    if kind == "Einsum":
        return _of_einsum(operation)
    if kind in _CONVOLUTIONS:
        filters, moved_over = (_shape(operation, place) for place in _CONVOLUTIONS[kind])
        return 2 * math.prod(filters) * math.prod(moved_over) // moved_over[_channels(operation)]
    return 0


def _shape(operation: Any, place: str) -> list[int]:
    kind, _, number = place.partition(" ")
    tensor = operation.inputs[int(number)] if kind == "input" else operation.outputs[0]
    return tensor.shape.as_list()


def _channels(operation: Any) -> int:
    return operation.get_attr("data_format").index(b"C")


def _of_einsum(operation: Any) -> int:
    """Counts a product over all of its labels; without labels that are summed it is no product."""
    inputs, _, result = operation.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(inputs.split(","), operation.inputs, strict=True):
        sizes |= zip(labels, tensor.shape, strict=True)
    if len(operation.inputs) < 2 or not {*sizes} - {*result}:
        return 0
    return 2 * math.prod(sizes.values())
