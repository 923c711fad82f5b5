"""Check that XLA can compile a function, without compiling it.

The function's operations are lowered to XLA's own, for the device at hand. Its arguments are known
only by shape and dtype, so nothing is computed or copied.
"""

import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2
from tensorflow.python.eager import context

from ddl.distribution.devices import replica_devices

# Philox's words, and the keys and counters for them. XLA draws other numbers from all other
# operations than TensorFlow does.
_SAME_DRAWS = {
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetKeyCounterAlg",
    "StatelessRandomGetAlg",
}
_DRAWS = re.compile(
    r"^Random|^Stateless(Random|Truncated|Parameterized|Multinomial|Shuffle)|"
    r"^(Truncated|Parameterized).*Normal|^Multinomial|^StatefulStandard|"
    r"^StatefulUniform|^StatefulTruncated|^StatefulRandom"
)
_COLLECTIVE = re.compile(r"^Collective|^Nccl|^XlaAllReduce")


def why_not_compiled(function: Any) -> tuple[str, str] | None:
    """Returns why XLA cannot compile a function to the same results, or None if it can.

    Args:
      function: A concrete function of no arguments, whose captured tensors lie in the graph that
        is being traced.

    Returns:
      The reason, a clause that names layer and operation; and the remedy, a sentence or "".
    """
    definition = function.function_def
    for node in _nodes(function.graph):
        if _COLLECTIVE.match(node.op):
            return f"{_named(node)} communicates across replicas", ""
        if _DRAWS.match(node.op) and node.op not in _SAME_DRAWS:
            return (
                f"{_named(node)} would draw other random numbers in XLA than in TensorFlow",
                "Draw with keras.random or ddl.random, or use layers of Keras.",
            )
    return _not_lowered(function, definition)


def _nodes(graph: tf.Graph) -> Iterator[node_def_pb2.NodeDef]:
    whole = graph.as_graph_def()
    yield from whole.node
    for inner in whole.library.function:
        yield from inner.node_def


def _named(node: node_def_pb2.NodeDef) -> str:
    return f"the operation {node.op} at {node.name}"


def _not_lowered(function: Any, definition: function_pb2.FunctionDef) -> tuple[str, str] | None:
    """Returns the reason for which the lowering fails, or None."""
    captures = function.captured_inputs
    handles = [_eager(tensor) for tensor in captures]
    by_value = [place for place, tensor in enumerate(captures) if tensor.dtype != tf.resource]
    resources = [place for place, tensor in enumerate(captures) if tensor.dtype == tf.resource]
    if any(handles[place] is None for place in resources):
        return None  # variables that only live within the update
    specs = [tf.TensorSpec(captures[place].shape, captures[place].dtype) for place in by_value]
    if not all(spec.shape.is_fully_defined() for spec in specs):
        return None
    device = _device(function, [handles[place] for place in resources])
    name = _with_values_first(definition, [*by_value, *resources])
    try:
        with tf.init_scope():
            context.context().get_compiler_ir(
                device_name=device,
                platform_name=None,
                function_name=name,
                flat_args=specs,
                captured_inputs=[handles[place] for place in resources],
                stage="stablehlo_serialized",
            )
    except (tf.errors.OpError, ValueError) as error:
        return _reason(str(error)), ""
    finally:
        context.context().remove_function(name)
    return None


def _eager(tensor: tf.Tensor) -> Any:
    """Returns the eager tensor that a graph's tensor captures, through outer graphs, or None."""
    while not hasattr(tensor, "numpy"):
        captures = getattr(tensor.graph, "captures", ())
        outer = [external for external, internal in captures if internal is tensor]
        if not outer:
            return None
        tensor = outer[0]
    return tensor


def _device(function: Any, handles: Sequence[Any]) -> str:
    """Returns the full name of the device on which the function will run."""
    for handle in handles:
        return str(handle.device)
    # Of no variables, such as the check for overflow. Only the first replica gets here.
    with tf.init_scope(), tf.device(replica_devices(tf.distribute.get_strategy())[0]):
        return str(tf.zeros([]).device)


def _with_values_first(definition: function_pb2.FunctionDef, order: Sequence[int]) -> str:
    """Registers the function with its arguments in another order; returns its name."""
    changed = function_pb2.FunctionDef()
    changed.CopyFrom(definition)
    arguments = list(definition.signature.input_arg)
    del changed.signature.input_arg[:]
    changed.signature.input_arg.extend(arguments[place] for place in order)
    changed.arg_attr.clear()
    for new, old in enumerate(order):
        if old in definition.arg_attr:
            changed.arg_attr[new].CopyFrom(definition.arg_attr[old])
    changed.signature.name = f"{definition.signature.name}_{uuid.uuid4().hex}"
    changed.attr["_XlaMustCompile"].CopyFrom(attr_value_pb2.AttrValue(b=True))
    with tf.init_scope():
        context.context().add_function_def(changed)
    return changed.signature.name


def _reason(message: str) -> str:
    """Returns a clause with the operations that an error of XLA names."""
    unsupported = re.findall(r"(\w+) \(No registered[^)]*\)?\{\{node ([^}]+)\}\}", message)
    if unsupported:
        operations = dict.fromkeys(f"{op} at {node}" for op, node in unsupported)
        return f"XLA has no kernel for {', '.join(list(operations)[:3])}"
    nodes = re.findall(r"\{\{node ([^}]+)\}\}", message)
    first = message.strip().splitlines()[0]
    return f"XLA fails at {nodes[0]}: {first:.300}" if nodes else f"XLA fails: {first:.300}"
