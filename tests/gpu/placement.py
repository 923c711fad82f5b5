"""Which operations of a graph would run on the host, or use host memory, if it ran on a GPU.

TensorFlow's wheel registers its kernels for GPUs on every machine, so that no GPU is needed. The
memory of arguments follows TensorFlow's rules: a kernel names those in host memory; arguments and
results of functions and loops are in host memory if they are int32.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

# Their arguments and results are in host memory by dtype, not by kernel.
_CALLS = {
    *("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"),
    *("If", "StatelessIf", "Case", "StatelessCase", "Placeholder", "_Arg", "_Retval"),
}


def on_host(graph: tf.Graph, most: int, allowed: Iterable[str] = ()) -> list[str]:
    """Finds what a GPU leaves to the host.

    Only operations that results or side effects need are looked at, in the graph and in the
    functions and loops that it calls.

    Args:
      graph: Graph of a traced function: `tf.function(…).get_concrete_function(…).graph`.
      most: Largest number of elements that a tensor in host memory may have, such as shapes and
        axes. Rows of a batch must be more.
      allowed: Types of operations that need no kernel for GPUs.

    Returns:
      A line for each operation without a kernel for GPUs, and for each larger tensor in host
      memory.
    """
    definition = graph.as_graph_def(add_shapes=True)
    needed = [tensor.op.name for tensor in graph.outputs]
    needed += [operation.name for operation in graph.control_outputs]
    body = Body(definition.node, needed)
    found: list[str] = []
    for node, of, _ in nodes(body, functions_of(definition)):
        found += of_node(node, of, most, set(allowed))
    return sorted(set(found))


def functions_of(definition: Any) -> dict[str, Any]:
    """Returns the functions of a graph's definition, by name."""
    return {function.signature.name: function for function in definition.library.function}


def nodes(
    body: "Body", functions: Mapping[str, Any], turns: int = 1
) -> Iterator[tuple[Any, "Body", int]]:
    """Returns the needed nodes of a body and of the functions that it calls, each function once.

    Args:
      body: The body.
      functions: All functions.
      turns: Turns of each loop in it.

    Returns:
      Each node, the body that it is of, and how often it runs.
    """
    seen: set[str] = set()
    waiting = [(body, 1)]
    while waiting:
        body, times = waiting.pop()
        for node in body.needed():
            yield node, body, times
            for name in _called(node):
                if name in functions and name not in seen:
                    seen.add(name)
                    each = turns if node.op in ("While", "StatelessWhile") else 1
                    waiting.append((body_of_function(functions[name]), times * each))


class Body:
    """The nodes of a graph or function, with the shapes of their results."""

    def __init__(self, nodes: Iterable[Any], needed: Iterable[str]):
        self._nodes = {node.name: node for node in nodes}
        self._wanted = list(needed)

    def needed(self) -> Iterator[Any]:
        waiting, seen = list(self._wanted), set(self._wanted)
        while waiting:
            node = self._nodes.get(waiting.pop())
            if node is None:  # an argument of a function
                continue
            yield node
            for name in map(node_of, node.input):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)

    def node(self, name: str) -> Any:
        """Returns the node of an input; None if it is an argument of the function."""
        return self._nodes.get(node_of(name))

    def shape_of(self, name: str) -> Any:
        """Returns the shape of an input; None if it is unknown."""
        node = self._nodes.get(node_of(name))
        parts = name.split(":")
        if node is None or "_output_shapes" not in node.attr:
            return None
        index = 0
        if len(parts) == 3:  # in functions: node, result, and number within the result
            index = _first_of(node, parts[1]) + int(parts[2])
        elif len(parts) == 2:
            index = int(parts[1])
        return node.attr["_output_shapes"].list.shape[index]


def body_of_function(function: Any) -> Body:
    results = [node_of(name) for name in function.ret.values()]
    return Body(function.node_def, [*results, *function.control_ret.values()])


def node_of(name: str) -> str:
    return name.lstrip("^").split(":")[0]


