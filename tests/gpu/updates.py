"""The operations of one update, counted in the graph of the training loop.

Device 1 of the CPU stands for the GPU, and device 0 for the host, so that the graph shows what
crosses between the two. The number of operations follows that of the kernels.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import ddl
from tests.gpu.placement import (
    Body,
    body_of_function,
    functions_of,
    is_in_host_memory,
    node_of,
    nodes,
    of_node,
)

HOST, DEVICE = "CPU:0", "CPU:1"

# They start no kernel: they name, share or describe what is there, or call functions.
_FREE = {
    *("Const", "Identity", "IdentityN", "NoOp", "Reshape", "ExpandDims", "Squeeze", "Shape"),
    *("ReadVariableOp", "AssignVariableOp", "VarHandleOp", "DestroyResourceOp", "EnsureShape"),
    *("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf"),
    *("Bitcast", "StridedSlice", "Empty", "StopGradient", "PreventGradient", "Size", "Rank"),
}

_LOOPS = ("While", "StatelessWhile")

# They call cuBLAS or cuDNN.
_LIBRARY = {
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv2DBackpropInput"),
    *("Conv2DBackpropFilter", "FusedBatchNormV3", "FusedBatchNormGradV3", "MaxPool", "MaxPoolGrad"),
}


@dataclasses.dataclass(frozen=True)
class Update:
    """What an update does.

    Attributes:
      operations: Number of operations that start a kernel, call a library, or copy.
      on_host: Operations that have no kernel for GPUs, or keep more in host memory than `most`.
      crossing: Bytes that cross between host and devices, by the operation that gives them.
      asks: Number of operations of the loop's condition, for whose result the host would wait.
      library_calls: Those of the operations that call a library.
    """

    operations: int
    on_host: list[str]
    crossing: dict[str, int]
    asks: int = 0
    library_calls: int = 0


def update_of(trainer: ddl.Trainer, most: int) -> Update:
    """Looks at the loop over updates of a trainer: its body and its condition."""
    loop = trainer._runner.loop
    graph = loop._concrete(trainer.state).graph
    return count(graph, most, trainer.accumulation_steps)


def evaluation_of(trainer: ddl.Trainer, most: int) -> Update:
    """Looks at the loop over the batches of a trainer's evaluation; see `update_of`."""
    evaluation, state = trainer._evaluations, trainer.state
    iterator = evaluation._pipeline.iterator(trainer.strategy, repeats=True)
    graph = evaluation._loop.get_concrete_function(
        iterator, tf.constant(4, tf.int64), state.batches, state.step
    ).graph
    return count(graph, most)


def count(graph: tf.Graph, most: int, turns: int = 1) -> Update:
    """Looks at the only loop of a graph: its body and its condition.

    Args:
      graph: Graph of a traced function.
      most: Largest number of elements that a tensor in host memory may have.
      turns: Turns of each loop within the loop.
    """
    definition = graph.as_graph_def(add_shapes=True)
    functions = functions_of(definition)
    updates = _loop_in(definition.node)
    # Arguments of loops are in host memory if they are int32, such as resident arrays.
    on_host = [*of_node(updates, Body(definition.node, ()), most, set())]
    operations, crossing = {"body": 0, "cond": 0}, {}
    library_calls = 0
    for part in operations:
        body = body_of_function(functions[updates.attr[part].func.name])
        seen: set[Any] = set()
        for node, of, times in nodes(body, functions, turns):
            on_host += of_node(node, of, most, set())
            counts = times * _counts(node, of, seen)
            operations[part] += counts
            library_calls += counts * (node.op in _LIBRARY)
            crossing |= dict(_crossing(node, of))
    total = sum(operations.values())
    return Update(total, sorted(set(on_host)), crossing, operations["cond"], library_calls)


def _loop_in(nodes: Any) -> Any:
    (found,) = [node for node in nodes if node.op in _LOOPS]
    return found


def _counts(node: Any, body: Body, seen: set[Any]) -> bool:
    """Returns whether a node counts: not of constants alone, not twice, and not on the host."""
    if node.op in _FREE or not any(_is_computed(name, body) for name in node.input):
        return False
    if _place(node) == HOST or is_in_host_memory(node):
        return False
    same = (id(body), node.op, *node.input, *(str(node.attr[key]) for key in sorted(node.attr)))
    if same in seen and not node.op.startswith("Resource"):
        return False
    seen.add(same)
    return True


def _is_computed(name: str, body: Body) -> bool:
    """Returns whether an input is neither a control input nor a function of constants."""
    if name.startswith("^"):
        return False
    node = body.node(name)
    if node is None:
        return True  # an argument
    return node.op != "Const" and (
        not node.input or any(_is_computed(given, body) for given in node.input)
    )


def _crossing(node: Any, body: Body) -> Iterator[tuple[str, int]]:
    """Returns name and bytes of what another device gives to a node."""
    for name in node.input:
        given = body.node(name)
        if name.startswith("^") or given is None or given.op == "Const":
            continue
        crosses = _place(given) and _place(node) and _place(given) != _place(node)
        # A loop takes a batch whose device nothing names to the first one.
        unplaced = given.op == "IteratorGetNext" and not _place(given) and node.op in _LOOPS
        if crosses or unplaced:
            dtype = tf.as_dtype(given.attr["T"].type or given.attr["dtype"].type or tf.bool)
            shape = body.shape_of(name)
            sizes = [dimension.size for dimension in shape.dim] if shape else [math.inf]
            yield node_of(name), math.prod(sizes) * dtype.size


def _place(node: Any) -> str:
    return tf.DeviceSpec.from_string(node.device).to_string().rpartition("device:")[2]
