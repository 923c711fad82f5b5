"""Floating-point operations of a graph, counted in its matrix products and convolutions.

A multiplication with its addition counts 2, as NVIDIA counts in its peak rates. Operations of other
kinds count 0: they are limited by memory, not by arithmetic.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ddl import microbatch
from ddl.step.compiled.one_replica import is_first_replica

_CONVOLUTIONS = {
    # The place of the filters' shape and of the shape that the filters are moved over.
    "Conv2D": ("input 1", "result"),
    "Conv2DBackpropInput": ("input 1", "input 2"),
    "Conv2DBackpropFilter": ("result", "input 2"),
    "Conv3D": ("input 1", "result"),
    "Conv3DBackpropInputV2": ("input 1", "input 2"),
    "Conv3DBackpropFilterV2": ("result", "input 2"),
    "DepthwiseConv2dNative": ("input 1", "result"),
    "DepthwiseConv2dNativeBackpropInput": ("input 1", "input 2"),
    "DepthwiseConv2dNativeBackpropFilter": ("result", "input 2"),
}
# How often these run their functions depends on values.
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_BRANCHES = ("body", "then_branch", "else_branch", "branches")
# Each is a whole network of products.
_WHOLE = re.compile(r"CudnnRNN.*")
_OF_OTHER_REPLICA = re.compile(r"(^|/)replica_[1-9]\d*/")


class ModelFlops:
    """An observer of a trace (`ddl.step.observing`) that counts the operations of an update.

    Counted are the matrix products and convolutions of the forward and backward passes of the
    first replica, in all gradients of a step, with padding. Not counted are operations that the
    backward pass repeats to save memory (`ddl.Remat`), other forward passes, the optimizers and
    evaluations.

    Attributes:
      reason: Why they cannot be counted; "" if they can.
    """

    def __init__(self) -> None:
        """Counts nothing yet."""
        self.reason = "the update has not been traced"
        self._traces: list[int] = []
        self._graph: Any = None
        self._first = self._backward = 0

    @property
    def of_microbatch(self) -> int | None:
        """Operations of one microbatch of a replica, summed over the gradients of a step.

        None before a trace, or if they cannot be counted.
        """
        # Batches by bucket are traced once for each length.
        if self.reason or len(set(self._traces)) != 1 or not self._traces[0]:
            return None
        return self._traces[0]

    def __call__(self, event: str, **values: Any) -> None:
        """Takes an event."""
        graph = tf.compat.v1.get_default_graph()
        if event == "update":
            if not self._traces:
                self.reason = ""
            self._traces.append(0)
            self._graph = graph
            return
        if not self._traces:
            return
        if event == "gradients" and graph is not self._graph:
            self.reason = "a condition or a loop of the step decides about them"
        current = microbatch.current()
        if current is None or not current.training or not is_first_replica():
            return
        if event == "rows":
            self._first = self._backward = graph.num_operations()
        elif event == "backward":
            self._backward = graph.num_operations()
        elif event == "differentiated":
            operations = graph.get_operations()[self._first : self._backward]
            # TensorFlow removes what no gradient needs, such as that of the first layer's input.
            operations += _ancestors(values["gradients"], graph, self._backward)
            try:
                self._traces[-1] += sum(map(_of_this_replica, operations))
            except _NotCounted as error:
                self.reason = str(error)


class _NotCounted(Exception):
    """The operations of a graph cannot be counted; the message says why."""


def flops_of(graph: tf.Graph) -> int:
    """Returns the operations of a graph, with those of the functions that it calls.

    Raises:
      ValueError: If a shape is not static, or a condition or a loop decides about products.
    """
    try:
        return _sum(graph.get_operations())
    except _NotCounted as error:
        raise ValueError(f"The operations cannot be counted: {error}.") from error


def _sum(operations: Iterable[Any]) -> int:
    return sum(map(_with_functions, operations))


def _of_this_replica(operation: Any) -> int:
    if _OF_OTHER_REPLICA.search(operation.name) or _is_repeated(operation.name):
        return 0
    return _with_functions(operation)


def _ancestors(tensors: Any, graph: tf.Graph, first: int) -> list[Any]:
    """Returns the operations from a place of a graph on that tensors are computed by."""
    places = {operation: place for place, operation in enumerate(graph.get_operations())}
    found: set[Any] = set()
    values = [x for x in tf.nest.flatten(tensors, expand_composites=True) if x is not None]
    ahead = [x.op for x in values if x.graph is graph]
    while ahead:
        operation = ahead.pop()
        if operation in found or places[operation] < first:
            continue
        found.add(operation)
        ahead += [*(x.op for x in operation.inputs), *operation.control_inputs]
    return [*found]


def _is_repeated(name: str) -> bool:
    """Returns whether the backward pass repeats an operation of the forward pass (`ddl.Remat`)."""
    before, again, _ = name.partition("again_remat_")
    return bool(again) and "gradient_tape/" not in before


def _with_functions(operation: Any) -> int:
    kind = operation.type
    if kind in ("PartitionedCall", "StatefulPartitionedCall"):
        return sum(_sum(graph.get_operations()) for graph in _graphs(operation, "f"))
    if kind in _CONTROL_FLOW:
        if any(_sum(graph.get_operations()) for graph in _graphs(operation, *_BRANCHES)):
            raise _NotCounted(f"{operation.name} decides how often some are computed")
        return 0
    if _WHOLE.fullmatch(kind):
        raise _NotCounted(f"{operation.name} computes a whole network")
    try:
        return _of(operation)
    except (TypeError, ValueError) as error:
        raise _NotCounted(f"{operation.name} has no static shape") from error


def _graphs(operation: Any, *attributes: str) -> Iterator[tf.Graph]:
    known = operation.node_def.attr
    for attribute in attributes:
        if attribute not in known:
            continue
        value = known[attribute]
        for function in [value.func] if value.HasField("func") else value.list.func:
            yield operation.graph._get_function(function.name).graph


def _of(operation: Any) -> int:
    kind = operation.type
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2"):
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