def _called(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        yield from [attribute.func.name, *(each.name for each in attribute.list.func)]


def of_node(node: Any, body: Body, most: int, allowed: set[str]) -> Iterator[str]:
    inputs, results = _arguments(node)
    in_memory = set()
    if node.op in _CALLS:
        in_memory = {name for name, dtype in {*inputs, *results} if dtype == tf.int32}
    elif node.op not in allowed:
        kernel = _kernel(node)
        if kernel is None:
            dtypes = ", ".join(sorted({dtype.name for _, dtype in (*inputs, *results)}))
            yield f"{node.op} of {dtypes} has no kernel for GPUs ({node.name})"
            return
        in_memory = set(kernel.host_memory_arg)
    data = [name for name in node.input if not name.startswith("^")]
    tensors = [
        *((name, dtype, body.shape_of(given)) for (name, dtype), given in _pairs(inputs, data)),
        *((name, dtype, shape) for (name, dtype), shape in _pairs(results, _shapes(node))),
    ]
    for name, dtype, shape in tensors:
        own = name in in_memory and (node.op not in _CALLS or dtype == tf.int32)
        if own and dtype not in (tf.resource, tf.variant) and _size(shape) > most:
            yield f"{node.op}: {name}, {dtype.name}{_text(shape)}, is in host memory ({node.name})"


def is_in_host_memory(node: Any) -> bool:
    """Returns whether a node's kernel for GPUs starts none, as all it takes and gives is there."""
    kernel = _kernel(node)
    names = {name for pairs in _arguments(node) for name, _ in pairs}
    return kernel is not None and names <= set(kernel.host_memory_arg)


def _pairs(names: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(names, values, strict=False)


def _shapes(node: Any) -> Sequence[Any]:
    return node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()


def _size(shape: Any) -> float:
    """Returns the number of elements; unknown dimensions of a vector, such as of axes, count 0."""
    if shape is None:
        return 0
    if shape.unknown_rank:
        return math.inf
    sizes = [dimension.size for dimension in shape.dim]
    if -1 in sizes:
        return 0 if len(sizes) == 1 else math.inf
    return math.prod(sizes)


def _text(shape: Any) -> str:
    return str([None if d.size == -1 else d.size for d in shape.dim])


def _arguments(node: Any) -> tuple[list[Any], list[Any]]:
    """Returns (name, dtype) of each input and result of a node; lists count one by one."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        return [], []
    return (
        [pair for argument in definition.input_arg for pair in _expanded(node, argument)],
        [pair for argument in definition.output_arg for pair in _expanded(node, argument)],
    )


def _expanded(node: Any, argument: Any) -> list[tuple[str, tf.DType]]:
    if argument.type_list_attr:
        dtypes = node.attr[argument.type_list_attr].list.type
        return [(argument.name, tf.as_dtype(dtype)) for dtype in dtypes]
    dtype = node.attr[argument.type_attr].type if argument.type_attr else argument.type
    number = node.attr[argument.number_attr].i if argument.number_attr else 1
    return [(argument.name, tf.as_dtype(dtype))] * number


def _first_of(node: Any, result: str) -> int:
    """Returns the place of a named result among all results of a node."""
    names = [name for name, _ in _arguments(node)[1]]
    return names.index(result)


@functools.cache
def _kernels(operation: str) -> list[Any]:
    """Returns the kernels for GPUs of an operation, those for every device last."""
    found = kernels.get_registered_kernels_for_op(operation).kernel
    return [
        kernel
        for device in ("GPU", "DEFAULT")
        for kernel in found
        if kernel.device_type == device and not kernel.label
    ]


def _kernel(node: Any) -> Any:
    """Returns the kernel that a GPU runs for a node; None if there is none."""
    for kernel in _kernels(node.op):
        if all(_fits(node.attr[each.name], each) for each in kernel.constraint):
            return kernel
    return None


def _fits(attribute: Any, constraint: Any) -> bool:
    allowed = set(constraint.allowed_values.list.type)
    return (set(attribute.list.type) or {attribute.type}) <= allowed
